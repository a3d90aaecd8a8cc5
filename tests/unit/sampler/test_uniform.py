"""The number behind a draw."""

from __future__ import annotations

import numpy as np

from mstar.engine.resources.sampler.uniform import child_seed, uniform

PINNED = [0.9557467261317436, 0.48634953628166855, 0.06735789320333596]


def test_the_number_is_a_function_of_seed_and_position_for_good():
    assert [uniform(42, position) for position in range(3)] == PINNED
    assert uniform(2**63 - 1, 10**6) == uniform(2**63 - 1, 10**6)


def test_numbers_fill_zero_to_one_evenly_over_positions_and_over_seeds():
    for numbers in ([uniform(7, position) for position in range(20_000)], [uniform(seed, 3) for seed in range(20_000)]):
        assert min(numbers) >= 0 and max(numbers) < 1
        counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
        assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square, 49 degrees: about 5 sigma


def test_neighbouring_seeds_and_positions_are_unrelated():
    table = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    for other in (table[1:, :], table[:, 1:], table[1:, 1:], table[1:, :-1]):
        mine = table[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(mine.ravel(), other.ravel())[0, 1]) < 0.03
    assert len(np.unique(table)) == table.size


def test_child_seeds_are_distinct_and_the_first_choice_keeps_the_seed():
    children = {child_seed(seed, index) for seed in range(100) for index in range(1, 100)}
    assert len(children) == 9900 and all(0 <= child < 2**63 for child in children)
    assert child_seed(12345, 0) == 12345
