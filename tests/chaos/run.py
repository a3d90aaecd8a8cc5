"""`make chaos SEED=… N=…`: random faults under a steady load against a real `mstar serve`; what clients saw, and what was left at the end.

    8 streams over the base, 6 adapters and one loaded at runtime, in 2 slots, on 2 ranks; another adapter is loaded and unloaded all along
    fault ─► found (its line in the log) ─► serves again (its line, then a stream's next token) ─► a quiet moment ─► next fault

Promised: every stream ends complete but those whose own front was killed and those whose adapter was changed; every token that any
client got is what transformers + peft in float32 give, teacher-forced, within 1e-3; nothing hangs; nothing is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.chaos.faults import FAULTS, Scene
from tests.chaos.load import MUTABLE, Load, Stream, load_and_unload
from tests.chaos.processes import Held, held
from tests.support.adapters import tiny_adapters
from tests.support.reference import Reference, tiny_reference
from tests.support.server import Server, ServerSpec, running_server

FAMILY = "llama2"
ADMIN_KEY = "the-admin-key"
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}
PASSING = "passing"  # loaded and unloaded all along; the same weights as `MUTABLE`
NUM_STREAMS = 8
STUCK_S = 10.0
FOUND_BOUND_S = 60.0  # bounds of waits, none of them a measure
SERVED_BOUND_S = 240.0
SPEC = ServerSpec(
    "chaos",
    FAMILY,
    2,
    (
        *("--num-gpu-blocks-override=512", "--max-num-seqs=32", "--enable-runtime-lora", f"--admin-key={ADMIN_KEY}"),
        *("--max-restarts=1000000", "--lora-read-timeout-s=4", "--agreement-timeout-s=6", f"--stuck-rank-timeout-s={STUCK_S:g}"),
        "--start-timeout-s=120",
    ),
)


@dataclass
class FaultRecord:
    """One fault: when it was found and served again, in seconds after it, and what the clients of then saw."""

    index: int
    kind: str
    at_s: float
    running: int
    found_s: float | None = None
    served_s: float | None = None
    complete: int = 0
    lost_with_front: int = 0
    adapter_errors: int = 0
    bad: int = 0
    longest_pause_s: float = 0.0


@dataclass
class Report:
    """A whole run."""

    seed: int
    seconds: float = 0.0
    faults: list[FaultRecord] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    num_tokens_checked: int = 0
    problems: list[str] = field(default_factory=list)
    samples: list[tuple[float, Held]] = field(default_factory=list)
    rss_mb_per_hour: dict[str, float] = field(default_factory=dict)


class Chaos:
    """One run on a running server."""

    def __init__(self, server: Server, seed: int, kinds: Sequence[str], mutable: Path, most_s: float) -> None:
        self._server = server
        self._most_s = most_s
        self._kinds = kinds
        self._draw = random.Random(seed)
        self._mutable = mutable
        self._started = time.monotonic()
        self.report = Report(seed)

    async def run(self) -> list[Stream]:
        """All faults, one after another; returns every stream."""
        load = Load(self._server.url, NUM_STREAMS, random.Random(self._draw.random()))
        scene = Scene(self._server, load, self._draw, self._mutable)
        passing = asyncio.ensure_future(load_and_unload(self._server, load, PASSING, str(tiny_adapters(FAMILY)[MUTABLE]), HEADERS))
        try:
            windows = []
            for index, kind in enumerate(self._kinds):
                await self._quiet(load)
                if time.monotonic() - self._started > self._most_s:
                    break
                windows.append(await self._one(scene, index, kind))
        finally:
            passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
        if not passing.cancelled() and passing.exception() is not None:
            self.report.problems.append(f"load and unload: {passing.exception()}")
        await load.stop()
        self._judge(load.streams, windows)
        self.report.refused = load.num_refused
        self.report.seconds = round(time.monotonic() - self._started, 1)
        return load.streams

    async def _quiet(self, load: Load) -> None:
        """Until a token has come to every stream that may run, more or less; then a sample of what is held."""
        begun = time.monotonic()
        await self._until("tokens to flow", lambda: load.last_token_at > begun, SERVED_BOUND_S)
        await asyncio.sleep(self._draw.uniform(0.5, 3))
        at = round(time.monotonic() - self._started, 1)
        self.report.samples += [(at, item) for item in held(self._server.process.pid)]

    async def _one(self, scene: Scene, index: int, kind: str) -> tuple[FaultRecord, float, float]:
        """One fault; returns its record and its window of time."""
        fault, load = FAULTS[kind], scene.load
        arrived, log_from = time.monotonic(), self._log_size()
        record = FaultRecord(index, kind, round(arrived - self._started, 1), len(load.running))
        self.report.faults.append(record)
        injecting = asyncio.ensure_future(fault.inject(scene))
        if fault.found is not None:
            await self._until(f"{kind}: found", lambda: self._log_says(fault.found, log_from), FOUND_BOUND_S + STUCK_S)
        found = time.monotonic()
        async with asyncio.timeout(SERVED_BOUND_S):
            began = await injecting
        record.found_s = round(found - began, 2) if fault.found is not None else None
        for line in fault.served:
            await self._until(f"{kind}: {line}", lambda line=line: self._log_says(line, log_from), SERVED_BOUND_S)
        up = time.monotonic()
        await self._until(f"{kind}: a token", lambda: load.last_token_at > up, SERVED_BOUND_S)
        record.served_s = round(load.last_token_at - began, 2)
        if fault.changes_adapter:
            await self._until(f"{kind}: its streams to end", lambda: not self._runs_mutable(load, began), SERVED_BOUND_S)
            self._restore()
        self._progress(record)
        return record, arrived, time.monotonic()

    def _runs_mutable(self, load: Load, since: float) -> bool:
        return any(stream.ask.model == MUTABLE and stream.began < since + 1 for stream in load.running)

    def _restore(self) -> None:
        name = "adapter_model.safetensors"
        beside = self._mutable / "restored"
        shutil.copyfile(tiny_adapters(FAMILY)[MUTABLE] / name, beside)
        beside.replace(self._mutable / name)

    async def _until(self, what: str, probe: Any, bound_s: float) -> None:
        deadline = time.monotonic() + bound_s
        while not probe():
            if time.monotonic() > deadline:
                raise AssertionError(f"hang: waited {bound_s:g} s for {what}\n{self._server.log_tail()}")
            await asyncio.sleep(0.02)

    def _log_size(self) -> int:
        return self._server.log_path.stat().st_size

    def _log_says(self, pattern: str | None, log_from: int) -> bool:
        with self._server.log_path.open("rb") as log:
            log.seek(log_from)
            return re.search(str(pattern), log.read().decode(errors="replace")) is not None

    def _progress(self, record: FaultRecord) -> None:
        sys.stderr.write(
            f"{record.at_s:7.1f} s  #{record.index:<3} {record.kind:24} found {record.found_s} s, serves {record.served_s} s\n"
        )

    def _judge(self, streams: Sequence[Stream], windows: Sequence[tuple[FaultRecord, float, float]]) -> None:
        """What each stream's end was, and which fault it met."""
        counts = {"complete": 0, "left": 0, "lost_with_front": 0, "adapter_errors": 0, "bad": 0}
        for stream in streams:
            met = [(record, start, stop) for record, start, stop in windows if stream.began < stop and stream.ended > start]
            verdict = _verdict(stream, [FAULTS[record.kind] for record, _, _ in met])
            counts[verdict] += 1
            if verdict == "bad":
                self.report.problems.append(f"{stream.ask} began {stream.began - self._started:.1f} s: {stream.error or 'not complete'}")
            for record, _, _ in met:
                if verdict != "left":
                    setattr(record, verdict, getattr(record, verdict) + 1)
                record.longest_pause_s = round(max(record.longest_pause_s, stream.longest_gap_s), 2)
        self.report.streams = counts


