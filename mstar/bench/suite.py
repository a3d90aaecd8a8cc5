"""`mstar bench suite`: the standard table against one running server.

    base c1 · base c8 · base c16 · 1 adapter c8 · 8 adapters c8 · 8 adapters c16        (round robin over the adapters)

Rounds alternate: every cell once per round, and every other round backwards, so that a machine that warms up or slows down does so for all
cells alike. Numbers are medians over the rounds. Each round of each cell has a seed of its own, else the second round would
be answered out of the server's prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from mstar.bench.metrics import medians
from mstar.bench.plan import Workload
from mstar.bench.results import CellResult, RunResult, SuiteResult
from mstar.bench.serve import Choice, Pace, make_workload, measure
from mstar.bench.server import Server
from mstar.bench.tables import load_progress
from mstar.bench.targets import Spread

_NUM_ADAPTERS = 8
_SEED_STRIDE = 1000  # rounds beyond this many would share prompts with the next cell


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    name: str
    num_adapters: int  # 0: the base alone
    concurrency: int
    prompt_tokens: int | None = None  # None: what the choice says
    max_tokens: int | None = None


def standard_cells(num_adapters_served: int) -> tuple[Cell, ...]:
    """The table for a server with that many adapters: fewer than eight are taken as they are; none leaves the base alone."""
    base = tuple(Cell(f"base c{concurrency}", 0, concurrency) for concurrency in (1, 8, 16))
    num = min(num_adapters_served, _NUM_ADAPTERS)
    one = Cell("1 adapter c8", 1, 8)
    mixed = tuple(Cell(f"{num} adapters c{concurrency}", num, concurrency) for concurrency in (8, 16))
    return base + ((one,) if num else ()) + (mixed if num > 1 else ())


def alternate(cells: Sequence[Cell], repeat: int) -> list[tuple[int, Cell]]:
    """(round, cell) in the order of running: there and back again."""
    return [(round_index, cell) for round_index in range(repeat) for cell in (cells if round_index % 2 == 0 else reversed(cells))]


def cell_pace(cell: Cell, *, is_quick: bool) -> Pace:
    """Whole waves of requests, so that a run does not end in a long thin tail: 8 waves at c1, else 4; quick: 2."""
    num_waves = 2 if is_quick else 8 if cell.concurrency == 1 else 4
    return Pace(
        num_requests=num_waves * cell.concurrency,
        concurrency=cell.concurrency,
        request_rate=None,
        warmup=max(cell.concurrency, cell.num_adapters),
        spread=Spread.ROUND_ROBIN if cell.num_adapters else Spread.BASE,
    )


def cell_workload(cell: Cell, cell_index: int, round_index: int, choice: Choice, *, is_quick: bool) -> Workload:
    """The load of one cell in one round."""
    pace = cell_pace(cell, is_quick=is_quick)
    seed = choice.seed + cell_index * _SEED_STRIDE + round_index
    own = replace(
        choice.with_load(choice.adapters[: cell.num_adapters], seed),
        prompt_tokens=cell.prompt_tokens or choice.prompt_tokens,
        max_tokens=cell.max_tokens or choice.max_tokens,
    )
    return make_workload(own, pace)


def lora_kept(cells: Sequence[CellResult]) -> dict[str, float]:
    """Median adapter throughput over median base throughput at the same concurrency, by cell, where both were measured."""
    base = {cell.concurrency: cell.median["output_tokens_per_s"] for cell in cells if not cell.num_adapters}
    return {
        cell.name: cell.median["output_tokens_per_s"] / base[cell.concurrency]
        for cell in cells
        if cell.num_adapters and base.get(cell.concurrency)
    }


def run_suite(
    server: Server,
    choice: Choice,
    repeat: int,
    console: Console,
    label: str,
    command: str,
    *,
    is_quick: bool,
    cells: Sequence[Cell] | None = None,
) -> SuiteResult:
    """All cells (the standard ones, if none are given), `repeat` rounds, measured under one progress bar on `console`."""
    cells = standard_cells(len(choice.adapters)) if cells is None else cells
    workloads = {
        (round_index, cell): cell_workload(cell, index, round_index, choice, is_quick=is_quick)
        for index, cell in enumerate(cells)
        for round_index in range(repeat)
    }
    rounds: dict[Cell, list[RunResult]] = {cell: [] for cell in cells}
    with load_progress(console, sum(load.warmup + load.num_requests for load in workloads.values())) as progress:
        for round_index, cell in alternate(cells, repeat):
            name = f"round {round_index + 1}/{repeat} {cell.name}"
            rounds[cell].append(measure(server, workloads[round_index, cell], choice.pool, progress, name).run)
    results = tuple(
        CellResult(
            name=cell.name,
            num_adapters=cell.num_adapters,
            concurrency=cell.concurrency,
            workload=workloads[0, cell],
            rounds=tuple(rounds[cell]),
            median=medians(run.classes["total"] for run in rounds[cell]),
        )
        for cell in cells
    )
    return SuiteResult(
        label=label,
        command=command,
        base_url=server.address.url,
        server_version=server.version,
        started_at=rounds[cells[0]][0].started_at,
        is_quick=is_quick,
        repeat=repeat,
        cells=results,
        lora_kept=lora_kept(results),
    )
