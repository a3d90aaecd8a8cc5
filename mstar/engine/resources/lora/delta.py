"""What a layer calls to add its target's delta over the current step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mstar.engine.resources.lora.pool import LoraAdapterPool


class LoraLayerDelta:
    """`y += delta(x)` for one target linear at one stack layer, over the current step.

    A layer computes its base output, then calls this before anything consumes `y`: for a row-parallel linear, before its
    all-reduce. `x [T, in]` and `y [T, out]` are this rank's shard. A step with no adapter row returns `y` untouched. The weight
    views are resolved once, here; a call reads only the step's addressing.
    """

    def __init__(self, pool: LoraAdapterPool, target: str, layer_idx: int) -> None:
        self._pool = pool
        self._weights = pool.layer_weights(target, layer_idx)
        self._grouping = pool.spec.target(target).row_grouping
        self._backend = pool.backend

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the delta in place and return `y`. Where an adapter of the step changes the base's own output too, that comes first."""
        plan = self._pool.kernel_plan(self._grouping)
        if plan is None:
            return y
        adjusted = self._pool.grouped_rows(self._grouping).adjusted
        if adjusted is not None:
            self._backend.adjust_rows(y, self._weights, *adjusted)
        return self._backend.add_delta(y, x, self._weights, plan)

    def native_target(self) -> int | None:
        """See NativeDelta; None where the backend has no kernel of its own, or rows are grouped."""
        return self._backend.native_target(self._weights) if self._grouping == 1 else None

    def native_step(self) -> tuple[int, int, int] | None:
        """See NativeDelta; None in a step with an adapter that changes the base's own output."""
        plan = self._pool.kernel_plan(self._grouping)
        if plan is None:
            return 0, 0, 0
        return self._backend.native_step(plan) if self._pool.grouped_rows(self._grouping).adjusted is None else None


class LoraEmbeddingDelta(LoraLayerDelta):
    """The same for an embedding: `x [T]` int64 are token ids counted from this rank's first, -1 where the token is another rank's.

    `y [T, hidden]` is what this rank's shard gives, zero for those tokens; the all-reduce that follows makes both sums whole.
    """

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the delta in place and return `y`."""
        if self._pool.kernel_plan(self._grouping) is None:
            return y
        grouped = self._pool.grouped_rows(self._grouping)
        if grouped.adjusted is not None:
            self._backend.adjust_rows(y, self._weights, *grouped.adjusted)
        return self._backend.add_embedding_delta(y, x, self._weights, grouped)
