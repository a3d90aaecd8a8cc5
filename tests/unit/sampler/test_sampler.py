"""Sampling: the filters and penalties against plain references, the draw against its distribution."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.sampler.draw import draw
from mstar.engine.resources.sampler.reference import draw_interval
from mstar.engine.resources.sampler.sampler import SampleRow, prompt_logprobs, sample_rows
from mstar.engine.resources.sampler.uniform import uniform
from mstar.types import SamplingParams


def params(seed=0, **fields):
    return SamplingParams(max_tokens=100, seed=seed, **fields)


def row(seed=0, position=0, prompt=(), output=(), banned=(), **fields):
    return SampleRow(params(seed, **fields), position, prompt, output, banned)


def pick(logits, *rows):
    return [token.token_id for token in sample_rows(torch.tensor(logits, dtype=torch.float32), rows)]


def drawable(logits, **fields):
    """Every token that some draw gives."""
    rows = [row(seed=seed, **fields) for seed in range(400)]
    return {token.token_id for token in sample_rows(torch.tensor([logits], dtype=torch.float32).expand(400, -1), rows)}


def test_greedy_takes_the_lowest_id_among_equals():
    assert pick([[1, 3, 3, 0], [0, 0, 0, 0]], row(temperature=0), row(temperature=0)) == [1, 0]


def test_a_vanishing_temperature_is_greedy():
    assert pick([[1.0, 1.0001, 1.0]], row(temperature=1e-6)) == [1]
    assert pick([[1.0, 1.01, 1.0]], row(temperature=2e-5, seed=5)) == [1]


def test_an_empty_batch_samples_nothing():
    assert sample_rows(torch.empty(0, 5), []) == []


def test_draws_follow_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    for temperature in (0.5, 1.0, 2.0):
        rows = [row(seed=9, position=position, temperature=temperature) for position in range(20_000)]
        counts = Counter(token.token_id for token in sample_rows(logits.expand(20_000, -1), rows))
        expected = (logits[0] / temperature).softmax(dim=0)
        chi_square = sum((counts[token] - 20_000 * p) ** 2 / (20_000 * p) for token, p in enumerate(expected.tolist()))
        assert chi_square < 25  # 3 degrees: about 5 sigma


def test_a_draw_depends_on_logits_seed_and_position_and_on_no_other_row():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    rows = [
        row(seed=1, position=4),
        row(seed=1, position=5, top_p=0.8),
        row(temperature=0),
        row(seed=2, position=4, top_k=20),
        row(seed=3, position=0, min_p=0.1, repetition_penalty=1.2, prompt=(5, 6), output=(7,)),
        row(seed=4, temperature=1.5, top_k=3, top_p=0.5),
    ]
    together = [token.token_id for token in sample_rows(logits, rows)]
    alone = [sample_rows(logits[index : index + 1], [rows[index]])[0].token_id for index in range(6)]
    order = [4, 0, 5, 2, 1, 3]
    shuffled = [token.token_id for token in sample_rows(logits[order], [rows[index] for index in order])]
    assert together == alone == [shuffled[order.index(index)] for index in range(6)]


def test_top_k_keeps_the_k_best_and_those_tied_with_the_last():
    assert drawable([0.0, 0.1, 0.2, 0.3], top_k=2) == {2, 3}
    assert drawable([0.0, 0.1, 0.1, 0.3], top_k=2) == {1, 2, 3}
    assert drawable([0.0, 0.1, 0.2, 0.3], top_k=9) == {0, 1, 2, 3}
    assert drawable([0.0, 0.1, 0.2, 0.3], top_k=1) == {3}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert drawable(logits, top_p=0.45) == {1}
    assert drawable(logits, top_p=0.6) == {1, 2}
    assert drawable(logits, top_p=0.8) == {1, 2, 3}
    assert drawable(logits, top_p=1e-9) == {1}


def test_min_p_keeps_what_is_within_a_share_of_the_best():
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert drawable(logits, min_p=0.29) == {1, 2, 3}
    assert drawable(logits, min_p=0.4) == {1, 2}
    assert drawable(logits, min_p=1.0) == {1}


def test_top_p_is_a_share_of_what_min_p_and_top_k_left():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert drawable(logits, top_p=0.55) == {0, 1}
    assert drawable(logits, top_p=0.55, top_k=2) == {0}


def test_top_p_over_a_flat_distribution_looks_beyond_its_candidates():
    generator = torch.Generator().manual_seed(1)
    logits = 0.01 * torch.randn(4, 3000, generator=generator)
    rows = [row(seed=seed, top_p=top_p) for seed, top_p in enumerate((0.9, 0.5, 0.01, 1.0))]
    check_intervals(logits, rows)


def test_many_tokens_tied_at_the_boundary_all_stay_beyond_the_candidates_too():
    logits = [1.0] * 600 + [0.0] * 300
    kept = drawable(logits, top_k=40)
    assert max(kept) > 500 and kept <= set(range(600))
    assert drawable([0.0] * 900, top_p=0.1) & set(range(600, 900))


def test_rows_with_filters_of_every_kind_draw_as_their_references_do_in_one_long_batch():
    generator = torch.Generator().manual_seed(5)
    fields = [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.02},
        {"top_k": 400},
        {"top_k": 400, "top_p": 0.99},
        {"min_p": 0.5, "top_p": 0.9},
    ]
    rows = [row(seed=seed, temperature=temperature, **fields[seed % 7]) for seed in range(28) for temperature in (0.7, 1.6)]
    check_intervals(2.5 * torch.randn(56, 2000, generator=generator), rows)


def test_a_draw_at_the_very_end_lands_on_the_last_token_that_is_kept():
    logits = torch.tensor([[1.0, 2.0, float("-inf"), float("-inf")]])
    assert draw(logits, torch.tensor([[2.0]]), [params()], [1.0]) == [1]


def test_frequency_and_presence_penalties_count_output_tokens_alone():
    logits = [[2.0, 1.9, 1.8]]
    assert pick(logits, row(temperature=0, presence_penalty=0.15, prompt=(0,), output=())) == [0]
    assert pick(logits, row(temperature=0, presence_penalty=0.15, output=(0,))) == [1]
    assert pick(logits, row(temperature=0, presence_penalty=0.15, output=(0, 0, 1))) == [0]
    assert pick(logits, row(temperature=0, frequency_penalty=0.15, output=(0, 0, 1))) == [2]
    assert pick(logits, row(temperature=0, frequency_penalty=-1.0, output=(2,))) == [2]


def test_the_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below():
    assert pick([[2.0, 1.9, -3.0]], row(temperature=0, repetition_penalty=1.2, prompt=(0,))) == [1]
    assert pick([[2.0, 1.9, -3.0]], row(temperature=0, repetition_penalty=1.2, output=(0, 0))) == [1]
    assert pick([[-2.0, -2.1]], row(temperature=0, repetition_penalty=1.2, prompt=(0,))) == [1]
    assert pick([[-2.0, -2.1]], row(temperature=0, repetition_penalty=0.5, prompt=(1,))) == [1]


def test_banned_ids_are_not_chosen_greedily_nor_drawn():
    assert pick([[2.0, 1.9, 1.0]], row(temperature=0, banned=(0,))) == [1]
    assert drawable([2.0, 1.9, 1.0], banned=(0, 2)) == {1}


def test_the_logits_are_left_as_they_are():
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample_rows(logits, [row(repetition_penalty=2.0, prompt=(1, 2), top_p=0.5, logprobs=2), row(frequency_penalty=1.0, output=(3,))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_of_broken_logits_is_told_and_leaves_the_others_alone(poison):
    logits = torch.zeros(3, 8)
    logits[1, 3] = poison
    rows = [row(seed=1), row(seed=2, top_p=0.5, logprobs=1), row(temperature=0, logprobs=0)]
    sampled = sample_rows(logits, rows)
    assert [token.is_finite for token in sampled] == [True, False, True]
    assert sampled[0] == sample_rows(logits[:1], rows[:1])[0] and sampled[2].token_id == 0


def test_logprobs_are_those_of_the_raw_logits_with_ranks():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -1.0]])
    scores = logits[0].log_softmax(dim=0)
    (sampled,) = sample_rows(logits, [row(temperature=0, banned=(1,), logprobs=3)])
    chosen, top = sampled.logprobs.chosen, sampled.logprobs.top
    assert (chosen.token_id, chosen.rank) == (2, 2) and chosen.logprob == pytest.approx(scores[2].item())
    assert [(best.token_id, best.rank) for best in top] == [(1, 1), (2, 2), (3, 2)]
    assert [best.logprob for best in top] == pytest.approx(scores[[1, 2, 3]].tolist())


def test_each_row_gets_as_many_alternatives_as_it_asked_for():
    rows = [row(temperature=0, logprobs=count) for count in (0, 2, None, 9)]
    sampled = sample_rows(torch.randn(4, 6), rows)
    assert [None if token.logprobs is None else len(token.logprobs.top) for token in sampled] == [0, 2, None, 6]


def test_prompt_logprobs_score_the_given_tokens():
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    first, second = prompt_logprobs(logits, [0, 0], 1)
    assert first.chosen.rank == 2 and first.chosen.logprob == pytest.approx(-math.log1p(math.e))
    assert second.chosen.rank == 1 and second.top[0].token_id == 0
    assert prompt_logprobs(torch.empty(0, 2), [], 1) == []


def check_intervals(logits, rows, tolerance=1e-6):
    for index, token in enumerate(sample_rows(logits, rows)):
        low, high = draw_interval(logits[index], rows[index], token.token_id)
        assert low < high
        if rows[index].sampling.temperature > 0:
            u = uniform(rows[index].sampling.seed, rows[index].position)
            assert low - tolerance <= u < high + tolerance


ROWS = st.builds(
    row,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    prompt=st.lists(st.integers(0, 39), max_size=6).map(tuple),
    output=st.lists(st.integers(0, 39), max_size=6).map(tuple),
    banned=st.lists(st.integers(0, 39), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 2**30), st.sampled_from([0.1, 2.0, 8.0]))
def test_every_draw_lies_in_the_interval_of_the_plain_reference(rows, seed, scale):
    logits = scale * torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(seed))
    check_intervals(logits, rows)


def test_the_reference_intervals_of_all_tokens_tile_zero_to_one():
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
    wanted = row(temperature=0.8, top_p=0.9, top_k=30, prompt=(1,), repetition_penalty=1.5)
    intervals = [draw_interval(logits, wanted, token_id) for token_id in range(40)]
    kept = [interval for interval in intervals if interval[0] < interval[1]]
    assert kept[0][0] == 0 and kept[-1][1] == pytest.approx(1)
    assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(kept))
    assert 1 < len(kept) < 30


def test_a_tolerance_counts_tokens_at_a_filters_boundary_both_ways():
    logits = torch.tensor([1.0, 0.5, 0.5 - 1e-5, -1.0])
    wanted = row(temperature=1.0, top_k=2)
    assert draw_interval(logits, wanted, 2) == (0.0, 0.0)
    low, high = draw_interval(logits, wanted, 2, tolerance=1e-3)
    assert low < high
    exact, wide = draw_interval(logits, wanted, 1), draw_interval(logits, wanted, 1, tolerance=1e-3)
    assert wide[0] < exact[0] and wide[1] >= exact[1]
    assert draw_interval(logits, row(temperature=0), 0) == (0.0, 1.0)
    close = torch.tensor([1.0, 1.0 - 1e-5])
    assert draw_interval(close, row(temperature=0), 1) == (0.0, 0.0)
    assert draw_interval(close, row(temperature=0), 1, tolerance=1e-3) == (0.0, 1.0)
