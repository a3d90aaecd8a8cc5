"""Rotary positions, scaled ones through transformers' own frequency functions, computed for the step's positions alone.

No table over all positions is kept: a step needs one row per token, and making it costs a few small operators per step, not per layer.
The rounding is transformers': angles in float32, cos and sin scaled, then cast to the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.models.arch import ModelArch


class Rope:
    """`tables(positions)` gives what `rotate` multiplies with.

    Raises ConfigError where the scaling would make a token's rotation depend on how long its request grows: then KV already
    written would be wrong, so such a model is served only up to the length where its frequencies stand still.
    """

    def __init__(self, arch: ModelArch, max_model_len: int, dtype: torch.dtype, device: torch.device | str) -> None:
        rope_type = arch.rope["rope_type"]
        limits = {"dynamic": arch.max_position_embeddings, "longrope": arch.rope.get("original_max_position_embeddings")}
        limit = limits.get(rope_type)
        if limit is not None and max_model_len > limit:
            raise ConfigError(f"max_model_len is {max_model_len}; a model with rope_type {rope_type!r} is served up to {limit} positions")
        frequencies, self._factor = _frequencies(arch)
        self._frequencies = frequencies.to(device=device, dtype=torch.float32)
        self._dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For `positions [T]`: cos and signed sin (its first half negated), each `[T, 1, head_dim]` in the model's dtype."""
        angles = positions[:, None].to(torch.float32) * self._frequencies
        cos = (angles.cos() * self._factor).to(self._dtype)
        sin = (angles.sin() * self._factor).to(self._dtype)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate every head of `x [T, heads, head_dim]` to its token's position; a new tensor.

    The halves of a head pair up (i, i + head_dim / 2), as in transformers; `roll` swaps them and the sign sits in the table.
    """
    return (x * cos).add_(torch.roll(x, x.shape[-1] // 2, -1).mul_(signed_sin))


def _frequencies(arch: ModelArch) -> tuple[Tensor, float]:
    if arch.rope["rope_type"] == "default":
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float) / arch.head_dim
        return 1.0 / (arch.rope["rope_theta"] ** exponents), 1.0
    # Here, since what they bring along (sympy, accelerate, …) takes 90 MB and half a second of every rank that needs none of it.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    config = LlamaConfig(
        hidden_size=arch.num_heads * arch.head_dim,
        num_attention_heads=arch.num_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_position_embeddings,
        rope_parameters=dict(arch.rope),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[arch.rope["rope_type"]](config)
    return frequencies, float(factor)
