"""Who holds what under tensor parallelism: pure shard arithmetic, for any degree up to the number of query heads.

Every rank computes the same plan from the same numbers, so nothing is exchanged. Two regimes for attention heads:

    tp_size <= num_kv_heads           9 query / 3 KV heads at TP 2
    cut KV heads, queries follow        rank 0: kv 0 1   q 0 1 2 3 4 5
                                        rank 1: kv 2     q 6 7 8
    tp_size > num_kv_heads            9 query / 3 KV heads at TP 4
    cut query heads; a rank holds       rank 0: q 0 1 2  kv 0
    every KV head that its run reads    rank 1: q 3 4    kv 1
                                        rank 2: q 5 6    kv 1 2      <- KV head 1 is on ranks 1 and 2
                                        rank 3: q 7 8    kv 2

A shared KV head is computed on each rank that holds it, from the same input and the same rows, so no collective is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mstar.errors import ConfigError

Range = tuple[int, int]  # [start, stop)


def even_cuts(total: int, parts: int) -> tuple[Range, ...]:
    """Cut `[0, total)` into `parts` runs whose sizes differ by at most one; the first ones are the larger."""
    size, extra = divmod(total, parts)
    starts = [index * size + min(index, extra) for index in range(parts + 1)]
    return tuple(pairwise(starts))


@dataclass(frozen=True)
class HeadPlan:
    """The attention heads of every rank: `q_ranges[tp_rank]` partition the query heads; `kv_ranges[tp_rank]` may overlap.

    `group_size` query heads in a row read one KV head.
    """

    q_ranges: tuple[Range, ...]
    kv_ranges: tuple[Range, ...]
    group_size: int

    def kv_of_query(self, tp_rank: int) -> tuple[int, ...]:
        """For each of the rank's query heads, in order, the index of its KV head among the rank's own KV heads."""
        first_kv = self.kv_ranges[tp_rank][0]
        return tuple(head // self.group_size - first_kv for head in range(*self.q_ranges[tp_rank]))


def plan_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> HeadPlan:
    """Plan `num_heads` query and `num_kv_heads` KV heads over `tp_size` ranks. Raises ConfigError where no plan exists."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_attention_heads is {num_heads}, which num_key_value_heads = {num_kv_heads} does not divide")
    if not 1 <= tp_size <= num_heads:
        raise ConfigError(f"tensor_parallel_size is {tp_size}; this model allows 1 to {num_heads}, its number of query heads")
    group_size = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        kv_ranges = even_cuts(num_kv_heads, tp_size)
        q_ranges = tuple((start * group_size, stop * group_size) for start, stop in kv_ranges)
    else:
        q_ranges = even_cuts(num_heads, tp_size)
        kv_ranges = tuple((start // group_size, (stop - 1) // group_size + 1) for start, stop in q_ranges)
    return HeadPlan(q_ranges, kv_ranges, group_size)
