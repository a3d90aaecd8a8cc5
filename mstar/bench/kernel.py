"""`mstar bench kernel`: each CPU kernel alone, on the shapes of one model, against the roof of memory and against plain torch.

One process, no server. Every case cycles through copies of what it reads until they exceed the caches by far, as the layers of a step do;
kernel and torch take turns, the least of the turns counts. `bytes` are those that must be read at least: weights, keys, values, adapters.
Beside prefills the roof is not memory but arithmetic: there the figure to look at is GFLOP/s.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mstar.distributed.linear import linear_product
from mstar.distributed.linear_cpu import CpuLinear
from mstar.engine.resources.attention.select import default_attention
from mstar.engine.resources.attention.torch_backend import TorchAttention
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.rows import KvRows
from mstar.engine.resources.lora.addressing import LoraAddressing, group_by_slot
from mstar.engine.resources.lora.backends.base import LayerWeights
from mstar.engine.resources.lora.backends.select import default_backend
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend
from mstar.models.arch import ModelArch, load_arch
from mstar.native import load_kernel
from mstar.native.pages import HugePages

_COLD_BYTES = 200 << 20
_TURNS = 7
_BLOCK = 16

Run = Callable[[], object]


@dataclass(frozen=True)
class KernelTime:
    """One kernel on one case. `torch_us` is the plain torch way to the same."""

    kernel: str
    case: str
    us: float
    torch_us: float
    read_bytes: int
    flops: int

    @property
    def gb_per_s(self) -> float:
        """Of what must be read."""
        return self.read_bytes / self.us / 1e3

    @property
    def gflops(self) -> float:
        """Achieved."""
        return self.flops / self.us / 1e3


@dataclass(frozen=True)
class _Case:
    kernel: str
    name: str
    runs: Sequence[Run]
    torch_runs: Sequence[Run]
    read_bytes: int
    flops: int


def stream_gb_per_s(threads: int) -> float:
    """A plain streaming read of this machine, by as many threads."""
    library = load_kernel(Path(__file__).with_name("stream.cpp"))
    data = HugePages().take(_COLD_BYTES).view(torch.float32)
    data.fill_(1)
    if library is None:
        return data.nbytes / _least([data.sum]) / 1e9
    library.mstar_stream.restype = ctypes.c_float
    arguments = ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.numel()), ctypes.c_int64(threads)
    return data.nbytes / _least([lambda: library.mstar_stream(*arguments)]) / 1e9


@torch.inference_mode()
def measure_kernels(model: Path, tokens: Sequence[int], dtype: torch.dtype) -> Iterator[KernelTime]:
    """Measure every kernel on `model`'s shapes at TP 1, as it is served. Raises ConfigError where `model` is none."""
    arch = load_arch(model)
    for case in (*_linears(arch, tokens, dtype), *_attentions(arch, tokens, dtype), *_deltas(arch, tokens, dtype)):
        for run in (*case.runs, *case.torch_runs):
            run()
        best, best_torch = float("inf"), float("inf")
        for _ in range(_TURNS):
            best = min(best, _least(case.runs, turns=1))
            best_torch = min(best_torch, _least(case.torch_runs, turns=1))
        yield KernelTime(case.kernel, case.name, best * 1e6, best_torch * 1e6, case.read_bytes, case.flops)


def _least(runs: Sequence[Run], turns: int = _TURNS) -> float:
    """Seconds of one run: all of them in turn, the least average of the turns."""
    best = float("inf")
    for _ in range(turns):
        began = time.perf_counter()
        for run in runs:
            run()
        best = min(best, (time.perf_counter() - began) / len(runs))
    return best


