"""A decoder's layers on a CPU through `layers_cpu.cpp`: the small operations one by one, and all layers of a step in one call.

The one call saves a thousand trips through Python a step. It takes a step where nothing has to come back to Python between two kernels;
where something has to (an adapter that also changes the base's output, a sum over gloo), the decoder goes layer by layer through the
same kernels, to the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.distributed.comm import CommGroup
from mstar.distributed.linear import NativeDelta
from mstar.distributed.linear_cpu import CpuLinear
from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.cpu_backend import CpuAttention
from mstar.models.ops import LayerOps
from mstar.native import address_of, load_kernel

_LINEARS = 4  # qkv, o, gate_up, down


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("linears", ctypes.c_void_p * _LINEARS),
        ("targets", ctypes.c_void_p * _LINEARS),
    )


class _Layers(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("mlp", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("linear", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("attention_of_rank", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("signed_sine", ctypes.c_void_p),
        ("attention_rows", ctypes.c_void_p),
        ("shrink", ctypes.c_void_p),
        ("expand", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load_kernel(Path(__file__).with_name("layers_cpu.cpp"))
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.mstar_layers_scratch_bytes.argtypes, library.mstar_layers_scratch_bytes.restype = (pointer, size), size
        library.mstar_layers_run.argtypes, library.mstar_layers_run.restype = (pointer, pointer), size
        library.mstar_norm.argtypes = (pointer, size, pointer, ctypes.c_float, size, size, size, pointer, size, size)
        library.mstar_rotate.argtypes = (pointer, size, pointer, pointer, size, size, size, size, size)
        library.mstar_gate.argtypes = (pointer, size, size, pointer, size, size)
        library.mstar_norm.restype = library.mstar_rotate.restype = library.mstar_gate.restype = None
    return library


class CpuOps(LayerOps):
    """The same through the kernels, for one dtype. Made by `layer_ops`."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library = library
        self._is_bf16 = int(dtype == torch.bfloat16)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps."""
        groups, size = (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
        assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == size) and weight.is_contiguous()
        y = x.new_empty(x.shape)
        threads = torch.get_num_threads()
        self._library.mstar_norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), eps, x.shape[0], groups, size, y.data_ptr(), self._is_bf16, threads
        )
        return y

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """See LayerOps; in place."""
        tokens, heads, dim = x.shape
        assert x.stride(1) == dim and x.stride(2) == 1 and cos.is_contiguous() and signed_sin.is_contiguous()
        threads = torch.get_num_threads()
        self._library.mstar_rotate(
            x.data_ptr(), x.stride(0), cos.data_ptr(), signed_sin.data_ptr(), tokens, heads, dim, self._is_bf16, threads
        )
        return x

    def gate(self, gate_up: Tensor) -> Tensor:
        """See LayerOps."""
        assert gate_up.is_contiguous()
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty((tokens, width))
        self._library.mstar_gate(gate_up.data_ptr(), tokens, width, y.data_ptr(), self._is_bf16, torch.get_num_threads())
        return y


def layer_ops(like: Tensor) -> LayerOps:
    """The kernels for tensors of `like`'s device and dtype where there are any, else plain torch."""
    if like.device.type != "cpu" or like.dtype not in (torch.bfloat16, torch.float32):
        return LayerOps()
    library = _library()
    return LayerOps() if library is None else CpuOps(library, like.dtype)


@dataclass(frozen=True)
class LayerParts:
    """One layer as the one call needs it. Products and deltas in the order qkv, o, gate_up, down."""

    input_norm: Tensor
    qk_norm: Tensor | None
    post_norm: Tensor
    products: tuple[Any, ...]
    deltas: tuple[Any, ...]  # Delta or None; those that are NativeDelta can be taken along


class CpuLayers:
    """All layers of this rank. Made by `create`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[LayerParts],
        eps: float,
        attention: CpuAttention,
        comm: CommGroup,
        deltas: Sequence[NativeDelta],
    ) -> None:
        self._library = library
        self._attention = attention
        self._comm = comm
        self._kept = tuple(layers)  # owns what the structs point to
        self._deltas = tuple(deltas)
        first = layers[0]
        self._layers = (_Layer * len(layers))(*map(_native_layer, layers))
        memory = comm.host_memory
        self._native = _Layers(
            ctypes.addressof(self._layers),
            len(layers),
            first.input_norm.shape[0],
            attention.num_heads,
            attention.cache.num_kv_heads,
            attention.cache.head_dim,
            first.products[3].in_size,
            int(first.input_norm.dtype == torch.bfloat16),
            eps,
            address_of(first.products[0].part),
            address_of(attention.kernel),
            ctypes.addressof(attention.native),
            None if memory is None else address_of(memory.library.mstar_host_memory_sum),
            None if memory is None else ctypes.addressof(memory.native),
        )
        self._address = ctypes.addressof(self._native)

    @classmethod
    def create(cls, layers: Sequence[LayerParts], eps: float, attention: AttentionBackend, comm: CommGroup) -> CpuLayers | None:
        """The one call, or None where a part of it is no kernel of ours."""
        deltas = [delta for layer in layers for delta in layer.deltas if delta is not None]
        natives = [delta for delta in deltas if isinstance(delta, NativeDelta) and delta.native_target() is not None]
        library = _library()
        if library is None or not isinstance(attention, CpuAttention) or len(natives) < len(deltas):
            return None
        if comm.tp_size > 1 and comm.host_memory is None:
            return None
        if not all(isinstance(product, CpuLinear) for layer in layers for product in layer.products):
            return None
        return cls(library, layers, eps, attention, comm, natives)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> bool:
        """Add all layers to the residual `x [T, hidden]` in place; the attention backend's plan of the step came first.

        False, and nothing done, where this step needs Python between two kernels. Raises WorkerError where a rank is lost.
        """
        shrink, expand, plan = 0, 0, 0
        if self._deltas:
            planned = self._deltas[0].native_step()
            if planned is None:
                return False
            shrink, expand, plan = planned
        assert x.is_contiguous() and cos.is_contiguous() and signed_sin.is_contiguous()
        tokens = x.shape[0]
        scratch = torch.empty(self._library.mstar_layers_scratch_bytes(self._address, tokens), dtype=torch.uint8)
        step = _Step(
            x.data_ptr(),
            cos.data_ptr(),
            signed_sin.data_ptr(),
            ctypes.addressof(self._attention.rows),
            shrink,
            expand,
            plan,
            scratch.data_ptr(),
            tokens,
            torch.get_num_threads(),
        )
        missing = self._library.mstar_layers_run(self._address, ctypes.addressof(step))
        if missing:
            raise self._comm.lost(missing - 1)
        return True


def _native_layer(layer: LayerParts) -> _Layer:
    targets = [delta.native_target() if isinstance(delta, NativeDelta) else None for delta in layer.deltas]
    return _Layer(
        layer.input_norm.data_ptr(),
        None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        (ctypes.c_void_p * _LINEARS)(*(ctypes.addressof(product.native) for product in layer.products)),
        (ctypes.c_void_p * _LINEARS)(*targets),
    )
