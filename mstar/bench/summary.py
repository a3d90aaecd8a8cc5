"""From request records to the numbers that are printed and saved. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mstar.bench.load import LoadOutcome, RequestRecord
from mstar.bench.percentiles import percentile
from mstar.bench.results import ClassSummary, ClientHealth, Quantiles, RunResult

_MAX_REASONS = 10


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """The sample in short; None if it is empty."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def summarize_run(outcome: LoadOutcome, max_tokens: int, started_at: str) -> RunResult:
    """One run by class: base, adapter (each if it had requests) and total."""
    base = [record for record in outcome.records if not record.target.is_adapter]
    adapter = [record for record in outcome.records if record.target.is_adapter]
    by_class = {"base": base, "adapter": adapter, "total": outcome.records}
    duration_s = max(outcome.duration_s, 1e-9)
    return RunResult(
        started_at=started_at,
        duration_s=outcome.duration_s,
        classes={
            name: summarize_class(records, duration_s, max_tokens) for name, records in by_class.items() if records or name == "total"
        },
        client=ClientHealth(
            cpu_share=outcome.cpu_s / duration_s,
            events_per_s=sum(len(record.event_times_s) for record in outcome.records) / duration_s,
            max_send_lag_s=outcome.max_send_lag_s,
        ),
    )


def summarize_class(records: Sequence[RequestRecord], duration_s: float, max_tokens: int) -> ClassSummary:
    """Sums, rates over `duration_s`, and pooled quantiles of the records that count."""
    counted = [record for record in records if record.failure is None]
    output_tokens = sum(record.output_tokens for record in counted)
    return ClassSummary(
        num_ok=len(counted),
        num_failed=len(records) - len(counted),
        num_short=sum(record.output_tokens < max_tokens for record in counted),
        reasons=_count_reasons(records),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in counted),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s,
        requests_per_s=len(counted) / duration_s,
        ttft_s=quantiles(record.event_times_s[0] - record.start_s for record in counted),
        inter_token_s=quantiles(gap for record in counted for gap in _gaps(record)),
        per_token_s=quantiles(_per_token(record) for record in counted if record.output_tokens > 1),
        e2e_s=quantiles(record.end_s - record.start_s for record in counted),
    )


def _gaps(record: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(record.event_times_s)]


def _per_token(record: RequestRecord) -> float:
    return (record.event_times_s[-1] - record.event_times_s[0]) / (record.output_tokens - 1)


def _count_reasons(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Failures by reason, the most frequent first, the tail as one."""
    counts = Counter(record.failure for record in records if record.failure is not None).most_common()
    kept = dict(counts[:_MAX_REASONS])
    num_others = sum(count for _, count in counts[_MAX_REASONS:])
    return {**kept, "other reasons": num_others} if num_others else kept
