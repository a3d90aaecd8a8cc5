"""Two results side by side. Pure: results in, rows out.

A serve file has one cell per class, a suite file one per line of its table; only cells that both files have are compared. Ratios are
A / B. Whether two files may be compared at all (same machine, same session, same load) is for the reader to know; a load that
differs is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mstar.bench.metrics import LORA_KEPT, METRICS, Metric, read_all
from mstar.bench.plan import Workload
from mstar.bench.results import Result, ServeResult
from mstar.errors import ConfigError

# What may differ between two runs of the same load: names are the server's business, and seeds only pick other random prompts.
_FREE_FIELDS = ("targets", "seed", "timeout_s", "warmup")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One metric of one cell in both files. `ratio` is a / b, None where b is 0."""

    cell: str
    metric: Metric
    a: float
    b: float

    @property
    def ratio(self) -> float | None:
        """a / b; None where b is 0."""
        return self.a / self.b if self.b else None


def compare(a: Result, b: Result) -> list[ReportRow]:
    """Every metric that both have, cell by cell in A's order. Raises ConfigError if they have no cell in common."""
    values_a, values_b = _values(a), _values(b)
    rows = [
        ReportRow(cell, metric, values_a[cell][metric.key], values_b[cell][metric.key])
        for cell in values_a
        if cell in values_b
        for metric in (*METRICS, LORA_KEPT)
        if metric.key in values_a[cell] and metric.key in values_b[cell]
    ]
    if not rows:
        raise ConfigError(f"nothing to compare: A has {', '.join(values_a)}; B has {', '.join(values_b)}")
    return rows


def load_differences(a: Result, b: Result) -> list[str]:
    """What the two loads do not have alike, in words, so that nobody reads a ratio of unlike things unawares."""
    loads_a, loads_b = _workloads(a), _workloads(b)
    found = [f"only in A: {cell}" for cell in loads_a if cell not in loads_b]
    found += [f"only in B: {cell}" for cell in loads_b if cell not in loads_a]
    for cell in loads_a.keys() & loads_b.keys():
        fields_a, fields_b = _fixed_fields(loads_a[cell]), _fixed_fields(loads_b[cell])
        found += [f"{cell}: {key} {fields_a[key]} / {fields_b[key]}" for key in fields_a if fields_a[key] != fields_b[key]]
    return sorted(found)


def _fixed_fields(workload: Workload) -> dict[str, object]:
    fields: dict[str, object] = msgspec.structs.asdict(workload)
    num_adapters = sum(target.is_adapter for target in workload.targets)
    return {key: value for key, value in fields.items() if key not in _FREE_FIELDS} | {"adapters": num_adapters}


def _values(result: Result) -> dict[str, dict[str, float]]:
    if isinstance(result, ServeResult):
        return {name: read_all(summary) for name, summary in result.run.classes.items()}
    kept = {f"kept {key}": {LORA_KEPT.key: value} for key, value in result.lora_kept.items()}
    return {cell.name: cell.median for cell in result.cells} | kept


def _workloads(result: Result) -> dict[str, Workload]:
    if isinstance(result, ServeResult):
        return {"load": result.workload}
    return {cell.name: cell.workload for cell in result.cells}
