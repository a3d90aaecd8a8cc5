"""What a run leaves behind: frozen structs, saved as JSON, read back and checked.

    ServeResult ── workload, RunResult                      `mstar bench serve`
    SuiteResult ── CellResult ── RunResult per round        `mstar bench suite`
    RunResult   ── ClassSummary for base, adapter, total    (a class without requests is absent; total never is)

Units are in the names; a number that could not be measured is null.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from mstar.bench.load import RequestRecord
from mstar.bench.plan import Workload
from mstar.errors import ConfigError


class Quantiles(msgspec.Struct, frozen=True):
    """A pooled sample in short."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class ClassSummary(msgspec.Struct, frozen=True):
    """The requests of one class. Rates are over the whole run's duration, so base and adapter add up to total.

    Failed requests count nowhere but in `num_failed` and `reasons`. `num_short`: answers with fewer tokens than were asked for, which means
    that the server did not honour `ignore_eos` and that its numbers do not compare.
    """

    num_ok: int
    num_failed: int
    num_short: int
    reasons: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Quantiles | None  # send → first token event
    inter_token_s: Quantiles | None  # gaps between successive token events of one stream, pooled over the streams
    per_token_s: Quantiles | None  # (last − first token event) / (tokens − 1), per request: fair if an event carries several tokens
    e2e_s: Quantiles | None  # send → end of the reply


class ClientHealth(msgspec.Struct, frozen=True):
    """The load generator's own account: what it took from the machine, and whether it kept its schedule."""

    cpu_share: float  # of one core, over the run
    events_per_s: float
    max_send_lag_s: float


class RunResult(msgspec.Struct, frozen=True):
    """One load, measured."""

    started_at: str  # ISO 8601, UTC
    duration_s: float  # first send → last end
    classes: dict[str, ClassSummary]
    client: ClientHealth


class ServeResult(msgspec.Struct, frozen=True, tag="mstar-bench-serve", tag_field="kind"):
    """The file of `mstar bench serve`."""

    label: str
    command: str
    base_url: str
    server_version: str | None
    workload: Workload
    run: RunResult
    records: tuple[RequestRecord, ...] | None = None  # with --save-events


class CellResult(msgspec.Struct, frozen=True):
    """One line of the standard table: its rounds, and the median of each metric over them (keys as in metrics.py)."""

    name: str
    num_adapters: int
    concurrency: int
    workload: Workload  # of the first round; later ones differ in their seed
    rounds: tuple[RunResult, ...]
    median: dict[str, float]

    @property
    def num_ok(self) -> int:
        """Answered requests, all rounds together."""
        return sum(run.classes["total"].num_ok for run in self.rounds)

    @property
    def num_failed(self) -> int:
        """Failed requests, all rounds together."""
        return sum(run.classes["total"].num_failed for run in self.rounds)


class SuiteResult(msgspec.Struct, frozen=True, tag="mstar-bench-suite", tag_field="kind"):
    """The file of `mstar bench suite`. `lora_kept`: adapter throughput over base throughput, by cell ("8 adapters c8")."""

    label: str
    command: str
    base_url: str
    server_version: str | None
    started_at: str
    is_quick: bool
    repeat: int
    cells: tuple[CellResult, ...]
    lora_kept: dict[str, float]


Result = ServeResult | SuiteResult


def command_line(argv: Sequence[str]) -> str:
    """The command as it could be typed again: without the API key, and of a whole path the last part, for it is read on other machines."""
    program = Path(argv[0]).name
    shown = ["python", "-m", "mstar.bench"] if program == "__main__.py" else [program]
    for before, argument in pairwise(argv):
        if before == "--api-key":
            argument = "REDACTED"
        elif argument.startswith("--api-key="):
            argument = "--api-key=REDACTED"
        option, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
        shown.append(f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument)
    return shlex.join(shown)


def check_writable(path: Path) -> None:
    """Raises ConfigError if a result could not be written there: better known before the run than after. Makes the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path}: not a file that can be written")


def save(result: Result, path: Path) -> None:
    """Write `result` as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def load(path: Path) -> Result:
    """Read a saved result. Raises ConfigError if there is none, or it is something else."""
    try:
        result: Result = msgspec.json.decode(path.read_bytes(), type=ServeResult | SuiteResult)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a result of mstar bench: {error}") from error
    return result
