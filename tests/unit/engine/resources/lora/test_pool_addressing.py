"""L28-L33: which slot each token addresses, what layers add, and what stands still meanwhile."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from mstar.engine.resources.base import StepContext
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.resources.lora.pool import LoraAdapterPool, LoraStep
from mstar.engine.resources.lora.spec import LoraTarget
from mstar.engine.runner import Runner
from mstar.types import Row, Step
from tests.unit.engine.leader_loop import count_tokens
from tests.unit.engine.lora_pools import CPU, HIDDEN, WIDTH, Reads, column_part, expected_delta, lora_step, path_of, tiny_spec, wants


def mixed(instances, **spec):
    """Rows on B, base, A and B again."""
    instance = instances(max_loras=3, **spec)
    for rid, name in (("a", "A"), ("b", "B"), ("b2", "B")):
        instance.run(rid, name)
    instance.ingest("base", None)
    return instance, ("b", "base", "a", "b2")


def slots_of_tokens(addressing):
    order, bounds = addressing.token_order.tolist(), addressing.slot_indptr.tolist()
    return {token: slot for slot in range(len(bounds) - 1) for token in order[bounds[slot] : bounds[slot + 1]]}


def test_l28_tokens_are_grouped_by_slot_in_segment_order(instances):
    instance, rids = mixed(instances)
    addressing = instance.pool.plan(*lora_step(*rids, tokens=(2, 1, 3, 2)))
    assert addressing.token_order.tolist() == [2, 3, 4, 5, 0, 1, 6, 7]
    assert addressing.slot_indptr.tolist() == [0, 1, 4, 8, 8]
    assert slots_of_tokens(addressing) == {0: 2, 1: 2, 2: 0, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2}
    assert addressing.token_order.dtype == addressing.slot_indptr.dtype == torch.int64


def test_l28_the_addressing_is_a_view_of_one_buffer_sized_to_the_step(instances):
    instance, _ = mixed(instances)
    pool = instance.pool
    places = set()
    for rids, tokens in ((("a",), 1), (("a", "b"), 3), (("b2", "base", "a"), 7)):
        addressing = pool.plan(*lora_step(*rids, tokens=tokens))
        assert addressing.token_order.shape == (len(rids) * tokens,) and addressing.slot_indptr.shape == (5,)
        places.add((addressing.token_order.data_ptr(), addressing.slot_indptr.data_ptr()))
    assert len(places) == 1


def test_l28_rows_that_failed_and_rows_without_tokens_address_nothing(instances):
    instance, rids = mixed(instances)
    step, ctx = lora_step(*rids, tokens=(2, 1, 3, 0))
    ctx.failed["a"] = None
    addressing = instance.pool.plan(step, ctx)
    assert slots_of_tokens(addressing) == {0: 2, 1: 2, 2: 0}


def test_l28_the_same_plan_after_other_steps_is_made_anew(instances):
    instance, _ = mixed(instances)
    pool = instance.pool
    first = pool.plan(*lora_step("a", "b")).token_order.tolist()
    pool.plan(*lora_step("b", "a"))
    assert pool.plan(*lora_step("a", "b")).token_order.tolist() == first == [0, 1]
    assert pool.plan(*lora_step("base")) is None
    assert pool.plan(*lora_step("a", "b")).token_order.tolist() == first
    assert pool.plan(*lora_step("a", "b")).token_order.tolist() == first


def test_l28_a_plan_follows_a_slot_that_was_filled_anew(instances):
    """The same step again, after a rollback, with its adapter in another slot."""
    instance = instances(max_loras=2)
    instance.run("a", "A")
    instance.leader.assert_runs("a", path_of("A"))
    instance.pool.rollback_admit(*lora_step("a"))
    for rid, name in (("b", "B"), ("c", "C")):
        instance.run(rid, name)
    instance.remove("b")
    instance.admit("a")
    assert instance.leader.slot_of("A") == 2
    instance.leader.assert_runs("a", path_of("A"))


def grouped_spec(*groupings):
    targets = tuple(LoraTarget(f"by{grouping}", (column_part("mlp.gate", WIDTH, 1),), row_grouping=grouping) for grouping in groupings)
    return {"targets": targets}


def test_l29_a_target_that_sees_other_rows_reads_an_addressing_of_its_own(instances):
    instance, rids = mixed(instances, **grouped_spec(1, 0, 4))
    pool = instance.pool
    pool.plan(*lora_step(*rids, tokens=(5, 1, 4, 2)))
    assert slots_of_tokens(pool.addressing(0)) == {0: 2, 1: 0, 2: 1, 3: 2}  # one row per segment
    assert slots_of_tokens(pool.addressing(4)) == {0: 2, 1: 2, 2: 0, 3: 1, 4: 2}  # one per four tokens, per segment
    assert len(slots_of_tokens(pool.addressing())) == 12
    with pytest.raises(KeyError):
        pool.addressing(2)


@pytest.mark.parametrize(("grouping", "owners"), [(1, "bbbbb-aaaabb"), (0, "b-ab"), (4, "bb-ab")])
def test_l29_its_deltas_are_those_of_its_rows(instances, grouping, owners):
    instance, rids = mixed(instances, **grouped_spec(1, 0, 4))
    pool = instance.pool
    pool.plan(*lora_step(*rids, tokens=(5, 1, 4, 2)))
    x = torch.randn(len(owners), HIDDEN, generator=torch.Generator().manual_seed(3))
    added = pool.layer_delta(f"by{grouping}", 1)(torch.zeros(len(owners), WIDTH), x)
    for row, owner in enumerate(owners):
        if owner == "-":
            assert not added[row].any()
        else:
            expected = expected_delta(pool.spec, 0, path_of(owner.upper()), f"by{grouping}", 1, x[row : row + 1])
            torch.testing.assert_close(added[row : row + 1], expected)


def test_l30_layer_delta_adds_in_place_and_returns_y(instances):
    instance, rids = mixed(instances)
    pool = instance.pool
    pool.plan(*lora_step(*rids))
    y, x = torch.ones(4, HIDDEN), torch.ones(4, WIDTH)
    assert pool.layer_delta("down", 0)(y, x) is y
    assert torch.equal(y[1], torch.ones(HIDDEN)) and not torch.equal(y[0], torch.ones(HIDDEN))


def test_l30_a_step_with_no_adapter_row_returns_y_untouched(instances):
    instance, _ = mixed(instances)
    pool, delta = instance.pool, instance.pool.layer_delta("down", 0)
    pool.plan(*lora_step("a"))
    y = torch.ones(1, HIDDEN)
    assert pool.plan(*lora_step("base")) is None and not pool.active
    assert delta(y, None) is y and torch.equal(y, torch.ones(1, HIDDEN))


def test_l30_after_the_commit_forwards_add_nothing_until_the_next_plan(instances):
    instance, _ = mixed(instances)
    pool, delta = instance.pool, instance.pool.layer_delta("down", 0)
    step, ctx = lora_step("a")
    pool.plan(step, ctx)
    assert pool.active
    pool.commit(step, ctx)
    assert not pool.active and not delta(torch.zeros(1, HIDDEN), torch.ones(1, WIDTH)).any()
    pool.plan(step, ctx)
    assert delta(torch.zeros(1, HIDDEN), torch.ones(1, WIDTH)).any()


def test_l30_weight_views_are_resolved_once_and_see_later_installs(instances):
    """A delta made before any adapter came serves all that come, also into a slot used before."""
    instance = instances(max_loras=1)
    pool = instance.pool
    delta = pool.layer_delta("down", 1)
    x = torch.ones(1, WIDTH)
    for rid, name in (("a", "A"), ("b", "B"), ("c", "C")):
        instance.run(rid, name)
        pool.plan(*lora_step(rid))
        torch.testing.assert_close(delta(torch.zeros(1, HIDDEN), x), expected_delta(pool.spec, 0, path_of(name), "down", 1, x))
        instance.remove(rid)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_l30_row_parallel_shards_sum_up_to_the_whole_and_column_shards_stand_side_by_side(instances, tp_size):
    instance = instances(tp_size=tp_size)
    instance.run("a", "A")
    whole = tiny_spec()
    for layer in (0, 1):
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(4))
        total = torch.zeros(1, HIDDEN)
        outs = {"mlp.gate": [], "mlp.up": []}
        for rank in instance.ranks:
            pool = rank.pool
            pool.plan(*lora_step("a"))
            first, last = pool.spec.target("down").parts[0].in_ranges[rank.pool.rank]
            total += pool.layer_delta("down", layer)(torch.zeros(1, HIDDEN), x[:, first:last])
            sizes = pool.spec.target("gate_up").out_sizes(pool.rank)
            shard = pool.layer_delta("gate_up", layer)(torch.zeros(1, sum(sizes)), x[:, :HIDDEN])
            for out, piece in zip(outs.values(), shard.split(sizes, dim=1), strict=True):
                out.append(piece)
        torch.testing.assert_close(total, expected_delta(whole, 0, path_of("A"), "down", layer, x))
        joined = torch.cat([torch.cat(pieces, dim=1) for pieces in outs.values()], dim=1)
        torch.testing.assert_close(joined, expected_delta(whole, 0, path_of("A"), "gate_up", layer, x[:, :HIDDEN]))


def test_l31_layer_ranks_is_each_slots_rank_and_0_where_its_adapter_adds_nothing(instances):
    instance = instances(max_loras=3)
    pool = instance.pool
    assert pool.layer_ranks("down", 0).tolist() == [0, 0, 0, 0]
    instance.run("a", "A")
    instance.run("b", "B")
    reads = instance.leader.reads
    for layer in (0, 1):
        for target in ("gate_up", "down"):
            expected = [0, *(reads("/adapters/" + name, None, lambda: False).targets[target].ranks[layer] for name in "AB"), 0]
            assert pool.layer_ranks(target, layer).tolist() == expected and min(expected[1:3]) > 0
    instance.remove("a")
    instance.serve("N", "/nothing")
    instance.run("n", "N")
    instance.remove("b")
    instance.serve("M", "/nothing")
    instance.ingest("m1", "M")
    instance.ingest("c", "C")
    instance.admit("m1", "c")
    assert pool.layer_ranks("down", 0).tolist().count(0) >= 2
    assert pool.layer_ranks("down", 0)[instance.leader.slot_of("N")] == 0


def test_l32_a_forward_in_base_only_adds_nothing_on_this_thread(instances):
    instance, _ = mixed(instances)
    pool, delta = instance.pool, instance.pool.layer_delta("down", 0)
    pool.plan(*lora_step("a"))

    def adds():
        return bool(delta(torch.zeros(1, HIDDEN), torch.ones(1, WIDTH)).any())

    seen = {}
    with pool.base_only():
        assert not adds() and not pool.active
        with pool.base_only():
            assert not adds()
        assert not adds()
        thread = threading.Thread(target=lambda: seen.update(elsewhere=adds()))
        thread.start()
        thread.join()
    assert seen == {"elsewhere": True} and adds()
    with pytest.raises(RuntimeError, match="warm-up failed"), pool.base_only():
        raise RuntimeError("warm-up failed")
    assert adds()


def test_l32_outside_any_step_it_is_a_base_only_step(instances):
    instance = instances()
    y = torch.ones(2, HIDDEN)
    with instance.pool.base_only():
        assert instance.pool.layer_delta("down", 0)(y, torch.ones(2, WIDTH)) is y


def test_l32_a_compile_traced_there_takes_the_base_only_branch_and_an_adapter_step_compiles_its_own(instances):
    instance, _ = mixed(instances)
    pool, delta = instance.pool, instance.pool.layer_delta("down", 0)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        return graph.forward

    layer = torch.compile(lambda y, x: delta(y + 1, x), backend=backend, dynamic=False)
    x = torch.ones(1, WIDTH)
    with pool.base_only():
        assert torch.equal(layer(torch.zeros(1, HIDDEN), x), torch.ones(1, HIDDEN))
    traced = list(graphs)
    pool.plan(*lora_step("a"))
    torch.testing.assert_close(layer(torch.zeros(1, HIDDEN), x), 1 + expected_delta(pool.spec, 0, path_of("A"), "down", 0, x))
    assert traced == [1] and len(graphs) > 1 and max(graphs) > 1
    pool.plan(*lora_step("base"))
    assert torch.equal(layer(torch.zeros(1, HIDDEN), x), torch.ones(1, HIDDEN))


def test_l33_double_buffering_is_forced_where_a_device_reads_the_layout_asynchronously():
    for device, forced in (("cpu", False), ("meta", True)):
        pool = LoraAdapterPool(tiny_spec(), device, read=Reads(tiny_spec()))
        assert pool.force_double_buffer is forced
        pool.close()
    assert not KvResource(KvSpec(4, 4)).force_double_buffer


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_l33_it_makes_the_runner_fence_before_each_plan(device):
    """Nothing of the last step may still read the buffer when the next plan fills it."""
    pool = LoraAdapterPool(tiny_spec(), device, read=Reads(tiny_spec()))
    happened = []

    def model(step):
        happened.append("forward")
        return count_tokens(step)

    runner = Runner([pool, KvResource(KvSpec(8, 4))], model, fence=lambda: happened.append("fence"))
    runner.ingest("base", wants(None))
    runner.execute(Step(1, (Row("base", 0, 3),)), lambda _: happened.append("admitted"))
    runner.execute(Step(2, (Row("base", 3, 1),)), lambda _: happened.append("admitted"))
    fence = ["fence"] if device == "meta" else []
    assert happened == ["admitted", *fence, "forward"] * 2
    pool.close()


def test_l28_plan_results_are_immutable(instances):
    instance, rids = mixed(instances)
    addressing = instance.pool.plan(*lora_step(*rids))
    with pytest.raises(dataclasses.FrozenInstanceError):
        addressing.token_order = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoraStep(("a",), (1,)).rids = ()
    assert StepContext(Step(1, ())).plan_results == {} and CPU.type == "cpu"
