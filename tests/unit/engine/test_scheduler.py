"""The leader's choice of steps, through the loop that serves: scheduler, pool, pages and runner on one rank."""

from __future__ import annotations

import random

import pytest

from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.runner import Runner
from mstar.types import Step
from tests.unit.engine.leader_loop import LeaderLoop, count_tokens
from tests.unit.engine.lora_pools import path_of, wants


def loop_of(instances, max_loras=2, instance=None, **fields) -> LeaderLoop:
    return LeaderLoop(instance or instances(max_loras=max_loras), **fields)


def rows(choice):
    return [(row.rid, row.start, row.num_tokens) for row in choice.rows]


def test_decodes_come_first_then_prefills_then_newcomers_within_the_budget(instances):
    loop = loop_of(instances, max_num_batched_tokens=8, caching=False)
    loop.add("long", None, tokens=20, max_tokens=4)
    assert rows(loop.step()) == [("long", 0, 8)]
    loop.add("short", None, tokens=2, max_tokens=4)
    assert rows(loop.step()) == [("long", 8, 8)]  # nothing is left of the budget for a newcomer
    assert rows(loop.step()) == [("long", 16, 4), ("short", 0, 2)]
    loop.add("new", None, tokens=9, max_tokens=1)
    assert rows(loop.step()) == [("long", 20, 1), ("short", 2, 1), ("new", 0, 6)]
    loop.add("late", None, tokens=5, max_tokens=1)
    assert rows(loop.step()) == [("long", 21, 1), ("short", 3, 1), ("new", 6, 3), ("late", 0, 3)]
    assert rows(loop.step()) == [("long", 22, 1), ("short", 4, 1), ("late", 3, 2)]


def test_prompts_take_no_more_beside_decodes_than_their_budget_says(instances):
    loop = loop_of(instances, max_num_batched_tokens=64, caching=False)
    asked = []

    def two(num_decodes):
        asked.append(num_decodes)
        return 2 if num_decodes else None

    loop.add("first", None, tokens=9, max_tokens=9)
    assert rows(loop.step(two)) == [("first", 0, 9)]
    loop.add("long", None, tokens=5, max_tokens=2)
    loop.add("late", None, tokens=4, max_tokens=1)
    assert rows(loop.step(two)) == [("first", 9, 1), ("long", 0, 2)]
    assert rows(loop.step(two)) == [("first", 10, 1), ("long", 2, 2)]
    assert rows(loop.step(lambda num_decodes: 0)) == [("first", 11, 1), ("long", 4, 1)], "a last token is a row of one, as a decode is"
    assert rows(loop.step(lambda num_decodes: 0)) == [("first", 12, 1), ("long", 5, 1)]
    assert rows(loop.step(two)) == [("first", 13, 1), ("late", 0, 2)]
    assert asked == [0, 1, 1, 1]


def test_a_prompt_is_sampled_from_only_when_it_is_whole(instances):
    loop = loop_of(instances, max_num_batched_tokens=4, max_num_seqs=2)
    loop.add("a", "A", tokens=10, max_tokens=2)
    loop.run()
    assert [len(outcome.tokens) for outcome in loop.outcomes] == [0, 0, 1, 1]
    assert [token.token_id for outcome in loop.outcomes for token in outcome.tokens] == [10, 11]


def test_no_more_rows_than_max_num_seqs(instances):
    loop = loop_of(instances, max_num_seqs=2)
    for number in range(5):
        loop.add(f"r{number}", None, max_tokens=3)
    while loop.scheduler.has_work():
        assert len(loop.step().rows) <= 2
    assert len(loop.ended) == 5


def test_nothing_to_do_is_no_step(instances):
    loop = loop_of(instances)
    assert not loop.scheduler.has_work() and loop.scheduler.choose() is None


