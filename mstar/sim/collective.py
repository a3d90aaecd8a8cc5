"""The load agreement among simulated ranks: a MAX all-reduce of a fixed-size vector, in the order in which ranks issue it.

Real collectives pair whatever comes next on each rank. Here the pairs are checked: ranks that issue different agreements, or one
that issues none while the others wait, are found at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from mstar.sim.world import Violation, World


class AgreeingRank(Protocol):
    """A rank that takes part."""

    tp_rank: int

    def park(self, why: str) -> None:
        """Block its step thread."""
        ...

    def unpark(self, why: str) -> None:
        """Go on, if it still waits for `why`."""
        ...


@dataclass(frozen=True)
class _Call:
    seq: int
    node: str
    statuses: tuple[int, ...]
    rank: AgreeingRank


class Collective:
    """All ranks' agreements. `results[seq, node]` are the outcomes of each pool's agreements in a step."""

    def __init__(self, world: World, num_ranks: int, width: int) -> None:
        self._world = world
        self._num_ranks = num_ranks
        self._width = width
        self._calls: dict[int, _Call] = {}
        self._result: list[int] = []
        self.results: dict[tuple[int, str], list[list[int]]] = defaultdict(list)

    def waiting(self) -> list[str]:
        """Who waits in an agreement, for the report of a deadlock."""
        return [f"rank {call.rank.tp_rank} in the agreement of step {call.seq} ({call.node})" for call in self._calls.values()]

    def agree(self, rank: AgreeingRank, seq: int, node: str, statuses: list[int]) -> list[int]:
        """One rank's call, on its step thread; returns when every rank has called."""
        call = _Call(seq, node, tuple(statuses), rank)
        other = next(iter(self._calls.values()), None)
        if other is not None and (other.seq, other.node, len(other.statuses)) != (seq, node, len(statuses)):
            raise Violation("agreement", f"rank {other.rank.tp_rank} agrees on {other}, rank {rank.tp_rank} on {call}")
        self._calls[rank.tp_rank] = call
        self._world.note(f"rank {rank.tp_rank}", f"step {seq}: {node} agrees {statuses}")
        if len(self._calls) == self._num_ranks:
            self._complete(seq, node)
        rank.park("agree")
        return [*self._result, *([0] * (self._width - len(self._result)))]

    def _complete(self, seq: int, node: str) -> None:
        self._result = [max(column) for column in zip(*(call.statuses for call in self._calls.values()), strict=True)]
        self.results[seq, node].append(self._result)
        number = len(self.results[seq, node])
        for call in self._calls.values():
            rank = call.rank
            self._world.after(
                self._world.settings.agree_delay_s,
                lambda rank=rank: rank.unpark("agree"),  # type: ignore[misc]
                "agreed", seq, node, number, rank.tp_rank,
            )  # fmt: skip
        self._calls = {}
