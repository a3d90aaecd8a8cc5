"""Percentiles, arrivals, targets, prompts and plans: pure and seeded."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.bench.arrivals import poisson_offsets
from mstar.bench.percentiles import median, percentile
from mstar.bench.plan import Workload, plan_load, plan_warmup
from mstar.bench.prompts import WORDS, middle_ids, seen_ids, text_prompt, token_prompt
from mstar.bench.targets import Spread, Target, choose_targets, list_targets
from mstar.errors import ConfigError

POOL = range(1000, 2000)
TARGETS = tuple(Target(name, is_adapter=True) for name in "abcd")


def workload(**changes) -> Workload:
    settings = {
        "targets": TARGETS,
        "num_requests": 12,
        "concurrency": 4,
        "request_rate": None,
        "prompt_tokens": 8,
        "max_tokens": 4,
        "seed": 7,
        "warmup": 5,
    }
    return Workload(**settings | changes)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_bench_percentiles_are_those_of_numpy(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_bench_median_takes_values_in_any_order():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0]) == 2.5


def test_bench_poisson_arrivals_start_at_once_ascend_and_have_the_asked_rate():
    offsets = poisson_offsets(4000, rate_per_s=20.0, seed=1)
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)
    assert 4000 / offsets[-1] == pytest.approx(20.0, rel=0.05)
    gaps = np.diff(offsets)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential: as wide as its mean


def test_bench_arrivals_are_fixed_by_their_seed():
    assert poisson_offsets(10, 5.0, seed=1) == poisson_offsets(10, 5.0, seed=1)
    assert poisson_offsets(10, 5.0, seed=1) != poisson_offsets(10, 5.0, seed=2)


def test_bench_round_robin_asks_for_each_target_in_turn():
    chosen = choose_targets(TARGETS, 6, Spread.ROUND_ROBIN, 1.0, seed=0)
    assert [target.model for target in chosen] == ["a", "b", "c", "d", "a", "b"]


def test_bench_zipf_prefers_early_targets_by_its_exponent():
    counts = Counter(target.model for target in choose_targets(TARGETS, 20_000, Spread.ZIPF, 2.0, seed=0))
    assert counts["a"] / counts["b"] == pytest.approx(4, rel=0.15)
    assert counts["a"] / counts["c"] == pytest.approx(9, rel=0.15)


def test_bench_uniform_ignores_the_exponent():
    counts = Counter(target.model for target in choose_targets(TARGETS, 20_000, Spread.UNIFORM, 5.0, seed=0))
    assert all(count == pytest.approx(5000, rel=0.1) for count in counts.values())


def test_bench_base_distribution_leaves_named_adapters_out():
    assert list_targets("base", ["a"], Spread.BASE, include_base=False) == (Target("base", is_adapter=False),)


def test_bench_base_takes_part_first_when_included():
    names = [target.model for target in list_targets("base", ["a", "b"], Spread.ZIPF, include_base=True)]
    assert names == ["base", "a", "b"]


@pytest.mark.parametrize(("adapters", "said"), [([], "needs adapters"), (["a", "a"], "occurs twice"), (["base"], "occurs twice")])
def test_bench_refuses_adapters_that_do_not_make_a_load(adapters, said):
    with pytest.raises(ConfigError, match=said):
        list_targets("base", adapters, Spread.ROUND_ROBIN, include_base=False)


def test_bench_prompts_have_the_asked_length_and_stay_in_the_pool():
    prompt = token_prompt(POOL, 64, seed=3, stream="load", index=0)
    assert len(prompt) == 64 and set(prompt) <= set(POOL)
    words = text_prompt(20, seed=3, stream="load", index=0).split()
    assert len(words) == 20 and set(words) <= set(WORDS)


def test_bench_prompts_are_fixed_by_seed_stream_and_index():
    first = token_prompt(POOL, 16, seed=3, stream="load", index=0)
    assert first == token_prompt(POOL, 16, seed=3, stream="load", index=0)
    others = [token_prompt(POOL, 16, seed, stream, index) for seed, stream, index in [(4, "load", 0), (3, "warmup", 0), (3, "load", 1)]]
    assert first not in others


def test_bench_safe_ids_leave_both_ends_of_the_vocabulary_out():
    assert middle_ids(800) == range(100, 700)
    with pytest.raises(ConfigError, match="too small"):
        middle_ids(8)


def test_bench_ids_seen_by_the_tokenizer_are_distinct_and_enough():
    assert seen_ids([5, 3, 5, *range(10, 30)]) == (3, 5, *range(10, 30))
    with pytest.raises(ConfigError, match="2 distinct ids"):
        seen_ids([5, 3, 5])


def test_bench_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS)


def test_bench_closed_loop_plan_has_no_send_times_and_an_open_one_has():
    assert {request.offset_s for request in plan_load(workload(), POOL)} == {None}
    open_loop = plan_load(workload(concurrency=None, request_rate=10.0), POOL)
    assert [request.offset_s for request in open_loop] == poisson_offsets(12, 10.0, seed=7)


def test_bench_warm_up_visits_every_target_with_prompts_of_its_own():
    load = workload(spread=Spread.ZIPF, zipf_exponent=9.0)
    warmup, planned = plan_warmup(load, POOL), plan_load(load, POOL)
    assert [request.target.model for request in warmup] == ["a", "b", "c", "d", "a"]
    assert not {request.prompt for request in warmup} & {request.prompt for request in planned}
