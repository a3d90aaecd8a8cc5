"""The slot table: which adapter's weights lie in which slot, who holds it, and whom a miss may overwrite.

Pure: no torch, threads, clock or randomness. Every rank of an instance keeps one and, given the same admits and removes in the
same order, all of them are equal; nothing about them is exchanged.

    slot 0          the zero adapter: never handed out, never in this table's choices
    slots 1 … n     holders > 0: held, overwritten by nobody
                    holders = 0: idle (its weights serve as a cache) or never used; the least recently used is a miss's victim

The clock counts admits that had something to decide. A slot's `last_used` is the clock when a request last took or let go of it;
never-used slots have 0; ties go by index. Unload changes neither.

Owned by the pool, called under its lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from mstar.errors import CapacityError

ZERO_SLOT = 0

READY, IN_FLIGHT, FAILED = 0, 1, 2  # where a copy stands on a rank; the agreement is the elementwise maximum


@dataclass
class Slot:
    """One device slot. `weights_of` is the adapter generation whose weights lie here, also after its name was forgotten."""

    index: int
    weights_of: str | None = None
    holders: set[str] = field(default_factory=set)
    last_used: int = 0


@dataclass(frozen=True)
class Miss:
    """One adapter that a step names and no slot holds, with the rows that wait for it, in row order."""

    adapter: str
    rids: tuple[str, ...]


@dataclass(frozen=True)
class AdmitPicks:
    """What the locked section of an admit decided: holds already taken, misses in row order, and the slots they may use."""

    taken: tuple[tuple[str, int], ...]
    misses: tuple[Miss, ...]
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class Install:
    """A miss that got a slot: its adapter's weights go there now."""

    adapter: str
    slot: int
    rids: tuple[str, ...]
    evicted: str | None  # whose weights lay there


class SlotTable:
    """Slots 1 … `max_loras`: holders, residents, the LRU clock."""

    def __init__(self, max_loras: int) -> None:
        self._slots = tuple(Slot(index) for index in range(1, max_loras + 1))
        self._slot_of_adapter: dict[str, int] = {}
        self._slot_of_request: dict[str, int] = {}
        self._clock = 0
        self._digest: bytes | None = None

    # what is

    @property
    def clock(self) -> int:
        """Admits so far that took a slot or looked for one."""
        return self._clock

    @property
    def max_loras(self) -> int:
        """Slots that can be handed out."""
        return len(self._slots)

    def slots(self) -> tuple[Slot, ...]:
        """All slots that can be handed out, by index from 1. For reading."""
        return self._slots

    def slot_of_request(self, rid: str) -> int | None:
        """The slot that `rid` holds."""
        return self._slot_of_request.get(rid)

    def slot_of_adapter(self, adapter: str) -> int | None:
        """The slot in which a request naming `adapter` finds its weights."""
        return self._slot_of_adapter.get(adapter)

    def is_held(self, adapter: str) -> bool:
        """Whether a live request holds the slot of `adapter`."""
        index = self._slot_of_adapter.get(adapter)
        return index is not None and bool(self._slots[index - 1].holders)

    def num_held(self) -> int:
        """Slots with holders."""
        return sum(1 for slot in self._slots if slot.holders)

    # an admit

    def begin(self, rows: Sequence[tuple[str, str]]) -> AdmitPicks:
        """Take the slots of resident adapters, then list whom the misses may overwrite.

        `rows` are (rid, adapter) in row order, each without a slot. All of it is one decision on the table as it stands: whatever
        happens before `finish` changes none of it.
        """
        if not rows:
            return AdmitPicks((), (), ())
        self._clock += 1
        self._digest = None
        taken: list[tuple[str, int]] = []
        missing: dict[str, list[str]] = {}
        for rid, adapter in rows:
            index = self._slot_of_adapter.get(adapter)
            if index is None:
                missing.setdefault(adapter, []).append(rid)
            else:
                self._hold(rid, index)
                taken.append((rid, index))
        unheld = sorted((slot for slot in self._slots if not slot.holders), key=lambda slot: (slot.last_used, slot.index))
        misses = tuple(Miss(adapter, tuple(rids)) for adapter, rids in missing.items())
        return AdmitPicks(tuple(taken), misses, tuple(slot.index for slot in unheld))

    def finish(self, picks: AdmitPicks, failed: Collection[str]) -> tuple[Install, ...]:
        """Hand the candidates to the misses whose adapter is not in `failed`, in row order.

        Raises CapacityError where there are more misses than slots (a backstop: reservations prevent it); the holds that `begin`
        took are then given back, on every rank alike.
        """
        good = [miss for miss in picks.misses if miss.adapter not in failed]
        if len(good) > len(picks.candidates):
            self.give_back(rid for rid, _ in picks.taken)
            raise CapacityError(f"{len(good)} adapters need a slot, {len(picks.candidates)} of {len(self._slots)} slots are free")
        return tuple(self._install(miss, index) for miss, index in zip(good, picks.candidates, strict=False))

    def give_back(self, rids: Iterable[str]) -> None:
        """Undo holds that an admit took. What it installed stays, idle, as a cache; the clock does not turn back."""
        for rid in rids:
            self.release(rid)

    def release(self, rid: str) -> None:
        """End `rid`'s hold, if it has one."""
        index = self._slot_of_request.pop(rid, None)
        if index is None:
            return
        slot = self._slots[index - 1]
        slot.holders.discard(rid)
        slot.last_used = self._clock
        self._digest = None

    # names

    def forget(self, adapter: str) -> None:
        """Drop the entry name → slot. The slot keeps weights, place and clock until a miss overwrites it."""
        self._slot_of_adapter.pop(adapter, None)

    # proof

    def digest(self) -> bytes:
        """A hash of what admits decide from: per slot its holders, clock and generation. Kept until something changes."""
        if self._digest is None:
            state = hashlib.blake2b(digest_size=16)
            for line in self.lines():
                state.update(line.encode())
            self._digest = state.digest()
        return self._digest

    def lines(self) -> list[str]:
        """The same state as text, a line a slot: what is dumped where two ranks differ."""
        return [f"clock {self._clock}\n"] + [
            f"slot {slot.index} weights_of={slot.weights_of} last_used={slot.last_used} holders={sorted(slot.holders)}\n"
            for slot in self._slots
        ]

    def _hold(self, rid: str, index: int) -> None:
        slot = self._slots[index - 1]
        slot.holders.add(rid)
        slot.last_used = self._clock
        self._slot_of_request[rid] = index
        self._digest = None

    def _install(self, miss: Miss, index: int) -> Install:
        slot = self._slots[index - 1]
        evicted = slot.weights_of
        if evicted is not None and self._slot_of_adapter.get(evicted) == index:
            del self._slot_of_adapter[evicted]
        slot.weights_of = miss.adapter
        self._slot_of_adapter[miss.adapter] = index
        for rid in miss.rids:
            self._hold(rid, index)
        return Install(miss.adapter, index, miss.rids, evicted)


