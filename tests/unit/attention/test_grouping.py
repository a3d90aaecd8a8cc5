"""Which rows attend together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.resources.attention.grouping import group_rows


def test_decode_rows_of_like_history_are_one_batch():
    assert group_rows([1] * 8, [100, 130, 90, 128, 101, 127, 99, 110]) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_prefill_chunk_does_not_pad_the_decode_rows_beside_it():
    assert group_rows([1, 512, 1], [90, 512, 100]) == [[1], [0, 2]]


def test_one_long_history_does_not_pad_the_short_ones():
    assert group_rows([1] * 4, [8000, 60, 70, 80]) == [[0], [1, 2, 3]]


def test_a_tiny_step_stays_one_batch_whatever_its_shapes():
    assert group_rows([1, 5, 2], [9, 5, 11]) == [[0, 1, 2]]


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 5000)), min_size=1, max_size=40))
def test_every_row_is_in_exactly_one_group(rows):
    queries, keys = [query for query, _ in rows], [query + past for query, past in rows]
    groups = group_rows(queries, keys)
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))
    assert all(group == sorted(group) for group in groups)
