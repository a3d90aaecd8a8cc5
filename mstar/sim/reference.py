"""The slot table once more, written from the requirements alone: slow, plain, and in no other way related to the engine's.

The oracle drives one per node beside all ranks, so that ranks that are wrong alike are found too. An adapter is its path here: names
that come and go play no part in what an admit decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar.sim.tiny import Generation


@dataclass
class _Slot:
    holds: Generation | None = None
    holders: set[str] = field(default_factory=set)
    last_used: int = 0


@dataclass(frozen=True)
class Expected:
    """What an admit must do. `refused`: more misses than slots, nothing is taken. `num_agreements` it takes on the way."""

    refused: bool
    failed: tuple[str, ...]
    taken: tuple[str, ...]
    num_agreements: int


class ReferenceTable:
    """One node's slots."""

    def __init__(self, max_loras: int) -> None:
        self._slots = [_Slot() for _ in range(max_loras)]
        self._clock = 0

    def holds(self, rid: str) -> bool:
        """Whether `rid` has a slot."""
        return any(rid in slot.holders for slot in self._slots)

    def num_held(self) -> int:
        """Slots with holders."""
        return sum(1 for slot in self._slots if slot.holders)

    def admit(self, rows: Sequence[tuple[str, Generation]], agreements: Sequence[Sequence[int]]) -> Expected:
        """Rows in order, with the generation each names; those that hold a slot have no part in it."""
        rows = [(rid, generation) for rid, generation in rows if not self.holds(rid)]
        if not rows:
            return Expected(refused=False, failed=(), taken=(), num_agreements=0)
        self._clock += 1
        taken: list[str] = []
        misses: list[Generation] = []
        for rid, generation in rows:
            slot = self._slot_of(generation)
            if slot is not None:
                self._take(slot, rid)
                taken.append(rid)
            elif generation not in misses:
                misses.append(generation)
        victims = sorted((slot for slot in self._slots if not slot.holders), key=lambda slot: slot.last_used)  # stable: by index
        broken = [miss for place, miss in enumerate(misses) if any(result[place] == 2 for result in agreements)]
        num_agreements = 0
        if misses:
            num_agreements = 2 if agreements and any(status == 1 for status in agreements[0]) else 1
        good = [miss for miss in misses if miss not in broken]
        if len(good) > len(victims):
            self.give_back(taken)
            return Expected(refused=True, failed=(), taken=(), num_agreements=num_agreements)
        for miss, slot in zip(good, victims, strict=False):
            slot.holds = miss
            for rid, generation in rows:
                if generation == miss:
                    self._take(slot, rid)
                    taken.append(rid)
        failed = tuple(rid for rid, generation in rows if generation in broken)
        return Expected(refused=False, failed=failed, taken=tuple(taken), num_agreements=num_agreements)

    def give_back(self, rids: Sequence[str]) -> None:
        """A rollback, or a remove."""
        for rid in rids:
            for slot in self._slots:
                if rid in slot.holders:
                    slot.holders.remove(rid)
                    slot.last_used = self._clock

    def lines(self) -> list[str]:
        """The table in the words of `LoraAdapterPool.lines`."""
        return [f"clock {self._clock}\n"] + [
            f"slot {index} weights_of={slot.holds.name if slot.holds else None} last_used={slot.last_used} holders={sorted(slot.holders)}\n"
            for index, slot in enumerate(self._slots, start=1)
        ]

    def _slot_of(self, generation: Generation) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds == generation), None)

    def _take(self, slot: _Slot, rid: str) -> None:
        slot.holders.add(rid)
        slot.last_used = self._clock
