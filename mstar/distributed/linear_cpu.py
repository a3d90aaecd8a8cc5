"""The base product on a CPU through `linear_cpu.cpp`: one blocked copy of the weight for decode and prefill alike."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mstar.native import load_kernel
from mstar.native.pages import HugePages


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load_kernel(Path(__file__).with_name("linear_cpu.cpp"))
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.mstar_linear_bytes.argtypes, library.mstar_linear_bytes.restype = (size, size, size), size
        library.mstar_linear_pack.argtypes, library.mstar_linear_pack.restype = (pointer, size, size, size, pointer), None
        library.mstar_linear_rows.argtypes, library.mstar_linear_rows.restype = (pointer, pointer, size, pointer), None
        library.mstar_linear.argtypes, library.mstar_linear.restype = (pointer, pointer, size, size, pointer, size, size), None
    return library


class CpuLinear:
    """`y [T, out] = x [T, in] W^T + b` in bfloat16 or float32, sums in float32, each in the order of the input.

    Holds its own copy of the weight; the given one is no longer needed. Made by `create`.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, pages: HugePages) -> None:
        out_size, in_size = weight.shape
        is_bf16 = int(weight.dtype == torch.bfloat16)
        plain = weight.contiguous()
        self._blocked = pages.take(library.mstar_linear_bytes(in_size, out_size, is_bf16))
        library.mstar_linear_pack(plain.data_ptr(), in_size, out_size, is_bf16, self._blocked.data_ptr())
        self._bias = None if bias is None else bias.contiguous()
        self._dtype = weight.dtype
        self._library = library
        self._whole, self.part = library.mstar_linear, library.mstar_linear_part
        self.in_size, self.out_size = in_size, out_size
        self.native = _Linear(self._blocked.data_ptr(), None if self._bias is None else self._bias.data_ptr(), in_size, out_size, is_bf16)
        self._address = ctypes.addressof(self.native)

    @classmethod
    def create(cls, weight: Tensor, bias: Tensor | None, pages: HugePages) -> CpuLinear | None:
        """The product, or None where the kernel cannot be built or does not know `weight`'s dtype or device."""
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            return None
        library = _library()
        return None if library is None else cls(library, weight, bias, pages)

    def __call__(self, x: Tensor) -> Tensor:
        """A new `[T, out]`."""
        assert x.dtype == self._dtype and x.shape[1] == self.in_size
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty((x.shape[0], self.out_size))
        threads = torch.get_num_threads()
        self._whole(self._address, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), self.out_size, threads)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the plain weight, `[n, in]`; `indices [n]` int64 in `[0, out)`. What a tied embedding looks up."""
        indices = indices.contiguous()
        picked = torch.empty((indices.shape[0], self.in_size), dtype=self._dtype)
        self._library.mstar_linear_rows(self._address, indices.data_ptr(), indices.shape[0], picked.data_ptr())
        return picked
