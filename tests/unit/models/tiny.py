"""Tiny random models of every family, saved as Hugging Face folders, and a bare engine that runs steps against our decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mstar.distributed.comm import CommGroup
from mstar.distributed.shards import plan_heads
from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.select import default_attention
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.rows import KvRows
from mstar.models.arch import ModelArch, load_arch
from mstar.models.decoder import Decoder, LayerDeltas
from mstar.models.loader import load_decoder

BLOCK_SIZE = 4
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_NINE_HEADS = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 130, "intermediate_size": 126}
_TEN_HEADS = {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 131, "intermediate_size": 125}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128, "factor": 2.0, **_FACTORS}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict]] = {
    "llama2": (LlamaForCausalLM, LlamaConfig, {}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64}}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama-dynamic": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN}),
    "llama-longrope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LONGROPE}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, **_NINE_HEADS}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "mistral-no-window": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2.5-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen2-window": (Qwen2ForCausalLM, Qwen2Config, _QWEN_WINDOW),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3-ten-heads": (Qwen3ForCausalLM, Qwen3Config, _TEN_HEADS),
    "qwen3-window": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "attention_bias": True, **_QWEN_WINDOW}),
}


def make_model(family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    """A random model of `family`, saved to `folder`; weights wide enough that every part of it moves the logits."""
    model_class, config_class, fields = FAMILIES[family]
    model = model_class(config_class(**{**_SIZES, **fields, **overrides}, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)
    model.to(dtype).save_pretrained(folder)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' logits at every position, `[len(tokens), vocab]` float32."""
    return model(torch.tensor([tokens])).logits[0].float()


@dataclass
class Engine:
    """A decoder with a page allocator as plain as can be; `step` runs rows given as (request, new tokens)."""

    arch: ModelArch
    decoder: Decoder
    attention: AttentionBackend
    cache: KvCache
    free: list[int]
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def step(self, rows: list[tuple[str, list[int]]]) -> list[Tensor]:
        """One forward over all rows; per row the logits of all its tokens, `[tokens, vocab]`."""
        counts = [len(tokens) for _, tokens in rows]
        return list(self.run(rows, list(range(sum(counts)))).split(counts))

    def run(self, rows: list[tuple[str, list[int]]], logits_rows: list[int]) -> Tensor:
        """One forward over all rows; the logits of the packed tokens `logits_rows`."""
        fresh: list[int] = []
        for rid, tokens in rows:
            table = self.tables.setdefault(rid, [])
            while len(table) * BLOCK_SIZE < self.lengths.get(rid, 0) + len(tokens):
                table.append(self.free.pop(0))
                fresh.append(table[-1])
        starts = tuple(self.lengths.get(rid, 0) for rid, _ in rows)
        counts = tuple(len(tokens) for _, tokens in rows)
        self.attention.plan(KvRows(tuple(tuple(self.tables[rid]) for rid, _ in rows), starts, counts, tuple(fresh)))
        tokens = torch.tensor([token for _, row in rows for token in row])
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        for (rid, _), start, count in zip(rows, starts, counts, strict=True):
            self.lengths[rid] = start + count
        return self.decoder.forward(tokens, positions, torch.tensor(logits_rows))

    def finish(self, rid: str) -> None:
        """Give the request's pages back; they are the first to be handed out again."""
        self.free[:0] = self.tables.pop(rid)
        del self.lengths[rid]


def make_engine(
    folder: Path,
    comm: CommGroup | None = None,
    deltas: LayerDeltas | None = None,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 128,
    make_attention: Callable[..., AttentionBackend] = default_attention,
) -> Engine:
    """Load `folder` through the loader on this rank."""
    comm = comm or CommGroup.single()
    arch = load_arch(folder)
    plan = plan_heads(arch.num_heads, arch.num_kv_heads, comm.tp_size)
    start, stop = plan.kv_ranges[comm.tp_rank]
    cache = KvCache(arch.num_layers, num_pages, BLOCK_SIZE, stop - start, arch.head_dim, dtype, "cpu")
    attention = make_attention(cache, plan.kv_of_query(comm.tp_rank), arch.head_dim**-0.5, arch.windows)
    decoder = load_decoder(folder, arch, comm, dtype, "cpu", max_model_len, attention, deltas)
    return Engine(arch, decoder, attention, cache, list(range(num_pages)))


def some_tokens(count: int, seed: int, vocab_size: int = 128) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
