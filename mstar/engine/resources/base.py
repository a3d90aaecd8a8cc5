"""The protocol of every resource that a step needs: slots, KV pages, sampling state.

A request lives in a resource from `ingest_request` to `remove_request`. The rank that chooses batches asks and reserves; every
rank admits, plans and commits each step in the same order:

    leader only      ask ─► reserve            (all resources or none; `cancel` undoes a reserve)
    every rank       admit ─► plan ─► forward ─► commit
                       └─ rollback_admit where a later resource refuses the step, on every rank alike

Runs on the step thread, but for what a resource says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mstar.errors import RequestError
from mstar.types import Row, SamplingParams, Step


@dataclass(frozen=True)
class AdmitOutcome:
    """What a resource says of a row: it needs room here (`ASKS`), or it fails with `error`."""

    error: RequestError | None = None


ASKS = AdmitOutcome()

WaitReason = Literal["read", "slot", "pages"]


@dataclass(frozen=True)
class ResourceReqConfig:
    """What a request brings to every resource when it is ingested."""

    prompt: tuple[int, ...] = ()
    sampling: SamplingParams | None = None  # None: a request without tokens (a pin)
    adapter: str | None = None  # the generation's name inside ranks
    cache_key: bytes = b""  # the weights' digest: whose KV this request may share
    output: tuple[int, ...] = ()  # tokens already sent, where the request resumes


@dataclass
class StepContext:
    """One step as it goes through the resources. `failed` rows run no further; `plan_results` are opaque to the runner."""

    step: Step
    failed: dict[str, AdmitOutcome] = field(default_factory=dict)
    plan_results: dict[str, Any] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)
    views: dict[str, Any] = field(default_factory=dict)  # the step as each node's resource sees it

    def live_rows(self) -> Sequence[Row]:
        """The rows that no admit failed and that have tokens to run."""
        return [row for row in self.step.rows if row.num_tokens and row.rid not in self.failed]


Agree = Callable[[list[int]], list[int]]
AddUp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EngineResourceInfo:
    """Where a resource is built: this rank's place in the instance and what it computes with.

    `agree` is the load agreement (elementwise maximum over ranks), `add_up` the sum over ranks of what ranks bring to an install;
    `decides` is true on the rank that chooses batches.
    """

    device: torch.device
    dtype: torch.dtype
    tp_rank: int = 0
    tp_size: int = 1
    agree: Agree | None = None
    add_up: AddUp | None = None
    decides: bool = True


class Resource(ABC):
    """One resource on one rank."""

    name: str

    @property
    def force_double_buffer(self) -> bool:
        """Whether a step's layout is staged through a reused host buffer, so that the runner must fence before it is reused."""
        return False

    @abstractmethod
    def ingest_request(self, rid: str, overrides: ResourceReqConfig | None = None) -> None:
        """Open the request's state, once per request."""

    @abstractmethod
    def remove_request(self, rid: str) -> None:
        """End it and free what it held. Before its ingest: leave a mark that the ingest consumes."""

    def ask(self, rid: str, node_name: str, graph_walk: str) -> AdmitOutcome | None:
        """ASKS for a row that needs room here, an outcome that fails it, or None where nothing is needed."""
        return None

    def reserve(self, rid: str, node_name: str, graph_walk: str, published: Any = None) -> int | None:
        """Count what `rid` needs; the number of units newly counted, or None where it must wait."""
        return 0

    def cancel(self, rid: str) -> None:
        """Undo `reserve`."""
        return None

    def waits_for(self, rid: str) -> WaitReason:
        """Why the last `reserve` of `rid` returned None."""
        return "pages"

    @abstractmethod
    def admit(self, step: Any, ctx: StepContext) -> None:
        """Take what the step's rows need. Raises CapacityError (then nothing here is taken)."""

    @abstractmethod
    def rollback_admit(self, step: Any, ctx: StepContext) -> None:
        """Give back what this step's admit took."""

    def plan(self, step: Any, ctx: StepContext) -> Any:
        """What the step's kernels read; immutable and opaque to the runner."""
        return None

    def commit(self, step: Any, ctx: StepContext) -> None:
        """Record that the step was consumed."""
        return None

    def digest(self) -> bytes:
        """A hash of what this resource's admits decide from, the same on every rank."""
        return b""

    def lines(self) -> list[str]:
        """The same as text, for the dump where two ranks differ."""
        return []
