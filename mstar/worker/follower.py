"""A follower's loop: does what the leader sends, in its order, and applies the front's messages whenever they come.

Step thread of TP ranks above 0. Nothing here reads a clock to decide; the clock only bounds waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from mstar.engine.lockstep.follower import FingerprintMismatch, FollowerSequence
from mstar.errors import ProtocolError
from mstar.types import Step
from mstar.wire import leader_follower
from mstar.worker.build import Rank
from mstar.worker.io import Event, FromLeader, FrontChanged, RankIo
from mstar.worker.shell import RankShell

log = logging.getLogger(__name__)

IDLE_S = 0.2


class Follower(RankShell):
    """One follower."""

    def __init__(self, rank: Rank, io: RankIo, epoch: str) -> None:
        super().__init__(rank, io, epoch)
        self._sequence = FollowerSequence()
        self._orders: deque[leader_follower.ToFollower] = deque()

    def run(self) -> None:
        """Until the front says stop (Stopped) or the process must end."""
        while True:
            self._drain(0 if self._orders else IDLE_S)
            self.tick()
            while self._orders:
                order = self._orders.popleft()
                if isinstance(order, Step):
                    self._step(order)
                else:
                    self._sequence.check_remove(order)
                    self._runner.remove(order.rid)
                self._drain(0)

    def last_seq(self) -> int:
        """The last step admitted here."""
        return self._sequence.last_seq

    def apply(self, event: Event) -> None:
        """Apply one event; the leader's are queued in their order."""
        if isinstance(event, FromLeader):
            self._orders.append(event.message)
        elif not isinstance(event, FrontChanged):  # the leader removes what a lost front asked for
            super().apply(event)

    def copy_in(self, name: str) -> None:
        """Hint to the leader that this rank's copy is in or failed."""
        self._io.to_leader(leader_follower.CopyHint(self._rank.tp_rank, name))

    def _drain(self, timeout_s: float) -> None:
        event = self._io.get(timeout_s)
        while event is not None:
            self.apply(event)
            event = self._io.get(0)

    def _step(self, step: Step) -> None:
        self._await_ingests(step)
        try:
            self._sequence.check_step(step)
        except FingerprintMismatch as error:
            self.dump(str(error))
            self._io.to_leader(leader_follower.Fault(self._rank.tp_rank, str(error)))
            raise
        self._io.progress.begin(f"in step {step.seq}")
        self._runner.execute(step, lambda fingerprint: self._sequence.admitted(step.seq, fingerprint))
        self._io.progress.done()

    def _await_ingests(self, step: Step) -> None:
        """Run nothing until every request of the step was ingested here; go on reading the front's channel meanwhile."""
        deadline = time.monotonic() + self._rank.config.ingest_wait_s
        while missing := self._sequence.missing(step, self._runner.is_ingested):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ProtocolError(f"step {step.seq} names {missing[:3]}, which never came here from the front")
            self._drain(min(left, IDLE_S))
