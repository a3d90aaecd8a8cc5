"""`python -m mstar.sim.check`: run seeds, or one run with its trace. Exit code 1 where a promise was broken.

    --seeds 100000 --jobs 2        run seeds; the first that fails is shrunk, printed and can be saved
    --seed 972                     one seed, its events and the verdict
    --replay 972/1,5/num_ranks=2   a run as it was reported: the same events, the same end

Own processes, one per job.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mstar.errors import ConfigError
from mstar.sim.run import Outcome, simulate
from mstar.sim.scenario import Scenario, draw_scenario
from mstar.sim.shrink import format_spec, parse_spec, shrink
from mstar.sim.world import Violation

CHUNK = 100
STUCK_S = 30
_SHOWN_FAILURES = 10

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


@dataclass
class Tally:
    """What so many seeds gave. `failures` are (seed, message)."""

    num_seeds: int = 0
    num_admits: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count another's."""
        self.num_seeds += other.num_seeds
        self.num_admits += other.num_admits
        self.failures += other.failures


def run(scenario: Scenario) -> Outcome:
    """`simulate`, with a bound in real time: a run that hangs has failed."""
    with _alarm(STUCK_S):
        return simulate(scenario)


def run_seeds(first: int, count: int) -> Tally:
    """Run seeds [first, first + count) in this process."""
    tally = Tally()
    for seed in range(first, first + count):
        outcome = run(draw_scenario(seed))
        tally.num_seeds += 1
        tally.num_admits += outcome.num_admits
        if outcome.violation is not None:
            tally.failures.append((seed, str(outcome.violation)))
    return tally


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(_signal: int, _frame: Any) -> None:
        raise Violation("stuck", f"no end after {seconds} s: a lock held over a wait, or an endless loop")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _prepare() -> None:
    """A worker process: one core (hand-overs between cores cost double), no torch threads, no logs of reads that fail on purpose."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def _run_many(first: int, num_seeds: int, jobs: int, console: Console) -> Tally:
    tally = Tally()
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool,
    ):
        task = progress.add_task("", total=num_seeds, note="")
        chunks = iter(range(first, first + num_seeds, CHUNK))
        pending: set[Future[Tally]] = set()
        while True:
            for start in chunks:
                pending.add(pool.submit(run_seeds, start, min(CHUNK, first + num_seeds - start)))
                if len(pending) >= 2 * jobs:
                    break
            if not pending:
                return tally
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                tally.add(future.result())
            progress.update(task, completed=tally.num_seeds, note=f"{len(tally.failures)} failed")
            if len(tally.failures) >= _SHOWN_FAILURES:
                chunks = iter(())


def _show(outcome: Outcome, console: Console) -> None:
    console.print(f"{outcome.scenario.settings}", markup=False, highlight=False)
    for line in outcome.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    verdict = "every promise held" if outcome.violation is None else str(outcome.violation)
    console.print(verdict, style="bold red" if outcome.violation else "green", markup=False)
    console.print(f"spec {format_spec(outcome.scenario)}   events {outcome.digest()}", markup=False, soft_wrap=True)


@app.command()
def check(
    seeds: Annotated[int, typer.Option(min=0, help="Run so many seeds.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    seed: Annotated[int | None, typer.Option(help="Run one seed and print its events.")] = None,
    replay: Annotated[str | None, typer.Option(metavar="SPEC", help="Run one spec and print its events.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the shrunk failure to FILE.")] = None,
) -> None:
    """Run many ranks of the real decision code under seeded event orders, and judge them."""
    console = Console()
    if seed is not None or replay is not None:
        _prepare()
        try:
            scenario = parse_spec(replay if replay is not None else str(seed))
        except ConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None
        outcome = run(scenario)
        _show(outcome, console)
        raise typer.Exit(1 if outcome.violation else 0)
    began = time.monotonic()
    tally = _run_many(first, seeds, jobs, console)
    took = time.monotonic() - began
    console.print(
        f"{tally.num_seeds} seeds, {tally.num_admits} admits judged, {len(tally.failures)} failed, "
        f"{took:.1f} s, {tally.num_seeds / max(took, 1e-9):.0f} seeds/s"
    )
    if not tally.failures:
        return
    for failed, message in sorted(tally.failures)[:_SHOWN_FAILURES]:
        console.print(f"seed {failed}: {message}", markup=False, style="red")
    _prepare()
    smallest = shrink(run(draw_scenario(min(tally.failures)[0])), run)
    _show(smallest, console)
    if save is not None and smallest.violation is not None:
        with save.open("a", encoding="utf-8") as file:
            file.write(f"{format_spec(smallest.scenario)}  # {smallest.violation.kind}\n")
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
