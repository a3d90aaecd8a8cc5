"""L01-L05: a fixed set of slots, the zero adapter, holds, and who is overwritten."""

from __future__ import annotations

import pytest
import torch

from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend
from mstar.engine.resources.lora.slots import ZERO_SLOT
from mstar.errors import CapacityError
from tests.unit.engine.lora_pools import PATIENCE_S, adapter_at, expected_delta, lora_step, path_of


def test_l01_slots_and_their_memory_are_fixed_whatever_passes_through(instances):
    instance = instances(max_loras=2)
    pool, size = instance.pool, instance.pool.size_bytes
    for number, name in enumerate("ABCDEFAB"):
        instance.run(f"r{number}", name)
        instance.remove(f"r{number}")
        assert [slot for slot, _, _ in pool.slots()] == [1, 2] and pool.size_bytes == size


def test_l01_a_backend_runs_against_the_addressing_and_the_slots_and_nothing_else(instances):
    instance = instances(max_loras=3)
    for rid, name in (("a", "A"), ("b", "B")):
        instance.run(rid, name)
    instance.ingest("base", None)
    instance.admit("base")
    pool = instance.pool
    step, ctx = lora_step("b", "base", "a", tokens=(2, 1, 3))
    addressing = pool.plan(step, ctx)
    assert addressing is pool.addressing()
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(2))
    by_pool = pool.layer_delta("down", 1)(torch.zeros(6, 6), x)
    by_hand = torch.zeros(6, 6)
    weights = pool.layer_weights("down", 1)
    bounds = addressing.slot_indptr.tolist()
    for slot in range(1, len(bounds) - 1):
        for token in addressing.token_order[bounds[slot] : bounds[slot + 1]].tolist():
            by_hand[token] = weights.scaling[slot, 0] * (x[token] @ weights.lora_a[slot, 0].T) @ weights.lora_b_t[slot]
    torch.testing.assert_close(by_pool, by_hand)
    paths = [path_of("B")] * 2 + [None] + [path_of("A")] * 3
    for token, path in enumerate(paths):
        expected = torch.zeros(1, 6) if path is None else expected_delta(pool.spec, 0, path, "down", 1, x[token : token + 1])
        torch.testing.assert_close(by_pool[token : token + 1], expected)


def test_l01_a_slot_filled_anew_keeps_nothing_of_its_last_adapter(instances):
    """Adapters of different ranks turn over in one slot, beside one of the largest rank that kernels read up to."""
    instance = instances(max_loras=2, adapters="ABCDEFGHIJ")
    instance.serve("N", "/nothing")
    widest = max("ABCDEFGHIJ", key=lambda name: adapter_at(instance.pool.spec, path_of(name)).pairs[0, "mlp.down"].rank)
    instance.run("wide", widest)
    instance.ingest("base", None)
    for number, name in enumerate("ABCNDEFNGHIJA"):
        instance.run(f"r{number}", name)
        path = "/nothing" if name == "N" else path_of(name)
        instance.leader.assert_step_runs(**{"wide": path_of(widest), f"r{number}": path, "base": None})
        instance.remove(f"r{number}")


def test_l02_slot_0_is_never_handed_out(instances):
    instance = instances(max_loras=1)
    for number, name in enumerate("ABAC"):
        instance.run(f"r{number}", name)
        assert instance.leader.slot_of(name) == 1
        instance.remove(f"r{number}")
    instance.ingest("x", "D")
    instance.ingest("y", "E")
    with pytest.raises(CapacityError):
        instance.admit("x", "y")


def test_l02_base_rows_address_slot_0_and_its_rank_and_scaling_are_zero(instances):
    instance = instances()
    instance.run("a", "A")
    instance.ingest("base", None)
    pool = instance.pool
    step, ctx = lora_step("base", "a", tokens=(2, 1))
    addressing = pool.plan(step, ctx)
    assert addressing.slot_indptr[:2].tolist() == [0, 2] and addressing.token_order[:2].tolist() == [0, 1]
    for target in ("gate_up", "down"):
        assert pool.layer_ranks(target, 0)[ZERO_SLOT] == 0
        assert not pool.layer_weights(target, 0).scaling[ZERO_SLOT].any() and not pool.layer_weights(target, 0).lora_a[ZERO_SLOT].any()


def test_l02_kernels_do_no_work_for_base_rows_not_a_product_with_zero(instances):
    """A NaN in a base row's input would survive a multiplication by zero; its output keeps its very bits."""
    instance = instances()
    instance.run("a", "A")
    instance.ingest("base", None)
    pool = instance.pool
    step, ctx = lora_step("base", "a", "base")
    pool.plan(step, ctx)
    x = torch.full((3, 12), float("nan"))
    x[1] = 1.0
    y = torch.randn(3, 6)
    before = y.clone()
    pool.layer_delta("down", 0)(y, x)
    assert torch.equal(y[0], before[0]) and torch.equal(y[2], before[2]) and not torch.equal(y[1], before[1])


