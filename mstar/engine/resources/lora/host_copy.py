"""One adapter in host memory, cut to this rank's shard and laid out as a slot is, so that an install is a few copies.

Reader thread: `HostReader` reads a folder once, checks it against the base and the digest, cuts and casts. The copy is never written
after (a slot is filled from it as often as it is evicted).

What an adapter may do to the base's own output, from the tensors that it has for a module (m = 1 and b = the base's where it has none):

    y = m · W x + m · scaling · B A x + b        m = magnitude / ‖row of W + scaling · B A‖   (DoRA)

so a slot holds, beside A and m·B, `scale = m` and `offset = b - m · base bias` for the base's output. A row's norm goes over all of
its inputs, so for a row-parallel linear each rank has a share of its square; the admit that installs the copy adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mstar.adapters import AdapterLimits, AdapterTensors, BaseFiles, Dtype, LoraPair, read_adapter_into
from mstar.engine.resources.lora.base_weights import BaseWeights, as_tensor
from mstar.engine.resources.lora.spec import LoraSpec, LoraTarget
from mstar.errors import AdapterError


@dataclass(frozen=True, eq=False)
class TargetCopy:
    """One target over all layers, this rank's shard, `r` the adapter's largest rank in the target.

    `lora_a [layers, P, r, in]`, `lora_b_t [layers, r, out]`, `scaling [layers, P]` float32; zero where the adapter has nothing.
    `ranks[layer]` is the largest rank there, 0 for nothing. `dora` and `bias` are None where no layer has such; on ranks other than the
    first `bias` is None for a row-parallel target, since the base's is added on the first.
    """

    lora_a: torch.Tensor
    lora_b_t: torch.Tensor
    scaling: torch.Tensor
    ranks: tuple[int, ...]
    dora: DoraCopy | None = None
    bias: BiasCopy | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        dora = () if self.dora is None else (self.dora.magnitude, self.dora.squares)
        return (self.lora_a, self.lora_b_t, self.scaling, *dora, *(() if self.bias is None else (self.bias.own, self.bias.base)))


@dataclass(frozen=True, eq=False)
class DoraCopy:
    """`magnitude [layers, out]` float32; `squares [layers, out]` float64: what this rank's inputs add to each row's squared norm.

    Both are 1 where a module has no magnitude (for a row-parallel target `squares` on the first rank alone), which scales by 1.
    """

    magnitude: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, eq=False)
class BiasCopy:
    """The bias with the adapter, `own [layers, out]`, and the `base` one that the base's output holds; both float32."""

    own: torch.Tensor
    base: torch.Tensor


@dataclass(frozen=True, eq=False)
class HostCopy:
    """All targets that the adapter adapts; empty where it has nothing for this pool.

    `adds_squares`, the same on every rank: some row-parallel target has DoRA, so an install needs the other ranks' squares.
    """

    digest: str
    targets: Mapping[str, TargetCopy]
    max_rank: int
    size_bytes: int
    adds_squares: bool = False


Found = Mapping[tuple[int, int], LoraPair]  # (layer, index of the part)

