"""The numbers that tables show and that medians and ratios are taken of: one row here is one row there. Pure.

TTFT: time to first token. ITL: inter-token latency. Both are defined in results.py, with the samples that they are read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mstar.bench.percentiles import median
from mstar.bench.results import ClassSummary, Quantiles

Sample = Literal["ttft_s", "inter_token_s", "per_token_s", "e2e_s"]
Point = Literal["p50", "p90", "p99", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`key` names it in JSON; `scale` turns the stored value into `unit`."""

    key: str
    title: str
    unit: str
    scale: float
    decimals: int
    is_higher_better: bool
    read: Callable[[ClassSummary], float | None]

    def show(self, value: float | None) -> str:
        """The value in the metric's unit, or a dash."""
        return "–" if value is None else f"{value * self.scale:,.{self.decimals}f}"


def _read_point(sample: Sample, point: Point, summary: ClassSummary) -> float | None:
    found: Quantiles | None = getattr(summary, sample)
    return None if found is None else float(getattr(found, point))


def _times(sample: Sample, title: str, points: Sequence[Point]) -> list[Metric]:
    stem = sample.removesuffix("_s")
    return [
        Metric(f"{stem}_{point}_s", f"{title} {point}", "ms", 1e3, 1, is_higher_better=False, read=partial(_read_point, sample, point))
        for point in points
    ]


METRICS: tuple[Metric, ...] = (
    Metric("output_tokens_per_s", "output tokens", "/s", 1, 1, is_higher_better=True, read=lambda s: s.output_tokens_per_s),
    Metric("requests_per_s", "requests", "/s", 1, 2, is_higher_better=True, read=lambda s: s.requests_per_s),
    *_times("ttft_s", "TTFT", ("p50", "p90", "p99", "max")),
    *_times("inter_token_s", "ITL", ("p50", "p99", "max")),
    *_times("per_token_s", "time per token", ("p50",)),
    *_times("e2e_s", "end to end", ("p50", "p90", "p99", "max")),
)
LORA_KEPT = Metric(
    "lora_kept", "adapters / base", "tokens/s", 1, 2, is_higher_better=True, read=lambda _: None
)  # of a suite, not of a class
BY_KEY = {metric.key: metric for metric in METRICS}


def read_all(summary: ClassSummary) -> dict[str, float]:
    """Every metric that `summary` has a value for, by key."""
    found = {metric.key: metric.read(summary) for metric in METRICS}
    return {key: value for key, value in found.items() if value is not None}


def medians(summaries: Iterable[ClassSummary]) -> dict[str, float]:
    """The median of each metric over those summaries that have it."""
    by_key: dict[str, list[float]] = {}
    for summary in summaries:
        for key, value in read_all(summary).items():
            by_key.setdefault(key, []).append(value)
    return {key: median(values) for key, values in by_key.items()}
