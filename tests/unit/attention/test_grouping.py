"""Which pieces of which rows attend together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.resources.attention.grouping import cut_rows, group_pieces


def grouped(starts, counts):
    """Per group the rows in it."""
    return [[piece.row for piece in group] for group in group_pieces(list(cut_rows(starts, counts)))]


def test_decode_rows_of_like_history_are_one_batch():
    assert grouped([99, 129, 89, 127, 100, 126, 98, 109], [1] * 8) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_prefill_chunk_does_not_pad_the_decode_rows_beside_it():
    assert grouped([89, 0, 99], [1, 120, 1]) == [[0, 2], [1]]


def test_one_long_history_does_not_pad_the_short_ones():
    assert grouped([8000, 60, 70, 80], [1] * 4) == [[0], [1, 2, 3]]


def test_a_tiny_step_stays_one_batch_whatever_its_shapes():
    assert grouped([8, 0, 9], [1, 5, 2]) == [[0, 1, 2]]


def test_a_long_chunk_is_cut_so_that_early_queries_score_fewer_keys():
    pieces = list(cut_rows([0], [300]))
    assert [(piece.start, piece.num_tokens, piece.first_token, piece.num_keys) for piece in pieces] == [
        (0, 128, 0, 128),
        (128, 128, 128, 256),
        (256, 44, 256, 300),
    ]


def test_a_chunk_after_a_long_history_stays_whole():
    assert len(list(cut_rows([8000], [512]))) == 1


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600)), min_size=1, max_size=40))
def test_every_token_is_in_exactly_one_piece_of_one_group_at_its_position(rows):
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    expected = [(row, start + i) for row, (start, count) in enumerate(rows) for i in range(count)]
    found = {}
    for group in group_pieces(list(cut_rows(starts, counts))):
        assert [piece.first_token for piece in group] == sorted(piece.first_token for piece in group)
        for piece in group:
            for i in range(piece.num_tokens):
                assert found.setdefault(piece.first_token + i, (piece.row, piece.start + i)) == (piece.row, piece.start + i)
    assert [found[token] for token in range(sum(counts))] == expected and len(found) == len(expected)
