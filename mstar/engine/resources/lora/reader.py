"""Who runs a host tier's reads: one thread of its own by default; the simulator steps them instead.

The store hands out one read at a time (`take`) and is told how it went (`run`). The seam is only *when* that happens and how a thread
that needs a copy waits; which read comes next and what its result means are the store's.

    store:  queue a read ─► reader.wake()          reader:  take() ─► run(task) ─► take() ─► …
    step thread in `store.wait`: reader.wait(timeout) until wake() or the timeout
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Protocol

from mstar.threads import give_way


class ReadSource(Protocol):
    """What a reader sees of its store. `take` is called with the lock held, `run` without."""

    @property
    def lock(self) -> threading.Condition:
        """The store's lock."""
        ...

    def take(self) -> Any | None:
        """The next read that may run, now counted as running; None where there is none."""
        ...

    def run(self, task: Any) -> None:
        """Read what `take` gave, then settle it. Does not raise."""
        ...


class Reader(ABC):
    """Runs the reads of one store, one at a time. `wake`, `wait` and `replace` are called with the store's lock held."""

    @abstractmethod
    def start(self, source: ReadSource) -> None:
        """Begin; called once, by the store's constructor."""

    @abstractmethod
    def wake(self) -> None:
        """Something changed: a read may be there to take, a wait may be over."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Block the calling thread until `wake` or for `timeout_s`; the lock is released meanwhile."""

    @abstractmethod
    def replace(self) -> None:
        """The running read was given up: go on with the others at once, whatever becomes of it."""

    @abstractmethod
    def close(self) -> None:
        """Take no further reads. Called without the lock."""


class ThreadReader(Reader):
    """A daemon thread; a fresh one where a read was given up. An abandoned thread ends when its read does."""

    def __init__(self) -> None:
        self._closed = False

    def start(self, source: ReadSource) -> None:
        """See Reader.start."""
        self._source = source
        self.replace()

    def wake(self) -> None:
        """See Reader.wake."""
        self._source.lock.notify_all()

    def wait(self, timeout_s: float) -> None:
        """See Reader.wait."""
        self._source.lock.wait(timeout_s)

    def replace(self) -> None:
        """See Reader.replace."""
        self._thread = threading.Thread(target=self._run, name="mstar-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See Reader.close; a read under way is left behind."""
        with self._source.lock:
            self._closed = True
            self._source.lock.notify_all()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        give_way()  # to steps
        while True:
            with self._source.lock:
                task = None
                while task is None:
                    if self._closed or self._thread is not threading.current_thread():
                        return
                    task = self._source.take()
                    if task is None:
                        self._source.lock.wait()
            self._source.run(task)
