"""The host tier: adapters' weights in host memory, and the reader thread that fetches them.

    served names ──ingest──► wanted ──reader──► ready ──last remove──► idle, kept until the tier needs the place (LRU)
                                  └──────────► failed ─last remove──► forgotten, so that the next ingest reads again

Files are read on reader threads alone, never on the step thread and never under the lock. A read longer than its bound has failed:
its thread is left behind and a fresh one takes over. The tier's bounds (a number of copies, and bytes) delay only reads that nobody
waits for: one that an admit needs goes first, over the bounds if it must (by at most `max_loras`).

    bytes   known from the load's read, else from the first read. One copy over the bound alone is refused, with both numbers. A read
            waits while it does not fit beside copies in use; it does not wait for pins, which may never end: the bytes may go over the
            bound by what is pinned. A read of unknown size waits only for a full tier, and may go over the bound by itself.

What the tier holds follows from the ingests and removes of its own rank, so it may differ between ranks; no slot decision reads it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from mstar.adapters.catalogue import refuse
from mstar.engine.resources.lora.reader import Reader, ThreadReader
from mstar.engine.resources.lora.slots import FAILED, IN_FLIGHT, READY
from mstar.errors import AdapterError, RequestError

Copy = TypeVar("Copy")
Cancelled = Callable[[], bool]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a served name is read from, and the digest that its bytes must have."""

    path: str
    digest: str | None


@dataclass
class Entry(Generic[Copy]):
    """One adapter in the tier. Invariant: `copy` is set exactly in state READY and is never written after."""

    source: Source
    state: int = IN_FLIGHT
    copy: Copy | None = None
    error: RequestError | None = None
    size_bytes: int = 0  # of the copy
    holders: int = 0
    pins: int = 0  # those of the holders that may never end
    seconds: float = 0.0


@dataclass
class _Task(Generic[Copy]):
    """One read: for the tier (`name`), or to check a load (`future`)."""

    source: Source
    name: str | None = None
    future: Future[Copy] | None = None
    started: float | None = None
    abandoned: bool = False


