"""The KV pages of one rank: two tensors and the rule that no stale number in them reaches anybody.

Owned by the step thread. One page more than the page table hands out is allocated: the *zero page*, never written. Padding of
a gathered batch points at it, and a page handed out anew is zeroed before its first write. So whatever attention gathers is
either the row's own or finite: a masked score is 0, and 0 x NaN would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mstar.native.pages import HugePages


class KvCache:
    """`k` and `v`: `[num_layers, num_pages + 1, block_size, num_kv_heads, head_dim]`, this rank's KV heads, all zero at first.

    Pages `[0, num_pages)` are for the page table; page `num_pages` is the zero page.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (num_layers, num_pages + 1, block_size, num_kv_heads, head_dim)
        self.k = _zeros(shape, dtype, self.device)
        self.v = _zeros(shape, dtype, self.device)

    @property
    def zero_page(self) -> int:
        """The page that padding points at: always zero."""
        return self.num_pages

    @staticmethod
    def page_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page on this rank, K and V over all layers."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    def zero(self, pages: Sequence[int]) -> None:
        """Overwrite `pages` with zeros in every layer."""
        if not pages:
            return
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        self.k.index_fill_(1, index, 0)
        self.v.index_fill_(1, index, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = HugePages().take(math.prod(shape) * dtype.itemsize)
    return pages.zero_().view(dtype).view(shape)
