"""The small operations between a layer's linears, in plain torch: what runs on any device, and what the CPU kernels must equal.

Roundings follow transformers step by step: norms in float32, cast, then scaled; cos and sin in the model's dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mstar.models.rope import rotate


class LayerOps:
    """Stateless; shapes are this rank's."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension: `x [T, ..., n]` by `weight [..., n]`, a new tensor."""
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """`x [T, heads, head_dim]` turned to its positions (`Rope.tables`). `x` may be overwritten."""
        return rotate(x, cos, signed_sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        """`gate_up [T, 2 n]` to `silu(gate) * up`, `[T, n]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
