"""L11-L16: a full pool is backpressure at the one admission queue."""

from __future__ import annotations

import pytest

from mstar.engine.resources.base import ASKS
from mstar.errors import CapacityError
from tests.unit.engine.leader_loop import LeaderLoop
from tests.unit.engine.lora_pools import PATIENCE_S, lora_step, path_of, wants


def test_l11_a_request_that_waits_for_a_slot_holds_no_pages_and_costs_no_running_row_a_step(instances):
    loop = LeaderLoop(instances(max_loras=1))
    loop.add("a", "A", max_tokens=6)
    loop.step()
    loop.add("b", "B")
    for _ in range(4):
        assert loop.rows(loop.step()) == ["a"]
        assert "b" in loop.scheduler.queue and not loop.kv.pages.table("b") and loop.pool.waits_for("b") == "slot"
    loop.run()
    assert loop.ended == {"a": "length", "b": "length"}


def test_l11_one_queue_for_slots_and_pages(instances):
    """What waits for a slot and what waits for pages stand in one order of arrival."""
    loop = LeaderLoop(instances(max_loras=1), num_pages=4, max_passes=0, caching=False)
    loop.add("a", "A", tokens=8, max_tokens=2)
    loop.step()
    loop.add("slot", "B")
    loop.add("pages", None, tokens=12)
    loop.add("small", None)
    assert loop.scheduler.queue.rids() == ["slot", "pages", "small"]
    assert loop.rows(loop.step()) == ["a"]  # nobody passes one that waits for pages
    loop.run()
    assert list(loop.ended) == ["a", "slot", "pages", "small"]


def test_l12_reservations_never_promise_more_slots_than_exist_and_pin_none(instances):
    instance = instances(max_loras=2)
    for rid, name in (("a", "A"), ("b", "B"), ("c", "C"), ("a2", "A")):
        instance.ingest(rid, name)
    leader = instance.leader
    assert [leader.reserve(rid) for rid in ("a", "b", "c", "a2")] == [1, 1, None, 0]
    assert leader.pool.slots() == [(1, None, 0), (2, None, 0)]
    instance.admit("b", "a", "a2")  # row order picks the slots, whatever was promised first
    assert (leader.slot_of("B"), leader.slot_of("A")) == (1, 2)


def test_l12_a_resident_adapter_nobody_holds_needs_a_free_slot_like_any_other(instances):
    instance = instances(max_loras=1)
    instance.run("old", "A")
    instance.remove("old")
    instance.ingest("b", "B")
    instance.ingest("a", "A")
    assert [instance.leader.reserve(rid) for rid in ("b", "a")] == [1, None]
    instance.remove("b")
    assert instance.leader.reserve("a") == 1


def test_l12_held_slots_count_and_their_adapters_are_shared(instances):
    instance = instances(max_loras=2)
    instance.run("a", "A")
    for rid, name in (("a2", "A"), ("b", "B"), ("c", "C")):
        instance.ingest(rid, name)
    assert [instance.leader.reserve(rid) for rid in ("a2", "b", "c")] == [0, 1, None]
    instance.remove("a")  # a2's promise now counts the slot that A would have freed
    assert instance.leader.reserve("c") is None
    instance.admit("a2", "b")
    assert instance.leader.holders() == {"A": 1, "B": 1}


def test_l12_requests_that_share_an_adapter_are_promised_one_slot_together(instances):
    instance = instances(max_loras=2)
    for rid, name in (("a1", "A"), ("a2", "A"), ("a3", "A"), ("b", "B"), ("c", "C")):
        instance.ingest(rid, name)
    assert [instance.leader.reserve(rid) for rid in ("a1", "a2", "a3", "b", "c")] == [1, 0, 0, 1, None]


def test_l12_cancelling_and_removing_give_the_promise_back(instances):
    instance = instances(max_loras=1)
    for rid, name in (("a", "A"), ("b", "B"), ("c", "C")):
        instance.ingest(rid, name)
    leader = instance.leader
    assert leader.reserve("a") == 1 and leader.reserve("b") is None
    leader.pool.cancel("a")
    assert leader.reserve("b") == 1 and leader.reserve("c") is None
    instance.remove("b")
    assert leader.reserve("c") == 1


