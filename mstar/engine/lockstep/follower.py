"""A follower's side: steps without gaps, teardowns at their fence, its fingerprints held against the leader's.

A Step waits until every request that it names was ingested here; a Remove lands after the admit of `after_tp_seq` and before the next
one. Both come over one ordered channel, so a fence that does not fit means a peer that broke the protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from mstar.errors import ProtocolError
from mstar.types import Remove, Step

_KEPT_FINGERPRINTS = 64


class FollowerSequence:
    """Checks what the leader sends against what this rank did."""

    def __init__(self) -> None:
        self._last_admitted = 0
        self._fingerprints: OrderedDict[int, bytes] = OrderedDict()

    @property
    def last_seq(self) -> int:
        """The last step admitted here; 0 before the first."""
        return self._last_admitted

    def check_step(self, step: Step) -> None:
        """Raises ProtocolError for a gap, and where the leader's fingerprint differs from this rank's own of that step."""
        if step.seq != self._last_admitted + 1:
            raise ProtocolError(f"step {step.seq} came after step {self._last_admitted}: steps have no gaps")
        own = self._fingerprints.get(step.fingerprint_seq)
        if step.fingerprint_seq and own is not None and own != step.fingerprint:
            raise FingerprintMismatch(step.fingerprint_seq, step.fingerprint, own)

    def check_remove(self, remove: Remove) -> None:
        """Raises ProtocolError where the fence is not the last admitted step."""
        if remove.after_tp_seq != self._last_admitted:
            fence, here = remove.after_tp_seq, self._last_admitted
            raise ProtocolError(f"the remove of {remove.rid} belongs after step {fence}; the last admitted here is {here}")

    def admitted(self, seq: int, fingerprint: bytes) -> None:
        """This rank's own state right after the admit of `seq`."""
        self._last_admitted = seq
        self._fingerprints[seq] = fingerprint
        while len(self._fingerprints) > _KEPT_FINGERPRINTS:
            self._fingerprints.popitem(last=False)

    @staticmethod
    def missing(step: Step, is_ingested: Callable[[str], bool]) -> list[str]:
        """Requests that the step names and this rank has not ingested yet."""
        return [row.rid for row in step.rows if not is_ingested(row.rid)]


class FingerprintMismatch(ProtocolError):
    """Two ranks' tables differ after the admit of `seq`: the one thing that must never happen."""

    def __init__(self, seq: int, leader: bytes, own: bytes) -> None:
        super().__init__(f"after the admit of step {seq} the leader's fingerprint is {leader.hex()}, this rank's {own.hex()}")
        self.seq = seq
