"""Copies of base weights in an adapter's file: PEFT writes them where head or embedding are adapted, or when it is asked to.

A copy that equals the served base's weight changes nothing and is ignored; any other would be applied by PEFT and is refused here.
Equal means the same bits, after the wider of the two was rounded to the other's dtype (an adapter saved in float32 from a bfloat16
base, or the reverse). Reader thread; numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mstar.adapters.base import BaseShapes
from mstar.adapters.base_files import BaseFiles
from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.facts import BaseCopy, Dtype, as_float32
from mstar.adapters.files import never

Cancelled = Callable[[], bool]


def check_base_copies(
    copies: Mapping[str, BaseCopy],
    base: BaseShapes,
    files: BaseFiles,
    share: tuple[int, int] = (0, 1),
    cancelled: Cancelled = never,
) -> None:
    """Compare `copies` with the base's files: of each the rows of share `i` of `n`, so that n ranks read each row once between them.

    Raises AdapterError `adapter_base_copy_mismatch` for the first row that differs, `adapter_base_unreadable`.
    """
    number, count = share
    for key, copy in copies.items():
        rows = copy.values.shape[0]
        layer, leaf = _module_key(copy.module)
        part = (rows * number // count, rows * (number + 1) // count)
        for first, values, dtype in files.chunks(base.weight_name(layer, leaf), part, cancelled):
            same = _rows_equal(copy.values[first : first + len(values)], copy.dtype, values, dtype)
            if not same.all():
                raise refuse("base_copy_values", key=shown(key), row=first + int(same.argmin()))


def _module_key(module: str) -> tuple[int, str]:
    """(layer, leaf) of `model.layers.3.self_attn.q_proj`; layer 0 for head and embedding."""
    name = module.removeprefix("model.")
    if not name.startswith("layers."):
        return 0, name
    _, layer, leaf = name.split(".", 2)
    return int(layer), leaf


def _rows_equal(copy: NDArray[Any], copy_dtype: Dtype, base: NDArray[Any], base_dtype: Dtype) -> NDArray[np.bool_]:
    """Per row, whether one is the other after rounding."""
    if copy.shape != base.shape:
        return np.zeros(len(copy), dtype=np.bool_)
    if copy_dtype == base_dtype:
        return _same_bits(copy, base)
    there = _same_bits(_rounded(as_float32(copy, copy_dtype), base_dtype), base)
    return there | _same_bits(copy, _rounded(as_float32(base, base_dtype), copy_dtype))


def _same_bits(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    kind = np.dtype(f"u{left.dtype.itemsize}")
    equal = left.view(kind) == right.view(kind)
    return np.asarray(equal.reshape(len(equal), -1).all(axis=1))


def _rounded(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """float32 to `dtype`, to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
