"""The host tier in a planned run: the real store with reads that take virtual time, and the conductor's gate before it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from mstar.engine.resources.lora.reader import Reader, ReadSource
from mstar.engine.resources.lora.store import LoraAdapterStore

Schedule = Callable[[float, Callable[[], None]], None]


class TimedReader(Reader):
    """One read at a time. Each of `times_s` is how long it keeps this reader, and when it is in on the slowest rank too.

    `schedule(delay_s, action)` is the driver's.
    """

    def __init__(self, times_s: Iterator[tuple[float, float]], schedule: Schedule) -> None:
        self._times_s = times_s
        self._schedule = schedule
        self._reads = False
        self.busy_s = 0.0

    def start(self, source: ReadSource) -> None:
        """See Reader.start."""
        self._source = source

    def wake(self) -> None:
        """See Reader.wake."""
        if self._reads:
            return
        task = self._source.take()
        if task is not None:
            self._reads = True
            takes_s, in_everywhere_s = next(self._times_s)
            self.busy_s += takes_s
            self._schedule(in_everywhere_s, lambda: self._source.run(task))
            self._schedule(takes_s, self._next)

    def wait(self, timeout_s: float) -> None:
        """Not called: the driver lets time pass."""
        raise AssertionError("a planned run never blocks")

    def replace(self) -> None:
        """Not called: reads have no bound here."""

    def close(self) -> None:
        """Nothing to stop."""

    def _next(self) -> None:
        self._reads = False
        with self._source.lock:
            self.wake()


def timed_store(capacity: int, reader: TimedReader, on_copy: Callable[[str], None]) -> LoraAdapterStore[object]:
    """The real host tier without weights."""
    copy = object()
    return LoraAdapterStore(
        lambda path, digest, cancelled: copy,
        capacity=capacity,
        read_timeout_s=float("inf"),
        on_change=on_copy,
        clock=lambda: 0.0,
        reader=reader,
    )


class Gate:
    """No more distinct adapters ingested than the host tier holds: `mstar.conductor.gate` as an index by adapter.

    A simulator may not import the conductor; a test holds the two against each other.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside: Counter[str] = Counter()
        self._waiting: OrderedDict[str, list[int]] = OrderedDict()  # adapter -> requests, adapters by the arrival of the first
        self.num_waiting = 0

    def enter(self, request: int, adapter: str) -> bool:
        """Whether the request may be ingested now; else it waits here."""
        if adapter in self._inside or len(self._inside) < self._capacity:
            self._inside[adapter] += 1
            return True
        self._waiting.setdefault(adapter, []).append(request)
        self.num_waiting += 1
        return False

    def leave(self, adapter: str) -> list[int]:
        """A request inside ended; returns those that may be ingested now, in order."""
        self._inside[adapter] -= 1
        if self._inside[adapter]:
            return []
        del self._inside[adapter]
        entered: list[int] = []
        while self._waiting and len(self._inside) < self._capacity:
            wanted, requests = self._waiting.popitem(last=False)
            self._inside[wanted] += len(requests)
            entered += requests
        self.num_waiting -= len(entered)
        return sorted(entered)