def test_l12_every_reserved_row_finds_a_slot_at_its_admit(instances):
    """Whatever was held or resident when it was promised."""
    instance = instances(max_loras=2)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.remove("b")
    for rid, name in (("c", "C"), ("a2", "A"), ("b2", "B")):
        instance.ingest(rid, name)
    assert [instance.leader.reserve(rid) for rid in ("c", "a2", "b2")] == [1, 0, None]
    instance.admit("c", "a2")
    assert instance.leader.holders() == {"A": 2, "C": 1}


def test_l13_a_row_whose_read_failed_is_let_through_at_once_and_takes_no_slot(instances):
    instance = instances(max_loras=1)
    instance.leader.reads.fail(path_of("B"))
    instance.ingest("a", "A")
    instance.ingest("b", "B")
    leader = instance.leader
    assert leader.reserve("a") == 1  # the pool is full now
    outcome = leader.ask("b")
    assert outcome.error is not None and "cannot be read" in outcome.error.message
    assert leader.reserve("b") == 0
    ctx = instance.admit("b", "a")[0]
    assert list(ctx.failed) == ["b"] and ctx.failed["b"].error.message == outcome.error.message
    assert leader.holders() == {"A": 1}


def test_l13_let_through_by_the_scheduler_it_ends_with_its_error_while_the_pool_is_full(instances):
    loop = LeaderLoop(instances(max_loras=1))
    loop.add("a", "A", max_tokens=5)
    loop.step()
    loop.instance.leader.reads.fail(path_of("B"))
    loop.add("b", "B")
    assert loop.rows(loop.step()) == ["a", "b"] and loop.ended == {"b": "failed"}
    assert loop.outcomes[-1].failed["b"].code == "adapter_refused"


def test_l13_one_whose_adapter_is_still_resident_counts_and_runs_on_it(instances):
    instance = instances(max_loras=2, max_cpu_loras=1)
    instance.run("old", "A")
    instance.remove("old")
    instance.ingest("b", "B")  # takes A's place in the host tier
    instance.remove("b")
    instance.leader.reads.fail(path_of("A"))
    instance.ingest("a", "A")
    leader = instance.leader
    assert leader.pool.store.host_names() == []
    assert leader.ask("a") is ASKS and leader.reserve("a") == 1
    ctx = instance.admit("a")[0]
    assert not ctx.failed
    leader.assert_runs("a", path_of("A"))


def test_l14_a_rank_that_does_not_decide_answers_nothing_and_keeps_no_reservation(instances):
    instance = instances(tp_size=2, max_loras=1)
    for rid, name in (("a", "A"), ("b", "B")):
        instance.ingest(rid, name)
    follower = instance.ranks[1]
    assert follower.ask("a") is None and follower.ask("unheard of") is None
    assert follower.reserve("a") == 0 and follower.reserve("b") == 0  # no count: both are let be
    instance.admit("b")
    assert follower.holders() == {"B": 1}


