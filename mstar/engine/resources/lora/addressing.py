"""Which slot each token of a step addresses: what the pool plans and all a backend reads.

    rows:        r0: base, 1 token    r1: slot 2, 3 tokens    r2: slot 1, 1 token         (packed in segment order)
    token_order  [0, 4, 1, 2, 3]      tokens grouped by slot, slot 0 first
    slot_indptr  [0, 1, 2, 5]         slot s owns token_order[slot_indptr[s] : slot_indptr[s + 1]]

A token past every slot's range (a capture bucket's tail) addresses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mstar.engine.resources.lora.slots import ZERO_SLOT


@dataclass(frozen=True, eq=False)
class LoraAddressing:
    """Token indices grouped by slot: `token_order [T]` int64 and `slot_indptr [max_loras + 2]` int64.

    Both are views of one fixed device buffer (one per capture slot, or the reused eager one), sized to this step's tokens.
    """

    token_order: torch.Tensor
    slot_indptr: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """One slot's run of `token_order`, known on the host: tokens [start, start + length)."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class HostAddressing:
    """The same grouping as host integers, from which the device views are filled."""

    token_order: tuple[int, ...]
    slot_indptr: tuple[int, ...]

    def segments(self) -> tuple[Segment, ...]:
        """Non-empty runs of the slots that hold an adapter, by slot."""
        bounds = self.slot_indptr
        return tuple(
            Segment(slot, bounds[slot], bounds[slot + 1] - bounds[slot])
            for slot in range(ZERO_SLOT + 1, len(bounds) - 1)
            if bounds[slot + 1] > bounds[slot]
        )


def group_by_slot(row_slots: Sequence[int], row_tokens: Sequence[int], num_slots: int) -> HostAddressing:
    """Group packed tokens by their row's slot; stable within a slot. `num_slots` counts slot 0."""
    starts: list[int] = []
    position = 0
    for count in row_tokens:
        starts.append(position)
        position += count
    by_slot: list[list[int]] = [[] for _ in range(num_slots)]
    for slot, start, count in zip(row_slots, starts, row_tokens, strict=True):
        by_slot[slot].extend(range(start, start + count))
    order: list[int] = []
    indptr = [0]
    for tokens in by_slot:
        order.extend(tokens)
        indptr.append(len(order))
    return HostAddressing(tuple(order), tuple(indptr))


def rows_of_grouping(row_tokens: Sequence[int], grouping: int) -> list[int]:
    """How many rows each segment has at a target that sees one row per `grouping` tokens (0: one per segment)."""
    if grouping == 1:
        return list(row_tokens)
    if grouping == 0:
        return [1 if count else 0 for count in row_tokens]
    return [-(-count // grouping) for count in row_tokens]
