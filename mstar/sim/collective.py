"""The collectives that pools issue, among simulated ranks: the load agreement (MAX of a fixed-size vector) and DoRA's sums.

Real collectives pair whatever comes next on each rank. Here the pairs are checked: ranks that issue different ones, or one that
issues none while the others wait, are found at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

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
    """One rank's part in one collective."""

    rank: AgreeingRank
    seq: int
    node: str
    kind: Literal["agreement", "sum"]
    values: torch.Tensor

    def __str__(self) -> str:
        return f"rank {self.rank.tp_rank}, step {self.seq}, {self.node}: {self.kind} of {self.values.tolist()}"

    def pairs_with(self, other: _Call) -> bool:
        """Whether two ranks' calls are one collective."""
        return (self.seq, self.node, self.kind, self.values.shape) == (other.seq, other.node, other.kind, other.values.shape)


class Collective:
    """All ranks' collectives. `results[seq, node]` are the outcomes of each pool's agreements in a step."""

    def __init__(self, world: World, num_ranks: int, width: int) -> None:
        self._world = world
        self._num_ranks = num_ranks
        self._width = width
        self._calls: dict[int, _Call] = {}
        self._num_done = 0
        self._result = torch.zeros(0)
        self.results: dict[tuple[int, str], list[list[int]]] = defaultdict(list)

    def waiting(self) -> list[str]:
        """Who waits in a collective, for the report of a deadlock."""
        return [str(call) for call in self._calls.values()]

    def agree(self, rank: AgreeingRank, seq: int, node: str, statuses: list[int]) -> list[int]:
        """One rank's part in a load agreement, on its step thread; returns when every rank has called."""
        result: list[int] = self._call(_Call(rank, seq, node, "agreement", torch.tensor(statuses))).tolist()
        return result + [0] * (self._width - len(result))

    def add_up(self, rank: AgreeingRank, seq: int, node: str, values: torch.Tensor) -> torch.Tensor:
        """One rank's part in a sum over all."""
        return self._call(_Call(rank, seq, node, "sum", values)).clone()

    def _call(self, call: _Call) -> torch.Tensor:
        other = next(iter(self._calls.values()), None)
        if other is not None and not call.pairs_with(other):
            raise Violation("agreement", f"ranks issue different collectives: {other}; {call}")
        self._calls[call.rank.tp_rank] = call
        self._world.note(f"rank {call.rank.tp_rank}", f"step {call.seq}: {call.node} {call.kind} {call.values.tolist()}")
        if len(self._calls) == self._num_ranks:
            self._complete(call)
        call.rank.park("collective")
        return self._result

    def _complete(self, last: _Call) -> None:
        values = torch.stack([call.values for call in self._calls.values()])
        if last.kind == "agreement":
            self._result = values.max(dim=0).values
            self.results[last.seq, last.node].append(self._result.tolist())
        else:
            self._result = values.sum(dim=0)
        self._num_done += 1
        for call in self._calls.values():
            rank = call.rank
            self._world.after(
                self._world.settings.agree_delay_s,
                lambda rank=rank: rank.unpark("collective"),  # type: ignore[misc]
                "collective", last.seq, last.node, self._num_done, rank.tp_rank,
            )  # fmt: skip
        self._calls = {}
