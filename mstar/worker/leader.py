"""The leader's loop: admits, chooses steps, broadcasts them, runs them, lands teardowns, streams tokens.

    drain inbox ─► choose ─► send Step ─► run it ─► tokens to the front ─► land the removes of ended rows ─► …

Step thread of TP rank 0. A row ends only here; every end becomes one Remove on every rank.
"""

from __future__ import annotations

import logging
import time

import msgspec

from mstar.engine.lockstep.leader import LeaderSequence
from mstar.engine.pacing import PrefillPace
from mstar.engine.requests import RequestState
from mstar.engine.resources.base import Resource
from mstar.engine.runner import NewToken, StepOutcome
from mstar.engine.scheduler import Scheduler, SchedulerLimits
from mstar.errors import RequestError, WorkerError
from mstar.types import Row
from mstar.wire import front_rank, leader_follower
from mstar.worker.build import Rank
from mstar.worker.io import Event, FromFollower, FrontChanged, RankIo
from mstar.worker.recording import LeaderRecord
from mstar.worker.shell import RankShell

log = logging.getLogger(__name__)

IDLE_S = 0.2
FAULT_S = 0.3  # how long after a lost collective a follower's last word may still come


class Leader(RankShell):
    """TP rank 0."""

    def __init__(self, rank: Rank, io: RankIo, epoch: str) -> None:
        super().__init__(rank, io, epoch)
        config = rank.config
        self._sequence = LeaderSequence()
        resources: list[Resource] = [rank.kv] if rank.pool is None else [rank.pool, rank.kv]
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, config.max_passes)
        self._scheduler = Scheduler(limits, resources, rank.kv)
        self._pace = PrefillPace(config.prefill_stretch)
        self._adapter_of: dict[str, str | None] = {}
        self._cached: dict[str, int] = {}
        self._announced: list[str] = []
        self._record = LeaderRecord(rank)
        self._eos = frozenset(rank.arch.eos_token_ids)

    def run(self) -> None:
        """Until the front says stop (Stopped) or the process must end."""
        while True:
            timeout_s: float = 0
            if not self._scheduler.has_work():
                timeout_s = IDLE_S
            self._drain(timeout_s)
            self.tick()
            if not self._step() and self._scheduler.has_work():
                self._drain(0.02)  # all wait for reads or hints, whose coming is an event

    def close(self) -> None:
        """See RankShell.close: what the recording still buffers is written."""
        self._record.close()

    def lost(self) -> None:
        """See RankShell.lost. A follower that differs says so and ends: this rank's tables are the other half of the story."""
        until = time.monotonic() + FAULT_S
        while (left_s := until - time.monotonic()) > 0:
            event = self._io.get(left_s)
            if isinstance(event, FromFollower) and isinstance(event.message, leader_follower.Fault):
                self.dump(event.message.message)
                return

    def last_seq(self) -> int:
        """The last step sent."""
        return self._sequence.last_seq

    def apply(self, event: Event) -> None:
        """Apply one event."""
        if isinstance(event, FrontChanged):
            for rid in list(self._adapter_of):
                self._end(rid)
        elif isinstance(event, FromFollower):
            self._hear(event.message)
        else:
            super().apply(event)

    def ingested(self, message: front_rank.Ingest) -> None:
        """Queue the request for admission."""
        self._record.ingested(message)
        uses_slot = self._pool is not None and self._pool.runs_adapters([message.rid])
        tokens = len(message.prompt) + len(message.output) if message.sampling is not None else 0
        self._adapter_of[message.rid] = message.adapter
        self._scheduler.add(message.rid, tokens, uses_slot=uses_slot)

    def served(self, load: front_rank.Load) -> None:
        """For the recording."""
        self._record.served(load, has_something=self._pool is not None and self._pool.has_something(load.name))

    def unserved(self, name: str) -> None:
        """For the recording."""
        self._record.unserved(name)

    def abort(self, rid: str) -> None:
        """The client went away: free its slot, pages and place now. One that ended already is no news."""
        if rid in self._adapter_of:
            self._end(rid)

    def stats(self, token: int = 0) -> front_rank.Stats:
        """This rank's, with what only the leader knows."""
        running = self._scheduler.running()
        waiting = self._scheduler.queue.rids()
        return msgspec.structs.replace(
            super().stats(token),
            running=len(running),
            waiting=len(waiting),
            running_adapters=self._adapters(running),
            waiting_adapters=self._adapters(waiting),
            num_preemptions=self._scheduler.num_preemptions,
        )

    def _adapters(self, rids: list[str]) -> tuple[str, ...]:
        return tuple(sorted({adapter for rid in rids if (adapter := self._adapter_of.get(rid)) is not None}))

    def _drain(self, timeout_s: float) -> None:
        event = self._io.get(timeout_s)
        while event is not None:
            self.apply(event)
            event = self._io.get(0)

    def _hear(self, message: leader_follower.ToLeader) -> None:
        if isinstance(message, leader_follower.Fault):
            self.dump(message.message)
            raise WorkerError(f"TP rank {message.tp_rank} failed: {message.message}")
        if self._pool is not None:
            self._pool.note_copy(message.tp_rank, message.name)

    def _step(self) -> bool:
        """Run one step; False where no row can run now."""
        choice = self._scheduler.choose(self._pace.budget)
        if choice is None:
            return False
        for row in choice.rows:
            if row.rid not in self._cached:
                self._cached[row.rid] = row.start
        step = self._sequence.step(choice.rows, choice.preempted)
        self._io.to_followers(step)
        self._record.sent(step)
        self._announce([row.rid for row in choice.rows], step.seq)
        self._io.progress.begin(f"in step {step.seq}")
        began = time.perf_counter()
        outcome = self._runner.execute(step, lambda fingerprint: self._sequence.admitted(step.seq, fingerprint))
        self._pace_by(step.rows, time.perf_counter() - began)
        self._io.progress.done()
        self._record.ran(outcome, self._scheduler)
        self._scheduler.committed(step.rows, outcome.sampled)
        self._publish(outcome)
        return True

    def _pace_by(self, rows: tuple[Row, ...], seconds: float) -> None:
        counts = [row.num_tokens for row in rows]
        self._pace.observe(sum(count for count in counts if count > 1), counts.count(1), seconds)

    def _announce(self, rids: list[str], seq: int) -> None:
        """Tell the front who is in the step that begins, where that changed: should it crash, they are suspects."""
        if rids != self._announced:
            self._announced = rids
            self._io.to_front(front_rank.Began(seq, tuple(rids)))

    def _publish(self, outcome: StepOutcome) -> None:
        ended: list[str] = []
        shown: list[front_rank.TokenOut] = []
        for token in outcome.tokens:
            request = self._runner.request(token.rid)
            assert request is not None
            reason, is_stop = self._finish_reason(request, token)
            if reason is not None:
                ended.append(token.rid)
            cached = self._cached[token.rid] if token.position == request.num_resumed else 0
            shown.append(
                front_rank.TokenOut(
                    token.rid, token.position, token.token_id, reason, is_stop, cached, token.logprobs, token.prompt_logprobs
                )
            )
        if shown:
            self._io.to_front(front_rank.Tokens(outcome.step.seq, tuple(shown)))
        for rid, error in outcome.failed.items():
            self._fail(rid, error)
        for rid in ended:
            self._end(rid)

    def _finish_reason(self, request: RequestState, token: NewToken) -> tuple[str | None, bool]:
        sampling = request.sampling
        is_stop = (token.token_id in self._eos and not sampling.ignore_eos) or token.token_id in sampling.stop_token_ids
        if is_stop:
            return "stop", True
        full = len(request.output) >= sampling.max_tokens or request.num_tokens >= self._rank.max_model_len
        return ("length" if full else None), False

    def _fail(self, rid: str, error: RequestError) -> None:
        self._io.to_front(front_rank.Failed(rid, error.message, error.code, error.status))
        self._end(rid)

    def _end(self, rid: str) -> None:
        """The one exit path: a Remove to every rank, everything it held is free here now."""
        remove = self._sequence.remove(rid)
        self._io.to_followers(remove)
        self._record.sent(remove)
        self._runner.remove(rid)
        self._scheduler.finish(rid)
        self._adapter_of.pop(rid, None)
        self._cached.pop(rid, None)
