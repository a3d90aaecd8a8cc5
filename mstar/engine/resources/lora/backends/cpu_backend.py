"""LoRA deltas on a CPU through `lora_cpu.cpp`: one call a target, each slot's weights read once, ranks as they are in the slots."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mstar.engine.resources.lora.addressing import LoraAddressing, Segment
from mstar.engine.resources.lora.backends.base import LayerWeights, LoraBackend
from mstar.native import address_of, load_kernel

MAX_PARTS = 8
_SOURCE = Path(__file__).with_name("lora_cpu.cpp")


class _Target(ctypes.Structure):
    _fields_ = (
        ("lora_a", ctypes.c_void_p),
        ("lora_b_t", ctypes.c_void_p),
        ("scaling", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("a_slot", "a_part", "a_row", "b_slot", "b_row")),
        ("parts", ctypes.c_int64),
        ("in_size", ctypes.c_int64),
        ("out_sizes", ctypes.c_int64 * MAX_PARTS),
        ("is_bf16", ctypes.c_int64),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
    )


@dataclass(frozen=True, eq=False)
class CpuLoraPlan:
    """One step, as the kernel reads it; the tensors own what `native` points to."""

    native: _Plan
    tensors: tuple[torch.Tensor, ...]


class CpuLoraBackend(LoraBackend):
    """Needs a C++ compiler at its first use; `create` says whether it is there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.mstar_lora_delta
        self._call.restype = None
        self._call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._parts = address_of(library.mstar_lora_shrink_part), address_of(library.mstar_lora_expand_columns)
        self._targets: dict[int, tuple[LayerWeights, _Target, int]] = {}

    @classmethod
    def create(cls, dtype: torch.dtype) -> CpuLoraBackend | None:
        """The backend, or None where it cannot be built or does not know `dtype`."""
        if dtype not in (torch.bfloat16, torch.float32):
            return None
        library = load_kernel(_SOURCE)
        return None if library is None else cls(library)

    def plan(self, addressing: LoraAddressing, segments: Sequence[Segment], ranks: Sequence[int]) -> CpuLoraPlan:
        """See LoraBackend.plan."""
        table = torch.tensor(
            [
                [segment.slot for segment in segments],
                [segment.start for segment in segments],
                [segment.length for segment in segments],
                list(ranks),
            ],
            dtype=torch.int64,
        )
        last = segments[-1]
        width = MAX_PARTS * max(ranks)
        scratch = torch.empty((last.start + last.length) * width, dtype=torch.float32)
        row = table.stride(0) * table.element_size()
        base = table.data_ptr()
        native = _Plan(
            addressing.token_order.data_ptr(),
            base,
            base + row,
            base + 2 * row,
            base + 3 * row,
            len(segments),
            torch.get_num_threads(),
            width,
            scratch.data_ptr(),
        )
        return CpuLoraPlan(native, (addressing.token_order, table, scratch))

    def add_delta(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, plan: CpuLoraPlan) -> torch.Tensor:
        """See LoraBackend.add_delta."""
        target = self._target(weights)
        if x.stride(1) != 1:
            x = x.contiguous()
        assert y.stride(1) == 1 and x.dtype == y.dtype == weights.lora_a.dtype
        self._call(target, ctypes.addressof(plan.native), x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
        return y

    def native_target(self, weights: LayerWeights) -> int:
        """See LoraBackend.native_target."""
        return self._target(weights)

    def native_step(self, plan: CpuLoraPlan) -> tuple[int, int, int]:
        """See LoraBackend.native_step."""
        return *self._parts, ctypes.addressof(plan.native)

    def _target(self, weights: LayerWeights) -> int:
        """The address of the kernel's view of `weights`, made once."""
        known = self._targets.get(id(weights))
        if known is not None:
            return known[2]
        _, parts, _, in_size = weights.lora_a.shape
        *a_strides, a_inner = weights.lora_a.stride()
        *b_strides, b_inner = weights.lora_b_t.stride()
        assert a_inner == b_inner == 1
        sizes: Any = (ctypes.c_int64 * MAX_PARTS)(*weights.out_sizes)
        native = _Target(
            weights.lora_a.data_ptr(),
            weights.lora_b_t.data_ptr(),
            weights.scaling.data_ptr(),
            *a_strides,
            *b_strides,
            parts,
            in_size,
            sizes,
            int(weights.lora_a.dtype == torch.bfloat16),
        )
        address = ctypes.addressof(native)
        self._targets[id(weights)] = (weights, native, address)  # `weights` is kept, so its id stays its own
        return address
