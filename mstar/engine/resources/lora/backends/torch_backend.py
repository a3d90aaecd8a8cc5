"""LoRA deltas in plain torch: two batched products a target, whatever the number of adapters. Runs on CPU and CUDA.

Tokens, grouped by slot, are cut into chunks of one size; a chunk has one slot, so shrink and expand are one `bmm` each over
chunks. The chunk size of a step trades padded rows against gathered copies of the weights.

    x [T, in] ──gather──► [C, c, in] ──A[slot of chunk]──► [C, c, P·r] ──scale──► B ──► [C, c, out] ──add──► y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mstar.engine.resources.lora.addressing import LoraAddressing, Segment
from mstar.engine.resources.lora.backends.base import LayerWeights, LoraBackend

_CHUNK_SIZES = (1, 4, 16, 64, 256)
_COPY_COST = 16  # gathering one chunk's weights costs about as much as so many rows of product


@dataclass(frozen=True, eq=False)
class TorchLoraPlan:
    """One step's chunks: `tokens [C, c]` (padded with a token of the chunk), `slots [C]`, and which of the C·c rows are real."""

    tokens: torch.Tensor
    slots: torch.Tensor
    real: torch.Tensor | None  # indices into C·c; None where nothing is padded
    targets: torch.Tensor  # [real rows]: the token each real row belongs to
    chunk_size: int
    max_rank: int


class TorchLoraBackend(LoraBackend):
    """The reference backend; also the fallback where no faster one is there."""

    def plan(self, addressing: LoraAddressing, segments: Sequence[Segment], ranks: Sequence[int]) -> TorchLoraPlan:
        """See LoraBackend.plan."""
        size = min(_CHUNK_SIZES, key=lambda c: sum(-(-s.length // c) * (c + _COPY_COST) for s in segments))
        positions: list[int] = []
        slots: list[int] = []
        real: list[int] = []
        for segment in segments:
            for first in range(0, segment.length, size):
                count = min(size, segment.length - first)
                begin = segment.start + first
                real.extend(range(len(positions), len(positions) + count))
                positions.extend(range(begin, begin + count))
                positions.extend([begin] * (size - count))
                slots.append(segment.slot)
        device = addressing.token_order.device
        tokens = addressing.token_order[torch.tensor(positions, device=device)]
        padded = len(real) < len(positions)
        keep = torch.tensor(real, device=device) if padded else None
        return TorchLoraPlan(
            tokens=tokens,
            slots=torch.tensor(slots, device=device),
            real=keep,
            targets=tokens if keep is None else tokens[keep],
            chunk_size=size,
            max_rank=max(ranks),
        )

    def add_delta(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, plan: TorchLoraPlan) -> torch.Tensor:
        """See LoraBackend.add_delta."""
        num_chunks, size, lora_rank = plan.slots.shape[0], plan.chunk_size, plan.max_rank
        num_parts, in_size = weights.lora_a.shape[1], weights.lora_a.shape[3]
        rows = x.index_select(0, plan.tokens).view(num_chunks, size, in_size)
        lora_a = weights.lora_a[:, :, :lora_rank].index_select(0, plan.slots).view(num_chunks, num_parts * lora_rank, in_size)
        shrunk = torch.bmm(rows, lora_a.transpose(1, 2)).view(num_chunks, size, num_parts, lora_rank)
        scaling = weights.scaling.index_select(0, plan.slots).to(shrunk.dtype)
        shrunk = shrunk * scaling[:, None, :, None]
        lora_b_t = weights.lora_b_t[:, :lora_rank].index_select(0, plan.slots)
        delta = self._expand(shrunk, lora_b_t, weights.out_sizes).view(num_chunks * size, -1)
        if plan.real is not None:
            delta = delta.index_select(0, plan.real)
        return y.index_add_(0, plan.targets, delta)

    @staticmethod
    def _expand(shrunk: torch.Tensor, lora_b_t: torch.Tensor, out_sizes: tuple[int, ...]) -> torch.Tensor:
        if len(out_sizes) == 1:
            return torch.bmm(shrunk[:, :, 0], lora_b_t)
        parts = []
        start = 0
        for part, out_size in enumerate(out_sizes):
            parts.append(torch.bmm(shrunk[:, :, part], lora_b_t[:, :, start : start + out_size]))
            start += out_size
        return torch.cat(parts, dim=-1)
