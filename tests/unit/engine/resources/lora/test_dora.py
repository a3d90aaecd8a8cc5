"""DoRA: equal to peft at any TP degree, with one sum over the ranks in the admit that installs it and none anywhere else."""

from __future__ import annotations

import shutil

import pytest
import torch

from mstar.adapters import AdapterLimits, BaseShapes, read_adapter
from mstar.engine.resources.lora.backends.cpu_backend import CpuLoraBackend
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend
from mstar.engine.resources.lora.host_copy import HostReader
from mstar.errors import WorkerError
from mstar.models.arch import load_arch
from mstar.types import EMBEDDING, HEAD, PROJECTIONS
from tests.unit.engine.resources.lora.peft_reference import (
    ALL,
    TOLERANCE,
    Request,
    Served,
    assert_equals_peft,
    edit,
    peft_folder,
    peft_logits,
)
from tests.unit.models.tiny import make_model, some_tokens

FAMILIES = ("smollm2", "llama-biases", "qwen3-ten-heads")
SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        make_model(family, made[family])
    return made


def trained(model):
    """Magnitudes and biases as training leaves them: not the norms that they began with."""
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.mul_(torch.rand_like(parameter) + 0.5)
        if name.endswith("base_layer.bias"):
            parameter.normal_(std=0.5)


def dora_folder(base, folder, seed=0, **lora):
    return peft_folder(base, folder, seed, trained, **{"use_dora": True, "target_modules": list(PROJECTIONS), **lora})


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_c08_dora_equals_peft_in_one_batch_with_plain_and_base_rows(family, tp_size, bases, tmp_path):
    base = bases[family]
    folders = [
        dora_folder(base, tmp_path / "all", 1),
        dora_folder(base, tmp_path / "row_only", 2, target_modules=["o_proj", "down_proj"], layers_to_transform=[1], use_rslora=True),
        dora_folder(base, tmp_path / "mixed", 3, target_modules=["q_proj", "o_proj", "up_proj"], rank_pattern={"q_proj": 2}),
        peft_folder(base, tmp_path / "plain", 4, target_modules=list(PROJECTIONS)),
    ]
    assert_equals_peft(base, folders, tp_size)


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_dora_with_biases_and_on_head_and_embedding_equals_peft(family, tp_size, bases, tmp_path):
    base = bases[family]
    folders = [
        dora_folder(base, tmp_path / "ends", 1, target_modules=["embed_tokens", "lm_head"]),
        dora_folder(base, tmp_path / "everything", 2, target_modules=list(ALL), bias="lora_only"),
        dora_folder(base, tmp_path / "bias", 3, target_modules=["v_proj", "o_proj", "down_proj"], bias="lora_only"),
    ]
    assert_equals_peft(base, folders, tp_size)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_the_ranks_add_up_once_an_admit_and_only_where_row_parallel_dora_is_installed(tp_size, bases, tmp_path):
    base = bases["smollm2"]
    plain = peft_folder(base, tmp_path / "plain", 1, target_modules=list(PROJECTIONS))
    columns = dora_folder(base, tmp_path / "columns", 2, target_modules=["q_proj", "gate_proj", HEAD])
    first, second = dora_folder(base, tmp_path / "first", 3), dora_folder(base, tmp_path / "second", 4, target_modules=["o_proj"])
    served = Served(base, tp_size)
    tokens = some_tokens(5, seed=1)
    try:
        served.run(Request(plain, tokens), Request(columns, tokens), Request(None, tokens))
        assert served.exchange.num_sums == 0
        served.run(Request(first, tokens), Request(plain, tokens), Request(second, tokens))
        assert served.exchange.num_sums == 1
        served.run(Request(first, tokens), Request(second, tokens))
        assert served.exchange.num_sums == 1, "resident adapters need no sum"
    finally:
        served.close()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("backend", [TorchLoraBackend, lambda: CpuLoraBackend.create(torch.float32)], ids=["torch", "cpp"])
def test_a_slot_that_held_dora_holds_none_of_it_after(backend, tp_size, bases, tmp_path):
    base = bases["llama-biases"]
    folders = [
        dora_folder(base, tmp_path / "all", 1, target_modules=list(ALL), bias="lora_only", r=8),
        dora_folder(base, tmp_path / "o", 2, target_modules=["o_proj"], r=1),
        peft_folder(base, tmp_path / "plain", 3, target_modules=["q_proj"], r=2),
        peft_folder(base, tmp_path / "bias", 4, trained, target_modules=["up_proj"], r=2, bias="lora_only"),
    ]
    served = Served(base, tp_size, backend, max_loras=1)
    tokens = some_tokens(9, seed=7)
    try:
        for folder in (*folders, *reversed(folders), folders[0]):
            (logits,) = served.run(Request(folder, tokens))
            torch.testing.assert_close(logits, peft_logits(base, folder, tokens), atol=TOLERANCE, rtol=0)
    finally:
        served.close()


