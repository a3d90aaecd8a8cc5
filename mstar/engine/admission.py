"""The one admission queue: who may enter the running set next.

Pure. First in, first out, with bounded overtaking: a request that cannot enter now is passed by later ones that can, but each pass that
can delay it counts, and after `max_passes` nobody may pass it in a way that counts.

    it waits for    a pass counts when the passer …
    a read          never (a read delays only itself)
    a slot          takes or prolongs a slot (names an adapter)
    pages           always

So a waiting request is delayed by at most `max_passes` later ones, and then by nobody.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mstar.engine.resources.base import WaitReason


class Verdict(Enum):
    """What trying one request gave. The WAITS leave nothing reserved."""

    ADMITTED = "admitted"
    WAITS_READ = "read"
    WAITS_SLOT = "slot"
    WAITS_PAGES = "pages"
    WAITS_TURN = "turn"  # not tried: an earlier one may not be passed any more
    FULL = "full"  # the step has no room for any further request: stop

    @staticmethod
    def waits(reason: WaitReason) -> Verdict:
        """The verdict for a wait."""
        return Verdict(reason)


@dataclass(order=True)
class Waiting:
    """One request in the queue; `order` is its arrival and decides alone."""

    order: int
    rid: str = field(compare=False)
    uses_slot: bool = field(compare=False)
    passes: int = field(default=0, compare=False)
    waits_for: Verdict | None = field(default=None, compare=False)


class AdmissionQueue:
    """Waiting requests by arrival."""

    def __init__(self, max_passes: int) -> None:
        self._max_passes = max_passes
        self._entries: list[Waiting] = []
        self._by_rid: dict[str, Waiting] = {}
        self.longest_pass_over = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def rids(self) -> list[str]:
        """Waiting requests, oldest first."""
        return [entry.rid for entry in self._entries]

    def push(self, rid: str, order: int, *, uses_slot: bool) -> None:
        """Add a request at the place that its arrival gives it: a preempted one comes back before all later ones."""
        entry = Waiting(order, rid, uses_slot)
        bisect.insort(self._entries, entry)
        self._by_rid[rid] = entry

    def remove(self, rid: str) -> None:
        """Take a request out (it ended); no-op where it is not here."""
        entry = self._by_rid.pop(rid, None)
        if entry is not None:
            del self._entries[bisect.bisect_left(self._entries, entry)]

    def waits(self) -> dict[str, str]:
        """What each request was last found to wait for, as a verdict's word; those not looked at yet are left out."""
        return {entry.rid: entry.waits_for.value for entry in self._entries if entry.waits_for is not None}

    def admit(self, attempt: Callable[[str], Verdict]) -> list[str]:
        """Try the waiting requests in order; returns those admitted."""
        admitted: list[str] = []
        waiting_slot: list[Waiting] = []
        waiting_pages: list[Waiting] = []
        slot_closed = pages_closed = False
        for entry in list(self._entries):
            if pages_closed or (slot_closed and entry.uses_slot):
                entry.waits_for = Verdict.WAITS_TURN
                continue
            verdict = attempt(entry.rid)
            entry.waits_for = verdict
            if verdict is Verdict.FULL:
                break
            if verdict is Verdict.ADMITTED:
                for earlier in (*waiting_pages, *waiting_slot) if entry.uses_slot else waiting_pages:
                    earlier.passes += 1
                    self.longest_pass_over = max(self.longest_pass_over, earlier.passes)
                self.remove(entry.rid)
                admitted.append(entry.rid)
                slot_closed = slot_closed or self._is_closed(waiting_slot)
                pages_closed = pages_closed or self._is_closed(waiting_pages)
            elif verdict is Verdict.WAITS_SLOT:
                waiting_slot.append(entry)
                slot_closed = slot_closed or entry.passes >= self._max_passes
            elif verdict is Verdict.WAITS_PAGES:
                waiting_pages.append(entry)
                pages_closed = pages_closed or entry.passes >= self._max_passes
        return admitted

    def _is_closed(self, waiting: Sequence[Waiting]) -> bool:
        """Whether one of them was passed as often as it may be."""
        return any(entry.passes >= self._max_passes for entry in waiting)