_DTYPES: Mapping[torch.dtype, Dtype] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class HostReader:
    """Reads adapter folders into host copies for one rank. Called on the reader thread."""

    def __init__(self, spec: LoraSpec, tp_rank: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._tp_rank = tp_rank
        self._dtype = dtype
        self._base = None if spec.base is None or spec.base_folder is None else BaseWeights(spec.base, BaseFiles(spec.base_folder), dtype)

    def __call__(self, path: str, digest: str | None, cancelled: Callable[[], bool]) -> HostCopy:
        """Read, check, cut and cast. Raises AdapterError; then nothing is kept."""
        if self._spec.base is None:
            raise AdapterError("this pool was built without the base's shapes, so it cannot check adapter folders")
        folder = Path(path)
        roots = tuple(map(Path, self._spec.roots)) or (folder,)
        limits = AdapterLimits(self._spec.max_lora_rank, roots, self._spec.target_modules, _DTYPES[self._dtype])

        def make(tensors: AdapterTensors) -> HostCopy:
            if tensors.base_copies:
                self._need_base().check_copies(tensors.base_copies, (self._tp_rank, self._spec.tp_size), cancelled)
            return self.cut(tensors, cancelled)

        return read_adapter_into(make, folder, self._spec.base, limits, digest, cancelled)

    def cut(self, tensors: AdapterTensors, cancelled: Callable[[], bool] = lambda: False) -> HostCopy:
        """This rank's shard of a read adapter, in slot dtype; the read saw to it that every value is in the dtype's range."""
        targets = {}
        adds_squares = False
        for target in self._spec.targets:
            copy = self._cut_target(target, tensors.pairs, cancelled)
            if copy is not None:
                targets[target.name] = copy
                adds_squares |= target.row_parallel and copy.dora is not None
        size = sum(tensor.nbytes for copy in targets.values() for tensor in copy.tensors())
        max_rank = max((max(copy.ranks) for copy in targets.values()), default=0)
        return HostCopy(tensors.digest, targets, max_rank, size, adds_squares)

    def _need_base(self) -> BaseWeights:
        if self._base is None:
            raise AdapterError("this pool was built without the base's files, which this adapter must be compared with")
        return self._base

    def _cut_target(
        self, target: LoraTarget, pairs: Mapping[tuple[int, str], LoraPair], cancelled: Callable[[], bool]
    ) -> TargetCopy | None:
        layers, parts = self._spec.layers_of(target), len(target.parts)
        found = {
            (layer, index): pairs[layer, part.module]
            for layer in range(layers)
            for index, part in enumerate(target.parts)
            if (layer, part.module) in pairs
        }
        if not found:
            return None
        out_sizes = target.out_sizes(self._tp_rank)
        width = max(pair.lora_a.shape[0] for pair in found.values())
        lora_a = fresh_zeros((layers, parts, width, target.in_size(self._tp_rank)), self._dtype)
        lora_b_t = fresh_zeros((layers, width, sum(out_sizes)), self._dtype)
        scaling = torch.zeros(layers, parts, dtype=torch.float32)
        ranks = [0] * layers
        for (layer, index), pair in found.items():
            part = target.parts[index]
            in_start, in_stop = part.in_ranges[self._tp_rank]
            out_start, out_stop = part.out_ranges[self._tp_rank]
            first = sum(out_sizes[:index])
            r = pair.lora_a.shape[0]
            a = as_tensor(pair.lora_a[:, in_start:in_stop], pair.dtype)
            b = as_tensor(pair.lora_b[out_start:out_stop], pair.dtype)
            lora_a[layer, index, :r] = a
            lora_b_t[layer, :r, first : first + out_sizes[index]] = b.t()
            scaling[layer, index] = pair.scaling
            ranks[layer] = max(ranks[layer], r)
        dora = self._dora(target, found, cancelled)
        bias = self._bias(target, found, cancelled) if dora is not None or any(p.bias is not None for p in found.values()) else None
        return TargetCopy(lora_a, lora_b_t, scaling, tuple(ranks), dora, bias)

    def _dora(self, target: LoraTarget, found: Found, cancelled: Callable[[], bool]) -> DoraCopy | None:
        """This rank's share of the norms, from the base's files; None where no module has a magnitude."""
        if all(pair.magnitude is None for pair in found.values()):
            return None
        base = self._need_base()
        magnitude = torch.ones(self._spec.layers_of(target), sum(target.out_sizes(self._tp_rank)))
        squares = torch.full_like(magnitude, 0.0 if target.row_parallel and self._tp_rank else 1.0, dtype=torch.float64)
        for (layer, index), pair in found.items():
            if pair.magnitude is not None:
                part, columns = target.parts[index], self._columns(target, index)
                out = slice(*part.out_ranges[self._tp_rank])
                magnitude[layer, columns] = torch.from_numpy(pair.magnitude[out].copy())
                ranges = part.out_ranges[self._tp_rank], part.in_ranges[self._tp_rank]
                squares[layer, columns] = base.squares(layer, part.module, pair, *ranges, cancelled)
        return DoraCopy(magnitude, squares)

    def _bias(self, target: LoraTarget, found: Found, cancelled: Callable[[], bool]) -> BiasCopy | None:
        """The base's biases with the adapter's in their places; None where this rank's product holds no bias."""
        if not target.has_bias or (target.row_parallel and self._tp_rank):
            return None
        base = torch.cat(
            [
                torch.stack(
                    [
                        self._need_base().bias(layer, part.module, part.out_ranges[self._tp_rank], cancelled)
                        for layer in range(self._spec.layers_of(target))
                    ]
                )
                for part in target.parts
            ],
            dim=1,
        )
        own = base.clone()
        for (layer, index), pair in found.items():
            if pair.bias is not None:
                out = slice(*target.parts[index].out_ranges[self._tp_rank])
                own[layer, self._columns(target, index)] = torch.from_numpy(pair.bias[out].copy())
        return BiasCopy(own, base)

    def _columns(self, target: LoraTarget, index: int) -> slice:
        """Where part `index` lies in the target's output on this rank."""
        sizes = target.out_sizes(self._tp_rank)
        return slice(sum(sizes[:index]), sum(sizes[: index + 1]))


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros as the kernel hands out memory: nothing is written, and no thread of the steps is taken for it as `torch.zeros` would."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
