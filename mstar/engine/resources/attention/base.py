"""The seam between the decoder and whatever computes attention over paged KV (torch here, a CUDA backend later).

One backend per rank, called by its step thread: `plan` once per step, then `forward` once per layer, in layer order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from mstar.engine.resources.kv.rows import KvRows


class AttentionBackend(ABC):
    """Causal attention of one step's packed tokens over this rank's KV heads and pages."""

    @abstractmethod
    def plan(self, rows: KvRows) -> None:
        """Read where this step's rows live; zero `rows.fresh_pages`. Tokens are packed in row order.

        Every layer's `forward` until the next `plan` runs against these rows.
        """

    @abstractmethod
    def forward(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write `k`, `v` to the rows' pages and attend over everything up to each token, itself included.

        `q [T, num_heads, head_dim]`, `k`, `v [T, num_kv_heads, head_dim]`: this rank's heads, positions already applied, any
        strides. Returns `[T, num_heads * head_dim]`, contiguous.
        """
