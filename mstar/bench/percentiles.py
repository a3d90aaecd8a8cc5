"""Percentiles and medians of plain lists of numbers. Pure.

A percentile is interpolated between its two neighbours (numpy's default, "linear"), so p50 of two values is their mean and p99 of
fewer than 100 values lies just under the maximum: read p99 together with the count.
"""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of `ordered` lies. `ordered` is sorted and not empty."""
    assert ordered and 0 <= percent <= 100
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """The middle of `values`, in any order, not empty."""
    return percentile(sorted(values), 50)