def test_a_request_whose_read_is_not_in_yet_delays_nobody(instances):
    loop = loop_of(instances)
    loop.add("b", "B", max_tokens=4)
    loop.step()
    loop.instance.leader.reads.hold(path_of("A"))
    loop.add("a", "A", settled=False)
    loop.add("b2", "B")
    loop.add("base", None)
    assert loop.rows(loop.step()) == ["b", "b2", "base"]
    loop.instance.leader.reads.let()
    loop.instance.leader.wait_read("A")
    loop.run()
    assert sorted(loop.ended) == ["a", "b", "b2", "base"]


def test_c50_a_request_in_the_middle_of_a_chunked_prefill_holds_its_slot(instances):
    """8 slots, 20 adapters, prompts that take many chunks: never more than 8 adapters at a time, and all get through."""
    names = [f"a{number}" for number in range(20)]
    loop = loop_of(instances, instance=instances(adapters=names, max_loras=8, max_cpu_loras=20), num_pages=400, max_num_batched_tokens=16)
    for number, name in enumerate(names):
        loop.add(f"r{number}", name, tokens=40, max_tokens=2, offset=1000 * number)
    most = 0
    while loop.scheduler.has_work():
        loop.step()
        held = loop.instance.leader.holders()
        most = max(most, sum(count > 0 for count in held.values()))
        for rid in loop.scheduler.running():
            assert held[loop.adapter_of[rid]] > 0, "a running request lost its slot between its chunks"
    assert most <= 8 and list(loop.ended.values()) == ["length"] * 20


def test_c53_slot_and_pages_are_taken_together_or_not_at_all(instances):
    """One that gets no pages keeps no adapter place either."""
    loop = loop_of(instances, max_loras=1, num_pages=4, caching=False)
    loop.add("a", None, tokens=8, max_tokens=2)
    loop.step()
    loop.add("big", "A", tokens=12, offset=100)
    loop.add("small", "B", tokens=2, offset=200)
    assert loop.rows(loop.step()) == ["a", "small"]  # the only slot is not spoken for by `big`
    assert loop.scheduler.queue.rids() == ["big"] and loop.instance.leader.holders() == {"B": 1}
    loop.run()
    assert sorted(loop.ended) == ["a", "big", "small"]


def test_c52_base_and_resident_adapters_pass_one_that_waits_for_a_slot(instances):
    loop = loop_of(instances, max_loras=2)
    for rid, name in (("a", "A"), ("b", "B")):
        loop.add(rid, name, max_tokens=6)
    loop.step()
    loop.add("fifth", "C", max_tokens=1)
    loop.add("base", None, max_tokens=1)
    loop.add("a2", "A", max_tokens=1)
    assert loop.rows(loop.step()) == ["a", "b", "base", "a2"]
    loop.run()
    assert loop.ended["fifth"] == "length"


def test_c54_only_slots_that_nobody_holds_are_taken(instances):
    loop = loop_of(instances, max_loras=4)
    for name in "ABCD":
        loop.add(name.lower(), name, max_tokens=3 if name == "A" else 9)
    loop.step()
    loop.add("e", "E", max_tokens=1)
    while "e" not in loop.ended:
        loop.step()
    assert loop.instance.leader.holders() == {"E": 0, "B": 1, "C": 1, "D": 1}


def test_c55_the_base_occupies_no_slot_and_a_pin_leaves_the_others(instances):
    loop = loop_of(instances, max_loras=2)
    loop.add_pin("pin", "A")
    loop.add("base", None, max_tokens=4)
    loop.add("b", "B", max_tokens=4)
    assert loop.rows(loop.step()) == ["pin", "base", "b"]
    assert loop.instance.leader.holders() == {"A": 1, "B": 1}
    loop.run()
    assert sorted(loop.ended) == ["b", "base"] and loop.instance.leader.holders() == {"A": 1, "B": 0}
    loop.add("a", "A")
    loop.add("c", "C")
    loop.run()
    assert loop.instance.leader.holders() == {"A": 1, "C": 0}
    loop.end("pin", "unpinned")
    assert loop.instance.leader.holders() == {"A": 0, "C": 0}


def test_a_pin_takes_no_place_among_the_rows_that_run(instances):
    loop = loop_of(instances, max_loras=3, max_num_seqs=1)
    loop.add_pin("pin1", "A")
    loop.add_pin("pin2", "B")
    loop.add("a", "A", max_tokens=3)
    loop.add("c", "C", max_tokens=1)
    loop.run()
    assert sorted(loop.ended) == ["a", "c"]


