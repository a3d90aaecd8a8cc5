"""Cutting an adapter to a rank's shard, and laying it into a slot: what every rank holds adds up to the whole adapter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mstar.adapters import as_float32, digest_adapter
from mstar.engine.resources.lora.host_copy import HostCopy, HostReader
from mstar.engine.resources.lora.spec import LoraSpec
from mstar.engine.resources.lora.weights import SlotWeights
from mstar.errors import AdapterError
from mstar.models.arch import arch_from_config
from mstar.models.lora_targets import lora_spec
from tests.unit.adapters.adapter_folders import BASE, CONFIG, hand_folder, pair
from tests.unit.engine.lora_pools import CPU, column_part, tensors, tiny_spec
from tests.unit.engine.lora_pools import pair as lora_pair

MODULES = tuple(BASE.leaves)
NEVER = lambda: False  # noqa: E731


def toy_spec(tp_size: int, max_lora_rank: int = 16) -> LoraSpec:
    """The pool's spec for the tiny base of the public cases: 4 query heads and 2 KV heads of 16 over `tp_size` ranks."""
    config = {
        **CONFIG,
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    arch = arch_from_config(config, {}, where="the toy base")
    return dataclasses.replace(lora_spec(arch, tp_size, max_loras=2, max_lora_rank=max_lora_rank, max_cpu_loras=2), base=BASE)


def cuts(spec: LoraSpec, pairs, dtype=torch.float32) -> list[HostCopy]:
    tp_size = len(spec.targets[0].parts[0].in_ranges)
    return [HostReader(spec, tp_rank, dtype).cut(tensors(pairs)) for tp_rank in range(tp_size)]


def shard_delta(spec, tp_rank, copy, target, layer, index):
    """`scaling * A.T @ B.T [in, out]` of one part as the rank holds it."""
    found = copy.targets.get(target.name)
    sizes = target.out_sizes(tp_rank)
    if found is None:
        return torch.zeros(target.in_size(tp_rank), sizes[index])
    first = sum(sizes[:index])
    return found.scaling[layer, index] * found.lora_a[layer, index].T @ found.lora_b_t[layer][:, first : first + sizes[index]]


def assert_shards_are_the_whole(spec, copies, pairs):
    """Every element of every projection's delta lies on the ranks whose ranges cover it, and nowhere else."""
    for target in spec.targets:
        for layer in range(spec.num_layers):
            for index, part in enumerate(target.parts):
                found = pairs.get((layer, part.module))
                whole = torch.zeros(part.in_features, part.out_features)
                if found is not None:
                    lora_a, lora_b = (torch.from_numpy(as_float32(half, found.dtype)) for half in (found.lora_a, found.lora_b))
                    whole = found.scaling * lora_a.T @ lora_b.T
                covered = torch.zeros_like(whole, dtype=torch.bool)
                for tp_rank, copy in enumerate(copies):
                    ins, outs = slice(*part.in_ranges[tp_rank]), slice(*part.out_ranges[tp_rank])
                    torch.testing.assert_close(shard_delta(spec, tp_rank, copy, target, layer, index), whole[ins, outs])
                    covered[ins, outs] = True
                assert covered.all(), f"{part.module}: no rank holds a part of it"


def all_pairs(rank=4, layers=(0, 1), modules=MODULES, scaling=0.5):
    return {
        (layer, module): lora_pair(rank, *BASE.leaves[module], scaling, seed=10 * layer + number)
        for layer in layers
        for number, module in enumerate(modules)
    }


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_c30_column_parallel_takes_rows_of_b_and_row_parallel_columns_of_a(tp_size):
    """Any degree, also where heads do not divide evenly and where ranks share a KV head."""
    spec, pairs = toy_spec(tp_size), all_pairs()
    copies = cuts(spec, pairs)
    assert_shards_are_the_whole(spec, copies, pairs)
    for tp_rank, copy in enumerate(copies):
        o_proj = copy.targets["o_proj"]
        assert o_proj.lora_a.shape == (2, 1, 4, spec.target("o_proj").in_size(tp_rank)) and o_proj.lora_b_t.shape == (2, 4, 64)
        qkv = copy.targets["qkv_proj"]
        assert qkv.lora_a.shape == (2, 3, 4, 64) and qkv.lora_b_t.shape == (2, 4, sum(spec.target("qkv_proj").out_sizes(tp_rank)))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_c33_a_fused_adapter_is_split_by_component_before_it_is_cut(tmp_path, tp_size):
    """`qkv_proj` and `gate_up_proj` in the file: one A for all parts, B stacked; k and v whole where ranks share their head."""
    file = {
        **pair(leaf="self_attn.qkv_proj", rank=3),
        **pair(leaf="mlp.gate_up_proj", rank=8, layer=1),
        **pair(leaf="self_attn.o_proj", rank=3),
    }
    folder, spec = hand_folder(tmp_path / "fused", file, r=3, lora_alpha=6, rank_pattern={"gate_up_proj": 8}), toy_spec(tp_size)
    copies = [HostReader(spec, tp_rank, torch.float32)(str(folder), None, NEVER) for tp_rank in range(tp_size)]
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_"
    q_b, k_b, v_b = np.split(file[f"{name}B.weight"], [64, 96])
    for tp_rank, copy in enumerate(copies):
        target = spec.target("qkv_proj")
        for index, lora_b in enumerate((q_b, k_b, v_b)):
            whole = torch.from_numpy(2.0 * file[f"{name}A.weight"].T @ lora_b.T)
            expected = whole[:, slice(*target.parts[index].out_ranges[tp_rank])]
            torch.testing.assert_close(shard_delta(spec, tp_rank, copy, target, 0, index), expected)
        assert copy.targets["qkv_proj"].ranks == (3, 0) and copy.targets["gate_up_proj"].ranks == (0, 8) and copy.max_rank == 8


@pytest.mark.parametrize("lora_rank", [1, 3, 8, 16])
def test_c34_one_padding_rule_for_a_and_b_whatever_the_rank(lora_rank):
    spec = toy_spec(2)
    pairs = all_pairs(lora_rank)
    copies = cuts(spec, pairs)
    assert_shards_are_the_whole(spec, copies, pairs)
    for tp_rank, copy in enumerate(copies):
        weights = SlotWeights(spec, tp_rank, torch.float32, CPU)
        weights.install(1, copy)
        for target in spec.targets:
            layer = weights.layer(target.name, 1)
            assert layer.lora_a.shape[2] == layer.lora_b_t.shape[1] == 16
            assert not layer.lora_a[1, :, lora_rank:].any() and not layer.lora_b_t[1, lora_rank:].any()
            assert torch.equal(layer.lora_a[1, :, :lora_rank], copy.targets[target.name].lora_a[1])
            assert torch.equal(layer.lora_b_t[1, :lora_rank], copy.targets[target.name].lora_b_t[1])
            assert weights.layer_ranks(target.name, 1).tolist() == [0, lora_rank, 0]
        assert weights.slot_rank(1) == lora_rank and weights.slot_rank(2) == 0


def test_c34_ranks_that_differ_between_the_parts_and_layers_of_one_target():
    spec = toy_spec(2)
    pairs = {}
    for layer, ranks in enumerate(((1, 16, 3), (8, 2, 5))):
        for module, rank in zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ranks, strict=True):
            pairs[layer, module] = lora_pair(rank, *BASE.leaves[module], 1.0 / rank, seed=rank)
    copies = cuts(spec, pairs)
    assert_shards_are_the_whole(spec, copies, pairs)
    assert all(copy.targets["qkv_proj"].ranks == (16, 8) and copy.max_rank == 16 for copy in copies)


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("lora_rank", [1, 3, 8])
def test_c35_any_rank_works_at_any_degree_of_parallelism(tp_size, lora_rank):
    """Also a rank that the number of ranks does not divide, and more ranks than LoRA rows."""
    target = dataclasses.replace(tiny_spec().targets[0], name="wide", parts=(column_part("mlp.gate", 24, tp_size),))
    spec = tiny_spec(tp_size=tp_size, targets=(target,), max_lora_rank=64)
    pairs = {(layer, "mlp.gate"): lora_pair(lora_rank, 6, 24, 2.0, seed=layer) for layer in (0, 1)}
    assert_shards_are_the_whole(spec, cuts(spec, pairs), pairs)


