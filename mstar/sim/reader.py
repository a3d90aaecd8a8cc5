"""A host tier's reader that reads in virtual time: late, failing on one rank alone, or longer than its bound.

Picks up a read a drawn moment after it was queued, ends it a drawn time later; what it gives is drawn for that rank and that read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from mstar.engine.resources.lora.reader import Reader, ReadSource
from mstar.sim.world import World


class WaitingRank(Protocol):
    """The rank whose step thread may wait for a copy."""

    def park(self, why: str) -> None:
        """Block its step thread."""
        ...

    def unpark(self, why: str) -> None:
        """Go on, if it still waits for `why`."""
        ...

    def waits_for_copy(self, node: str) -> None:
        """Its step thread is about to wait for a copy in a node's pool."""
        ...

    def tick(self) -> None:
        """What the step thread does now and then: end a read that ran past its bound."""
        ...


class SteppedReader(Reader):
    """Runs one store's reads by events. `key` names the rank and the node."""

    def __init__(self, world: World, rank: WaitingRank, key: str, node: str) -> None:
        self._world = world
        self._rank = rank
        self._key = key
        self._node = node
        self._running: Any = None
        self._picks_up = False
        self._waits = 0
        self._num_reads: Counter[str] = Counter()
        self.fails: Callable[[], bool] = lambda: False  # how the read under way ends

    def start(self, source: ReadSource) -> None:
        """See Reader.start."""
        self._source = source

    def wake(self) -> None:
        """See Reader.wake."""
        if self._waits:
            number = self._waits
            self._world.at(self._world.now, lambda: self._unpark(number), self._key, "wake")
        self._look()

    def wait(self, timeout_s: float) -> None:
        """See Reader.wait; runs on the rank's step thread."""
        self._waits += 1
        number = self._waits
        self._world.at(self._world.now + timeout_s, lambda: self._unpark(number), self._key, "timeout")
        self._rank.waits_for_copy(self._node)
        self._source.lock.release()
        try:
            self._rank.park(f"copy {self._key}")
        finally:
            self._source.lock.acquire()

    def replace(self) -> None:
        """See Reader.replace."""
        self._running = None
        self._look()

    def close(self) -> None:
        """See Reader.close."""

    def _unpark(self, number: int) -> None:
        if number == self._waits:  # an older wait is over
            self._rank.unpark(f"copy {self._key}")

    def _look(self) -> None:
        if self._running is None and not self._picks_up:
            self._picks_up = True
            self._world.after(self._world.settings.turn_s, self._pick_up, self._key, "pick up", self._num_reads.total())

    def _pick_up(self) -> None:
        self._picks_up = False
        if self._running is not None:
            return
        with self._source.lock:
            task = self._source.take()
        if task is None:
            return
        self._running = task
        world, settings, path = self._world, self._world.settings, task.source.path
        self._num_reads[path] += 1
        key = ("read", self._key, path, self._num_reads[path])
        takes = world.draws.delay(settings.read_s, *key)
        if world.draws.chance(settings.slow_reads, *key, "slow"):
            takes = settings.read_timeout_s * (1.01 + world.draws.unit(*key, "how slow"))
        hangs = takes > settings.read_timeout_s and world.draws.chance(0.5, *key, "hangs")
        fails = world.draws.chance(settings.read_failures, *key, "fails")
        world.note(self._key, f"reads {path} for {'ever' if hangs else f'{takes:.3f} s'}{' in vain' if fails else ''}")
        if not hangs:
            world.at(world.now + takes, lambda: self._end(task, fails=fails), *key)
        if takes > settings.read_timeout_s:
            world.at(world.now + settings.read_timeout_s * 1.001, self._rank.tick, *key, "bound")

    def _end(self, task: Any, *, fails: bool) -> None:
        self.fails = lambda: fails
        self._source.run(task)
        if self._running is task:
            self._running = None
        self._look()