def _verdict(stream: Stream, met: Sequence[Any]) -> str:
    if stream.is_complete:
        return "complete"
    if stream.was_left and not stream.error:
        return "left"
    is_transport = not stream.error.startswith(("adapter_", "instance_", "hang", "server_", "request_", "internal"))
    if is_transport and any(fault.kills_front for fault in met):
        return "lost_with_front"
    if stream.error.startswith("adapter_") and stream.ask.model == MUTABLE and any(fault.changes_adapter for fault in met):
        return "adapter_errors"
    return "bad"


def check_tokens(report: Report, streams: Sequence[Stream], reference: Reference) -> None:
    """Every token that any client got, also of streams that were left or lost."""
    for stream in sorted(streams, key=lambda item: item.ask.model):
        if not stream.tokens:
            continue
        ask = replace(stream.ask, model=MUTABLE) if stream.ask.model == PASSING else stream.ask
        try:
            reference.check(replace(stream.answer(), ask=ask))
        except AssertionError as error:
            report.problems.append(f"wrong token: {error}")
        report.num_tokens_checked += len(stream.tokens)


def check_leaks(report: Report, server: Server, before: Sequence[Held]) -> None:
    """Nothing held, and every process with about the descriptors and threads that it began with."""
    status = server.wait_until_idle()
    for rank in status["ranks"]:
        if rank["kv"]["free"] != server.at_start["ranks"][0]["kv"]["free"]:
            report.problems.append(f"rank {rank['tp_rank']}: {rank['kv']} pages, at the start {server.at_start['ranks'][0]['kv']}")
    at_start = {item.role: item for item in before}
    report.samples += [(report.seconds, item) for item in held(server.process.pid)]
    for item in held(server.process.pid):
        first = at_start[item.role]
        if item.num_fds > first.num_fds + 4 or item.num_threads > first.num_threads + 2:
            report.problems.append(f"{item.role} holds {item.num_fds} fds and {item.num_threads} threads, it began with {first}")
    report.rss_mb_per_hour = _rss_slopes(report.samples)


