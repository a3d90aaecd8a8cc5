"""`bias: "lora_only"`: the adapter's bias in the place of the base's, once over all ranks, as peft has it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.resources.lora.peft_reference import (
    Request,
    Served,
    assert_equals_peft,
    edit,
    peft_folder,
    peft_logits,
)  # fmt: skip
from tests.unit.models.tiny import make_model, some_tokens

FAMILIES = {  # which modules of each have a bias
    "qwen2": ["q_proj", "k_proj", "v_proj"],
    "llama-biases": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3-window": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        make_model(family, made[family])
    return made


def trained_biases(model):
    """Biases far from the base's, and A and B that do nothing: what moves is the bias alone."""
    for name, parameter in model.named_parameters():
        if name.endswith("base_layer.bias"):
            parameter.normal_(std=0.5)


def nothing_but_biases(model):
    trained_biases(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_c28_lora_only_equals_peft_in_one_batch_with_base_and_plain_rows(family, tp_size, bases, tmp_path):
    base = bases[family]
    folders = [
        peft_folder(base, tmp_path / "all", 1, trained_biases, target_modules=FAMILIES[family], bias="lora_only"),
        peft_folder(
            base, tmp_path / "some", 2, trained_biases, target_modules=FAMILIES[family][::3], bias="lora_only", layers_to_transform=[1]
        ),
        peft_folder(base, tmp_path / "plain", 3, target_modules=FAMILIES[family]),
        peft_folder(base, tmp_path / "alone", 4, nothing_but_biases, target_modules=FAMILIES[family], bias="lora_only"),
    ]
    assert_equals_peft(base, folders, tp_size)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_slot_that_held_biases_holds_none_of_them_after(tp_size, bases, tmp_path):
    base = bases["llama-biases"]
    modules = FAMILIES["llama-biases"]
    biased = peft_folder(base, tmp_path / "biased", 1, trained_biases, target_modules=modules, bias="lora_only")
    one = peft_folder(base, tmp_path / "one", 2, trained_biases, target_modules=["k_proj"], bias="lora_only", layers_to_transform=[0])
    plain = peft_folder(base, tmp_path / "plain", 3, target_modules=["q_proj"])
    served = Served(base, tp_size, max_loras=1)
    try:
        tokens = some_tokens(9, seed=5)
        for folder in (biased, one, plain, biased, plain):
            (logits,) = served.run(Request(folder, tokens))
            torch.testing.assert_close(logits, peft_logits(base, folder, tokens), atol=1e-3, rtol=0)
    finally:
        served.close()


def test_base_rows_beside_biased_ones_keep_their_bits(bases, tmp_path):
    base = bases["llama-biases"]
    biased = peft_folder(base, tmp_path / "biased", 1, trained_biases, target_modules=FAMILIES["llama-biases"], bias="lora_only")
    served = Served(base)
    try:
        first, second = some_tokens(7, seed=1), some_tokens(6, seed=2)
        alone = served.run(Request(None, first), Request(None, second))
        mixed = served.run(Request(None, first), Request(biased, second))
        assert torch.equal(alone[0], mixed[0]) and not torch.allclose(alone[1], mixed[1])
    finally:
        served.close()


def test_biases_that_were_not_saved_stay_the_bases_as_in_peft(bases, tmp_path):
    """Older peft lost them on saving."""
    base = bases["qwen2"]
    folder = peft_folder(base, tmp_path / "lost", 1, trained_biases, target_modules=["q_proj"], bias="lora_only")
    edit(folder, lambda tensors: {key: value for key, value in tensors.items() if not key.endswith("bias")})
    assert_equals_peft(base, [folder], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c28_a_bfloat16_slot_stays_close(dtype, bases, tmp_path):
    base = bases["qwen2"]
    folder = peft_folder(base, tmp_path / "a", 1, trained_biases, target_modules=["q_proj", "v_proj"], bias="lora_only")
    tokens = some_tokens(9, seed=5)
    served = Served(base, dtype=dtype)
    try:
        (logits,) = served.run(Request(folder, tokens))
        expected = peft_logits(base, folder, tokens)
        error, moved = (logits - expected).abs().mean(), (expected - peft_logits(base, None, tokens)).abs().mean()
        assert error < (1e-5 if dtype == torch.float32 else 0.15 * moved), (error, moved)
    finally:
        served.close()