def test_the_retained_copy_is_never_written_by_an_install(bases, tmp_path):
    base = bases["smollm2"]
    folder, other = dora_folder(base, tmp_path / "a", 1), dora_folder(base, tmp_path / "b", 2)
    served = Served(base, max_loras=1)
    tokens = some_tokens(5, seed=1)
    try:
        (before,) = served.run(Request(folder, tokens))
        copy = served.pools[0].store.copy(str(folder))
        kept = [tensor.clone() for target in copy.targets.values() for tensor in target.tensors()]
        served.run(Request(other, tokens))
        (after,) = served.run(Request(folder, tokens))
        assert served.pools[0].store.copy(str(folder)) is copy and torch.equal(before, after)
        now = [tensor for target in copy.targets.values() for tensor in target.tensors()]
        assert all(torch.equal(left, right) for left, right in zip(kept, now, strict=True))
    finally:
        served.close()


def test_base_and_plain_rows_beside_dora_keep_their_bits(bases, tmp_path):
    base = bases["llama-biases"]
    dora = dora_folder(base, tmp_path / "dora", 1, target_modules=list(ALL), bias="lora_only")
    plain = peft_folder(base, tmp_path / "plain", 2, target_modules=list(PROJECTIONS))
    served = Served(base)
    first, second, third = (some_tokens(count, seed=count) for count in (7, 6, 5))
    try:
        alone = served.run(Request(None, first), Request(plain, second), Request(None, third))
        mixed = served.run(Request(None, first), Request(plain, second), Request(dora, third))
        assert torch.equal(alone[0], mixed[0]) and torch.equal(alone[1], mixed[1]) and not torch.allclose(alone[2], mixed[2])
    finally:
        served.close()


def test_steps_without_such_an_adapter_adjust_nothing(bases, tmp_path):
    base = bases["smollm2"]
    plain, dora = peft_folder(base, tmp_path / "plain", 1, target_modules=["q_proj"]), dora_folder(base, tmp_path / "dora", 2)

    class Counting(TorchLoraBackend):
        adjusted = 0

        def adjust_rows(self, *args):
            self.adjusted += 1
            super().adjust_rows(*args)

    served = Served(base, backend=Counting, max_loras=1)
    tokens = some_tokens(5, seed=1)
    try:
        served.run(Request(dora, tokens), Request(None, tokens))
        backend = served.pools[0].backend
        assert backend.adjusted == 4 * load_arch(base).num_layers + 2
        served.run(Request(plain, tokens), Request(None, tokens))  # in the same slot
        assert backend.adjusted == 4 * load_arch(base).num_layers + 2
    finally:
        served.close()


@pytest.mark.parametrize("tp_size", [2, 3, 5])
def test_the_ranks_shares_add_up_to_the_whole_norms(tp_size, bases, tmp_path):
    base = bases["smollm2"]
    folder = dora_folder(base, tmp_path / "a", 1, target_modules=list(ALL))
    whole = Served(base)
    spec_of = Served(base, tp_size)
    try:
        shapes = whole.pools[0].spec.base
        assert isinstance(shapes, BaseShapes)
        tensors = read_adapter(folder, shapes, AdapterLimits(8, (tmp_path,), ALL))
        one = HostReader(whole.pools[0].spec, 0, torch.float32).cut(tensors)
        ranks = [HostReader(spec_of.pools[0].spec, rank, torch.float32).cut(tensors) for rank in range(tp_size)]
        for name in ("o_proj", "down_proj", EMBEDDING):
            total = sum(copy.targets[name].dora.squares for copy in ranks)
            torch.testing.assert_close(total, one.targets[name].dora.squares, rtol=1e-6, atol=0)
        assert all(copy.adds_squares for copy in (one, *ranks))
    finally:
        whole.close()
        spec_of.close()


def test_c08_magnitudes_and_the_flag_must_agree(bases, tmp_path):
    base = bases["smollm2"]
    dora = dora_folder(base, tmp_path / "dora", 1, target_modules=["q_proj", "o_proj"])
    lost = shutil.copytree(dora, tmp_path / "lost")
    edit(lost, lambda tensors: {key: value for key, value in tensors.items() if "layers.1.self_attn.o_proj.lora_magnitude" not in key})
    unflagged = shutil.copytree(dora, tmp_path / "unflagged")
    config = unflagged / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": true', '"use_dora": false'))
    served = Served(base)
    try:
        for folder, word in ((lost, "layers.1.self_attn.o_proj"), (unflagged, "lora_magnitude_vector")):
            error = served.refusal(folder)
            assert error.code == "adapter_dora_mismatch" and word in error.message
    finally:
        served.close()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bfloat16_slots_stay_close_to_peft(tp_size, bases, tmp_path):
    base = bases["llama-biases"]
    folder = dora_folder(base, tmp_path / "a", 1, target_modules=list(ALL), bias="lora_only")
    tokens = some_tokens(9, seed=5)
    served = Served(base, tp_size, dtype=torch.bfloat16)
    try:
        (logits,) = served.run(Request(folder, tokens))
        expected, plain = peft_logits(base, folder, tokens), peft_logits(base, None, tokens)
        assert (logits - expected).abs().mean() < 0.1 * (expected - plain).abs().mean()
    finally:
        served.close()


def test_a_pool_of_several_ranks_without_the_sum_says_so(bases, tmp_path):
    """A WorkerError: the table has changed, so this instance restarts."""
    base = bases["smollm2"]
    served = Served(base, 2)
    for pool in served.pools:
        pool._add_up = None  # what a build that forgot it leaves
    try:
        with pytest.raises(WorkerError, match="add_up"):
            served.run(Request(dora_folder(base, tmp_path / "a", 1), [1, 2]))
    finally:
        served.close()
