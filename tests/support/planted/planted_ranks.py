"""Real ranks whose messages and reads are late, whose steps are written down, and of which rank 0 may follow a script.

MSTAR_TEST_RANKS names a JSON file:

    seed         of all delays; each rank draws its own
    trace        folder: `rank-R.txt` gets a line per step (number, fingerprint, sampled ids, failed rows, a hash of the tables),
                 `tables-R.txt` the tables as text when the rank ends
    unreadable   {part of an adapter's path: rank}: that rank alone cannot read it
    script       a recording: rank 0 decides nothing and sends what stands there
    diverges     [rank, step]: once, that rank keeps another sampled id than it sampled

Late means: an event is handed to the step thread up to MESSAGE_S after it came, in the order of its own channel, whatever the other
channels do; a read takes up to READ_S longer; a step begins up to STEP_S later.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import deque
from hashlib import blake2b
from pathlib import Path

from mstar.engine.lockstep.record import Ingested, Ran, read_records
from mstar.errors import AdapterError
from mstar.types import Remove, Step
from mstar.wire import front_rank
from mstar.worker.io import FromFollower, FromFront, FromLeader, RankIo
from mstar.worker.leader import Leader

MESSAGE_S, READ_S, STEP_S = 0.03, 0.2, 0.004
WAIT_S = 60.0


def plant(main) -> None:
    """Change `mstar.worker.main` so that it runs such a rank."""
    spec = json.loads(Path(os.environ["MSTAR_TEST_RANKS"]).read_text())
    trace = Path(spec["trace"])
    build_rank = main.build_rank

    def build(launch, tp_rank, on_copy):
        rank = build_rank(launch, tp_rank, on_copy)
        draw = random.Random(1000 * spec["seed"] + tp_rank)
        _delay_reads(rank.pool.store, tp_rank, spec["unreadable"], random.Random(draw.random()))
        _trace_steps(rank.runner, trace / f"rank-{tp_rank}.txt", random.Random(draw.random()))
        if spec["diverges"] is not None and spec["diverges"][0] == tp_rank and not (trace / "diverged").exists():
            _diverge(rank.runner, spec["diverges"][1], trace / "diverged")
        return rank

    def io_of(tp_rank, *args):
        return LateIo(random.Random(1000 * spec["seed"] + 500 + tp_rank), tp_rank, *args)

    main.build_rank, main.RankIo = build, io_of
    if spec["script"] is not None:
        main.Leader = lambda *args: ScriptedLeader(spec["script"], *args)
    main.Leader, main.Follower = (_writing_tables(loop, trace) for loop in (main.Leader, main.Follower))


class LateIo(RankIo):
    """Hands over each channel's events in their order, each after a delay of its own."""

    def __init__(self, draw, *args) -> None:
        super().__init__(*args)
        self._draw = draw
        self._held = {}  # kind of event -> (due, event) in order

    def get(self, timeout_s):
        """See RankIo.get."""
        until = time.monotonic() + timeout_s
        while True:
            event = super().get(0)
            while event is not None:
                self._hold(event)
                event = super().get(0)
            now = time.monotonic()
            due = min((queue for queue in self._held.values() if queue), key=lambda queue: queue[0][0], default=None)
            if due is not None and due[0][0] <= now:
                return due.popleft()[1]
            if now >= until:
                return None
            event = super().get(min(until, due[0][0] if due else until) - now)
            if event is not None:
                self._hold(event)

    def _hold(self, event) -> None:
        kind = type(event) if isinstance(event, FromFront | FromLeader | FromFollower) else None
        queue = self._held.setdefault(kind, deque())
        late_s = self._draw.choice((0.0, 0.0, self._draw.uniform(0, MESSAGE_S)))
        queue.append((max(time.monotonic() + late_s, queue[-1][0] if queue else 0.0), event))


class ScriptedLeader(Leader):
    """Sends what a recording says, and ends the process where its own admits or tokens are others."""

    def __init__(self, path, *args) -> None:
        super().__init__(*args)
        self._script = path
        self._done = 0

    def run(self) -> None:
        """All of the recording, then the front's messages until it says stop."""
        step = outcome = None
        for record in read_records(self._script):
            self._drain(0)
            self.tick()
            if isinstance(record, Ingested):
                self._until(lambda record=record: self._runner.is_ingested(record.rid))
            elif isinstance(record, Step):
                step = record
                self._io.to_followers(step)
                outcome = self._runner.execute(step)
                self._done = step.seq
                self._io.to_front(front_rank.Began(step.seq, ()))
            elif isinstance(record, Remove):
                self._io.to_followers(record)
                self._runner.remove(record.rid)
            elif isinstance(record, Ran):
                here = outcome.fingerprint, outcome.sampled, outcome.failed.keys()
                there = record.fingerprint, record.sampled, record.failed.keys()
                assert here == there, f"step {record.seq}: {here} here, {there} in the recording"
        while True:
            self._drain(0.2)
            self.tick()

    def last_seq(self) -> int:
        """The last step run."""
        return self._done

    def ingested(self, message) -> None:
        """The script says when it runs."""

    def _until(self, holds) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "what the script waits for never came"
            self._drain(0.02)
            self.tick()


def plant_slow_reads(main, rank_and_seconds: str) -> None:
    """Change `mstar.worker.main` so that one rank's disk is slow: `1:0.5` for half a second more a read on rank 1."""
    slow, seconds = rank_and_seconds.split(":")
    build_rank = main.build_rank

    def build(launch, tp_rank, on_copy):
        rank = build_rank(launch, tp_rank, on_copy)
        if tp_rank == int(slow):
            _before_reads(rank.pool.store, lambda path: time.sleep(float(seconds)))
        return rank

    main.build_rank = build


def _delay_reads(store, tp_rank, unreadable, draw) -> None:
    def delay(path):
        time.sleep(draw.choice((0.0, draw.uniform(0, READ_S))))
        if any(part in path and rank == tp_rank for part, rank in unreadable.items()):
            raise AdapterError("planted: this rank cannot read it", code="adapter_unreadable", status=500)

    _before_reads(store, delay)


def _before_reads(store, delay) -> None:
    read = store._read

    def late(path, digest, cancelled):
        delay(path)
        return read(path, digest, cancelled)

    store._read = late


def _trace_steps(runner, path, draw) -> None:
    execute = runner.execute

    def traced(step, admitted=lambda fingerprint: None):
        time.sleep(draw.choice((0.0, draw.uniform(0, STEP_S))))
        outcome = execute(step, admitted)
        failed = sorted(outcome.failed)  # what each says of it is its own: only one may know why
        tables = blake2b("".join(runner.lines()).encode(), digest_size=8).hexdigest()
        with path.open("a") as file:
            file.write(f"{step.seq} {outcome.fingerprint.hex()} {sorted(outcome.sampled.items())} {failed} {tables}\n")
        return outcome

    runner.execute = traced


def _diverge(runner, at, mark) -> None:
    execute = runner.execute

    def other(step, admitted=lambda fingerprint: None):
        outcome = execute(step, admitted)
        if step.seq == at:
            mark.touch()
            runner._last_ids += b",x"
        return outcome

    runner.execute = other


def _writing_tables(loop_of, trace):
    def make(rank, io, epoch):
        loop = loop_of(rank, io, epoch)
        run = loop.run

        def until_the_end():
            try:
                run()
            finally:
                (trace / f"tables-{rank.tp_rank}.txt").write_text("".join(rank.runner.lines()))

        loop.run = until_the_end
        return loop

    return make
