"""L17-L22: one admit, from the set check of a steady step to the rollback."""

from __future__ import annotations

import pytest

from mstar.errors import CapacityError
from tests.unit.engine.lora_pools import PATIENCE_S, lora_step, path_of, promptly


class OnlyItsRidSet:
    """A step that lets nobody see more than the set of its rids."""

    def __init__(self, *rids):
        self.rid_set = frozenset(rids)


def test_l17_a_step_whose_rows_all_hold_their_slots_costs_one_set_check(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.ingest("base", None)
    before = instance.pool.lines()
    for rank in instance.ranks:
        rank.pool.admit(OnlyItsRidSet("a", "base", "b"), None)
    assert instance.pool.lines() == before and len(instance.agreement.rounds) == 2
    with pytest.raises(AttributeError):
        instance.pool.admit(OnlyItsRidSet("a", "new"), None)


def test_l17_steady_steps_do_not_advance_the_clock(instances):
    instance = instances(max_loras=2)
    instance.run("a", "A")
    before = instance.pool.digest()
    for _ in range(5):
        instance.admit("a")
    assert instance.pool.digest() == before


def test_l18_a_miss_does_not_evict_an_unheld_adapter_that_a_later_row_of_the_step_names(instances):
    instance = instances(max_loras=2)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.remove("a", "b")  # A's slot is the older one
    instance.ingest("c", "C")
    instance.ingest("a2", "A")
    instance.admit("c", "a2")
    assert instance.leader.holders() == {"A": 1, "C": 1} and instance.pool.num_installs == 3
    instance.leader.assert_step_runs(a2=path_of("A"), c=path_of("C"))


def test_l18_where_only_a_later_rows_adapter_is_left_to_evict_the_step_is_refused(instances):
    instance = instances(max_loras=2)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.remove("a", "b")
    for rid, name in (("c", "C"), ("d", "D"), ("a2", "A")):
        instance.ingest(rid, name)
    with pytest.raises(CapacityError):
        instance.admit("c", "d", "a2")
    instance.admit("a2")
    instance.leader.assert_runs("a2", path_of("A"))


def test_l19_misses_take_the_unheld_slots_least_recently_used_first_in_row_order(instances):
    instance = instances(max_loras=3)
    for rid, name in (("a", "A"), ("b", "B"), ("c", "C")):
        instance.run(rid, name)
    instance.remove("c", "a", "b")
    instance.ingest("x", "A")
    instance.admit("x")
    instance.remove("x")  # the order of use is now C = B, A; C and B were let go of at one tick
    instance.ingest("d", "D")
    instance.ingest("e", "E")
    instance.admit("e", "d")
    assert (instance.leader.slot_of("E"), instance.leader.slot_of("D")) == (2, 3)


def test_l19_misses_that_did_not_fail_close_up_in_row_order(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.ranks[1].reads.fail(path_of("A"))
    for rid, name in (("a", "A"), ("b", "B"), ("c", "C")):
        instance.ingest(rid, name)
    contexts = instance.admit("a", "b", "c")
    assert [list(ctx.failed) for ctx in contexts] == [["a"], ["a"]]
    assert (instance.leader.slot_of("B"), instance.leader.slot_of("C")) == (1, 2)
    instance.assert_alike()


def test_l19_the_choice_stands_before_any_wait_whatever_happens_meanwhile(instances):
    """Ingests, loads and unloads that a rank applies while it waits do not change which slots the misses take."""
    instance = instances(tp_size=2, max_loras=2, adapters="ABCDEF")
    for rid, name in (("a", "A"), ("b", "B")):
        instance.run(rid, name)
    instance.remove("a", "b")
    late = instance.ranks[1]
    late.reads.hold(path_of("C"))
    instance.ingest("c", "C", settled=False)
    admit = instance.begin_admit("c")
    instance.agreement.wait_round(1)
    late.pool.unload_adapter("A")
    late.pool.unload_adapter("F")
    late.pool.register_adapter("G", path_of("G"))
    late.pool.ingest_request("early", None)
    late.reads.let()
    admit.result(PATIENCE_S)
    assert instance.leader.slot_of("C") == 1
    instance.assert_alike()


def test_l20_one_collective_tells_where_every_miss_stands_and_failures_fail_on_all_ranks(instances):
    """0 ready, 1 in flight, 2 failed: the elementwise maximum over ranks decides, before any slot is handed out."""
    instance = instances(tp_size=3, max_loras=3)
    instance.ranks[1].reads.hold(path_of("B"))
    instance.ranks[2].reads.fail(path_of("C"))
    instance.ranks[1].reads.fail(path_of("D"))
    for rid, name in (("a", "A"), ("d", "D"), ("c", "C"), ("b", "B")):
        instance.ingest(rid, name, settled=False)
    for rank, names in zip(instance.ranks, ("ABCD", "ACD", "ABCD"), strict=True):
        for name in names:
            rank.wait_read(name)
    admit = instance.begin_admit("a", "b", "c", "d")
    assert instance.agreement.wait_round(1) == [[0, 0, 0, 0], [0, 1, 0, 2], [0, 0, 2, 0]]
    assert all(rank.holders() == {} for rank in instance.ranks)
    instance.ranks[1].reads.let()
    for rank, ctx in zip(instance.ranks, admit.result(PATIENCE_S), strict=True):
        assert sorted(ctx.failed) == ["c", "d"] and rank.holders() == {"A": 1, "B": 1}
        assert all(outcome.error.code in ("adapter_refused", "adapter_read_failed") for outcome in ctx.failed.values())
    instance.assert_alike()


def test_l20_a_failed_row_takes_no_slot_that_another_row_needs(instances):
    instance = instances(tp_size=2, max_loras=1)
    instance.ranks[1].reads.fail(path_of("A"))
    for rid, name in (("a", "A"), ("b", "B")):
        instance.ingest(rid, name)
    instance.admit("a", "b")
    for rank in instance.ranks:
        assert rank.holders() == {"B": 1}
        rank.assert_runs("b", path_of("B"))


def test_l20_every_row_on_a_failed_adapter_fails(instances):
    instance = instances(max_loras=1)
    instance.leader.reads.fail(path_of("A"))
    for rid in ("a1", "a2"):
        instance.ingest(rid, "A")
    ctx = instance.admit("a1", "a2")[0]
    assert list(ctx.failed) == ["a1", "a2"] and instance.leader.holders() == {}


def test_l21_a_follower_waits_for_its_copy_only_after_the_agreement_and_outside_the_lock(instances):
    instance = instances(tp_size=2, max_loras=1)
    follower = instance.ranks[1]
    follower.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    instance.leader.wait_read("A")
    admit = instance.begin_admit("a")
    assert instance.agreement.wait_round(1) == [[0], [1]]
    assert promptly(lambda: follower.pool.serves("B")) and not promptly(lambda: follower.pool.unload_adapter("Z"))
    promptly(lambda: follower.pool.ingest_request("other", None))
    assert not admit.done()
    for rank in instance.ranks:  # not even the rank that has its copy installed it
        assert rank.pool.slots() == [(1, None, 0)] and not rank.pool.layer_ranks("down", 0).any()
    follower.reads.let()
    assert not any(ctx.failed for ctx in admit.result(PATIENCE_S))
    assert instance.agreement.rounds[1:] == [[[0], [0]]]
    for rank in instance.ranks:
        rank.assert_runs("a", path_of("A"))
    instance.assert_alike()


def test_l21_no_second_collective_where_nothing_was_in_flight(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.ranks[0].reads.fail(path_of("B"))
    for rid, name in (("a", "A"), ("b", "B")):
        instance.ingest(rid, name)
    instance.admit("a", "b")
    assert len(instance.agreement.rounds) == 1


def test_l21_a_read_that_fails_during_the_wait_leaves_every_rank_as_it_was(instances):
    instance = instances(tp_size=2, max_loras=1)
    instance.run("old", "B")
    instance.remove("old")
    follower = instance.ranks[1]
    follower.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    admit = instance.begin_admit("a")
    instance.agreement.wait_round(1)
    follower.reads.fail(path_of("A"))
    assert all("a" in ctx.failed for ctx in admit.result(PATIENCE_S))
    assert instance.agreement.rounds[-1] == [[0], [2]]
    for rank in instance.ranks:
        assert rank.holders() == {"B": 0}
    instance.remove("a")
    instance.ingest("b", "B")
    instance.admit("b")
    for rank in instance.ranks:
        rank.assert_runs("b", path_of("B"))
    instance.assert_alike()


def test_l21_a_failure_beside_a_copy_in_flight_is_settled_in_the_first_collective(instances):
    """Nobody waits for an adapter that failed somewhere."""
    instance = instances(tp_size=2, max_loras=2)
    first, second = instance.ranks
    first.reads.fail(path_of("A"))
    second.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    first.wait_read("A")
    contexts = promptly(lambda: instance.admit("a"))
    assert all("a" in ctx.failed for ctx in contexts) and instance.agreement.rounds == [[[2], [1]]]


def test_l21_a_copy_that_never_comes_counts_as_failed_when_the_waits_bound_is_over(instances):
    instance = instances(tp_size=2, max_loras=1, copy_wait_s=45.0, read_timeout_s=1000.0)
    follower = instance.ranks[1]
    follower.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    instance.leader.wait_read("A")
    admit = instance.begin_admit("a")
    instance.agreement.wait_round(1)
    follower.clock.now += 46
    follower.pool.store.urge(["A"])  # wakes the wait, which looks at its clock
    assert all("a" in ctx.failed for ctx in admit.result(PATIENCE_S))
    assert instance.agreement.rounds[-1] == [[0], [2]]
    instance.assert_alike()


def test_l22_rollback_gives_back_what_this_admit_took_and_keeps_what_it_loaded_as_a_cache(instances):
    instance = instances(tp_size=2, max_loras=3)
    instance.run("held", "A")
    for rid, name in (("a2", "A"), ("b", "B")):
        instance.ingest(rid, name)
    instance.admit("held", "a2", "b")
    for rank in instance.ranks:
        rank.pool.rollback_admit(*lora_step("held", "a2", "b"))
        assert rank.holders() == {"A": 1, "B": 0}
    instance.assert_alike()
    rounds = len(instance.agreement.rounds)
    instance.admit("held", "a2", "b")
    assert len(instance.agreement.rounds) == rounds and instance.pool.num_installs == 2  # B was still there
    for rank in instance.ranks:
        rank.assert_runs("b", path_of("B"))


def test_l22_rollback_of_a_step_that_took_nothing_gives_nothing_back(instances):
    instance = instances(max_loras=1)
    instance.run("a", "A")
    instance.admit("a")
    instance.pool.rollback_admit(*lora_step("a"))
    assert instance.leader.holders() == {"A": 1}
    instance.leader.assert_runs("a", path_of("A"))


def test_l22_rollback_does_not_turn_the_clock_back(instances):
    """B was loaded and rolled back, and is still used more recently than A."""
    instance = instances(max_loras=2)
    instance.run("a", "A")
    instance.remove("a")
    instance.ingest("b", "B")
    instance.admit("b")
    clock = instance.pool.lines()[0]
    instance.pool.rollback_admit(*lora_step("b"))
    assert instance.pool.lines()[0] == clock == "clock 2\n"
    instance.remove("b")
    instance.run("c", "C")
    assert instance.leader.holders() == {"B": 0, "C": 1}


def test_l22_a_refusal_follows_from_tables_that_ranks_share_so_it_happens_on_all(instances):
    instance = instances(tp_size=3, max_loras=1)
    instance.run("a", "A")
    for rid, name in (("b", "B"), ("c", "C")):
        instance.ingest(rid, name)
    refused = []
    for rids in (("b",), ("a", "c"), ("b", "c")):
        with pytest.raises(CapacityError) as caught:
            instance.admit(*rids)
        refused.append(str(caught.value))
        instance.assert_alike()
    assert len(instance.agreement.rounds) == 4  # every rank came to every agreement before it refused
