"""LoRA on `lm_head` and `embed_tokens`, vocabulary cut over the ranks: equal to peft, and absent where the server did not ask for it."""

from __future__ import annotations

import json

import pytest
import torch

from mstar.adapters import AdapterLimits, BaseShapes, inspect_adapter
from mstar.engine.resources.base import ResourceReqConfig, StepContext
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.resources.lora.backends.cpu_backend import CpuLoraBackend
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend
from mstar.engine.resources.lora.pool import LoraStep
from mstar.engine.resources.lora.spec import LOGITS_ROWS, LoraTarget
from mstar.engine.runner import Runner
from mstar.errors import AdapterError
from mstar.models.arch import load_arch
from mstar.models.lora_targets import lora_spec
from mstar.types import PROJECTIONS, Row, SamplingParams, Step
from tests.unit.engine.leader_loop import count_tokens
from tests.unit.engine.lora_pools import WIDTH, column_part
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

FAMILIES = ("smollm2", "qwen2", "qwen3-ten-heads")  # the first has tied heads; vocabularies of 130, 128 and 131
SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        make_model(family, made[family])
    return made


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_head_embedding_and_both_equal_peft_in_one_mixed_batch(family, tp_size, bases, tmp_path):
    base = bases[family]
    folders = [
        peft_folder(base, tmp_path / "head", 1, target_modules=["lm_head"]),
        peft_folder(base, tmp_path / "embedding", 2, target_modules=["embed_tokens"], r=3, use_rslora=True),
        peft_folder(base, tmp_path / "all", 3, target_modules=list(ALL), r=5, alpha_pattern={"lm_head": 3, "embed_tokens": 11}),
        peft_folder(base, tmp_path / "projections", 4, target_modules=list(PROJECTIONS)),
    ]
    assert_equals_peft(base, folders, tp_size)


@pytest.mark.parametrize("tp_size", SIZES)
def test_tied_heads_are_adapted_apart_unless_the_file_has_both(tp_size, bases, tmp_path):
    """peft's `ensure_weight_tying` saves the one pair under both names; without it a pair is the one module's alone."""
    base = bases["smollm2"]
    tied = peft_folder(base, tmp_path / "tied", 1, target_modules=["embed_tokens"], ensure_weight_tying=True)
    alone = peft_folder(base, tmp_path / "alone", 2, target_modules=["embed_tokens"])
    assert_equals_peft(base, [tied, alone], tp_size)


def test_a_tied_pair_that_lost_its_half_is_refused(bases, tmp_path):
    base = bases["smollm2"]
    folder = peft_folder(base, tmp_path / "tied", 1, target_modules=["embed_tokens"], ensure_weight_tying=True)
    edit(folder, lambda tensors: {key: value for key, value in tensors.items() if "lm_head.lora" not in key})
    served = Served(base)
    try:
        error = served.refusal(folder)
        assert error.code == "adapter_tied_pair_missing" and "lm_head" in error.message
    finally:
        served.close()


@pytest.mark.parametrize("tp_size", SIZES)
def test_the_head_sees_the_rows_that_give_logits_whatever_their_number(tp_size, bases, tmp_path):
    base = bases["qwen2"]
    head = peft_folder(base, tmp_path / "head", 1, target_modules=["lm_head", "q_proj"])
    other = peft_folder(base, tmp_path / "other", 2, target_modules=["lm_head"])
    served = Served(base, tp_size)
    try:
        requests = [
            Request(head, some_tokens(6, seed=1), num_logits=1),
            Request(other, some_tokens(9, seed=2), num_logits=0),
            Request(None, some_tokens(4, seed=3), num_logits=4),
            Request(other, some_tokens(5, seed=4), num_logits=5),
            Request(head, some_tokens(8, seed=5), num_logits=3),
        ]
        for request, logits in zip(requests, served.run(*requests), strict=True):
            expected = peft_logits(base, request.adapter, request.tokens)[len(request.tokens) - request.wanted :]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        (nothing,) = served.run(Request(head, some_tokens(6, seed=1), num_logits=0))
        assert nothing.shape == (0, 128)
    finally:
        served.close()


