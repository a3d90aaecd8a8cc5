"""What one step adds: its rows grouped by slot, on the device, and what the backend planned for them.

Step thread. Made anew where rows or slots have changed since the step before; kept otherwise, since most steps are like their last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mstar.engine.resources.lora.addressing import HostAddressing, LoraAddressing, Segment, group_by_slot, rows_of_grouping
from mstar.engine.resources.lora.backends.base import GroupedRows, LoraBackend
from mstar.engine.resources.lora.spec import LOGITS_ROWS, LoraSpec
from mstar.engine.resources.lora.weights import SlotWeights


@dataclass
class StepRows:
    """A step's rows that compute something, in order: slot (0: base), tokens, and how many of those give logits."""

    slots: list[int]
    num_tokens: list[int]
    num_logits: list[int]


class StepPlan:
    """The plan of the current step. Empty maps where no row has an adapter; keys are `LoraTarget.row_grouping`."""

    def __init__(self, spec: LoraSpec, weights: SlotWeights, backend: LoraBackend, device: torch.device) -> None:
        self.addressings: dict[int, LoraAddressing] = {}
        self.kernel_plans: dict[int, Any] = {}
        self.grouped: dict[int, GroupedRows] = {}
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._device = device
        self._groupings = sorted({1} | {target.row_grouping for target in spec.targets})
        self._key: Hashable = None
        self._is_active = False
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._thread = threading.local()

    @property
    def is_active(self) -> bool:
        """Whether the current step has a row on an adapter, as this thread sees it."""
        return self._is_active and not getattr(self._thread, "num_left_out", 0)

    def make(self, key: Hashable, rows_of_step: Callable[[], StepRows]) -> LoraAddressing | None:
        """Plan the step that `key` stands for; None where no row has an adapter."""
        if key == self._key:
            self._is_active = bool(self.kernel_plans)
            return self.addressings.get(1)
        self._key = key
        self.addressings, self.kernel_plans, self.grouped = {}, {}, {}
        rows = rows_of_step()
        self._is_active = any(rows.slots)
        if not self._is_active:
            return None
        for grouping in self._groupings:
            self._group(grouping, rows)
        return self.addressings[1]

    def end(self) -> None:
        """The step is over: nothing is added until the next plan."""
        self._is_active = False

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Nothing is added on this thread meanwhile, whatever the step."""
        self._thread.num_left_out = getattr(self._thread, "num_left_out", 0) + 1
        try:
            yield
        finally:
            self._thread.num_left_out -= 1

    def _group(self, grouping: int, rows: StepRows) -> None:
        counts = rows.num_logits if grouping == LOGITS_ROWS else rows_of_grouping(rows.num_tokens, grouping)
        host = group_by_slot(rows.slots, counts, self._spec.max_loras + 1)
        addressing = self._to_device(grouping, host)
        self.addressings[grouping] = addressing
        segments = host.segments()
        if not segments:  # no row of an adapter gives logits in a step of chunks
            return
        ranks = tuple(self._weights.slot_rank(segment.slot) for segment in segments)
        self.kernel_plans[grouping] = self._backend.plan(addressing, segments, ranks)
        self.grouped[grouping] = GroupedRows(addressing, segments, ranks, self._adjusted(addressing, segments))

    def _adjusted(self, addressing: LoraAddressing, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows of slots that change the base's output, and each one's slot."""
        found = [segment for segment in segments if self._weights.adjusts(segment.slot)]
        if not found:
            return None
        rows = torch.cat([addressing.token_order[segment.start : segment.start + segment.length] for segment in found])
        slots = torch.tensor([segment.slot for segment in found for _ in range(segment.length)], device=self._device)
        return rows, slots

    def _to_device(self, grouping: int, host: HostAddressing) -> LoraAddressing:
        """Into buffers that are kept, so that their addresses stay."""
        count = len(host.token_order)
        buffers = self._buffers.get(grouping)
        if buffers is None or buffers[0].shape[0] < count:
            size = max(256, 1 << (count - 1).bit_length())
            buffers = (
                torch.empty(size, dtype=torch.int64, device=self._device),
                torch.empty(self._spec.max_loras + 2, dtype=torch.int64, device=self._device),
            )
            self._buffers[grouping] = buffers
        order = buffers[0][:count]
        order.copy_(torch.tensor(host.token_order, dtype=torch.int64))
        buffers[1].copy_(torch.tensor(host.slot_indptr, dtype=torch.int64))
        return LoraAddressing(order, buffers[1])
