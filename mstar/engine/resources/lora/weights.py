"""The slots' weights on the device: allocated once, filled on install, read through per-layer views.

Per target: `lora_a [layers, slots, P, R, in]`, `lora_b_t [layers, slots, R, out]`, `scaling [layers, slots, P]`; slot 0 is zero for
good. `scale` and `offset [layers, slots, out]` hold something for adjusted slots alone (DoRA, biases; see host_copy.py). Kernels read ranks
up to the largest in use, so an install zeroes what the last occupant wrote beyond the new one's rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mstar.engine.resources.lora.backends.base import LayerWeights
from mstar.engine.resources.lora.host_copy import HostCopy, TargetCopy
from mstar.engine.resources.lora.spec import LoraSpec, LoraTarget
from mstar.native.pages import HugePages, untouched


class SlotWeights:
    """All slots of one pool on one rank."""

    def __init__(self, spec: LoraSpec, tp_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        slots, cap = spec.max_loras + 1, spec.max_lora_rank
        self._spec = spec
        self._out_sizes = {target.name: target.out_sizes(tp_rank) for target in spec.targets}
        self._lora_a: dict[str, torch.Tensor] = {}
        self._lora_b_t: dict[str, torch.Tensor] = {}
        self._scaling: dict[str, torch.Tensor] = {}
        self._ranks: dict[str, torch.Tensor] = {}
        self._scale: dict[str, torch.Tensor] = {}
        self._offset: dict[str, torch.Tensor] = {}
        sizes = {target.name: (len(target.parts), target.in_size(tp_rank), sum(target.out_sizes(tp_rank))) for target in spec.targets}
        row_size = sum(spec.layers_of(target) * (parts * a + b) for target, (parts, a, b) in zip(spec.targets, sizes.values(), strict=True))
        pairs = _Pairs(slots, cap, row_size, dtype, device)
        for target in spec.targets:
            layers = spec.layers_of(target)
            parts, in_size, out_size = sizes[target.name]
            self._lora_a[target.name], self._lora_b_t[target.name] = pairs.take(layers, parts, in_size, out_size)
            self._scaling[target.name] = torch.zeros(layers, slots, parts, dtype=torch.float32, device=device)
            self._ranks[target.name] = torch.zeros(layers, slots, dtype=torch.int64, device=device)
            self._scale[target.name] = pairs.beside(layers, out_size)
            if target.has_bias and not (target.row_parallel and tp_rank):
                self._offset[target.name] = pairs.beside(layers, out_size)
        self._written = {target.name: [0] * slots for target in spec.targets}
        self._slot_rank = [0] * slots
        self._adjusts = [False] * slots

    @property
    def size_bytes(self) -> int:
        """Device bytes of all slots."""
        kinds = (self._lora_a, self._lora_b_t, self._scaling, self._scale, self._offset)
        return sum(tensor.nbytes for kind in kinds for tensor in kind.values())

    def slot_rank(self, slot: int) -> int:
        """The largest rank of the adapter in `slot`."""
        return self._slot_rank[slot]

    def adjusts(self, slot: int) -> bool:
        """Whether the adapter in `slot` changes the base's own output on this rank."""
        return self._adjusts[slot]

    def squares(self, copies: Sequence[HostCopy]) -> torch.Tensor:
        """This rank's squares of `copies` in row-parallel targets, `[copies, n]` float64 on the host; n follows from the spec alone."""
        rows = []
        for copy in copies:
            parts = []
            for target in self._row_parallel():
                source = copy.targets.get(target.name)
                parts.append(self._no_squares(target) if source is None or source.dora is None else source.dora.squares)
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
        return torch.stack(rows)

    def install(self, slot: int, copy: HostCopy, squares: torch.Tensor | None = None) -> None:
        """Fill `slot` from a host copy, which is only read. Whatever lay there is gone.

        `squares [n]`: this copy's row of `squares`, summed over the ranks; None where no row-parallel target has DoRA.
        """
        summed = self._split(squares)
        self._adjusts[slot] = any(source.dora is not None or source.bias is not None for source in copy.targets.values())
        for target in self._spec.targets:
            name = target.name
            source = copy.targets.get(name)
            scale = None if source is None else _scale(source, summed.get(name))
            if self._adjusts[slot]:
                self._adjust(name, slot, source, scale)
            rank = 0 if source is None else source.lora_a.shape[2]
            stale = self._written[name][slot]
            if source is not None:
                self._lora_a[name][:, slot, :, :rank] = source.lora_a
                self._lora_b_t[name][:, slot, :rank] = source.lora_b_t if scale is None else source.lora_b_t * scale[:, None]
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
            self._lora_a[target][layer_idx],
            self._lora_b_t[target][layer_idx],
            self._scaling[target][layer_idx],
            self._out_sizes[target],
            self._scale[target][layer_idx],
            self._offset[target][layer_idx] if target in self._offset else None,
        )

    def layer_ranks(self, target: str, layer_idx: int) -> torch.Tensor:
        """`[slots]` int64."""
        return self._ranks[target][layer_idx]

    def _adjust(self, name: str, slot: int, source: TargetCopy | None, scale: torch.Tensor | None) -> None:
        """What `slot` makes of the base's output of one target: nothing (1 and 0) where its adapter has nothing there."""
        self._scale[name][:, slot] = 1 if scale is None else scale
        if name in self._offset:
            bias = None if source is None else source.bias
            self._offset[name][:, slot] = 0 if bias is None else bias.own - (bias.base if scale is None else scale * bias.base)

    def _row_parallel(self) -> list[LoraTarget]:
        return [target for target in self._spec.targets if target.row_parallel]

    def _no_squares(self, target: LoraTarget) -> torch.Tensor:
        return torch.zeros(self._spec.layers_of(target), sum(self._out_sizes[target.name]), dtype=torch.float64)

    def _split(self, squares: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """`squares [n]` by target, `[layers, out]` each."""
        if squares is None:
            return {}
        shapes = {target.name: self._no_squares(target).shape for target in self._row_parallel()}
        pieces = torch.split(squares, [shape.numel() for shape in shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _scale(source: TargetCopy, summed: torch.Tensor | None) -> torch.Tensor | None:
    """`[layers, out]` float32: DoRA's magnitude over the norm; None without DoRA."""
    if source.dora is None:
        return None
    squares = source.dora.squares if summed is None else summed
    return (source.dora.magnitude / squares.sqrt()).float()


class _Pairs:
    """Hands out A and B of one target after another, zeroed.

    On a CPU by slot, and in a slot by row of the rank, all targets and layers of one row together: an adapter takes memory up to its own
    rank whatever the cap, a slot without one takes none, and all of it lies in few huge pages.
    """

    def __init__(self, slots: int, cap: int, row_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`row_size`: elements that all targets need for one row."""
        self._slots, self._cap, self._row_size = slots, cap, row_size
        self._dtype, self._device = dtype, device
        self._taken = 0
        size_bytes = slots * cap * row_size * dtype.itemsize
        self._memory = HugePages().take(size_bytes).view(dtype) if device.type == "cpu" else None

    def take(self, layers: int, parts: int, in_size: int, out_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[layers, slots, parts, cap, in]` and `[layers, slots, cap, out]`."""
        shape_a, shape_b = (layers, self._slots, parts, self._cap, in_size), (layers, self._slots, self._cap, out_size)
        if self._memory is None:
            lora_a, lora_b_t = (torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in (shape_a, shape_b))
            return lora_a, lora_b_t
        row, slot, first = self._row_size, self._cap * self._row_size, self._memory.storage_offset() + self._taken
        self._taken += layers * (parts * in_size + out_size)
        lora_a = self._memory.as_strided(shape_a, (parts * in_size, slot, in_size, row, 1), first)
        return lora_a, self._memory.as_strided(shape_b, (out_size, slot, row, 1), first + layers * parts * in_size)

    def beside(self, layers: int, out_size: int) -> torch.Tensor:
        """`[layers, slots, out]` float32 for what few adapters have: on a CPU it takes memory when it is first written."""
        shape = (layers, self._slots, out_size)
        if self._memory is None:
            return torch.zeros(shape, device=self._device)
        return untouched(math.prod(shape) * torch.float32.itemsize).view(torch.float32).view(shape)
