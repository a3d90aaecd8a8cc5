"""`mstar bench compare`: ours against the peer on this machine, servers in turn, the same load generator, medians over rounds.

    round 1: ours, peer without LoRA, peer with LoRA        round 2: the other way round        …

Each server is started fresh in each round, so a round also measures its start. Every claim is a ratio of medians of one session.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mstar.bench.peers import BASE_NAME, Contender, contenders, install_peer, make_adapters, running
from mstar.bench.serve import Choice, choose_pool
from mstar.bench.server import ask_server
from mstar.bench.suite import run_suite


@dataclass(frozen=True)
class Measurement:
    """One server in one round: seconds to ready, memory, and output tokens/s and TTFT by cell."""

    label: str
    round: int
    start_s: float
    memory_mb: float  # of all its processes after the load, what they share counted once
    tokens_per_s: dict[str, float]
    ttft_p50_s: dict[str, float]
    inter_token_p99_s: dict[str, float]


def compare(model: Path, rounds: int, num_adapters: int, console: Console, *, is_quick: bool) -> list[Measurement]:
    """Measure all contenders in all rounds. Raises ConfigError where one does not start."""
    adapters = make_adapters(model, num_adapters)
    field = contenders(model, adapters, install_peer(console), max_loras=num_adapters)
    results = []
    for index in range(rounds):
        for contender in field if index % 2 == 0 else reversed(field):
            results.append(_measure(contender, index, num_adapters, console, is_quick=is_quick))
    return results


def _measure(contender: Contender, index: int, num_adapters: int, console: Console, *, is_quick: bool) -> Measurement:
    with running(contender, console) as (url, start_s, memory_mb):
        server = ask_server(url, None)
        names = server.adapter_names(BASE_NAME)[:num_adapters]
        pool = choose_pool(server, BASE_NAME, 40_000, is_text=False)
        choice = Choice(BASE_NAME, names, pool, prompt_tokens=64, max_tokens=64, seed=1000 * index, is_text=False, timeout_s=600.0)
        suite = run_suite(server, choice, 1, console, f"{contender.label}, round {index + 1}", "", is_quick=is_quick)
        held_mb = memory_mb()
    cells = {cell.name: cell.median for cell in suite.cells}
    return Measurement(
        contender.label,
        index,
        start_s,
        held_mb,
        {name: median["output_tokens_per_s"] for name, median in cells.items()},
        {name: median["ttft_p50_s"] for name, median in cells.items()},
        {name: median["inter_token_p99_s"] for name, median in cells.items()},
    )


def medians(results: list[Measurement]) -> dict[str, dict[str, float]]:
    """Medians by label and cell: output tokens/s, and what stands beside them in units of its own."""
    table: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(result.label for result in results):
        runs = [result for result in results if result.label == label]
        table[label] = {cell: statistics.median(run.tokens_per_s[cell] for run in runs) for cell in runs[0].tokens_per_s}
        ttft = {cell: statistics.median(run.ttft_p50_s[cell] for run in runs) for cell in runs[0].ttft_p50_s}
        table[label] |= {f"TTFT p50 {cell}, s": value for cell, value in ttft.items()}
        table[label]["start to ready, s"] = statistics.median(run.start_s for run in runs)
        table[label]["memory, MB"] = statistics.median(run.memory_mb for run in runs)
    return table


def ratio_table(table: dict[str, dict[str, float]]) -> Table:
    """Medians, and ours over each of the others."""
    labels = list(table)
    ours = table[labels[0]]
    shown = Table("output tokens/s", *labels, *(f"ours / {label}" for label in labels[1:]))
    for cell in ours:
        values = [table[label].get(cell) for label in labels]
        ratios = [ours[cell] / value if value else None for value in values[1:]]
        shown.add_row(
            cell, *(f"{v:.2f}" if v and v < 10 else f"{v:.1f}" if v else "–" for v in values), *(f"{r:.2f}" if r else "–" for r in ratios)
        )
    return shown


def save(results: list[Measurement], path: Path, command: str) -> None:
    """Everything measured, as JSON."""
    body = {"command": command, "at": datetime.now(UTC).isoformat(timespec="seconds"), "runs": [asdict(result) for result in results]}
    path.write_text(json.dumps(body, indent=1), encoding="utf-8")
