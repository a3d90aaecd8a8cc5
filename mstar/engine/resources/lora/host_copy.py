"""One adapter in host memory, cut to this rank's shard and laid out as a slot is, so that an install is a few copies.

Reader thread: `HostReader` reads a folder once, checks it against the base and the digest, cuts and casts. The copy is never written
after (a slot is filled from it as often as it is evicted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mstar.adapters import AdapterLimits, AdapterTensors, LoraPair, read_adapter
from mstar.engine.resources.lora.spec import LoraSpec, LoraTarget
from mstar.errors import AdapterError


@dataclass(frozen=True, eq=False)
class TargetCopy:
    """One target over all layers, this rank's shard, `r` the adapter's largest rank in the target.

    `lora_a [layers, P, r, in]`, `lora_b_t [layers, r, out]`, `scaling [layers, P]` float32; zero where the adapter has nothing.
    `ranks[layer]` is the largest rank there, 0 for nothing.
    """

    lora_a: torch.Tensor
    lora_b_t: torch.Tensor
    scaling: torch.Tensor
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HostCopy:
    """All targets that the adapter adapts; empty where it has nothing for this pool."""

    digest: str
    targets: Mapping[str, TargetCopy]
    max_rank: int
    size_bytes: int


class HostReader:
    """Reads adapter folders into host copies for one rank. Called on the reader thread."""

    def __init__(self, spec: LoraSpec, tp_rank: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._tp_rank = tp_rank
        self._dtype = dtype

    def __call__(self, path: str, digest: str | None, cancelled: Callable[[], bool]) -> HostCopy:
        """Read, check, cut and cast. Raises AdapterError; then nothing is kept."""
        if self._spec.base is None:
            raise AdapterError("this pool was built without the base's shapes, so it cannot check adapter folders")
        folder = Path(path)
        limits = AdapterLimits(max_lora_rank=self._spec.max_lora_rank, roots=tuple(map(Path, self._spec.roots)) or (folder,))
        return self.cut(read_adapter(folder, self._spec.base, limits, digest, cancelled))

    def cut(self, tensors: AdapterTensors) -> HostCopy:
        """This rank's shard of a read adapter, in slot dtype. Raises AdapterError where a value leaves the dtype's range."""
        targets = {}
        for target in self._spec.targets:
            copy = self._cut_target(target, tensors.pairs)
            if copy is not None:
                targets[target.name] = copy
        size = sum(t.lora_a.nbytes + t.lora_b_t.nbytes + t.scaling.nbytes for t in targets.values())
        max_rank = max((max(copy.ranks) for copy in targets.values()), default=0)
        return HostCopy(tensors.digest, targets, max_rank, size)

    def _cut_target(self, target: LoraTarget, pairs: Mapping[tuple[int, str], LoraPair]) -> TargetCopy | None:
        layers, parts = self._spec.num_layers, len(target.parts)
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
        lora_a = torch.zeros(layers, parts, width, target.in_size(self._tp_rank), dtype=self._dtype)
        lora_b_t = torch.zeros(layers, width, sum(out_sizes), dtype=self._dtype)
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
            lora_a[layer, index, :r] = self._cast(a, f"layer {layer} {part.module} lora_A")
            lora_b_t[layer, :r, first : first + out_sizes[index]] = self._cast(b, f"layer {layer} {part.module} lora_B").t()
            scaling[layer, index] = pair.scaling
            ranks[layer] = max(ranks[layer], r)
        return TargetCopy(lora_a, lora_b_t, scaling, tuple(ranks))

    def _cast(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        if tensor.dtype == self._dtype:
            return tensor
        cast = tensor.to(self._dtype)
        if torch.finfo(self._dtype).max < torch.finfo(tensor.dtype).max and not bool(torch.isfinite(cast).all()):
            name, largest = str(self._dtype).removeprefix("torch."), float(tensor.abs().max())
            raise AdapterError(
                f"{what} holds {largest:g}, which {name} slots cannot hold (largest {torch.finfo(self._dtype).max:g}); "
                "serve with a dtype of a wider range",
                code="adapter_dtype_overflow",
            )
        return cast


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A numpy view of one read tensor as torch sees it; BF16 comes as uint16 bit patterns."""
    copied = torch.from_numpy(np.array(array, order="C"))  # the read buffer is read-only and goes away
    return copied.view(torch.bfloat16) if dtype == "BF16" else copied