def _copies(size_bytes: int) -> range:
    return range(max(1, min(64, _COLD_BYTES // size_bytes)))


def _sizes(arch: ModelArch) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Each linear: inputs, outputs, and the outputs by part."""
    q, kv, hidden, mlp = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size, arch.intermediate_size
    return {
        "qkv": (hidden, q + 2 * kv, (q, kv, kv)),
        "o": (q, hidden, (hidden,)),
        "gate_up": (hidden, 2 * mlp, (mlp, mlp)),
        "down": (mlp, hidden, (hidden,)),
    }


def _linears(arch: ModelArch, tokens: Sequence[int], dtype: torch.dtype) -> Iterator[_Case]:
    shapes = {name: sizes[:2] for name, sizes in _sizes(arch).items()} | {"lm_head": (arch.hidden_size, arch.vocab_size)}
    for name, (in_size, out_size) in shapes.items():
        weight = torch.randn(out_size, in_size).mul_(in_size**-0.5).to(dtype)
        pages = HugePages()
        products = [linear_product(weight, None, pages) for _ in _copies(weight.nbytes)]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for _ in _copies(weight.nbytes)]
        for count in tokens:
            x = torch.randn(count, in_size).to(dtype)
            yield _Case(
                "linear" if isinstance(products[0], CpuLinear) else "linear (torch)",
                f"{name} {in_size} to {out_size}, {count} tokens",
                [partial(product, x) for product in products],
                [partial(torch.ops.mkldnn._linear_pointwise, x, w, None, "none", [], "") for w in packed],
                weight.nbytes,
                2 * count * weight.numel(),
            )


def _attentions(arch: ModelArch, tokens: Sequence[int], dtype: torch.dtype) -> Iterator[_Case]:
    rows = [(f"{count} rows at {start}", (start,) * count, (1,) * count) for count in tokens if count <= 64 for start in (127, 1023)]
    rows += [(f"prefill of {count}", (0,), (count,)) for count in tokens if count > 64]
    heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
    kv_of_query = [head // (arch.num_heads // arch.num_kv_heads) for head in range(arch.num_heads)]
    for name, starts, counts in rows:
        pages = [-(-(start + count) // _BLOCK) for start, count in zip(starts, counts, strict=True)]
        tables = tuple(tuple(range(sum(pages[:row]), sum(pages[: row + 1]))) for row in range(len(pages)))
        page_bytes = KvCache.page_bytes(1, _BLOCK, arch.num_kv_heads, arch.head_dim, dtype)
        layers = len(_copies(sum(pages) * page_bytes))
        cache = KvCache(layers, sum(pages), _BLOCK, arch.num_kv_heads, arch.head_dim, dtype, "cpu")
        cache.k.normal_()
        cache.v.normal_()
        planned = []
        for make in (default_attention, TorchAttention):
            attention = make(cache, kv_of_query, arch.head_dim**-0.5, (None,) * layers)
            attention.plan(KvRows(tables, starts, counts))
            planned.append(attention)
        q, k, v = torch.split(torch.randn(sum(counts), sum(heads), arch.head_dim).to(dtype), list(heads), dim=1)
        runs = [[partial(attention.forward, layer, q, k, v) for layer in range(layers)] for attention in planned]
        seen = sum((2 * start + count + 1) * count // 2 for start, count in zip(starts, counts, strict=True))
        yield _Case("attention", name, runs[0], runs[1], sum(pages) * page_bytes, 4 * seen * arch.num_heads * arch.head_dim)


def _deltas(arch: ModelArch, tokens: Sequence[int], dtype: torch.dtype) -> Iterator[_Case]:
    """Eight adapters of rank 8 and 16 in slots of rank 16, tokens in turn over them."""
    slot_ranks = [0, *(8, 16) * 4]
    for name, (in_size, out_size, parts) in _sizes(arch).items():
        by_rank = (len(parts) * in_size + out_size) * dtype.itemsize
        weights = []
        for _ in _copies(by_rank * sum(slot_ranks)):
            a = torch.randn(9, len(parts), 16, in_size).mul_(in_size**-0.5).to(dtype)
            weights.append(LayerWeights(a, torch.randn(9, 16, out_size).to(dtype), torch.ones(9, len(parts)), parts))
        for count in tokens:
            x, y = torch.randn(count, in_size).to(dtype), torch.zeros(count, out_size).to(dtype)
            slots = [1 + index % 8 for index in range(count)]
            host = group_by_slot(slots, [1] * count, len(slot_ranks))
            addressing = LoraAddressing(torch.tensor(host.token_order), torch.tensor(host.slot_indptr))
            segments = host.segments()
            ranks = [slot_ranks[segment.slot] for segment in segments]
            runs = []
            for backend in (default_backend(torch.device("cpu"), dtype), TorchLoraBackend()):
                plan = backend.plan(addressing, segments, ranks)
                runs.append([partial(backend.add_delta, y, x, w, plan) for w in weights])
            flops = 2 * sum(slot_ranks[slot] for slot in slots) * (len(parts) * in_size + out_size)
            yield _Case("LoRA delta", f"{name}, {count} tokens, {len(segments)} adapters", runs[0], runs[1], by_rank * sum(ranks), flops)
