"""Loading a base model: each rank reads only its own slices of the safetensors files, straight into the fused layout.

Runs once at start, on the rank's step thread. The base model's files are mapped by safetensors: unlike adapters they belong to
the operator and do not change while an instance starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mstar.distributed.comm import CommGroup
from mstar.distributed.linear import Product, linear_product
from mstar.distributed.linear_cpu import CpuLinear
from mstar.distributed.shards import Range, even_cuts, plan_heads
from mstar.engine.resources.attention.base import AttentionBackend
from mstar.errors import ConfigError
from mstar.models.arch import ModelArch
from mstar.models.decoder import Decoder, DecoderWeights, LayerDeltas, LayerWeights
from mstar.models.rope import Rope
from mstar.native.pages import HugePages


def load_decoder(
    folder: str | Path,
    arch: ModelArch,
    comm: CommGroup,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    attention: AttentionBackend,
    deltas: LayerDeltas | None,
) -> Decoder:
    """Read this rank's shard of the model in `folder`, cast to `dtype` on `device`, and build its decoder.

    Raises ConfigError for a missing or unreadable file, a missing tensor or a shape that `arch` does not describe, and for a
    `tensor_parallel_size` or `max_model_len` that the model does not allow.
    """
    rope = Rope(arch, max_model_len, dtype, device)
    with ExitStack() as stack:
        reader = _ShardReader(_Checkpoint(Path(folder), stack), arch, comm, dtype, device)
        weights = reader.decoder()
    return Decoder(arch, weights, comm, rope, attention, deltas)


def weights_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that this rank holds."""
    return decoder.weights.size_bytes