class LoraAdapterStore(Generic[Copy]):
    """Host copies of the served adapters on one rank: at most `capacity` of them, and at most `max_bytes` by `size_of` (None: no bound).

    `read(path, digest, cancelled)` runs on a reader thread and returns a copy or raises; it is the seam that tests replace.
    `on_change(name)` is called, on the reader thread and outside the lock, whenever a copy came in or failed. `reader` runs the reads.
    """

    def __init__(
        self,
        read: Callable[[str, str | None, Cancelled], Copy],
        *,
        capacity: int,
        max_bytes: int | None = None,
        size_of: Callable[[Copy], int] = lambda copy: 0,
        read_timeout_s: float = 30.0,
        on_change: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        reader: Reader | None = None,
    ) -> None:
        self._read = read
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._read_timeout_s = read_timeout_s
        self._on_change = on_change or (lambda name: None)
        self._clock = clock
        self._lock = threading.Condition()
        self._reader = reader or ThreadReader()
        self._served: dict[str, Source] = {}
        self._entries: OrderedDict[str, Entry[Copy]] = OrderedDict()  # least recently used first
        self._queue: deque[_Task[Copy]] = deque()
        self._running: _Task[Copy] | None = None
        self._urgent: frozenset[str] = frozenset()  # read ahead of the queue and over the bound
        self._sizes: dict[str, int] = {}  # of served names whose copy was read before
        self._num_ready = 0
        self._ready_bytes = 0
        self._num_reads = 0
        self._num_failures = 0
        self._reader.start(self)

    # served names

    def serve(self, name: str, path: str, digest: str | None = None, size_bytes: int | None = None) -> None:
        """Make `name` servable from `path`; nothing is read until a request names it. Raises AdapterError where it is served.

        `size_bytes` is its copy's, where that is known.
        """
        with self._lock:
            if name in self._served:
                raise AdapterError(f"the adapter {name!r} is served already", code="adapter_already_loaded", status=409)
            self._served[name] = Source(path, digest)
            if size_bytes is not None:
                self._sizes[name] = size_bytes

    def serves(self, name: str) -> bool:
        """Whether requests may name it."""
        with self._lock:
            return name in self._served

    def forget(self, name: str) -> None:
        """Drop the name and its copy."""
        with self._lock:
            self._served.pop(name, None)
            self._sizes.pop(name, None)
            self._drop(name)

    def check(self, path: str, digest: str | None) -> Future[Copy]:
        """Read `path` once, on the reader thread, and keep nothing here: the future has the copy or what refused it."""
        future: Future[Copy] = Future()
        with self._lock:
            self._queue.append(_Task(Source(path, digest), future=future))
            self._reader.wake()
        return future

    # the tier

    def hold(self, name: str, *, pinned: bool = False) -> None:
        """A request naming `name` was ingested: keep its copy, start reading it if there is none. `pinned`: the request may never end."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                source = self._served.get(name)
                entry = Entry(source or Source("", None))
                self._entries[name] = entry
                if source is None:
                    entry.state = FAILED
                    entry.error = AdapterError(f"the adapter {name!r} is not served on this rank", code="adapter_not_served", status=404)
                elif self._running is None or self._running.source is not source:  # else that read is this one's
                    self._queue.append(_Task(source, name=name))
            entry.holders += 1
            entry.pins += pinned
            self._entries.move_to_end(name)
            self._trim()
            self._reader.wake()

    def drop(self, name: str, *, pinned: bool = False) -> None:
        """The request, held with the same `pinned`, was removed. A failed entry nobody holds is forgotten: the next request reads anew."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return
            entry.holders -= 1
            entry.pins -= pinned
            if entry.holders <= 0 and entry.state != READY:
                self._drop(name)
            self._trim()
            self._reader.wake()

    def state(self, name: str) -> int:
        """READY, IN_FLIGHT or FAILED on this rank. A name the tier does not hold has failed."""
        with self._lock:
            entry = self._entries.get(name)
            return FAILED if entry is None else entry.state

    def error(self, name: str) -> RequestError:
        """Why the read of `name` failed here, or a general word where another rank's did."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is not None and entry.error is not None:
            return entry.error
        return AdapterError(f"the adapter {name!r} could not be read on every rank", code="adapter_read_failed", status=500)

    def copy(self, name: str) -> Copy:
        """The copy of a READY name."""
        with self._lock:
            entry = self._entries[name]
            if entry.copy is None:
                raise AdapterError(f"no host copy of {name!r} is in", code="adapter_read_failed", status=500)
            self._entries.move_to_end(name)
            return entry.copy

    def urge(self, names: Collection[str]) -> None:
        """An admit needs these: read them next, whatever the tier's bound says."""
        with self._lock:
            wanted = frozenset(names)
            first = [task for task in self._queue if task.name in wanted]
            rest = [task for task in self._queue if task.name not in wanted]
            self._queue = deque(first + rest)
            self._urgent = wanted
            self._reader.wake()

    def wait(self, names: Collection[str], timeout_s: float, idle: Callable[[], None] | None = None) -> bool:
        """Block until none of `names` is in flight; False after `timeout_s`. `idle` runs now and then, outside the lock."""
        self.urge(names)
        deadline = self._clock() + timeout_s
        while True:
            self.expire()
            with self._lock:
                pending = [name for name in names if name in self._entries and self._entries[name].state == IN_FLIGHT]
                left = deadline - self._clock()
                if not pending or left <= 0:
                    return not pending
                self._reader.wait(min(left, 0.02 if idle else 0.5))
            if idle is not None:
                idle()

    # about

    def host_names(self) -> list[str]:
        """Names whose copy is in."""
        with self._lock:
            return [name for name, entry in self._entries.items() if entry.state == READY]

    def host_bytes(self) -> int:
        """What the copies that are in take."""
        with self._lock:
            return self._ready_bytes

    def counts(self) -> tuple[int, int]:
        """Reads finished and reads failed so far."""
        with self._lock:
            return self._num_reads, self._num_failures

    def expire(self) -> None:
        """Fail a read that ran past its bound and put a fresh thread in place. Called from the step thread, now and then."""
        with self._lock:
            task = self._running
            if task is None or task.started is None or self._clock() - task.started <= self._read_timeout_s:
                return
            task.abandoned = True
            self._running = None
            self._reader.replace()
        error = AdapterError(
            f"reading {task.source.path} took longer than {self._read_timeout_s:g} s", code="adapter_read_timeout", status=503
        )
        self._settle(task, None, error)

    def close(self) -> None:
        """Take no further reads; one under way is left behind (its thread is a daemon)."""
        self._reader.close()

    # the reader's side

    @property
    def lock(self) -> threading.Condition:
        """See ReadSource.lock."""
        return self._lock

    def take(self) -> _Task[Copy] | None:
        """See ReadSource.take."""
        task = self._next_task()
        if task is not None:
            task.started = self._clock()
            self._running = task
        return task

    def run(self, task: _Task[Copy]) -> None:
        """See ReadSource.run."""
        copy: Copy | None = None
        error: RequestError | None = None
        try:
            copy = self._fitting(self._read(task.source.path, task.source.digest, lambda: task.abandoned))
        except RequestError as refused:
            error = refused
        except Exception as crashed:  # a reader's bug or an OSError fails this read; the tier goes on
            log.exception("reading %s failed", task.source.path)
            error = AdapterError(f"reading the adapter failed: {crashed}", code="adapter_read_failed", status=500)
        with self._lock:
            if task.abandoned:
                return
            self._running = None
        self._settle(task, copy, error)

    def _fitting(self, copy: Copy) -> Copy:
        """The copy. Raises AdapterError where it alone is over the bound."""
        size = self._size_of(copy)
        if self._max_bytes is not None and size > self._max_bytes:
            raise refuse("host_tier", size=size, limit=self._max_bytes)
        return copy

    def _next_task(self) -> _Task[Copy] | None:
        """The first task that may run: the tier's bounds hold back reads that no admit waits for."""
        self._trim()
        is_first = True
        for position, task in enumerate(self._queue):
            if task.name is None or task.name in self._urgent or (is_first and self._has_place(task.name)):
                del self._queue[position]
                return task
            is_first = False  # small copies do not pass a large one that waits for its bytes
        return None

    def _has_place(self, name: str) -> bool:
        """Whether the copy of `name` fits now, or is kept out by pins alone."""
        if self._num_ready >= self._capacity:
            return False
        in_use = (entry for entry in self._entries.values() if entry.state == READY and entry.holders > entry.pins)
        return self._fits(self._size(name)) or next(in_use, None) is None

    def _fits(self, size_bytes: int) -> bool:
        return self._max_bytes is None or self._ready_bytes + size_bytes <= self._max_bytes

    def _size(self, name: str) -> int:
        """Bytes of its copy; 1 where they are not known yet, so that it fits into a tier that is not full."""
        return self._sizes.get(name, 1)

    def _settle(self, task: _Task[Copy], copy: Copy | None, error: RequestError | None) -> None:
        if task.future is not None:
            if error is not None:
                task.future.set_exception(error)
            elif copy is not None:
                task.future.set_result(copy)
            return
        name = task.name
        if name is None:
            return
        with self._lock:
            self._num_reads += 1
            self._num_failures += error is not None
            entry = self._entries.get(name)
            if entry is not None and entry.source is task.source and entry.state == IN_FLIGHT:
                entry.copy, entry.error = copy, error
                entry.state = READY if error is None else FAILED
                if copy is not None:
                    entry.size_bytes = self._sizes[name] = self._size_of(copy)
                    self._num_ready += 1
                    self._ready_bytes += entry.size_bytes
                entry.seconds = self._clock() - (task.started or self._clock())
                if entry.holders <= 0 and entry.state == FAILED:
                    self._drop(name)
            self._urgent = self._urgent - {name}
            self._trim()
            self._reader.wake()
        if error is not None:
            log.warning("adapter %s: %s", name, error)
        self._on_change(name)

    def _trim(self) -> None:
        """Let go of the least recently used copies that no request holds, until the bounds hold and every read to come has its place.

        Of every read, not the next alone: a copy kept meanwhile may be taken up by a later request and hold an earlier one's read back.
        Where requests need copies in several tiers, those would then wait for each other.
        """
        tasks = [*self._queue, *([] if self._running is None else [self._running])]
        coming = [task.name for task in tasks if task.name is not None]
        places, size = max(0, self._capacity - len(coming)), sum(map(self._size, coming))
        if self._num_ready <= places and self._fits(size):
            return
        for name, entry in list(self._entries.items()):
            if entry.state == READY and entry.holders <= 0:
                self._drop(name)
                if self._num_ready <= places and self._fits(size):
                    return

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None and entry.state == READY:
            self._num_ready -= 1
            self._ready_bytes -= entry.size_bytes
        self._queue = deque(task for task in self._queue if task.name != name)
