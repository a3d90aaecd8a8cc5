"""Grouping packed tokens by slot, against the sentence that defines it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.lora.addressing import HostAddressing, Segment, group_by_slot, rows_of_grouping

STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12)


def test_the_drawing_of_the_module():
    grouped = group_by_slot([0, 2, 1], [1, 3, 1], 4)
    assert grouped == HostAddressing((0, 4, 1, 2, 3), (0, 1, 2, 5, 5))
    assert grouped.segments() == (Segment(1, 1, 1), Segment(2, 2, 3))


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_every_token_is_in_the_range_of_its_rows_slot_once_and_in_order(step):
    slots, tokens = [slot for slot, _ in step], [count for _, count in step]
    grouped = group_by_slot(slots, tokens, 5)
    owner = [slot for slot, count in step for _ in range(count)]
    assert sorted(grouped.token_order) == list(range(len(owner)))
    assert grouped.slot_indptr[0] == 0 and grouped.slot_indptr[-1] == len(owner) and len(grouped.slot_indptr) == 6
    for slot in range(5):
        run = grouped.token_order[grouped.slot_indptr[slot] : grouped.slot_indptr[slot + 1]]
        assert list(run) == [token for token, place in enumerate(owner) if place == slot]


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_segments_are_the_non_empty_runs_of_adapter_slots_and_never_slot_0(step):
    grouped = group_by_slot([slot for slot, _ in step], [count for _, count in step], 5)
    counted = {slot: sum(count for place, count in step if place == slot) for slot in range(1, 5)}
    assert {segment.slot: segment.length for segment in grouped.segments()} == {slot: count for slot, count in counted.items() if count}
    for segment in grouped.segments():
        assert segment.start == grouped.slot_indptr[segment.slot]


def test_rows_of_a_grouping():
    assert rows_of_grouping([5, 0, 1, 8], 1) == [5, 0, 1, 8]
    assert rows_of_grouping([5, 0, 1, 8], 0) == [1, 0, 1, 1]
    assert rows_of_grouping([5, 0, 1, 8], 4) == [2, 0, 1, 2]