def test_l29_the_heads_addressing_groups_the_logits_rows_and_not_the_tokens(bases, tmp_path):
    base = bases["qwen2"]
    folder = peft_folder(base, tmp_path / "head", 1, target_modules=["lm_head"])
    served = Served(base)
    try:
        served.run(Request(folder, [1, 2]))
        (pool,) = served.pools
        for rid, adapter in (("a", str(folder)), ("b", None), ("c", str(folder))):
            pool.ingest_request(rid, request_of(adapter))
        pool.store.wait([str(folder)], 30)
        step = LoraStep(("a", "b", "c"), (5, 3, 4), (1, 3, 2))
        pool.admit(step, StepContext(Step(1, ())))
        pool.plan(step, StepContext(Step(1, ())))
        slot = next(slot for slot, name, _ in pool.slots() if name == str(folder))
        addressing = pool.addressing(LOGITS_ROWS)
        bounds = addressing.slot_indptr.tolist()
        assert addressing.token_order.tolist()[bounds[slot] : bounds[slot + 1]] == [0, 4, 5]
        with pytest.raises(AssertionError, match="which rows give logits"):
            pool.plan(LoraStep(("a",), (5,)), StepContext(Step(1, ())))
    finally:
        served.close()


def request_of(adapter, tokens=(1, 2, 3), **sampling):
    return ResourceReqConfig(tuple(tokens), SamplingParams(8, seed=0, **sampling), adapter)


def test_l29_the_runner_tells_the_pool_the_rows_that_the_model_is_asked_for(instances):
    """Chunks, samples and scored prompts: what the head's addressing holds is what the jobs want, in their order."""
    target = LoraTarget("head", (column_part("mlp.gate", WIDTH, 1),), row_grouping=LOGITS_ROWS)
    pool = instances(targets=(target,)).pool
    seen = []

    def model(inputs):
        wanted = [job.request.rid for job in inputs.jobs for _ in range(job.num_logits)]
        bounds = pool.addressing(LOGITS_ROWS).slot_indptr.tolist()
        order = pool.addressing(LOGITS_ROWS).token_order.tolist()
        owners = {row: slot for slot in range(len(bounds) - 1) for row in order[bounds[slot] : bounds[slot + 1]]}
        seen.append([(rid, owners[row] > 0) for row, rid in enumerate(wanted)])
        assert len(owners) == len(wanted)
        return count_tokens(inputs)

    runner = Runner([pool, KvResource(KvSpec(16, 4))], model)
    runner.ingest("scored", request_of("A", range(5), prompt_logprobs=0))
    runner.ingest("plain", request_of("B", range(4)))
    runner.ingest("base", request_of(None, range(3), prompt_logprobs=0))
    runner.ingest("pin", ResourceReqConfig(adapter="A"))
    pool.store.wait(["A", "B"], 30)
    runner.execute(Step(1, (Row("pin", 0, 0), Row("scored", 0, 2), Row("plain", 0, 3), Row("base", 0, 3))))
    runner.execute(Step(2, (Row("plain", 3, 1), Row("scored", 2, 3), Row("base", 3, 1))))
    runner.execute(Step(3, (Row("scored", 5, 1), Row("plain", 4, 1))))
    assert seen == [
        [("scored", True)] * 2 + [("base", False)] * 3,
        [("plain", True)] + [("scored", True)] * 3 + [("base", False)],
        [("scored", True), ("plain", True)],
    ]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("backend", [TorchLoraBackend, lambda: CpuLoraBackend.create(torch.float32)], ids=["torch", "cpp"])
