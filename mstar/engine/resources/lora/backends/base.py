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
    Rows past a slot's own rank are zero as far as any slot's rank in use reaches.
    """

    lora_a: torch.Tensor
    lora_b_t: torch.Tensor
    scaling: torch.Tensor
    out_sizes: tuple[int, ...]


class LoraBackend(ABC):
    """Adds low-rank deltas for a whole mixed batch."""

    @abstractmethod
    def plan(self, addressing: LoraAddressing, segments: Sequence[Segment], ranks: Sequence[int]) -> Any:
        """Prepare one step (for one row grouping). `segments` are the host's copy of the non-empty slots, at least one, and `ranks`
        the largest rank in use in each. The result is immutable and is handed to every `add_delta` of the step."""

    @abstractmethod
    def add_delta(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, plan: Any) -> torch.Tensor:
        """`y [T, out] += scaling · (x [T, in] @ A.T) @ B.T` for the rows that address an adapter; base rows are not touched."""
