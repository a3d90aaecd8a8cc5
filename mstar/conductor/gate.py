"""Keeps no more distinct adapters ingested at a time than the host tier holds.

Pure. Base requests and requests on an adapter that is counted already pass; further adapters wait, in order of arrival.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping


class HostTierGate:
    """Which requests may be ingested on the ranks now."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside: Counter[str] = Counter()
        self._adapter_of: dict[str, str] = {}
        self._waiting: OrderedDict[str, str] = OrderedDict()  # rid -> adapter, by arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Mapping[str, str]:
        """Waiting requests and the adapter each wants, by arrival."""
        return self._waiting

    def enter(self, rid: str, adapter: str | None) -> bool:
        """Whether `rid` may be ingested now; else it waits here."""
        if adapter is None:
            return True
        if adapter in self._inside or len(self._inside) < self._capacity:
            self._count(rid, adapter)
            return True
        self._waiting[rid] = adapter
        return False

    def leave(self, rid: str) -> list[str]:
        """`rid` ended, inside or waiting; returns the requests that may be ingested now, in order."""
        self._waiting.pop(rid, None)
        adapter = self._adapter_of.pop(rid, None)
        if adapter is None:
            return []
        self._inside[adapter] -= 1
        if self._inside[adapter]:
            return []
        del self._inside[adapter]
        entered = []
        for waiting, wanted in list(self._waiting.items()):
            if wanted in self._inside or len(self._inside) < self._capacity:
                del self._waiting[waiting]
                self._count(waiting, wanted)
                entered.append(waiting)
        return entered

    def _count(self, rid: str, adapter: str) -> None:
        self._inside[adapter] += 1
        self._adapter_of[rid] = adapter
