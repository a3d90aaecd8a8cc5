"""The one admission queue: first in, first out, with a bound on how often one that waits is passed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.admission import AdmissionQueue, Verdict

ADMITTED, FULL = Verdict.ADMITTED, Verdict.FULL
READ, SLOT, PAGES = Verdict.WAITS_READ, Verdict.WAITS_SLOT, Verdict.WAITS_PAGES


def queue_of(*entries, max_passes=2):
    """Entries are rid, or (rid, uses_slot)."""
    queue = AdmissionQueue(max_passes)
    for order, entry in enumerate(entries):
        rid, uses_slot = entry if isinstance(entry, tuple) else (entry, True)
        queue.push(rid, order, uses_slot=uses_slot)
    return queue


def attempt(**verdicts):
    tried = []

    def one(rid):
        tried.append(rid)
        return verdicts.get(rid, ADMITTED)

    one.tried = tried
    return one


def test_first_in_first_out():
    queue = queue_of("a", "b", "c")
    assert queue.admit(attempt()) == ["a", "b", "c"] and len(queue) == 0


def test_a_full_step_ends_the_round():
    queue = queue_of("a", "b", "c")
    one = attempt(b=FULL)
    assert queue.admit(one) == ["a"] and one.tried == ["a", "b"] and queue.rids() == ["b", "c"]


def test_verdicts_name_what_is_waited_for():
    assert [Verdict.waits(reason) for reason in ("read", "slot", "pages")] == [READ, SLOT, PAGES]


def test_c52_what_cannot_run_now_is_skipped():
    queue = queue_of("five", ("base", False), "resident", max_passes=4)
    assert queue.admit(attempt(five=SLOT)) == ["base", "resident"] and queue.rids() == ["five"]


def test_passes_over_a_slot_waiter_count_only_for_those_that_use_slots():
    queue = queue_of("b", ("base", False), "a1", ("base2", False), "a2", "a3", max_passes=2)
    one = attempt(b=SLOT)
    assert queue.admit(one) == ["base", "a1", "base2", "a2"]
    assert "a3" not in one.tried and queue.longest_pass_over == 2
    assert queue.admit(attempt(b=SLOT)) == []
    assert queue.admit(attempt()) == ["b", "a3"]


def test_passes_over_a_pages_waiter_always_count():
    queue = queue_of("p", ("base", False), ("base2", False), ("base3", False), "a", max_passes=2)
    assert queue.admit(attempt(p=PAGES)) == ["base", "base2"] and queue.rids() == ["p", "base3", "a"]


def test_passes_over_a_read_waiter_never_count():
    queue = queue_of("r", *[f"a{number}" for number in range(9)], max_passes=0)
    assert queue.admit(attempt(r=READ)) == [f"a{number}" for number in range(9)] and queue.longest_pass_over == 0


def test_one_waiter_at_its_bound_holds_back_whoever_could_delay_it_and_nobody_else():
    queue = queue_of("s", "a", ("base", False), max_passes=0)
    one = attempt(s=SLOT)
    assert queue.admit(one) == ["base"] and one.tried == ["s", "base"]


def test_a_pass_counts_for_every_waiter_it_passes():
    queue = queue_of("s", "p", "a1", "a2", max_passes=1)
    assert queue.admit(attempt(s=SLOT, p=PAGES)) == ["a1"]
    assert queue.admit(attempt(s=SLOT, p=PAGES)) == []
    assert queue.admit(attempt(p=PAGES)) == ["s"]  # p still is at its bound
    assert queue.admit(attempt()) == ["p", "a2"]


def test_one_that_comes_back_stands_where_its_arrival_puts_it():
    queue = queue_of("a", "b", "c")
    queue.admit(attempt(b=SLOT, c=SLOT))
    queue.push("a", 0, uses_slot=True)
    assert queue.rids() == ["a", "b", "c"]


def test_removing_takes_one_out_wherever_it_stands():
    queue = queue_of("a", "b", "c")
    queue.remove("b")
    queue.remove("b")
    queue.remove("never")
    assert queue.rids() == ["a", "c"] and "b" not in queue and "a" in queue


@settings(deadline=None, max_examples=150)
@given(
    max_passes=st.integers(0, 3),
    uses=st.lists(st.booleans(), min_size=1, max_size=14),
    rounds=st.lists(st.lists(st.sampled_from([ADMITTED, READ, SLOT, PAGES, FULL]), min_size=14, max_size=14), max_size=8),
)
def test_nobody_is_passed_more_often_than_the_bound_in_a_way_that_counts(max_passes, uses, rounds):
    queue = queue_of(*[(f"r{index}", uses_slot) for index, uses_slot in enumerate(uses)], max_passes=max_passes)
    passed: Counter[str] = Counter()
    for verdicts in rounds:
        waits: dict[str, Verdict] = {}

        def one(rid, verdicts=verdicts, waits=waits):
            index = int(rid[1:])
            verdict = verdicts[index]
            if verdict is SLOT and not uses[index]:
                verdict = PAGES  # a base request waits for no slot
            if verdict is ADMITTED:
                passed.update(
                    other for other, why in waits.items() if why is PAGES or (why is SLOT and uses[index])
                )  # fmt: skip
            elif verdict is not FULL:
                waits[rid] = verdict
            return verdict

        before = queue.rids()
        admitted = queue.admit(one)
        assert queue.rids() == [rid for rid in before if rid not in admitted]
    assert all(count <= max_passes for count in passed.values())
    assert queue.longest_pass_over == max(passed.values(), default=0)
