"""What travels between the simulated front and ranks: the wire's messages as far as decisions read them.

`key` names a message for its delay; it stays the same where other messages are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar.engine.resources.base import ResourceReqConfig
from mstar.sim.tiny import Generation


@dataclass(frozen=True)
class Ingest:
    """Open a request, on every rank."""

    rid: str
    config: ResourceReqConfig

    @property
    def key(self) -> str:
        """See the module."""
        return f"ingest {self.rid}"


@dataclass(frozen=True)
class Load:
    """Serve a generation; `verify` reads it first. Every rank answers."""

    load_id: str
    generation: Generation
    verify: bool

    @property
    def key(self) -> str:
        """See the module."""
        return f"load {self.load_id} {self.generation.name}"


@dataclass(frozen=True)
class Unload:
    """Stop serving a name; `path` only tells the reader of a trace which generation was meant."""

    name: str
    path: str

    @property
    def key(self) -> str:
        """See the module."""
        return f"unload {self.path}"


@dataclass(frozen=True)
class Abort:
    """To the leader alone: the client went away, or a pin ends."""

    rid: str

    @property
    def key(self) -> str:
        """See the module."""
        return f"abort {self.rid}"


ToRank = Ingest | Load | Unload | Abort


@dataclass(frozen=True)
class LoadAnswer:
    """How a Load went on one rank; empty `refusal` is success."""

    load_id: str
    tp_rank: int
    refusal: str

    @property
    def key(self) -> str:
        """See the module."""
        return f"answer {self.load_id} {self.tp_rank}"


@dataclass(frozen=True)
class Ended:
    """From the leader: a request ended, having given so many tokens; `why` is "length" or the failure's code."""

    rid: str
    why: str
    num_tokens: int

    @property
    def key(self) -> str:
        """See the module."""
        return f"ended {self.rid}"


ToFront = LoadAnswer | Ended
