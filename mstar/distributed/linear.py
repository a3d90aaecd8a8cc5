"""The two parallel linears, with the seams for a base product that is not `F.linear` and for the LoRA delta.

    column-parallel   y_i = x W_i^T + b_i   (+= delta)             x whole, y this rank's columns; nothing to sum
    row-parallel      y   = sum_i( x_i W_i^T  (+= delta_i) ) + b   x this rank's columns, y whole after the all-reduce

The delta of a row-parallel linear goes in before the all-reduce, so the base's sum adds it up and no collective is added.
Its bias is inside rank 0's product, so it counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.distributed.comm import CommGroup
from mstar.distributed.linear_cpu import CpuLinear
from mstar.native.pages import HugePages

Product = Callable[[Tensor], Tensor]  # x [tokens, in of this rank] -> y [tokens, out of this rank]
Delta = Callable[[Tensor, Tensor], Tensor]  # (y, x): does y += delta(x) in place and returns y


@runtime_checkable
class NativeDelta(Protocol):
    """A delta that a CPU kernel may add without Python in between: the same numbers as calling it, or None where it cannot."""

    def native_target(self) -> int | None:
        """The address of what the kernel adds at this linear."""

    def native_step(self) -> tuple[int, int, int] | None:
        """Addresses of its two kernels, of which each thread runs a part, and of the step's plan; zeros where nothing is added."""


def linear_product(weight: Tensor, bias: Tensor | None = None, pages: HugePages | None = None) -> Product:
    """The base product with a plain `weight [out, in]` and `bias [out]`, both this rank's shard.

    On a CPU the weight is laid out anew (in `pages`) and the given one is no longer needed: a decode step is bound by reading the
    weights, and a blocked one streams two to three times as fast as a plain one. Our own kernel does it where it can be
    built, else oneDNN.
    """
    native = CpuLinear.create(weight, bias, pages or HugePages())
    if native is not None:
        return native
    if _packs(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_TOKENS)
        return partial(_packed_linear, weight=packed, bias=bias)
    return partial(F.linear, weight=weight, bias=bias)


_PACKED_FOR_TOKENS = 64  # a hint to oneDNN; the layout serves any number of tokens


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _packs(weight: Tensor) -> bool:
    """Whether this torch build can pack `weight`: the operators are internal, `torch.compile`'s own for a frozen CPU model."""
    if weight.device.type != "cpu" or weight.numel() == 0 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return weight.dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class ColumnParallelLinear:
    """`y = product(x)`, plus the delta where there is one. `x [tokens, in]`, `y [tokens, out of this rank]`."""

    def __init__(self, product: Product, delta: Delta | None = None) -> None:
        self._product = product
        self._delta = delta

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's columns of the output."""
        y = self._product(x)
        return y if self._delta is None else self._delta(y, x)


class RowParallelLinear:
    """`y = all_reduce(product(x) + delta(x))`. `x [tokens, in of this rank]`, `y [tokens, out]`, whole on every rank."""

    def __init__(self, product: Product, comm: CommGroup, delta: Delta | None = None) -> None:
        self._product = product
        self._delta = delta
        self._comm = comm

    def __call__(self, x: Tensor) -> Tensor:
        """The whole output, the same on every rank."""
        y = self._product(x)
        if self._delta is not None:
            y = self._delta(y, x)
        return self._comm.all_reduce(y)
