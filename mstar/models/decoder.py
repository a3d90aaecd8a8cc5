"""One decoder for the Llama line, this rank's shard of it, over a packed batch of any rows.

Owned by the rank's step thread. Attention and the LoRA deltas come in through their seams; nothing here knows requests.

    tokens [T] -> embedding (vocabulary cut, delta, sum) -> x [T, hidden], whole on every rank
      per layer   x += o_proj(attention(rotate(qkv_proj(norm(x)))))         qkv fused, heads cut; one all-reduce
                  x += down_proj(silu(gate) * up of gate_up_proj(norm(x)))  gate and up fused, cut; one all-reduce
    rows that need logits -> norm -> lm_head (vocabulary cut, delta, gathered) -> [L, vocab] float32, the same bits on every rank

Roundings follow transformers step by step (`ops.py`), so bfloat16 agrees as closely as two orders of the same sums can. On a CPU
the layers of a step run in one call (`layers_cpu.py`) where nothing in between needs Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mstar.distributed.comm import CommGroup
from mstar.distributed.linear import ColumnParallelLinear, Delta, Product, RowParallelLinear
from mstar.distributed.linear_cpu import CpuLinear
from mstar.distributed.shards import even_cuts, plan_heads
from mstar.engine.resources.attention.base import AttentionBackend
from mstar.models.arch import ModelArch
from mstar.models.layers_cpu import CpuLayers, CpuOps, LayerParts, layer_ops
from mstar.models.ops import LayerOps
from mstar.models.rope import Rope

# (target, layer_idx) -> the delta of that linear, the LoRA pool's `layer_delta`; None where adapters do not adapt it.
LayerDeltas = Callable[[str, int], Delta | None]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's shard. Norms are whole: `[hidden]`; `qk_norm [q + kv heads of this rank, head_dim]` or None."""

    input_norm: Tensor
    qkv: Product
    qk_norm: Tensor | None
    o: Product
    post_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class DecoderWeights:
    """This rank's shard of the model. `embedding` looks up rows: ids `[T]` of this rank's vocabulary to `[T, hidden]`; a tied head
    shares its weight with `lm_head`. `size_bytes` is what all of it takes on this rank.
    """

    embedding: Product
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Product
    size_bytes: int


class Decoder:
    """This rank's shard of `arch`, ready to run. `deltas` None builds a decoder without LoRA."""

    def __init__(
        self,
        arch: ModelArch,
        weights: DecoderWeights,
        comm: CommGroup,
        rope: Rope,
        attention: AttentionBackend,
        deltas: LayerDeltas | None,
    ) -> None:
        self.arch = arch
        self.weights = weights
        self.attention = attention
        self._comm = comm
        self._rope = rope
        self._vocab_cuts = even_cuts(arch.vocab_size, comm.tp_size)
        self._embedding_delta = None if deltas is None else deltas("embed_tokens", 0)
        self._head_delta = None if deltas is None else deltas("lm_head", 0)
        self._ops = layer_ops(weights.final_norm)
        self._layers = tuple(_Layer(arch, index, layer, comm, attention, deltas, self._ops) for index, layer in enumerate(weights.layers))
        self._at_once = CpuLayers.create([layer.parts for layer in self._layers], arch.rms_norm_eps, attention, comm)

    @property
    def has_fixed_order(self) -> bool:
        """Whether every sum of a token is taken in an order that its own shapes fix: all operations are our CPU kernels."""
        products = [self.weights.lm_head, *(product for layer in self._layers for product in layer.parts.products)]
        return isinstance(self._ops, CpuOps) and all(isinstance(product, CpuLinear) for product in products)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """Run one step's packed tokens; the attention backend's `plan` for it comes first.

        `tokens [T]`, `positions [T]`, `logits_rows [L]` (indices into the packed tokens), all int64 on the device. Returns
        logits `[L, vocab]` float32, the same bits on every rank. Raises WorkerError when a collective fails.
        """
        x = self._embed(tokens)
        cos, signed_sin = self._rope.tables(positions)
        if self._at_once is None or not self._at_once.forward(x, cos, signed_sin):
            for layer in self._layers:
                x = layer.forward(x, cos, signed_sin)
        if logits_rows.numel() == 0:  # every rank has the same rows, so all of them leave out the gather
            return x.new_empty((0, self.arch.vocab_size), dtype=torch.float32)
        x = self._ops.norm(x.index_select(0, logits_rows), self.weights.final_norm, self.arch.rms_norm_eps)
        local = self.weights.lm_head(x)
        if self._head_delta is not None:
            local = self._head_delta(local, x)
        return self._comm.all_gather_columns(local, self._vocab_cuts).float()

    def _embed(self, tokens: Tensor) -> Tensor:
        """Look up `tokens [T]` in the ranks' shards of the vocabulary: a token elsewhere counts zero here, the sum is whole."""
        delta = self._embedding_delta
        if self._comm.tp_size == 1:
            x = self.weights.embedding(tokens)
            return x if delta is None else delta(x, tokens)
        start, stop = self._vocab_cuts[self._comm.tp_rank]
        elsewhere = (tokens < start) | (tokens >= stop)
        local = (tokens - start).masked_fill_(elsewhere, 0)
        x = self.weights.embedding(local).masked_fill_(elsewhere[:, None], 0)
        if delta is not None:
            x = delta(x, local.masked_fill_(elsewhere, -1))
        return self._comm.all_reduce(x)