def test_both_backends_serve_them_and_slots_turn(backend, tp_size, bases, tmp_path):
    """Through one slot, one after the other: what the last adapter left in head and embedding is gone."""
    base = bases["qwen3-ten-heads"]
    folders = [
        peft_folder(base, tmp_path / "all", 1, target_modules=list(ALL), r=8),
        peft_folder(base, tmp_path / "head", 2, target_modules=["lm_head"], r=2),
        peft_folder(base, tmp_path / "embedding", 3, target_modules=["embed_tokens"], r=1),
        peft_folder(base, tmp_path / "q", 4, target_modules=["q_proj"], r=2),
    ]
    served = Served(base, tp_size, backend, max_loras=1)
    try:
        tokens = some_tokens(11, seed=9, vocab_size=131)
        for folder in (*folders, *reversed(folders)):
            (logits,) = served.run(Request(folder, tokens))
            torch.testing.assert_close(logits, peft_logits(base, folder, tokens), atol=TOLERANCE, rtol=0)
    finally:
        served.close()


def test_base_rows_keep_their_bits(bases, tmp_path):
    base = bases["smollm2"]
    folder = peft_folder(base, tmp_path / "all", 1, target_modules=list(ALL))
    served = Served(base, 2)
    try:
        first, second = some_tokens(7, seed=1), some_tokens(6, seed=2)
        alone, _ = served.run(Request(None, first), Request(None, second))
        mixed, _ = served.run(Request(None, first), Request(folder, second))
        assert torch.equal(alone, mixed)
    finally:
        served.close()


# what the server was started for


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "down_proj"])
def test_c02_modules_outside_lora_target_modules_are_refused_by_front_and_ranks(module, bases, tmp_path):
    base = bases["qwen2"]
    folder = peft_folder(base, tmp_path / "a", 1, target_modules=["q_proj", module])
    shapes = BaseShapes.from_config(json.loads((base / "config.json").read_text()))
    modules = tuple(name for name in PROJECTIONS if name != module)
    with pytest.raises(AdapterError) as refused:
        inspect_adapter(folder, shapes, AdapterLimits(16, (tmp_path,), modules))
    assert refused.value.code == "adapter_target_module_not_served"
    assert module in refused.value.message and "--lora-target-modules" in refused.value.message
    served = Served(base, target_modules=modules)
    try:
        assert served.refusal(folder).message == refused.value.message
    finally:
        served.close()


def test_c02_a_part_of_a_fused_linear_may_be_left_out(bases, tmp_path):
    base = bases["qwen2"]
    served = Served(base, target_modules=("q_proj", "v_proj"))
    try:
        assert [target.name for target in served.pools[0].spec.targets] == ["qkv_proj"]
        assert served.refusal(peft_folder(base, tmp_path / "k", 1, target_modules=["k_proj"])).code == "adapter_target_module_not_served"
        folder = peft_folder(base, tmp_path / "qv", 1, target_modules=["q_proj", "v_proj"])
        tokens = some_tokens(8, seed=3)
        (logits,) = served.run(Request(folder, tokens))
        torch.testing.assert_close(logits, peft_logits(base, folder, tokens), atol=TOLERANCE, rtol=0)
    finally:
        served.close()


def test_head_and_embedding_take_slot_memory_only_where_they_are_named(bases):
    arch = load_arch(bases["qwen2"])
    fields = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 2}
    assert [target.name for target in lora_spec(arch, 2, **fields).targets] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    spec = lora_spec(arch, 3, **fields, target_modules=ALL)
    head, embedding = spec.target("lm_head"), spec.target("embed_tokens")
    assert (spec.layers_of(head), spec.layers_of(embedding), spec.layers_of(spec.target("o_proj"))) == (1, 1, arch.num_layers)
    assert head.parts[0].out_ranges == embedding.parts[0].in_ranges == ((0, 43), (43, 86), (86, 128))
    assert not head.row_parallel and embedding.row_parallel and head.row_grouping == LOGITS_ROWS
    without, with_ends = Served(bases["qwen2"], target_modules=PROJECTIONS), Served(bases["qwen2"])
    try:
        grown = with_ends.pools[0].size_bytes - without.pools[0].size_bytes
        assert grown == 5 * 4 * 2 * (8 * (128 + 64) + 1) + 5 * 4 * (128 + 64)  # slots · (A, B and scaling; scale), head and embedding
    finally:
        without.close()
        with_ends.close()
