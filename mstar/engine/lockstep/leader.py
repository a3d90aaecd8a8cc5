"""The leader's side: numbers the steps, stamps each teardown with the last step sent, attaches fingerprints.

Step 7 ─ Step 8 ─ Remove(r, after 8) ─ Step 9(fingerprint of 8) ─ …        one ordered channel per follower
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.types import Remove, Row, Step


class LeaderSequence:
    """Makes the messages that fix the order of admits and teardowns on every rank."""

    def __init__(self) -> None:
        self._last_seq = 0
        self._fingerprint_seq = 0
        self._fingerprint = b""

    @property
    def last_seq(self) -> int:
        """The last step sent; 0 before the first."""
        return self._last_seq

    def step(self, rows: Sequence[Row], preempted: Sequence[str], bucket: int = 0) -> Step:
        """The next step, carrying the fingerprint of the last one admitted here."""
        self._last_seq += 1
        return Step(
            seq=self._last_seq,
            rows=tuple(rows),
            preempted=tuple(preempted),
            bucket=bucket,
            fingerprint_seq=self._fingerprint_seq,
            fingerprint=self._fingerprint,
        )

    def admitted(self, seq: int, fingerprint: bytes) -> None:
        """The leader's own state right after the admit of `seq`."""
        self._fingerprint_seq, self._fingerprint = seq, fingerprint

    def remove(self, rid: str) -> Remove:
        """The end of `rid`: it lands after the admit of the last step sent, before the next, on every rank."""
        return Remove(rid, after_tp_seq=self._last_seq)
