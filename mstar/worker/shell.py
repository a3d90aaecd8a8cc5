"""What leader and follower have in common: applying the front's messages, answering for this rank.

Step thread. Ingest, Load and Unload touch the host tier, servable names and request state, never the slot table, so they are applied
whenever they come: between steps, and while a follower waits.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from mstar.engine.resources.base import ResourceReqConfig
from mstar.errors import AdapterError, MstarError, RequestError, WorkerError
from mstar.wire import front_rank
from mstar.worker.build import Rank
from mstar.worker.io import CopyIn, Event, Fatal, FromFront, LoadDone, RankIo

log = logging.getLogger(__name__)

STATS_S = 0.5


class Stopped(Exception):
    """The front asked this rank to end."""


class RankShell:
    """Base of the two loops."""

    def __init__(self, rank: Rank, io: RankIo, epoch: str) -> None:
        self._epoch = epoch
        self._rank = rank
        self._io = io
        self._runner = rank.runner
        self._pool = rank.pool
        self._next_stats = 0.0

    def apply(self, event: Event) -> None:
        """Apply one event that either role understands."""
        if isinstance(event, Fatal):
            raise event.error
        if isinstance(event, FromFront):
            self._apply_front(event.message)
        elif isinstance(event, CopyIn):
            self.copy_in(event.name)
        elif isinstance(event, LoadDone):
            error = event.future.exception()
            if error is None and self._pool is not None:
                self.served(event.load)
            self._answer_load(event.load.load_id, error)

    def served(self, load: front_rank.Load) -> None:
        """New requests may name this generation."""

    def unserved(self, name: str) -> None:
        """No new requests on this generation."""

    def copy_in(self, name: str) -> None:
        """This rank's reader finished a read."""

    def ingested(self, message: front_rank.Ingest) -> None:
        """A request was opened here."""

    def last_seq(self) -> int:
        """The last step admitted here."""
        raise NotImplementedError

    def stats(self, token: int = 0) -> front_rank.Stats:
        """Where this rank stands now."""
        pool, kv = self._pool, self._rank.kv
        reads, failures = pool.store.counts() if pool is not None else (0, 0)
        stats = self._runner.stats
        return front_rank.Stats(
            tp_rank=self._rank.tp_rank,
            token=token,
            last_seq=self.last_seq(),
            slots=tuple(front_rank.SlotStatus(*slot) for slot in pool.slots()) if pool is not None else (),
            host_adapters=tuple(pool.store.host_names()) if pool is not None else (),
            kv_used=kv.spec.num_pages - kv.pages.num_free(),
            kv_cached=kv.pages.num_cached(),
            kv_free=kv.pages.num_free(),
            num_requests=self._runner.num_requests,
            running=0,
            waiting=0,
            running_adapters=(),
            waiting_adapters=(),
            num_steps=stats.num_steps,
            num_agreements=pool.num_agreements if pool is not None else 0,
            num_installs=pool.num_installs if pool is not None else 0,
            num_evictions=pool.num_evictions if pool is not None else 0,
            num_reads=reads,
            num_read_failures=failures,
            num_preemptions=0,
            longest_admit_s=stats.longest_admit_s,
            blocked_on_reads_s=pool.blocked_s if pool is not None else 0.0,
            dropped_frames=self._io.num_dropped(),
            fingerprint=self._runner.fingerprint().hex(),
        )

    def close(self) -> None:
        """The loop has ended, however it did."""

    def lost(self) -> None:
        """The loop has ended because a peer did not come to a collective, or is gone."""

    def tick(self) -> None:
        """Now and then: tell the front where this rank stands, end a read that ran past its bound."""
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + STATS_S
            self._io.to_front(self.stats())
            if self._pool is not None:
                self._pool.store.expire()

    def dump(self, reason: str) -> None:
        """Write this rank's tables where the supervisor finds them."""
        path = Path(self._rank.launch.run_dir) / f"tables-{self._epoch}-rank{self._rank.tp_rank}.txt"
        path.write_text(f"{reason}\nstep {self.last_seq()}\n" + "".join(self._runner.lines()), encoding="utf-8")
        log.error("TP rank %d: %s; tables written to %s", self._rank.tp_rank, reason, path)

    def _apply_front(self, message: front_rank.ToRank) -> None:
        if isinstance(message, front_rank.Ingest):
            self._ingest(message)
        elif isinstance(message, front_rank.Load):
            self._load(message)
        elif isinstance(message, front_rank.Unload):
            if self._pool is not None:
                self._pool.unload_adapter(message.name)
                self.unserved(message.name)
        elif isinstance(message, front_rank.AskStatus):
            self._io.to_front(self.stats(message.token))
        elif isinstance(message, front_rank.Stop):
            raise Stopped
        else:
            self.abort(message.rid)

    def abort(self, rid: str) -> None:
        """Leader only: the client went away. A follower hears of it as a Remove."""
        raise WorkerError(f"an abort of {rid} came to TP rank {self._rank.tp_rank}, which does not decide")

    def _ingest(self, message: front_rank.Ingest) -> None:
        if message.adapter is not None and self._pool is None:
            raise WorkerError(f"request {message.rid} names an adapter, but this instance has no slots")
        config = ResourceReqConfig(message.prompt, message.sampling, message.adapter, message.cache_key, message.output)
        self._runner.ingest(message.rid, config)
        self.ingested(message)

    def _load(self, message: front_rank.Load) -> None:
        pool = self._pool
        if pool is None:
            self._answer_load(message.load_id, AdapterError("this server runs without LoRA", code="lora_disabled"))
            return
        try:
            if not message.verify:
                pool.register_adapter(message.name, message.path, message.digest, has_something=message.has_something)
                self.served(message)
                self._answer_load(message.load_id, None)
                return
            future = pool.load_adapter_async(message.name, message.path, message.digest)
        except RequestError as error:
            self._answer_load(message.load_id, error)
            return
        future.add_done_callback(lambda done: self._io.put(LoadDone(message, done)))

    def _answer_load(self, load_id: int, error: BaseException | None) -> None:
        if error is None:
            self._io.to_front(front_rank.LoadResult(load_id))
            return
        refused = error if isinstance(error, RequestError) else AdapterError(str(error), code="adapter_load_failed", status=500)
        self._io.to_front(front_rank.LoadResult(load_id, refused.code, refused.message, refused.status))


def exit_status(error: BaseException) -> int:
    """The exit status that tells the supervisor what happened."""
    return 3 if isinstance(error, MstarError) else 1