def test_c35_a_rank_over_the_cap_is_refused_at_the_read(tmp_path):
    folder = hand_folder(tmp_path / "wide", pair(rank=9), r=9)
    with pytest.raises(AdapterError, match="9"):
        HostReader(toy_spec(1, max_lora_rank=8), 0, torch.float32)(str(folder), None, NEVER)


def test_c37_the_retained_copy_is_never_written_and_every_refill_is_the_first(tmp_path):
    spec, pairs = toy_spec(1), all_pairs(scaling=2.0)
    (copy,) = cuts(spec, pairs)
    kept = {name: (found.lora_a.clone(), found.lora_b_t.clone(), found.scaling.clone()) for name, found in copy.targets.items()}
    weights = SlotWeights(spec, 0, torch.float32, CPU)
    other = cuts(spec, all_pairs(rank=16, scaling=3.0))[0]
    for _ in range(3):
        weights.install(1, copy)
        for name, (lora_a, lora_b_t, scaling) in kept.items():
            layer = weights.layer(name, 0)
            assert torch.equal(layer.lora_a[1, :, :4], lora_a[0]) and torch.equal(layer.lora_b_t[1, :4], lora_b_t[0])
            assert torch.equal(layer.scaling[1], scaling[0])
            found = copy.targets[name]
            assert all(map(torch.equal, (found.lora_a, found.lora_b_t, found.scaling), (lora_a, lora_b_t, scaling)))
            layer.lora_a[1].zero_()  # a slot's memory is its own
            assert torch.equal(copy.targets[name].lora_a, lora_a)
        weights.install(1, other)


