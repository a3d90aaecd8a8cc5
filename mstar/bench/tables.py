"""How results look on a terminal: rich tables and the progress bar. Numbers come ready; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mstar.bench.load import RequestRecord
from mstar.bench.metrics import BY_KEY, METRICS
from mstar.bench.report import ReportRow
from mstar.bench.results import ClassSummary, RunResult, ServeResult, SuiteResult

_BUSY_CPU_SHARE = 0.25
_MIN_CPU_SPAN_S = 1.0  # over less, the start of the run is most of it
_LATE_SEND_S = 0.02
_SUITE_KEYS = ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "inter_token_p50_s", "inter_token_p99_s", "inter_token_max_s")


class LoadProgress:
    """A bar over requests with tokens/s and failures so far. One refresh a second: each is paid from the measured machine."""

    def __init__(self, progress: Progress, num_requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=num_requests, rate="", failed="")
        self._num_tokens = 0
        self._num_failed = 0
        self._phase_start_s = progress.get_time()

    def begin(self, phase: str) -> None:
        """A new part of the run: the rate counts from here."""
        self._num_tokens = 0
        self._phase_start_s = self._progress.get_time()
        self._progress.update(self._task, description=escape(phase), rate="")

    def on_done(self, record: RequestRecord) -> None:
        """One request is over."""
        self._num_tokens += record.output_tokens
        self._num_failed += record.failure is not None
        elapsed_s = self._progress.get_time() - self._phase_start_s
        rate = f"{self._num_tokens / elapsed_s:,.0f} tokens/s" if elapsed_s > 0 else ""
        failed = f"[red]{self._num_failed} failed[/red]" if self._num_failed else ""
        self._progress.update(self._task, advance=1, rate=rate, failed=failed)


@contextmanager
def load_progress(console: Console, num_requests: int) -> Iterator[LoadProgress]:
    """The bar, shown while the block runs, gone after it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=1, transient=True) as progress:
        yield LoadProgress(progress, num_requests)


def serve_table(result: ServeResult) -> Table:
    """One column per class, one row per metric."""
    table = Table(title=escape(f"{result.label}: {_load_text(result)}"), caption=escape(_caption(result)))
    table.add_column("")
    for name in result.run.classes:
        table.add_column(name, justify="right")
    summaries = list(result.run.classes.values())
    _add_counts(table, summaries)
    for metric in METRICS:
        table.add_row(f"{metric.title} ({metric.unit})", *(metric.show(metric.read(summary)) for summary in summaries))
    return table


def _add_counts(table: Table, summaries: Sequence[ClassSummary]) -> None:
    counts: dict[str, Callable[[ClassSummary], int]] = {
        "requests ok": lambda summary: summary.num_ok,
        "requests failed": lambda summary: summary.num_failed,
        "output tokens": lambda summary: summary.output_tokens,
    }
    for title, read in counts.items():
        table.add_row(title, *(f"{read(summary):,}" for summary in summaries))


def _load_text(result: ServeResult) -> str:
    workload = result.workload
    num_adapters = sum(target.is_adapter for target in workload.targets)
    pace = f"c{workload.concurrency}" if workload.concurrency is not None else f"{workload.request_rate:g} requests/s"
    who = "base" if not num_adapters else f"{workload.spread} over {num_adapters} adapter{'s' * (num_adapters > 1)}"
    return f"{who}, {pace}, {workload.prompt_tokens} + {workload.max_tokens} tokens"


def _caption(result: ServeResult) -> str:
    client = result.run.client
    return f"{result.run.duration_s:.1f} s; load generator: {client.cpu_share:.0%} of a core at {client.events_per_s:,.0f} events/s"


def suite_table(result: SuiteResult) -> Table:
    """One row per cell; medians over the rounds."""
    medians = "one round" if result.repeat == 1 else f"medians of {result.repeat} rounds"
    table = Table(title=escape(f"{result.label}: {medians}"), box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for key in _SUITE_KEYS:
        table.add_column(f"{BY_KEY[key].title}\n({BY_KEY[key].unit})".replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("ok /\nfailed", justify="right", no_wrap=True)
    for cell in result.cells:
        values = (BY_KEY[key].show(cell.median.get(key)) for key in _SUITE_KEYS)
        table.add_row(cell.name, *values, f"{cell.num_ok} / {cell.num_failed}")
    return table


def report_table(label_a: str, label_b: str, rows: Sequence[ReportRow]) -> Table:
    """Both values and their ratio; green where A is better, red where it is worse, by more than 2 %."""
    table = Table("", "", escape(label_a), escape(label_b), "A / B", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    shown_cell = ""
    for row in rows:
        metric = row.metric
        table.add_row(
            row.cell if row.cell != shown_cell else "",
            f"{metric.title} ({metric.unit})",
            metric.show(row.a),
            metric.show(row.b),
            _ratio_text(row),
        )
        shown_cell = row.cell
    return table


def _ratio_text(row: ReportRow) -> str:
    if row.ratio is None:
        return "–"
    gain = row.ratio if row.metric.is_higher_better else 1 / row.ratio if row.ratio else float("inf")
    colour = "green" if gain > 1.02 else "red" if gain < 1 / 1.02 else "default"
    return f"[{colour}]{row.ratio:.2f}[/{colour}]"


def warnings_of(run: RunResult) -> list[str]:
    """What a reader must know before believing the numbers."""
    summary, client = run.classes["total"], run.client
    found = [f"{count} × failed: {reason}" for reason, count in summary.reasons.items()]
    if summary.num_short:
        found.append(f"{summary.num_short} answers were shorter than asked for: ignore_eos is not honoured, rates do not compare")
    if client.cpu_share > _BUSY_CPU_SHARE and run.duration_s > _MIN_CPU_SPAN_S:
        found.append(f"the load generator itself used {client.cpu_share:.0%} of a core")
    if client.max_send_lag_s > _LATE_SEND_S:
        found.append(f"a request was sent {client.max_send_lag_s * 1e3:.0f} ms behind its schedule")
    return found
