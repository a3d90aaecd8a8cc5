"""Which attention backend a rank takes."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.cpu_backend import CpuAttention
from mstar.engine.resources.attention.torch_backend import TorchAttention
from mstar.engine.resources.kv.cache import KvCache


def default_attention(cache: KvCache, kv_of_query: Sequence[int], scale: float, windows: Sequence[int | None]) -> AttentionBackend:
    """The C++ kernel on a CPU that has a compiler, else plain torch."""
    return CpuAttention.create(cache, kv_of_query, scale, windows) or TorchAttention(cache, kv_of_query, scale, windows)