def _rss_slopes(samples: Sequence[tuple[float, Held]]) -> dict[str, float]:
    """Least squares over each process that was seen for at least a minute, but for its first 20 s."""
    by_process: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for at, item in samples:
        by_process.setdefault((item.role, item.pid), []).append((at, item.rss_mb))
    slopes = {}
    for (role, pid), points in by_process.items():
        points = [(at, rss) for at, rss in points if at >= points[0][0] + 20]
        if len(points) < 3 or points[-1][0] - points[0][0] < 60:
            continue
        mean_at, mean_rss = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((at - mean_at) ** 2 for at, _ in points)
        slopes[f"{role} ({pid}, {points[-1][0] - points[0][0]:.0f} s)"] = round(
            3600 * sum((at - mean_at) * (rss - mean_rss) for at, rss in points) / spread, 1
        )
    return slopes


def run_chaos(seed: int, kinds: Sequence[str], folder: Path, most_s: float = math.inf) -> Report:
    """Start a server, do `kinds` in order, for `most_s` or a little longer, judge."""
    mutable = folder / "mutable"
    shutil.copytree(tiny_adapters(FAMILY)[MUTABLE], mutable)
    with running_server(SPEC.command_line(folder), folder, spec=SPEC) as server:
        reply = server.post("/v1/load_lora_adapter", {"lora_name": MUTABLE, "lora_path": str(mutable)}, headers=HEADERS)
        assert reply.status_code == 200, reply.text
        before = held(server.process.pid)
        chaos = Chaos(server, seed, kinds, mutable, most_s)
        streams = asyncio.run(chaos.run())
        check_leaks(chaos.report, server, before)
    check_tokens(chaos.report, streams, tiny_reference(FAMILY))
    return chaos.report


def table(report: Report) -> str:
    """The report for people: one line per kind of fault."""
    lines = [
        f"{'fault':24} {'times':>5} {'found s':>15} {'serves again s':>15} {'running':>8} {'complete':>9} {'lost*':>6} {'file**':>6} {'bad':>4}"
    ]
    for kind in FAULTS:
        records = [record for record in report.faults if record.kind == kind]
        if not records:
            continue
        total = {
            name: sum(getattr(record, name) for record in records)
            for name in ("running", "complete", "lost_with_front", "adapter_errors", "bad")
        }
        lines.append(
            f"{kind:24} {len(records):5} {_spread([record.found_s for record in records]):>15} {_spread([record.served_s for record in records]):>15} "
            f"{total['running']:8} {total['complete']:9} {total['lost_with_front']:6} {total['adapter_errors']:6} {total['bad']:4}"
        )
    lines += [
        "* its own front was killed   ** its adapter's file was changed: an error, as promised",
        f"{len(report.faults)} faults in {report.seconds:.0f} s, seed {report.seed}; streams {report.streams}; refused and tried again {report.refused}",
        f"{report.num_tokens_checked} tokens checked against transformers + peft; RSS in MB per hour {report.rss_mb_per_hour}",
        f"{len(report.problems)} problems",
        *report.problems[:20],
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float | None]) -> str:
    given = sorted(value for value in values if value is not None)
    return f"{given[len(given) // 2]:.1f} ({given[0]:.1f}-{given[-1]:.1f})" if given else "-"


def random_kinds(seed: int, num_faults: int) -> list[str]:
    """Every kind equally often, in a random order."""
    kinds = [kind for _ in range(-(-num_faults // len(FAULTS))) for kind in FAULTS]
    random.Random(seed).shuffle(kinds)
    return kinds[:num_faults]


def soak_kinds(seed: int, num_faults: int) -> list[str]:
    """Mostly pauses, so that processes live long enough to show what they gather; something else now and then."""
    draw = random.Random(seed)
    return [draw.choice(list(FAULTS)) if draw.random() < 1 / 40 else "pause a process" for _ in range(num_faults)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after so long")
    parser.add_argument("--soak", action="store_true", help="mostly pauses, until --minutes are over")
    parser.add_argument("--kinds", help="comma-separated kinds, instead of random ones")
    parser.add_argument("--out", type=Path, default=Path("chaos.json"), help="where the JSON report goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kinds:
        kinds = options.kinds.split(",")
    else:
        kinds = soak_kinds(options.seed, 100_000) if options.soak else random_kinds(options.seed, options.faults)
    with tempfile.TemporaryDirectory(prefix="mstar-chaos-") as folder:
        try:
            report = run_chaos(options.seed, kinds, Path(folder), 60 * options.minutes)
        except BaseException:
            shutil.copyfile(Path(folder) / "serve.log", options.out.with_suffix(".log"))
            raise
        shutil.copyfile(Path(folder) / "serve.log", options.out.with_suffix(".log"))
    options.out.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    sys.stdout.write(table(report) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