@pytest.mark.parametrize("max_passes", [0, 1, 4])
def test_one_slot_and_a_b_a_a_a_for_ever_b_runs_within_the_bound(instances, max_passes):
    loop = loop_of(instances, max_loras=1, max_passes=max_passes)
    loop.add("a0", "A", max_tokens=4)
    loop.step()
    loop.add("b", "B", max_tokens=1)
    passers, number = 0, 0
    while "b" not in loop.ended:
        number += 1
        assert number < 100, "B never runs"
        loop.add(f"a{number}", "A", max_tokens=4)
        loop.step()
        passers = sum(rid.startswith("a") and rid != "a0" for rid in {row.rid for choice in loop.choices for row in choice.rows})
    assert passers <= max_passes and loop.scheduler.queue.longest_pass_over <= max_passes
    loop.run()


def test_many_base_requests_pass_one_that_waits_for_a_slot(instances):
    loop = loop_of(instances, max_loras=1, max_passes=0)
    loop.add("a", "A", max_tokens=8)
    loop.step()
    loop.add("b", "B", max_tokens=1)
    for number in range(5):
        loop.add(f"base{number}", None, max_tokens=1)
        loop.step()
        assert loop.ended.get(f"base{number}") == "length" and "b" not in loop.ended


def test_where_pages_run_out_the_youngest_gives_way_and_comes_back(instances):
    loop = loop_of(instances, num_pages=6, caching=False)
    for number in range(3):
        loop.add(f"r{number}", None, tokens=7, max_tokens=6, offset=50 * (number + 1))
    while not any(choice.preempted for choice in loop.choices):
        loop.step()
    (preempting,) = [choice for choice in loop.choices if choice.preempted]
    assert preempting.preempted == ("r2",) and loop.rows(preempting) == ["r0", "r1"]
    assert loop.scheduler.queue.rids() == ["r2"] and loop.scheduler.num_preemptions == 1
    loop.run()
    assert list(loop.ended) == ["r0", "r1", "r2"]
    tokens = [token.token_id for outcome in loop.outcomes for token in outcome.tokens if token.rid == "r2"]
    assert tokens == [7, 8, 9, 10, 11, 12]  # it lost nothing and said nothing twice


def test_a_preempted_request_keeps_its_slot_and_its_arrival(instances):
    loop = loop_of(instances, max_loras=2, num_pages=4, caching=False)
    loop.add("a", "A", tokens=7, max_tokens=6)
    loop.add("b", "B", tokens=7, max_tokens=6, offset=100)
    loop.step()
    while "b" not in loop.scheduler.queue:
        loop.step()
    loop.add("late", "B", tokens=3, max_tokens=1)
    assert loop.instance.leader.holders() == {"A": 1, "B": 1} and loop.scheduler.queue.rids() == ["b", "late"]
    installs = loop.pool.num_installs
    loop.run()
    assert loop.pool.num_installs == installs and list(loop.ended) == ["late", "a", "b"]


def test_l03_one_that_waits_for_a_preempted_requests_slot_does_not_keep_it_from_coming_back(instances):
    """A held slot is given back only by its holder's end. B waits for A's slot at its bound; A waits for pages: A goes on first."""
    loop = loop_of(instances, max_loras=1, num_pages=4, max_passes=1, caching=False)
    loop.add("a1", "A", tokens=7, max_tokens=6)
    loop.step()
    loop.add("b", "B", tokens=2, max_tokens=1, offset=50)
    loop.add("a2", "A", tokens=7, max_tokens=6, offset=100)
    loop.step()  # a2 passes b, which is at its bound now
    assert loop.scheduler.running() == ["a1", "a2"]
    while "a2" not in loop.scheduler.queue:
        loop.step()
    assert loop.scheduler.queue.rids() == ["b", "a2"]
    loop.run()
    assert list(loop.ended) == ["a1", "a2", "b"]