def test_c27_layers_and_targets_that_an_adapter_leaves_out_are_zero():
    spec = toy_spec(2)
    pairs = {
        (1, "mlp.down_proj"): lora_pair(4, *BASE.leaves["mlp.down_proj"], 1.0, 1),
        (0, "self_attn.o_proj"): lora_pair(2, 64, 64, 1.0, 2),
    }
    copies = cuts(spec, pairs)
    assert_shards_are_the_whole(spec, copies, pairs)
    assert all(sorted(copy.targets) == ["down_proj", "o_proj"] for copy in copies)
    assert copies[0].targets["o_proj"].ranks == (2, 0) and copies[0].targets["down_proj"].ranks == (0, 4)


def test_an_adapter_with_nothing_for_the_pool_has_no_targets_on_any_rank():
    spec = tiny_spec(tp_size=2)
    for copy in cuts(spec, {(0, "vision.proj"): lora_pair(2, 6, 6, 1.0, 3)}):
        assert copy.targets == {} and copy.max_rank == 0 and copy.size_bytes == 0


def test_c24_values_are_cast_once_to_the_slots_dtype():
    spec, pairs = toy_spec(1), all_pairs()
    (copy,) = cuts(spec, pairs, torch.bfloat16)
    q_proj = torch.from_numpy(pairs[0, "self_attn.q_proj"].lora_a).to(torch.bfloat16)
    assert torch.equal(copy.targets["qkv_proj"].lora_a[0, 0], q_proj)
    assert copy.targets["qkv_proj"].scaling.dtype == torch.float32
    halved = {key: dataclasses.replace(found, lora_a=found.lora_a.astype(np.float16), lora_b=found.lora_b.astype(np.float16), dtype="F16")
              for key, found in pairs.items()}  # fmt: skip
    (copy,) = cuts(spec, halved, torch.bfloat16)
    expected = torch.from_numpy(halved[0, "mlp.gate_proj"].lora_b).to(torch.bfloat16).T
    assert torch.equal(copy.targets["gate_up_proj"].lora_b_t[0][:, :128], expected)


def test_c24_bfloat16_files_are_read_as_they_are():
    spec = toy_spec(1)
    bits = np.random.default_rng(5).integers(0x3000, 0x4000, (4, 64)).astype(np.uint16)
    found = dataclasses.replace(lora_pair(4, 64, 64, 1.0, 1), lora_a=bits, lora_b=bits.reshape(64, 4), dtype="BF16")
    (copy,) = cuts(spec, {(0, "self_attn.o_proj"): found}, torch.bfloat16)
    assert torch.equal(copy.targets["o_proj"].lora_a[0, 0].view(torch.uint16), torch.from_numpy(bits))
    (wide,) = cuts(spec, {(0, "self_attn.o_proj"): found}, torch.float32)
    assert torch.equal(wide.targets["o_proj"].lora_a[0, 0], torch.from_numpy(bits).view(torch.bfloat16).float())


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, -7e4), (torch.bfloat16, 3.4e38)])
def test_c24_a_cast_that_overflows_is_refused_with_the_tensor_and_the_range_on_every_rank(tmp_path, dtype, value, tp_rank):
    """Whichever rank's shard the value lies in."""
    file = pair(1, "self_attn.o_proj")
    key = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    file[key][3, 1] = value
    folder = hand_folder(tmp_path / "loud", file)
    with pytest.raises(AdapterError) as caught:
        HostReader(toy_spec(2), tp_rank, dtype)(str(folder), None, NEVER)
    name, largest = {torch.float16: ("float16", "65504"), torch.bfloat16: ("bfloat16", "3.38953e+38")}[dtype]
    assert (caught.value.code, caught.value.status) == ("adapter_dtype_overflow", 400)
    assert caught.value.message == (
        f'"{key}" holds {abs(value):g}, but this server\'s slots are {name}, whose largest number is {largest} (`--dtype`).'
    )
    (copy,) = HostReader(toy_spec(2), tp_rank, torch.float32)(str(folder), None, NEVER).targets.values()
    assert torch.isfinite(copy.lora_a).all()


