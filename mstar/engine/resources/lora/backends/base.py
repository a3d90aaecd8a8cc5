"""The seam for LoRA kernels: a backend runs against the addressing and the slots' weights, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mstar.engine.resources.lora.addressing import LoraAddressing, Segment


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One target at one layer, for all slots; `R` is the pool's rank cap, `P` the target's parts, sizes are this rank's shard.

    `lora_a [slots, P, R, in]`, `lora_b_t [slots, R, out]` (B transposed, parts side by side in `out`), `scaling [slots, P]` float32.
    Rows past a slot's own rank are zero as far as any slot's rank in use reaches. `scale [slots, out]` and `offset [slots, out]`
    (float32; offset None where there is never one) say what an adjusted slot makes of its rows of the base's output; for other slots
    they hold nothing.
    """

    lora_a: torch.Tensor
    lora_b_t: torch.Tensor
    scaling: torch.Tensor
    out_sizes: tuple[int, ...]
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """One row grouping in one step: the addressing, and on the host its non-empty slots with the rank in use in each.

    `adjusted` are the rows of slots that change the base's own output (DoRA, biases) and each one's slot, both `[n]` int64; None
    where no such slot is in the step.
    """

    addressing: LoraAddressing
    segments: tuple[Segment, ...]
    ranks: tuple[int, ...]
    adjusted: tuple[torch.Tensor, torch.Tensor] | None


class LoraBackend(ABC):
    """Adds low-rank deltas for a whole mixed batch."""

    @abstractmethod
    def plan(self, addressing: LoraAddressing, segments: Sequence[Segment], ranks: Sequence[int]) -> Any:
        """Prepare one step (for one row grouping). `segments` are the host's copy of the non-empty slots, at least one, and `ranks`
        the largest rank in use in each. The result is immutable and is handed to every `add_delta` of the step."""

    @abstractmethod
    def add_delta(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, plan: Any) -> torch.Tensor:
        """`y [T, out] += scaling · (x [T, in] @ A.T) @ B.T` for the rows that address an adapter; base rows are not touched."""

    def native_target(self, weights: LayerWeights) -> int | None:
        """Where the backend's kernel reads `weights` from, for another kernel that calls it; None: it has none to call."""
        return None

    def native_step(self, plan: Any) -> tuple[int, int, int] | None:
        """Addresses of the shrink `(target, plan, x, x_stride)`, the expand `(target, plan, column, columns, y, y_stride)` and the plan.

        Each thread of a parallel region calls the shrink; after a barrier, whoever has made columns of `y` calls the expand on them.
        """
        return None

    def adjust_rows(self, y: torch.Tensor, weights: LayerWeights, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """`y[rows[i]] = y[rows[i]] · scale[slots[i]] + offset[slots[i]]`, before `add_delta`; no other row is touched."""
        assert weights.scale is not None
        base = y.index_select(0, rows).float()
        base *= weights.scale.index_select(0, slots)
        if weights.offset is not None:
            base += weights.offset.index_select(0, slots)
        y.index_copy_(0, rows, base.to(y.dtype))

    def add_embedding_delta(self, y: torch.Tensor, ids: torch.Tensor, weights: LayerWeights, grouped: GroupedRows) -> torch.Tensor:
        """`y [T, out] += scaling · lora_a[:, ids].T @ lora_b.T`; `ids [T]` count this rank's columns of `lora_a`, -1 is another rank's."""
        for segment, lora_rank in zip(grouped.segments, grouped.ranks, strict=True):
            rows = grouped.addressing.token_order[segment.start : segment.start + segment.length]
            picked = ids.index_select(0, rows)
            shrunk = weights.lora_a[segment.slot, 0, :lora_rank].index_select(1, picked.clamp_min(0)).t().float()
            shrunk = (shrunk * weights.scaling[segment.slot, 0]).masked_fill((picked < 0)[:, None], 0)
            y.index_add_(0, rows, (shrunk @ weights.lora_b_t[segment.slot, :lora_rank].float()).to(y.dtype))
        return y
