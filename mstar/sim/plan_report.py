"""Planned runs on a terminal, as JSON and as a picture. Figures come ready from the tally."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from mstar.errors import ConfigError
from mstar.sim.planner import PlanSpec
from mstar.sim.tally import Tally
from mstar.sim.workload import WorkloadSpec

# figure -> (label, how it is shown)
_ROWS: dict[str, tuple[str, str]] = {
    "finished": ("requests finished", "count"),
    "refused": ("refused, queue full (429)", "count"),
    "slot_hit_rate": ("slot hit rate", "share"),
    "installs": ("installs", "count"),
    "evictions": ("evictions", "count"),
    "reads": ("reads per rank", "count"),
    "reader_busy_share": ("reader busy", "share"),
    "wait_p50_s": ("wait p50", "time"),
    "wait_p99_s": ("wait p99", "time"),
    "wait_hit_p99_s": ("wait p99, adapter in a slot", "time"),
    "wait_miss_p99_s": ("wait p99, adapter not in a slot", "time"),
    "wait_base_p99_s": ("wait p99, base model", "time"),
    "first_token_p50_s": ("first token p50", "time"),
    "first_token_p99_s": ("first token p99", "time"),
    "longest_pass_over": ("longest pass-over", "count"),
    "steps": ("steps", "count"),
    "steps_with_collective": ("steps with a load agreement", "count"),
    "steps_with_collective_share": ("… of all", "share"),
    "stalls": ("steps that waited for a follower's copy", "count"),
    "slots_held_mean": ("slots held, mean", "number"),
    "rows_mean": ("rows in a step, mean", "number"),
    "busy_share": ("time in steps", "share"),
    "output_tokens_per_s": ("output tokens/s", "number"),
    "simulated_s": ("simulated time", "time"),
}


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run: its instance and what it gave."""

    spec: PlanSpec
    tally: Tally


def plan_table(runs: Sequence[Planned]) -> Table:
    """A column per run."""
    table = Table("", *(f"{run.spec.slots} slots" for run in runs))
    for column in table.columns[1:]:
        column.justify = "right"
    figures = [run.tally.figures() for run in runs]
    for key, (label, kind) in _ROWS.items():
        table.add_row(label, *(_shown(values[key], kind) for values in figures))
    return table


def hints(runs: Sequence[Planned]) -> list[str]:
    """What a reader of the table should not miss."""
    lines = []
    for run in runs:
        figures = run.tally.figures()
        if run.tally.num_refused:
            lines.append(f"{run.spec.slots} slots: the load is more than this instance serves; waits say only how full its queue is")
        elif (figures["reader_busy_share"] or 0) > 0.9:
            lines.append(f"{run.spec.slots} slots: reading is the bottleneck; a larger host tier or faster files help more than slots")
        if (figures["reader_busy_share"] or 0) > 0.7 and run.spec.ranks > 1 and not run.spec.check:
            lines.append(f"{run.spec.slots} slots: reads queue; --check also counts steps that wait for a follower's copy")
    return lines


def write_json(path: Path, workload: WorkloadSpec, runs: Sequence[Planned]) -> None:
    """All options and figures. Raises ConfigError."""
    document = {
        "workload": dataclasses.asdict(workload),
        "runs": [{"instance": dataclasses.asdict(run.spec), "figures": run.tally.figures()} for run in runs],
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def check_plot(path: Path) -> None:
    """Raises ConfigError where no picture can be drawn, before anything ran."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'mstar[plot]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def write_plot(path: Path, runs: Sequence[Planned]) -> None:
    """Left: how many requests waited at most so long. Right: hit rate and waits by slots, where there are several."""
    from matplotlib.figure import Figure  # optional, and half a second

    figure = Figure(figsize=(12 if len(runs) > 1 else 7, 4.5))
    axes = figure.subplots(1, 2 if len(runs) > 1 else 1, squeeze=False)
    left = axes[0][0]
    for run in runs:
        tally = run.tally
        waits = np.sort(np.concatenate([np.frombuffer(part) for part in (tally.waits_hit, tally.waits_miss, tally.waits_base) if part]))
        shown = np.unique(np.linspace(0, len(waits) - 1, 2000).astype(int))
        left.plot(np.maximum(waits[shown], 1e-3), (shown + 1) / len(waits), label=f"{run.spec.slots} slots")
    left.set_xscale("log")
    left.set_xlabel("wait from arrival to admission, s")
    left.set_ylabel("share of requests")
    left.legend()
    if len(runs) > 1:
        right = axes[0][1]
        slots = [run.spec.slots for run in runs]
        figures = [run.tally.figures() for run in runs]
        right.plot(slots, [values["wait_p99_s"] for values in figures], "o-", label="wait p99, s")
        right.plot(slots, [values["wait_p50_s"] for values in figures], "o-", label="wait p50, s")
        right.set_yscale("symlog", linthresh=0.01)
        right.set_xlabel("slots (max_loras)")
        right.legend(loc="upper right")
        rate = right.twinx()
        rate.plot(slots, [values["slot_hit_rate"] for values in figures], "s--", color="grey")
        rate.set_ylabel("slot hit rate (dashed)")
        rate.set_ylim(0, 1)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _shown(value: float | int | None, kind: str) -> str:
    if value is None:
        return "–"
    if kind == "share":
        return f"{value:.1%}"
    if kind == "time":
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 600 else f"{value / 60:.0f} min"
    return f"{value:.1f}" if kind == "number" else f"{value:,}"