class _Layer:
    """One transformer layer of this rank."""

    def __init__(
        self,
        arch: ModelArch,
        layer_idx: int,
        weights: LayerWeights,
        comm: CommGroup,
        attention: AttentionBackend,
        deltas: LayerDeltas | None,
        ops: LayerOps,
    ) -> None:
        def delta(target: str) -> Delta | None:
            return None if deltas is None else deltas(target, layer_idx)

        names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        qkv, o, gate_up, down = products = (weights.qkv, weights.o, weights.gate_up, weights.down)
        on_qkv, on_o, on_gate_up, on_down = added = tuple(map(delta, names))
        self.parts = LayerParts(weights.input_norm, weights.qk_norm, weights.post_norm, products, added)
        self._ops = ops
        self._layer_idx = layer_idx
        self._weights = weights
        self._attention = attention
        self._eps = arch.rms_norm_eps
        self._head_dim = arch.head_dim
        plan = plan_heads(arch.num_heads, arch.num_kv_heads, comm.tp_size)
        first_q, last_q = plan.q_ranges[comm.tp_rank]
        first_kv, last_kv = plan.kv_ranges[comm.tp_rank]
        self._num_heads = last_q - first_q
        self._num_kv_heads = last_kv - first_kv
        self._qkv = ColumnParallelLinear(qkv, on_qkv)
        self._o = RowParallelLinear(o, comm, on_o)
        self._gate_up = ColumnParallelLinear(gate_up, on_gate_up)
        self._down = RowParallelLinear(down, comm, on_down)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Add this layer to the residual `x [T, hidden]` in place; `cos`, `signed_sin [T, 1, head_dim]`."""
        ops = self._ops
        qkv = self._qkv(ops.norm(x, self._weights.input_norm, self._eps))
        heads = qkv.view(x.shape[0], -1, self._head_dim)
        to_rotate = heads[:, : self._num_heads + self._num_kv_heads]  # q and k heads, turned together
        if self._weights.qk_norm is not None:
            to_rotate = ops.norm(to_rotate, self._weights.qk_norm, self._eps)
        rotated = ops.rotate(to_rotate, cos, signed_sin)
        q, k = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        v = heads[:, self._num_heads + self._num_kv_heads :]
        x.add_(self._o(self._attention.forward(self._layer_idx, q, k, v)))
        gate_up = self._gate_up(ops.norm(x, self._weights.post_norm, self._eps))
        return x.add_(self._down(ops.gate(gate_up)))
