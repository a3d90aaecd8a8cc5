"""Step threads under strict hand-over: exactly one thread runs at any time, and only where the other one passed the baton.

The real `admit` blocks (in the agreement, for a copy). Each simulated rank runs its steps on a thread of its own, which parks at
those points, so the code under test is the code that serves. The simulator's thread decides who goes on, so a run is deterministic.

    simulator ── start(job) ──► rank: job … park() ──► simulator … ── resume() ──► rank: … end ──► simulator
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

_LOST_S = 5.0  # a job that runs on for so long without parking is in an endless loop


class Abandoned(BaseException):
    """Unwinds a parked job whose run is over. No code under test catches it (none catches BaseException)."""


class StepThread:
    """One reusable thread. `start`, `resume` and `abandon` belong to the simulator's thread, `park` to the job."""

    def __init__(self) -> None:
        self._go = _thread.allocate_lock()
        self._back = _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._job: Callable[[], None] | None = None
        self._abandon = False
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="mstar-sim-step", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a job is parked here."""
        return self._job is not None

    def start(self, job: Callable[[], None]) -> bool:
        """Run `job` until it parks (False) or ends (True; `error` has what it raised)."""
        self.error = None
        self._job = job
        return self.resume()

    def resume(self) -> bool:
        """Go on with a parked job, as `start` does."""
        self._go.release()
        self._back.acquire()
        return self._job is None

    def park(self) -> None:
        """Pass the baton to the simulator; returns when resumed. Raises Abandoned."""
        self._back.release()
        self._go.acquire()
        if self._abandon:
            raise Abandoned

    def abandon(self) -> bool:
        """Unwind a parked job; it may park again meanwhile. False where it never comes back: the thread is then lost."""
        self._abandon = True
        while self._job is not None:
            if self._go.locked():
                self._go.release()
            if not self._back.acquire(timeout=_LOST_S):
                return False
        self._abandon = False
        return True

    def _run(self) -> None:
        while True:
            self._go.acquire()
            job = self._job
            assert job is not None
            try:
                job()
            except Abandoned:
                pass
            except BaseException as error:  # the simulator judges it
                self.error = error
            self._job = None
            self._back.release()


_idle: list[StepThread] = []


def borrow() -> StepThread:
    """A thread without a job; starting one costs more than a whole small run."""
    return _idle.pop() if _idle else StepThread()


def give_back(thread: StepThread) -> None:
    """Return a borrowed thread, unwinding what is parked on it."""
    if thread.abandon():
        _idle.append(thread)