def test_l02_the_padding_rows_of_a_capture_bucket_are_not_touched(instances):
    instance = instances()
    instance.run("a", "A")
    pool = instance.pool
    step, ctx = lora_step("a", tokens=3)
    pool.plan(step, ctx)
    y, x = torch.zeros(8, 6), torch.full((8, 12), float("nan"))
    x[:3] = 1.0
    pool.layer_delta("down", 0)(y, x)
    assert y[:3].all() and not y[3:].any()
    assert isinstance(pool.backend, TorchLoraBackend)


def test_l03_a_request_holds_its_slot_from_its_first_admit_until_it_is_removed(instances):
    instance = instances(max_loras=1)
    instance.ingest("a", "A")
    assert instance.leader.holders() == {}
    for _ in range(3):
        instance.admit("a")
        assert instance.leader.holders() == {"A": 1}
    instance.remove("a")
    assert instance.leader.holders() == {"A": 0}


def test_l03_requests_on_one_adapter_share_its_slot_and_each_holds_it(instances):
    instance = instances(max_loras=2)
    instance.ingest("a1", "A")
    instance.ingest("a2", "A")
    instance.admit("a1", "a2")
    instance.ingest("a3", "A")
    instance.admit("a3", "a1")
    assert instance.leader.holders() == {"A": 3} and instance.pool.num_installs == 1
    for rid, left in (("a2", 2), ("a1", 1), ("a3", 0)):
        instance.remove(rid)
        assert instance.leader.holders() == {"A": left}


def test_l04_a_held_slot_is_never_overwritten(instances):
    instance = instances(max_loras=1)
    instance.run("a", "A")
    instance.ingest("b", "B")
    with pytest.raises(CapacityError):
        instance.admit("b")
    instance.leader.assert_runs("a", path_of("A"))
    instance.remove("a")
    instance.admit("b")
    instance.leader.assert_runs("b", path_of("B"))


def test_l04_a_slot_that_a_rolled_back_admit_took_may_be_overwritten(instances):
    instance = instances(max_loras=1)
    instance.ingest("a", "A")
    instance.admit("a")
    instance.pool.rollback_admit(*lora_step("a"))
    instance.run("b", "B")
    assert instance.leader.holders() == {"B": 1}
    instance.leader.assert_runs("b", path_of("B"))


def test_l05_the_victim_is_the_least_recently_used_unheld_slot(instances):
    instance = instances(max_loras=3)
    for rid, name in (("a", "A"), ("b", "B"), ("c", "C")):
        instance.run(rid, name)
    instance.remove("a", "b", "c")
    instance.run("a2", "A")  # A is used again, so B is the oldest
    instance.remove("a2")
    instance.run("d", "D")
    assert instance.leader.holders() == {"A": 0, "D": 1, "C": 0}
    instance.run("e", "E")
    assert instance.leader.holders() == {"A": 0, "D": 1, "E": 1}


def test_l05_letting_go_of_a_slot_is_a_use_of_it(instances):
    instance = instances(max_loras=3)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.remove("b")
    instance.run("c", "C")  # the clock goes on while A is held
    instance.remove("a")
    instance.run("d", "D")
    assert instance.leader.holders() == {"A": 0, "D": 1, "C": 1}


def test_l05_only_admits_advance_the_clock_and_never_time(instances):
    """Whatever time passes and whatever else happens between them, the same admits give the same victims."""
    seen = []
    for pause in (0.0, 1e6):
        instance = instances(max_loras=2)
        instance.run("a", "A")
        instance.leader.clock.now += pause
        instance.run("b", "B")
        instance.remove("b")
        instance.leader.clock.now -= 2 * pause
        instance.ingest("noise", None)
        instance.admit("noise")
        instance.pool.unload_adapter("F")
        instance.remove("a", "noise")
        instance.run("c", "C")
        seen.append(instance.pool.lines())
    assert seen[0] == seen[1]


def test_l05_slots_never_used_come_first_and_ties_go_by_index(instances):
    instance = instances(max_loras=4)
    instance.ingest("x", "A")
    instance.ingest("y", "B")
    instance.admit("x", "y")
    assert (instance.leader.slot_of("A"), instance.leader.slot_of("B")) == (1, 2)
    instance.remove("y", "x")
    instance.run("c", "C")
    instance.run("d", "D")
    assert (instance.leader.slot_of("C"), instance.leader.slot_of("D")) == (3, 4)
    instance.run("e", "E")  # A and B were let go of at one tick
    assert instance.leader.slot_of("E") == 1


def test_l05_a_slot_without_a_name_keeps_its_place_in_the_order(instances):
    instance = instances(max_loras=2)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.remove("a")
    instance.admit("b")
    instance.remove("b")
    instance.ingest("again", "A")
    instance.admit("again")
    instance.remove("again")
    assert instance.pool.unload_adapter("A")  # its slot is the most recently used one
    instance.run("c", "C")
    assert instance.pool.slots()[1][:2] == (2, "C")


def test_l05_a_failed_miss_advances_the_clock_like_any_other_admit(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.run("a", "A")
    instance.ranks[1].reads.fail(path_of("B"))
    instance.ingest("b", "B")
    before = instance.pool.digest()
    contexts = instance.admit("b")
    assert all("b" in ctx.failed for ctx in contexts) and instance.pool.digest() != before
    assert instance.begin_admit("a").result(PATIENCE_S)
    instance.assert_alike()
