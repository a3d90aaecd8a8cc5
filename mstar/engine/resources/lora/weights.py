"""The slots' weights on the device: allocated once, filled on install, read through per-layer views.

Per target: `lora_a [layers, slots, P, R, in]`, `lora_b_t [layers, slots, R, out]`, `scaling [layers, slots, P]`; slot 0 is zero for
good. Kernels read ranks up to the largest in use, so an install zeroes what the last occupant wrote beyond the new one's rank.
"""

from __future__ import annotations

import torch

from mstar.engine.resources.lora.backends.base import LayerWeights
from mstar.engine.resources.lora.host_copy import HostCopy
from mstar.engine.resources.lora.spec import LoraSpec


class SlotWeights:
    """All slots of one pool on one rank."""

    def __init__(self, spec: LoraSpec, tp_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        slots, cap, layers = spec.max_loras + 1, spec.max_lora_rank, spec.num_layers
        self._spec = spec
        self._out_sizes = {target.name: target.out_sizes(tp_rank) for target in spec.targets}
        self._lora_a: dict[str, torch.Tensor] = {}
        self._lora_b_t: dict[str, torch.Tensor] = {}
        self._scaling: dict[str, torch.Tensor] = {}
        self._ranks: dict[str, torch.Tensor] = {}
        for target in spec.targets:
            parts, in_size, out_size = len(target.parts), target.in_size(tp_rank), sum(target.out_sizes(tp_rank))
            self._lora_a[target.name] = torch.zeros(layers, slots, parts, cap, in_size, dtype=dtype, device=device)
            self._lora_b_t[target.name] = torch.zeros(layers, slots, cap, out_size, dtype=dtype, device=device)
            self._scaling[target.name] = torch.zeros(layers, slots, parts, dtype=torch.float32, device=device)
            self._ranks[target.name] = torch.zeros(layers, slots, dtype=torch.int64, device=device)
        self._written = {target.name: [0] * slots for target in spec.targets}
        self._slot_rank = [0] * slots

    @property
    def size_bytes(self) -> int:
        """Device bytes of all slots."""
        tensors = [*self._lora_a.values(), *self._lora_b_t.values(), *self._scaling.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def slot_rank(self, slot: int) -> int:
        """The largest rank of the adapter in `slot`."""
        return self._slot_rank[slot]

    def install(self, slot: int, copy: HostCopy) -> None:
        """Fill `slot` from a host copy, which is only read. Whatever lay there is gone."""
        for target in self._spec.targets:
            name = target.name
            source = copy.targets.get(name)
            rank = 0 if source is None else source.lora_a.shape[2]
            stale = self._written[name][slot]
            if source is not None:
                self._lora_a[name][:, slot, :, :rank] = source.lora_a
                self._lora_b_t[name][:, slot, :rank] = source.lora_b_t
                self._scaling[name][:, slot] = source.scaling
                self._ranks[name][:, slot] = torch.tensor(source.ranks)
            else:
                self._scaling[name][:, slot] = 0
                self._ranks[name][:, slot] = 0
            if stale > rank:
                self._lora_a[name][:, slot, :, rank:stale] = 0
                self._lora_b_t[name][:, slot, rank:stale] = 0
            self._written[name][slot] = rank
        self._slot_rank[slot] = copy.max_rank

    def layer(self, target: str, layer_idx: int) -> LayerWeights:
        """Views at one target and layer."""
        return LayerWeights(
            self._lora_a[target][layer_idx], self._lora_b_t[target][layer_idx], self._scaling[target][layer_idx], self._out_sizes[target]
        )

    def layer_ranks(self, target: str, layer_idx: int) -> torch.Tensor:
        """`[slots]` int64."""
        return self._ranks[target][layer_idx]
