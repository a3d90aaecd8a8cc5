"""Paged attention with plain torch operators: one padded gather and one SDPA call per group of like pieces, on any device.

Owned by the step thread. Per step, `plan` builds index tensors; per layer and group:

    pages [B, P] --gather--> k, v [B, keys, hkv, d]      keys = P * block_size, table padding reads the zero page
    q [T, hq, d] --gather--> [B, hkv, queries * g, d]    g query heads of one KV head ride as more queries: nothing is repeated
    SDPA(q, k, v, mask [B, 1, queries * g, keys])        causal, windowed; every query sees at least its own key

Padding never brings a NaN: padded keys are the zero page or the row's own zeroed page (KvCache), padded queries repeat the row's
last token. Groups see different rows only in the batch dimension, so nothing of one row enters another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.grouping import Piece, cut_rows, group_pieces
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.rows import KvRows

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Group:
    """Pieces of rows that attend in one padded batch.

    `tokens` are the packed tokens that the padded queries read, `[batch * num_queries]` or a plain run of them; `pages [batch * P]`;
    `masks` by window, additive, `[batch, 1, num_queries * g or 1, keys]`; `real` (None: all) picks the unpadded queries.
    """

    batch: int
    num_queries: int
    tokens: Tensor | slice
    pages: Tensor
    masks: dict[int | None, Tensor]
    real: Tensor | None


class TorchAttention(AttentionBackend):
    """Attention over `cache` with this rank's heads.

    `kv_of_query[i]` is the local KV head of local query head i (non-decreasing). `windows[layer_idx]` is how many positions a
    token sees, itself included; None is all.
    """

    def __init__(self, cache: KvCache, kv_of_query: Sequence[int], scale: float, windows: Sequence[int | None]) -> None:
        self.cache = cache
        self._scale = scale
        self._windows = tuple(windows)
        num_heads, num_kv_heads = len(kv_of_query), cache.num_kv_heads
        group_size = num_heads // num_kv_heads
        uniform = group_size * num_kv_heads == num_heads and list(kv_of_query) == [i // group_size for i in range(num_heads)]
        self._num_heads = num_heads
        self._group_size = group_size if uniform else 1
        self._kv_index = None if uniform else torch.tensor(kv_of_query, dtype=torch.int64, device=cache.device)
        self._flat_k = cache.k.view(cache.num_layers, -1, num_kv_heads, cache.head_dim)
        self._flat_v = cache.v.view(cache.num_layers, -1, num_kv_heads, cache.head_dim)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []
        self._order: Tensor | None = None

    def plan(self, rows: KvRows) -> None:
        """Build the step's index tensors and masks; zero the fresh pages."""
        self.cache.zero(rows.fresh_pages)
        counts = np.asarray(rows.num_tokens, dtype=np.int64)
        ends = np.asarray(rows.starts, dtype=np.int64) + counts
        tables = self._tables(rows, ends)
        positions = np.arange(int(counts.sum())) + np.repeat(ends - np.cumsum(counts), counts)
        block = self.cache.block_size
        self._slots = self._to_device(tables[np.repeat(np.arange(len(counts)), counts), positions // block] * block + positions % block)
        groups = group_pieces(list(cut_rows(rows.starts, rows.num_tokens)))
        self._groups = [self._group(group, tables) for group in groups]
        packed = [np.arange(piece.first_token, piece.first_token + piece.num_tokens) for group in groups for piece in group]
        order = np.argsort(np.concatenate(packed))
        self._order = None if (order[1:] > order[:-1]).all() else self._to_device(order)

    def forward(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the seam."""
        self._flat_k[layer_idx].index_copy_(0, self._slots, k)
        self._flat_v[layer_idx].index_copy_(0, self._slots, v)
        outs = [self._attend(layer_idx, q, group) for group in self._groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._order is None else out.index_select(0, self._order)

    def _attend(self, layer_idx: int, q: Tensor, group: _Group) -> Tensor:
        """One group's real queries, `[tokens of the group, num_heads * head_dim]`."""
        head_dim, batch, queries, g = self.cache.head_dim, group.batch, group.num_queries, self._group_size
        keys = self._gather(self.cache.k[layer_idx], group)
        values = self._gather(self.cache.v[layer_idx], group)
        q = q[group.tokens] if isinstance(group.tokens, slice) else q.index_select(0, group.tokens)
        q = q.reshape(batch, queries, -1, g, head_dim).transpose(1, 2).reshape(batch, -1, queries * g, head_dim)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.masks[self._windows[layer_idx]], scale=self._scale)
        out = out.view(batch, -1, queries, g, head_dim).transpose(1, 2).reshape(batch * queries, self._num_heads * head_dim)
        return out if group.real is None else out.index_select(0, group.real)

    def _gather(self, pages: Tensor, group: _Group) -> Tensor:
        """The group's keys or values, `[batch, heads, keys, head_dim]`; one head per query head where heads map unevenly."""
        gathered = pages.index_select(0, group.pages).view(group.batch, -1, self.cache.num_kv_heads, self.cache.head_dim)
        if self._kv_index is not None:
            gathered = gathered.index_select(2, self._kv_index)
        return gathered.transpose(1, 2)

    def _tables(self, rows: KvRows, ends: Ints) -> Ints:
        """The block tables side by side, cut to the pages in use, padded with the zero page: `[rows, most pages]`."""
        used = -(-ends // self.cache.block_size)
        tables = np.full((len(used), int(used.max(initial=1))), self.cache.zero_page, dtype=np.int64)
        for row, (table, count) in enumerate(zip(rows.block_tables, used.tolist(), strict=True)):
            tables[row, :count] = table[:count]
        return tables

    def _group(self, pieces: Sequence[Piece], tables: Ints) -> _Group:
        counts = np.asarray([piece.num_tokens for piece in pieces])[:, None]
        queries = int(counts.max())
        within = np.minimum(np.arange(queries), counts - 1)  # padded queries repeat the piece's last token
        tokens = (np.asarray([piece.first_token for piece in pieces])[:, None] + within).ravel()
        is_run = len(tokens) == int(tokens[-1] - tokens[0]) + 1 and bool((tokens[1:] > tokens[:-1]).all())
        num_pages = -(-max(piece.num_keys for piece in pieces) // self.cache.block_size)
        pages = tables[[piece.row for piece in pieces], :num_pages].ravel()
        positions = np.asarray([piece.start for piece in pieces])[:, None] + within
        return _Group(
            batch=len(pieces),
            num_queries=queries,
            tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if is_run else self._to_device(tokens),
            pages=self._to_device(pages),
            masks={window: self._mask(positions, num_pages * self.cache.block_size, window) for window in set(self._windows)},
            real=None if (counts == queries).all() else self._to_device(np.flatnonzero(np.arange(queries) < counts)),
        )

    def _mask(self, positions: Ints, num_keys: int, window: int | None) -> Tensor:
        """0 where a query sees a key, else -inf, in the cache's dtype; made on the device."""
        query = self._to_device(positions)[:, :, None]
        key = torch.arange(num_keys, device=self.cache.device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        if self._group_size > 1 and positions.shape[1] > 1:
            hidden = hidden.repeat_interleave(self._group_size, dim=1)
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.cache.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.cache.device)
