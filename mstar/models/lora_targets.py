"""The LoRA targets of the decoder: its four fused linears, head and embedding, and how each rank's shard of them is cut.

Pure: the same on every rank. The cuts are the decoder's own (`HeadPlan`, `even_cuts`), so a delta always fits its linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar.distributed.shards import Range, even_cuts, plan_heads
from mstar.engine.resources.lora.spec import LOGITS_ROWS, LoraPart, LoraSpec, LoraTarget
from mstar.models.arch import ModelArch
from mstar.types import PROJECTIONS


def lora_spec(
    arch: ModelArch,
    tp_size: int,
    *,
    max_loras: int,
    max_lora_rank: int,
    max_cpu_loras: int,
    adapters: Mapping[str, str] | None = None,
    target_modules: Sequence[str] = PROJECTIONS,
) -> LoraSpec:
    """The pool's spec for `arch` over `tp_size` ranks. `adapters` (name to folder) are servable from the start.

    `target_modules` are the leaf names that adapters may have tensors for; a linear of which none is named gets no slots.
    Raises ConfigError where the heads cannot be cut over `tp_size`.
    """
    plan = plan_heads(arch.num_heads, arch.num_kv_heads, tp_size)
    q_features = tuple((start * arch.head_dim, stop * arch.head_dim) for start, stop in plan.q_ranges)
    kv_features = tuple((start * arch.head_dim, stop * arch.head_dim) for start, stop in plan.kv_ranges)
    mlp_features = even_cuts(arch.intermediate_size, tp_size)
    vocab = even_cuts(arch.vocab_size, tp_size)
    hidden, q_size, kv_size = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    targets = (
        LoraTarget(
            "qkv_proj",
            (
                _column("self_attn.q_proj", hidden, q_size, q_features),
                _column("self_attn.k_proj", hidden, kv_size, kv_features),
                _column("self_attn.v_proj", hidden, kv_size, kv_features),
            ),
            has_bias=arch.qkv_bias,
        ),
        LoraTarget("o_proj", (_row("self_attn.o_proj", q_size, hidden, q_features),), row_parallel=True, has_bias=arch.o_bias),
        LoraTarget(
            "gate_up_proj",
            (
                _column("mlp.gate_proj", hidden, arch.intermediate_size, mlp_features),
                _column("mlp.up_proj", hidden, arch.intermediate_size, mlp_features),
            ),
            has_bias=arch.mlp_bias,
        ),
        LoraTarget(
            "down_proj", (_row("mlp.down_proj", arch.intermediate_size, hidden, mlp_features),), row_parallel=True, has_bias=arch.mlp_bias
        ),
        LoraTarget("lm_head", (_column("lm_head", hidden, arch.vocab_size, vocab),), row_grouping=LOGITS_ROWS, once=True),
        LoraTarget(
            "embed_tokens", (_row("embed_tokens", arch.vocab_size, hidden, vocab),), row_parallel=True, once=True, is_embedding=True
        ),
    )
    wanted = tuple(target for target in targets if any(part.module.rpartition(".")[2] in target_modules for part in target.parts))
    return LoraSpec(
        wanted,
        arch.num_layers,
        max_loras,
        max_lora_rank,
        max_cpu_loras,
        adapters=dict(adapters or {}),
        target_modules=tuple(target_modules),
    )


def _column(module: str, in_features: int, out_features: int, cuts: Sequence[Range]) -> LoraPart:
    """A column-parallel part: the whole input on every rank, the output cut."""
    return LoraPart(module, in_features, out_features, ((0, in_features),) * len(cuts), tuple(cuts))


def _row(module: str, in_features: int, out_features: int, cuts: Sequence[Range]) -> LoraPart:
    """A row-parallel part: the input cut, the whole output on every rank."""
    return LoraPart(module, in_features, out_features, tuple(cuts), ((0, out_features),) * len(cuts))
