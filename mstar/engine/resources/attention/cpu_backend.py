"""Paged attention on a CPU through `attention_cpu.cpp`: no gathering, no padding, decode rows and prefill chunks in one call.

Fresh pages need no zeroing here: only positions that their row has written are ever read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.rows import KvRows
from mstar.native import load_kernel


class _Attention(ctypes.Structure):
    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("first_query", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("pages", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class _Heads(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


@cache
def _library() -> ctypes.CDLL | None:
    library = load_kernel(Path(__file__).with_name("attention_cpu.cpp"))
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.mstar_attention.argtypes = (pointer, pointer, size, pointer, pointer, pointer, pointer, size)
        library.mstar_attention.restype = None
    return library


class CpuAttention(AttentionBackend):
    """Attention over `cache` (bfloat16 or float32) with this rank's heads; the arguments are TorchAttention's. Made by `create`."""

    def __init__(
        self, library: ctypes.CDLL, cache: KvCache, kv_of_query: Sequence[int], scale: float, windows: Sequence[int | None]
    ) -> None:
        assert all(before <= after for before, after in pairwise(kv_of_query))
        self.cache = cache
        self.kernel = library.mstar_attention
        self.num_heads = len(kv_of_query)
        first_query = [list(kv_of_query).index(head) for head in range(cache.num_kv_heads)]
        self._first_query = torch.tensor([*first_query, len(kv_of_query)])
        self._windows = torch.tensor([window or 0 for window in windows])
        self.native = _Attention(
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            self._first_query.data_ptr(),
            self._windows.data_ptr(),
            cache.num_pages + 1,
            cache.block_size,
            cache.num_kv_heads,
            cache.head_dim,
            int(cache.dtype == torch.bfloat16),
            scale,
        )
        self.rows = _Rows()
        self._table = torch.empty(0, dtype=torch.int64)
        self._heads = (_Heads(), _Heads(), _Heads())

    @classmethod
    def create(cls, cache: KvCache, kv_of_query: Sequence[int], scale: float, windows: Sequence[int | None]) -> CpuAttention | None:
        """The backend, or None where the kernel cannot be built or does not know the cache's dtype or device."""
        if cache.device.type != "cpu" or cache.dtype not in (torch.bfloat16, torch.float32):
            return None
        library = _library()
        return None if library is None else cls(library, cache, kv_of_query, scale, windows)

    def plan(self, rows: KvRows) -> None:
        """See the seam."""
        count, width = len(rows.starts), max(map(len, rows.block_tables), default=0)
        table = [page for pages in rows.block_tables for page in (*pages, *([0] * (width - len(pages))))]
        self._table = torch.tensor([*table, *rows.starts, *rows.num_tokens], dtype=torch.int64)
        starts = self._table.data_ptr() + 8 * count * width
        self.rows = _Rows(self._table.data_ptr(), starts, starts + 8 * count, count, width)

    def forward(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the seam."""
        out = q.new_empty((q.shape[0], self.num_heads * self.cache.head_dim))
        for heads, given in zip(self._heads, (q, k, v), strict=True):
            assert given.stride(2) == 1 and given.dtype == self.cache.dtype
            heads.data, heads.token_stride, heads.head_stride = given.data_ptr(), given.stride(0), given.stride(1)
        addresses = map(ctypes.addressof, (self.native, self.rows))
        self.kernel(*addresses, layer_idx, *map(ctypes.addressof, self._heads), out.data_ptr(), torch.get_num_threads())
        return out