def test_the_reader_checks_folder_and_digest(tmp_path):
    folder = hand_folder(tmp_path / "a")
    read = HostReader(dataclasses.replace(toy_spec(2), roots=(str(tmp_path),)), 1, torch.float32)
    copy = read(str(folder), digest_adapter(folder, (tmp_path,)), NEVER)
    assert copy.digest == digest_adapter(folder, (tmp_path,)) and copy.targets["qkv_proj"].ranks == (4, 0)
    with pytest.raises(AdapterError) as changed:
        read(str(folder), "0" * 64, NEVER)
    assert changed.value.code == "adapter_changed"
    with pytest.raises(AdapterError) as cancelled:
        read(str(folder), None, lambda: True)
    assert "cancel" in cancelled.value.code


def test_a_pool_without_the_bases_shapes_cannot_read_folders(tmp_path):
    with pytest.raises(AdapterError, match="base's shapes"):
        HostReader(tiny_spec(), 0, torch.float32)(str(tmp_path), None, NEVER)


def test_the_size_of_a_copy_is_what_its_tensors_take():
    (copy,) = cuts(toy_spec(1), all_pairs(rank=3))
    size = sum(t.lora_a.nbytes + t.lora_b_t.nbytes + t.scaling.nbytes for t in copy.targets.values())
    assert copy.size_bytes == size > 0
    half = cuts(toy_spec(1), all_pairs(rank=3), torch.bfloat16)[0]
    assert half.size_bytes < copy.size_bytes


# slots


def slot_state(weights: SlotWeights, spec: LoraSpec, slot: int):
    return [
        (weights.layer(target.name, layer).lora_a[slot].clone(), weights.layer(target.name, layer).lora_b_t[slot].clone(),
         weights.layer(target.name, layer).scaling[slot].clone(), int(weights.layer_ranks(target.name, layer)[slot]))
        for target in spec.targets
        for layer in range(spec.num_layers)
    ]  # fmt: skip


def same(one, other):
    return all(all(map(torch.equal, a[:3], b[:3])) and a[3] == b[3] for a, b in zip(one, other, strict=True))


def test_an_install_leaves_nothing_of_the_last_occupant():
    """Smaller ranks, other targets, other layers: the slot is as if it had never held anything else."""
    spec = toy_spec(2)
    copies = [
        cuts(spec, pairs)[1]
        for pairs in (
            all_pairs(16),
            all_pairs(1, layers=(0,)),
            all_pairs(8, modules=("self_attn.k_proj", "mlp.down_proj")),
            all_pairs(3, layers=(1,), modules=("self_attn.o_proj",)),
            {},
            all_pairs(2),
        )
    ]
    weights = SlotWeights(spec, 1, torch.float32, CPU)
    for copy in [*copies, *reversed(copies), copies[0], copies[4], copies[3]]:
        weights.install(2, copy)
        fresh = SlotWeights(spec, 1, torch.float32, CPU)
        fresh.install(2, copy)
        if copy.targets:
            assert same(slot_state(weights, spec, 2), slot_state(fresh, spec, 2))
        else:
            assert all(not scaling.any() and rank == 0 for _, _, scaling, rank in slot_state(weights, spec, 2))
        assert weights.slot_rank(2) == fresh.slot_rank(2) == copy.max_rank


def test_an_install_touches_its_own_slot_alone():
    spec = toy_spec(1)
    weights = SlotWeights(spec, 0, torch.float32, CPU)
    weights.install(1, cuts(spec, all_pairs(5))[0])
    first, zero, size = slot_state(weights, spec, 1), slot_state(weights, spec, 0), weights.size_bytes
    weights.install(2, cuts(spec, all_pairs(7, scaling=9.0))[0])
    assert same(slot_state(weights, spec, 1), first) and same(slot_state(weights, spec, 0), zero)
    assert not any(part.any() for state in zero for part in state[:3]) and weights.size_bytes == size


def test_the_bytes_of_the_slots_are_those_of_the_shard():
    sizes = [SlotWeights(toy_spec(2), tp_rank, torch.float32, CPU).size_bytes for tp_rank in (0, 1)]
    whole = SlotWeights(toy_spec(1), 0, torch.float32, CPU).size_bytes
    assert sizes[0] == sizes[1] and whole / 2 < sizes[0] < whole
    assert SlotWeights(toy_spec(1), 0, torch.bfloat16, CPU).size_bytes < whole