def test_l14_the_refusal_in_admit_is_a_backstop_that_takes_nothing(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.run("a", "A")
    instance.run("b", "B")
    instance.remove("b")
    for rid, name in (("b2", "B"), ("c", "C"), ("d", "D")):
        instance.ingest(rid, name)
    slots = instance.pool.slots()
    with pytest.raises(CapacityError):
        instance.admit("b2", "c", "d")
    for rank in instance.ranks:
        assert rank.pool.slots() == slots
        rank.assert_runs("a", path_of("A"))
    instance.assert_alike()
    instance.admit("b2")
    assert instance.leader.holders() == {"A": 1, "B": 1} and not instance.leader.reserve("c")


def test_l15_what_ask_returns(instances):
    instance = instances(max_loras=2)
    instance.serve("N", "/nothing", has_something=False)
    leader = instance.leader
    leader.reads.fail(path_of("F"))
    for rid, name in (("a", "A"), ("base", None), ("n", "N"), ("f", "F")):
        instance.ingest(rid, name)
    assert leader.ask("a") is ASKS
    assert leader.ask("base") is None
    assert leader.ask("n") is None
    assert leader.ask("f").error.code == "adapter_refused"
    assert leader.reserve("a") == 1
    assert leader.ask("a") is None  # holds a reservation: asked again by another node that the pool serves
    instance.admit("a")
    assert leader.ask("a") is None  # holds its slot
    instance.admit("n", "base")
    assert leader.holders() == {"A": 1}


def test_l16_reserve_counts_only_once_this_ranks_copy_is_in(instances):
    instance = instances(max_loras=1)
    instance.leader.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    leader = instance.leader
    assert leader.reserve("a") is None and leader.pool.waits_for("a") == "read"
    leader.reads.let()
    leader.wait_read("A")
    assert leader.reserve("a") == 1


def test_l16_also_where_the_adapter_is_resident_since_it_may_be_evicted_before_the_admit(instances):
    instance = instances(max_loras=2, max_cpu_loras=1)
    instance.run("old", "A")
    instance.remove("old")
    instance.ingest("b", "B")
    instance.remove("b")
    leader = instance.leader
    leader.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    leader.reads.wait_began(path_of("A"), times=2)
    assert leader.slot_of("A") is not None
    assert leader.reserve("a") is None and leader.pool.waits_for("a") == "read"
    leader.reads.let()
    leader.wait_read("A")
    assert leader.reserve("a") == 1


def test_l16_the_leader_waits_for_every_followers_hint(instances):
    instance = instances(tp_size=3, max_loras=1)
    instance.ingest("a", "A")
    leader = instance.leader
    for tp_rank in (2, 1):
        assert leader.reserve("a") is None and leader.pool.waits_for("a") == "read"
        instance.ranks[tp_rank].wait_hint("A")
        assert instance.ranks[tp_rank].hints == ["A"]
        leader.pool.note_copy(tp_rank, "A")
        leader.pool.note_copy(tp_rank, "A")
    assert leader.reserve("a") == 1


def test_l16_a_hint_is_waited_for_no_longer_than_its_bound(instances):
    instance = instances(tp_size=2, max_loras=1, hint_wait_s=2.0)
    instance.ingest("a", "A")
    leader = instance.leader
    assert leader.reserve("a") is None
    leader.clock.now += 1.5
    assert leader.reserve("a") is None
    leader.clock.now += 0.5
    assert leader.reserve("a") == 1


def test_l16_a_follower_hints_a_failed_read_too(instances):
    instance = instances(tp_size=2)
    instance.ranks[1].reads.fail(path_of("A"))
    instance.ingest("a", "A")
    instance.ranks[1].wait_hint("A")
    assert instance.ranks[1].hints == ["A"]


def test_l16_a_follower_that_has_the_copy_already_hints_at_once(instances):
    """No read will end for the second request, and the leader would wait its whole bound for nothing."""
    instance = instances(tp_size=2, max_loras=1)
    instance.ingest("first", "A")
    instance.remove("first")
    leader, follower = instance.ranks
    follower.wait_hint("A")
    follower.hints.clear()
    instance.ingest("second", "A")
    assert follower.hints == ["A"]
    leader.pool.note_copy(1, "A")
    assert leader.reserve("second") == 1


def test_l16_a_hint_that_comes_before_the_leaders_own_ingest_counts(instances):
    instance = instances(tp_size=2, max_loras=1)
    instance.ranks[1].pool.ingest_request("a", wants("A"))
    instance.ranks[1].wait_read("A")
    instance.pool.note_copy(1, "A")
    instance.pool.ingest_request("a", wants("A"))
    instance.leader.wait_read("A")
    assert instance.leader.reserve("a") == 1


def test_l16_no_correctness_depends_on_a_hint(instances):
    """A hint for a copy that is not there only moves the wait into the follower's admit."""
    instance = instances(tp_size=2, max_loras=1)
    follower = instance.ranks[1]
    follower.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    instance.leader.wait_read("A")
    instance.pool.note_copy(1, "A")
    assert instance.leader.reserve("a") == 1
    admit = instance.begin_admit("a")
    instance.agreement.wait_round(1)
    follower.reads.let()
    assert not any(ctx.failed for ctx in admit.result(PATIENCE_S))
    instance.assert_alike()
    follower.assert_runs("a", path_of("A"))


def test_l16_nothing_is_hinted_for_a_request_that_needs_no_copy(instances):
    instance = instances()
    instance.serve("N", "/nothing", has_something=False)
    instance.ingest("base", None)
    instance.ingest("n", "N")
    assert instance.leader.hints == [] and instance.leader.reads.began == []
    step, ctx = lora_step("base", "n")
    instance.pool.admit(step, ctx)
    assert instance.agreement.rounds == []