class _Checkpoint:
    """The safetensors files of a folder, one or several with an index, opened as they are needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._files: dict[str, Any] = {}
        self._file_of = dict(self._index())

    def slice(self, name: str, shape: tuple[int, ...]) -> Any:
        """A lazy view of the tensor `name`; reading a range of it reads only that. Raises ConfigError unless it has `shape`."""
        file_name = self._file_of.get(name)
        if file_name is None:
            raise ConfigError(f"{self.folder}: the model's files lack the tensor {name}")
        try:
            view = self._open(file_name).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.folder / file_name}: cannot read the tensor {name}: {error}") from None
        found = tuple(view.get_shape())
        if found != shape:
            raise ConfigError(f"{self.folder / file_name}: {name} has shape {list(found)}; config.json asks for {list(shape)}")
        return view

    def _index(self) -> Iterator[tuple[str, str]]:
        """(tensor, file) of every tensor: from the index where there is one, else from the single file."""
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            for name in self._open("model.safetensors").keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                yield name, "model.safetensors"
            return
        try:
            files = json.loads(index.read_bytes())["weight_map"]
            yield from ((str(name), str(file)) for name, file in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"cannot read {index}: {type(error).__name__}: {error}") from None

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self.folder / file_name
            if not path.is_file():
                raise ConfigError(f"{path} is missing; a model folder holds model.safetensors, or an index and the files that it names")
            try:
                self._files[file_name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {path}: {error}") from None
        return self._files[file_name]


class _ShardReader:
    """Reads one rank's cuts of every tensor into new tensors in the decoder's layout."""

    def __init__(self, files: _Checkpoint, arch: ModelArch, comm: CommGroup, dtype: torch.dtype, device: torch.device | str) -> None:
        plan = plan_heads(arch.num_heads, arch.num_kv_heads, comm.tp_size)
        self._files = files
        self._arch = arch
        self._dtype = dtype
        self._device = device
        self._is_first = comm.tp_rank == 0
        self._q = _features(plan.q_ranges[comm.tp_rank], arch.head_dim)
        self._kv = _features(plan.kv_ranges[comm.tp_rank], arch.head_dim)
        self._mlp = even_cuts(arch.intermediate_size, comm.tp_size)[comm.tp_rank]
        self._vocab = even_cuts(arch.vocab_size, comm.tp_size)[comm.tp_rank]
        self._size_bytes = 0
        self._pages = HugePages()

    def decoder(self) -> DecoderWeights:
        """The whole shard."""
        arch = self._arch
        vocabulary = (arch.vocab_size, arch.hidden_size)
        embedding = self._rows([("model.embed_tokens.weight", vocabulary, self._vocab)])
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(arch.num_layers))
        final_norm = self._vector("model.norm.weight", arch.hidden_size)
        lookup: Product = partial(F.embedding, weight=embedding)
        if not arch.tie_word_embeddings:
            lm_head = linear_product(self._rows([("lm_head.weight", vocabulary, self._vocab)]), None, self._pages)
        elif (tied := CpuLinear.create(embedding, None, self._pages)) is not None:
            lookup, lm_head = tied.rows, tied
        else:
            lm_head = partial(F.linear, weight=embedding)  # plain: a packed copy would be a second embedding
        return DecoderWeights(lookup, layers, final_norm, lm_head, self._size_bytes)

    def _layer(self, prefix: str) -> LayerWeights:
        arch = self._arch
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = [
            (f"{prefix}self_attn.q_proj", q_size, self._q),
            (f"{prefix}self_attn.k_proj", kv_size, self._kv),
            (f"{prefix}self_attn.v_proj", kv_size, self._kv),
        ]
        gate_up = [(f"{prefix}mlp.{name}", arch.intermediate_size, self._mlp) for name in ("gate_proj", "up_proj")]
        return LayerWeights(
            input_norm=self._vector(f"{prefix}input_layernorm.weight", arch.hidden_size),
            qkv=self._column(qkv, has_bias=arch.qkv_bias),
            qk_norm=self._qk_norm(prefix) if arch.qk_norm else None,
            o=self._row(f"{prefix}self_attn.o_proj", q_size, self._q, has_bias=arch.o_bias),
            post_norm=self._vector(f"{prefix}post_attention_layernorm.weight", arch.hidden_size),
            gate_up=self._column(gate_up, has_bias=arch.mlp_bias),
            down=self._row(f"{prefix}mlp.down_proj", arch.intermediate_size, self._mlp, has_bias=arch.mlp_bias),
        )

    def _column(self, parts: Sequence[tuple[str, int, Range]], *, has_bias: bool) -> Product:
        """A fused column-parallel linear of `(module, output features, this rank's cut)` parts, one after the other."""
        weight = self._rows([(f"{name}.weight", (size, self._arch.hidden_size), cut) for name, size, cut in parts])
        bias = self._rows([(f"{name}.bias", (size,), cut) for name, size, cut in parts]) if has_bias else None
        return linear_product(weight, bias, self._pages)

    def _row(self, name: str, in_size: int, cut: Range, *, has_bias: bool) -> Product:
        """A row-parallel linear: this rank's input columns; the bias on the first rank alone, so that the sum has it once."""
        view = self._files.slice(f"{name}.weight", (self._arch.hidden_size, in_size))
        weight = self._new((self._arch.hidden_size, cut[1] - cut[0]))
        weight.copy_(view[:, cut[0] : cut[1]])
        bias = self._vector(f"{name}.bias", self._arch.hidden_size) if has_bias and self._is_first else None
        return linear_product(weight, bias, self._pages)

    def _rows(self, parts: Sequence[tuple[str, tuple[int, ...], Range]]) -> Tensor:
        """Rows `cut` of each `(tensor, whole shape, cut)`, stacked in one new tensor."""
        total = sum(stop - start for _, _, (start, stop) in parts)
        out = self._new((total, *parts[0][1][1:]))
        filled = 0
        for name, shape, (start, stop) in parts:
            out[filled : filled + stop - start].copy_(self._files.slice(name, shape)[start:stop])
            filled += stop - start
        return out

    def _vector(self, name: str, size: int) -> Tensor:
        return self._rows([(name, (size,), (0, size))])

    def _qk_norm(self, prefix: str) -> Tensor:
        """The two head norms as one row per local query and KV head: `[heads, head_dim]`."""
        dim = self._arch.head_dim
        rows = []
        for name, (start, stop) in (("q_norm", self._q), ("k_norm", self._kv)):
            view = self._files.slice(f"{prefix}self_attn.{name}.weight", (dim,))
            rows.append(view[:].expand((stop - start) // dim, dim))
        out = self._new((sum(len(row) for row in rows), dim))
        return out.copy_(torch.cat(rows))

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._size_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _features(heads: Range, head_dim: int) -> Range:
    return heads[0] * head_dim, heads[1] * head_dim