class Reservations:
    """The leader's promises of slots: they count slots and pin none.

    Invariant: held slots + adapters promised and not held never exceed the slots, so every promised row finds one at its admit.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._adapter_of: dict[str, str] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._adapter_of

    def __len__(self) -> int:
        return len(self._adapter_of)

    def promised(self) -> int:
        """Slots promised beyond those held."""
        return len({adapter for adapter in self._adapter_of.values() if not self._table.is_held(adapter)})

    def fits(self, adapter: str) -> bool:
        """Whether `adapter` has a slot to itself or shares one that is held or promised."""
        if self._table.is_held(adapter) or adapter in self._adapter_of.values():
            return True
        return self._table.num_held() + self.promised() < self._table.max_loras

    def promise(self, rid: str, adapter: str) -> int:
        """Count `rid`'s adapter; returns the slots newly counted (0 where it shares one)."""
        shares = self._table.is_held(adapter) or adapter in self._adapter_of.values()
        self._adapter_of[rid] = adapter
        return 0 if shares else 1

    def drop(self, rid: str) -> None:
        """Forget `rid`'s promise: it was admitted, or it will not be."""
        self._adapter_of.pop(rid, None)


class AdmitPlan:
    """One admit from point to point, so that a simulator may drive it step by step as the pool drives it blocking.

        begin ──► agree(statuses) ──► [wait for copies ──► agree(statuses)] ──► finish

    No misses: nothing to agree. A second agreement only where the first held IN_FLIGHT. No slot and no table entry changes before
    the last of them: no rank installs what another could not.
    """

    def __init__(self, table: SlotTable, rows: Sequence[tuple[str, str]]) -> None:
        self._table = table
        self.picks = table.begin(rows)
        self.failed: set[str] = set()

    @property
    def misses(self) -> tuple[Miss, ...]:
        """The adapters to agree on, in row order."""
        return self.picks.misses

    def statuses(self, state_of: Callable[[str], int]) -> list[int]:
        """Where each miss's copy stands on this rank, in row order."""
        return [state_of(miss.adapter) for miss in self.picks.misses]

    def agreed(self, result: Sequence[int]) -> tuple[str, ...]:
        """Take an agreement's outcome; returns the adapters whose copies every rank now waits for (empty: go on to finish)."""
        for miss, status in zip(self.picks.misses, result, strict=False):
            if status == FAILED:
                self.failed.add(miss.adapter)
        pending = any(status == IN_FLIGHT for status in result[: len(self.picks.misses)])
        good = tuple(miss.adapter for miss in self.picks.misses if miss.adapter not in self.failed)
        return good if pending else ()

    def finish(self) -> tuple[Install, ...]:
        """Hand out the slots. Raises CapacityError as SlotTable.finish does."""
        return self._table.finish(self.picks, self.failed)