def test_a_pin_is_not_preempted_for_pages_that_it_does_not_hold(instances):
    loop = loop_of(instances, max_loras=2, num_pages=4, caching=False)
    for number in range(2):
        loop.add(f"r{number}", None, tokens=7, max_tokens=6, offset=50 * (number + 1))
    loop.add_pin("pin", "A")
    loop.run()
    assert {rid for choice in loop.choices for rid in choice.preempted} == {"r1"}
    assert loop.scheduler.running() == ["pin"]


def test_pages_given_up_are_broadcast_even_where_no_row_can_run(instances):
    """The leader's table has changed: a follower must hear of it."""
    loop = loop_of(instances, num_pages=2, caching=False)
    loop.add("a", None, tokens=8, max_tokens=4)
    loop.step()
    choice = loop.scheduler.choose()
    assert choice is not None and choice.rows == () and choice.preempted == ("a",)


def test_a_follower_that_gets_the_leaders_steps_has_the_leaders_tables(instances):
    """Preemptions, prefix hits and evictions included: nothing of a step is decided anew."""
    leader = loop_of(instances, max_loras=2, num_pages=10)
    follower = Runner([instances(max_loras=2).pool, KvResource(KvSpec(10, 4), decides=False)], count_tokens)
    draw = random.Random(5)
    fingerprints = []
    for number in range(60):
        if number < 30:
            name, tokens = draw.choice([None, "A", "B", "C"]), draw.randint(1, 12)
            leader.add(f"r{number}", name, tokens=tokens, max_tokens=draw.randint(1, 6))
            follower.ingest(f"r{number}", wants(name, tokens, cache_key=(name or "").encode()))
        num_ended = len(leader.ended)
        choice = leader.step()
        if choice is None:
            break
        step = Step(number + 1, choice.rows, choice.preempted)
        outcome = follower.execute(step)
        fingerprints.append((leader.outcomes[-1].fingerprint, outcome.fingerprint))
        assert outcome.sampled == leader.outcomes[-1].sampled
        for rid in list(leader.ended)[num_ended:]:
            follower.remove(rid)
    assert len(fingerprints) > 20 and all(one == other for one, other in fingerprints)
    assert leader.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", range(6))
def test_n_slots_n_plus_one_adapters_and_base_with_cancels_all_finish(instances, seed):
    """200 random arrivals; every one of them ends exactly once, nothing is left held."""
    draw = random.Random(seed)
    num_slots = draw.randint(1, 3)
    names = [f"a{number}" for number in range(num_slots + 1)]
    instance = instances(adapters=names, max_loras=num_slots, max_cpu_loras=num_slots + 1)
    loop = LeaderLoop(
        instance, num_pages=draw.randint(8, 40), max_num_seqs=draw.randint(2, 8),
        max_num_batched_tokens=draw.choice([8, 16, 64]), max_passes=draw.randint(0, 3), caching=draw.random() < 0.5,
    )  # fmt: skip
    if seed % 3 == 0:
        instance.leader.reads.fail(path_of(names[-1]), "torn file")
    accepted, live = 0, []
    while accepted < 200 or loop.scheduler.has_work():
        if accepted < 200 and draw.random() < 0.7:
            rid = f"r{accepted}"
            loop.add(
                rid, draw.choice([None, *names]), tokens=draw.randint(1, 20), max_tokens=draw.randint(1, 8), offset=draw.choice([0, 40])
            )
            accepted += 1
        live = [f"r{number}" for number in range(accepted) if f"r{number}" not in loop.ended]
        if live and draw.random() < 0.1:
            loop.end(draw.choice(live), "cancelled")
        if loop.step() is None and loop.scheduler.has_work():
            assert loop.scheduler.queue.rids() and accepted < 200, "nothing can run and nothing will come"
    assert len(loop.ended) == 200 and {"length", "cancelled"} <= set(loop.ended.values())
    assert all(count == 0 for count in instance.leader.holders().values())
    assert loop.kv.pages.num_free() == loop.kv.spec.num_pages and loop.runner.num_requests == 0
