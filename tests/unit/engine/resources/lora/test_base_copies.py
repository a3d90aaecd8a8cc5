"""Copies of base weights in an adapter's file, through a load: equal ones change nothing, any other is refused on some rank."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mstar.errors import AdapterError
from tests.unit.engine.resources.lora.peft_reference import Request, Served, assert_equals_peft, edit, peft_folder
from tests.unit.models.tiny import make_model

FAMILIES = ("smollm2", "qwen2")
SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        make_model(family, made[family])
    return made


def with_embeddings(base: Path, folder: Path) -> Path:
    """As `save_pretrained(save_embedding_layers=True)` leaves it."""
    peft_folder(base, folder, target_modules=["q_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).save_pretrained(folder, save_embedding_layers=True)
    return folder


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_c07_copies_that_equal_the_base_are_ignored(family, tp_size, bases, tmp_path):
    base = bases[family]
    folder = with_embeddings(base, tmp_path / "adapter")
    q = AutoModelForCausalLM.from_pretrained(base).model.layers[1].self_attn.q_proj.weight.detach()
    key = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    edit(folder, lambda tensors: {**tensors, key: q.clone()})
    assert_equals_peft(base, [folder], tp_size)


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["embed_tokens.weight", "base_layer.weight"])
def test_c07_a_copy_of_other_weights_is_refused_and_the_name_stays_free(kind, family, tp_size, bases, tmp_path):
    base = bases[family]
    good = with_embeddings(base, tmp_path / "adapter")
    bad = shutil.copytree(good, tmp_path / "bad")
    q = AutoModelForCausalLM.from_pretrained(base).model.layers[1].self_attn.q_proj.weight.detach()
    key = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    edit(bad, lambda tensors: {**tensors, key: q.clone()})

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (name,) = [name for name in tensors if name.endswith(kind)]
        changed = tensors[name].clone()
        changed[-1, 0] += 0.01
        return {**tensors, name: changed}

    edit(bad, change)
    served = Served(base, tp_size)
    try:
        error = served.refusal(bad)
        assert isinstance(error, AdapterError) and error.code == "adapter_base_copy_mismatch" and kind in error.message
        assert not any(pool.serves(f"refused {bad}") for pool in served.pools[tp_size - 1 :])
        served.load(good)
        served.run(Request(good, [1, 2, 3]))
    finally:
        served.close()


def test_without_the_bases_files_an_adapter_with_copies_is_refused(bases, tmp_path):
    folder = with_embeddings(bases["qwen2"], tmp_path / "adapter")
    served = Served(bases["qwen2"])
    try:
        moved = bases["qwen2"] / "model.safetensors"
        away = moved.rename(moved.with_suffix(".away"))
        error = served.refusal(folder)
        away.rename(moved)
        assert (error.code, error.status) == ("adapter_base_unreadable", 500)
    finally:
        served.close()
