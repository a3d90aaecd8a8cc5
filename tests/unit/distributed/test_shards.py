"""Shard arithmetic: examples that a reader can check by eye, and the laws for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.distributed.shards import even_cuts, plan_heads
from mstar.errors import ConfigError


def test_even_cuts_give_the_extra_to_the_first_ranks():
    assert even_cuts(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert even_cuts(2, 3) == ((0, 1), (1, 2), (2, 2))


def test_nine_query_and_three_kv_heads_at_tp_two_follow_the_kv_heads():
    plan = plan_heads(9, 3, 2)
    assert plan.q_ranges == ((0, 6), (6, 9)) and plan.kv_ranges == ((0, 2), (2, 3))
    assert plan.kv_of_query(0) == (0, 0, 0, 1, 1, 1) and plan.kv_of_query(1) == (0, 0, 0)


def test_nine_query_and_three_kv_heads_at_tp_four_share_the_kv_head_that_a_run_crosses():
    plan = plan_heads(9, 3, 4)
    assert plan.q_ranges == ((0, 3), (3, 5), (5, 7), (7, 9)) and plan.kv_ranges == ((0, 1), (1, 2), (1, 3), (2, 3))
    assert [plan.kv_of_query(tp_rank) for tp_rank in range(4)] == [(0, 0, 0), (0, 0), (0, 1), (0, 0)]


@given(st.data(), st.integers(1, 8), st.integers(1, 12))
def test_every_degree_up_to_the_query_heads_covers_each_query_head_once_with_its_kv_head(data, num_kv_heads, group_size):
    num_heads = num_kv_heads * group_size
    tp_size = data.draw(st.integers(1, num_heads))
    plan = plan_heads(num_heads, num_kv_heads, tp_size)
    assert [head for start, stop in plan.q_ranges for head in range(start, stop)] == list(range(num_heads))
    for tp_rank, ((q_start, q_stop), (kv_start, kv_stop)) in enumerate(zip(plan.q_ranges, plan.kv_ranges, strict=True)):
        assert q_stop > q_start
        read = [kv_start + local for local in plan.kv_of_query(tp_rank)]
        assert read == [head // group_size for head in range(q_start, q_stop)]
        assert sorted(set(read)) == list(range(kv_start, kv_stop)), "a rank holds the KV heads that it reads and no other"
    if tp_size <= num_kv_heads:
        assert [head for start, stop in plan.kv_ranges for head in range(start, stop)] == list(range(num_kv_heads))


@pytest.mark.parametrize("tp_size", [0, 10])
def test_a_degree_beyond_the_query_heads_is_refused_with_what_is_allowed(tp_size):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {tp_size}; this model allows 1 to 9"):
        plan_heads(9, 3, tp_size)


def test_kv_heads_that_do_not_divide_the_query_heads_are_refused():
    with pytest.raises(ConfigError, match="num_attention_heads is 9"):
        plan_heads(9, 2, 1)
