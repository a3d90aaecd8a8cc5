"""The smallest adapters that can be told apart: one number each, its *mark*, which a forward reads back from the slot.

One target of one input and one output; `scaling * B @ A` is the mark. Half of the adapters have rank 2, the second row adding a
quarter, so a slot that keeps a row of its last occupant gives a number that is nobody's mark. Some have DoRA, scaled by 1 exactly where
the squares of all ranks were added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mstar.engine.resources.lora.addressing import LoraAddressing, Segment
from mstar.engine.resources.lora.backends.base import LayerWeights, LoraBackend
from mstar.engine.resources.lora.host_copy import DoraCopy, HostCopy, TargetCopy
from mstar.engine.resources.lora.spec import LoraPart, LoraSpec, LoraTarget
from mstar.errors import AdapterError

TARGET = "proj"
MAX_RANK = 2


@dataclass(frozen=True)
class Generation:
    """One adapter as ranks know it. `path` is its identity in every setting; `name` may come back under another path.

    `nodes` are the pools that it has something for; `mark` its weights, equal for two paths with equal weights.
    """

    name: str
    path: str
    mark: int
    nodes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """What its weights hash to."""
        return f"digest-{self.mark}"

    @property
    def cache_key(self) -> bytes:
        """Whose KV it may share."""
        return self.digest.encode()


def tiny_spec(
    node: str, num_ranks: int, *, max_loras: int, max_cpu_loras: int, read_timeout_s: float, hint_wait_s: float, copy_wait_s: float
) -> LoraSpec:
    """A pool of one node for adapters with marks."""
    whole = ((0, 1),) * num_ranks
    return LoraSpec(
        targets=(LoraTarget(TARGET, (LoraPart(TARGET, 1, 1, whole, whole),), row_parallel=True),),
        num_layers=1,
        max_loras=max_loras,
        max_lora_rank=MAX_RANK,
        max_cpu_loras=max_cpu_loras,
        node_name=node,
        read_timeout_s=read_timeout_s,
        hint_wait_s=hint_wait_s,
        copy_wait_s=copy_wait_s,
    )


@lru_cache(maxsize=4096)
def tiny_copy(mark: int, num_ranks: int) -> HostCopy:
    """One rank's host copy of a mark; 0 has nothing for the pool. The same object for all ranks: nobody may write to it."""
    if not mark:
        return HostCopy("digest-0", {}, 0, 0)
    lora_rank = 1 + mark % 2
    rows = [mark - 0.25, 0.25][:lora_rank] if lora_rank == 2 else [float(mark)]
    squares = torch.full((1, 1), float(mark), dtype=torch.float64)
    dora = DoraCopy((squares * num_ranks).sqrt().float(), squares) if mark // 2 % 3 == 0 else None
    target = TargetCopy(
        lora_a=torch.ones(1, 1, lora_rank, 1),
        lora_b_t=torch.tensor(rows).view(1, lora_rank, 1),
        scaling=torch.ones(1, 1),
        ranks=(lora_rank,),
        dora=dora,
    )
    return HostCopy(f"digest-{mark}", {TARGET: target}, lora_rank, 4 * lora_rank, adds_squares=dora is not None)


def checked_copy(generation: Generation, node: str, digest: str | None, num_ranks: int) -> HostCopy:
    """What a read of `generation` gives one node's pool. Raises AdapterError where `digest` is another's."""
    if digest not in (None, generation.digest):
        raise AdapterError(f"{generation.path} has digest {generation.digest}, expected {digest}", code="adapter_digest_mismatch")
    return tiny_copy(generation.mark if node in generation.nodes else 0, num_ranks)


class MarkBackend(LoraBackend):
    """Adds each token's mark in plain Python, from the addressing and the slots' weights alone, as kernels do."""

    def plan(self, addressing: LoraAddressing, segments: Sequence[Segment], ranks: Sequence[int]) -> Any:
        """See LoraBackend.plan. All slots are read up to the largest rank, as kernels may."""
        return addressing.token_order.tolist(), addressing.slot_indptr.tolist(), max(ranks)

    def add_delta(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, plan: Any) -> torch.Tensor:
        """See LoraBackend.add_delta; `x` is all ones."""
        order, indptr, max_rank = plan
        lora_a, lora_b_t, scaling = weights.lora_a.tolist(), weights.lora_b_t.tolist(), weights.scaling.tolist()
        added = y[:, 0].tolist()
        for slot in range(1, len(indptr) - 1):
            for token in order[indptr[slot] : indptr[slot + 1]]:
                added[token] += scaling[slot][0] * sum(lora_a[slot][0][r][0] * lora_b_t[slot][r][0] for r in range(max_rank))
        y[:, 0] = torch.tensor(added)
        return y
