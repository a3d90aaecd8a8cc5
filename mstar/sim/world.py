"""Virtual time, ordered channels and the trace: what all parts of a simulated run share.

One heap of events by (time, drawn tie, number). A message is delayed by a draw, but two messages of one channel keep their order.
When the heap is empty, nothing can happen any more: whatever still waits then waits for ever.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from mstar.sim.draws import Draws
from mstar.sim.scenario import Scenario

MAX_EVENTS = 20_000


class Violation(Exception):
    """The run broke a promise. `kind` is which one, `detail` what was seen."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Keyed(Protocol):
    """A message with a name of its own."""

    @property
    def key(self) -> str:
        """Names it for the draws and the trace."""
        ...


Message = TypeVar("Message", bound=Keyed)


class World:
    """The clock and what is to come."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.settings = scenario.settings
        self.draws = Draws(scenario.seed)
        self.now = 0.0
        self.trace: list[tuple[float, str, str]] = []
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._num_pushed = 0

    def at(self, due: float, action: Callable[[], None], *key: object) -> None:
        """Do `action` at `due`; `key` breaks ties, so that things of one time come in a drawn order."""
        self._num_pushed += 1
        tie = self.draws.below(1 << 16, "tie", *key)
        heapq.heappush(self._heap, (max(due, self.now), tie, self._num_pushed, action))

    def after(self, scale_s: float, action: Callable[[], None], *key: object) -> None:
        """Do `action` after a drawn delay."""
        self.at(self.now + self.draws.delay(scale_s, *key), action, *key)

    def run(self) -> None:
        """Until nothing is left to happen. Raises Violation where it never ends."""
        num_events = 0
        while self._heap:
            due, _tie, _number, action = heapq.heappop(self._heap)
            self.now = due
            num_events += 1
            if num_events > MAX_EVENTS:
                raise Violation("livelock", f"{MAX_EVENTS} events and no end")
            action()

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        self.trace.append((self.now, who, what))


class Channel(Generic[Message]):
    """One ordered channel: messages arrive as they were sent, each late by a draw of its own."""

    def __init__(self, world: World, name: str, scale_s: float, receive: Callable[[Message], None]) -> None:
        self._world = world
        self._name = name
        self._scale_s = scale_s
        self._receive = receive
        self._queue: deque[Message] = deque()
        self._last_due = 0.0

    def send(self, message: Message) -> None:
        """Put `message` behind those under way."""
        world = self._world
        due = world.now + world.draws.delay(self._scale_s, self._name, message.key)
        self._last_due = max(self._last_due, due)
        self._queue.append(message)
        world.at(self._last_due, self._deliver, self._name, message.key)

    def _deliver(self) -> None:
        message = self._queue.popleft()
        self._world.note(self._name, message.key)
        self._receive(message)
