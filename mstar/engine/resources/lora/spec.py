"""What a LoRA pool is built for: the target linears, how each is cut over the ranks, and the pool's bounds.

A *target* is one linear of the model as it runs (`qkv_proj` is one matmul); its *parts* are the projections that PEFT names
(`q_proj`, `k_proj`, `v_proj`), side by side in the output. Column-parallel: `lora_a` whole, `lora_b` cut by output rows.
Row-parallel: `lora_a` cut by input columns, `lora_b` whole, one sum with the base's. No collective is added.

Pure data: no torch. The same on every rank; a rank reads its own cut by its `tp_rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mstar.adapters import BaseShapes
from mstar.types import PROJECTIONS

Range = tuple[int, int]  # [start, stop)

LOGITS_ROWS = -1  # a row grouping: the step's rows that give logits, as many per segment as the step says


@dataclass(frozen=True)
class LoraPart:
    """One PEFT projection inside a target.

    `module` is its path below a layer (`self_attn.q_proj`); features are global; `out_ranges[tp_rank]` are the rows of
    `lora_b [out, r]` and `in_ranges[tp_rank]` the columns of `lora_a [r, in]` that the rank holds.
    """

    module: str
    in_features: int
    out_features: int
    in_ranges: tuple[Range, ...]
    out_ranges: tuple[Range, ...]


@dataclass(frozen=True)
class LoraTarget:
    """One linear of the model as it runs.

    `row_grouping` is how many step tokens one row of the target stands for: 1 for most, k where a row folds k tokens,
    0 where there is one row per segment, LOGITS_ROWS at the head. `once` is set where the model has one of it and not one a layer (its
    layer index is 0). `has_bias`: the base's linear has a bias, which an adapter may replace. `is_embedding`: its input are token ids,
    each standing for one column of `lora_a`.
    """

    name: str
    parts: tuple[LoraPart, ...]
    row_parallel: bool = False
    row_grouping: int = 1
    once: bool = False
    has_bias: bool = False
    is_embedding: bool = False

    def in_size(self, tp_rank: int) -> int:
        """Input columns on this rank (all parts share the input)."""
        start, stop = self.parts[0].in_ranges[tp_rank]
        return stop - start

    def out_sizes(self, tp_rank: int) -> tuple[int, ...]:
        """Output rows of each part on this rank, in order."""
        return tuple(stop - start for start, stop in (part.out_ranges[tp_rank] for part in self.parts))


@dataclass(frozen=True)
class LoraSpec:
    """One node's pool: targets × layers, and its bounds.

    `max_loras` slots besides slot 0; `max_lora_rank` is the largest `r` a slot holds; `max_cpu_loras` host copies on each rank, of at
    most `max_cpu_lora_bytes` together (None: no such bound).
    `adapters` are those configured at startup (name to folder), servable without a load call. `base` is what adapter folders are
    checked against, `base_folder` where its files lie: without it an adapter that has to be compared with the base's weights, or
    computed from them, is refused. `target_modules` are the leaf names that adapters may have tensors for. The three bounds are
    seconds: a read; the leader's wait for the followers' copies; a follower's wait in admit.
    """

    targets: tuple[LoraTarget, ...]
    num_layers: int
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    max_cpu_lora_bytes: int | None = None
    node_name: str = "llm"
    graph_walks: tuple[str, ...] = ("step",)
    adapters: Mapping[str, str] = field(default_factory=dict)
    base: BaseShapes | None = None
    base_folder: str | None = None
    target_modules: tuple[str, ...] = PROJECTIONS
    roots: tuple[str, ...] = ()  # folders that adapter files may lie in; empty: the adapter's own
    read_timeout_s: float = 30.0
    hint_wait_s: float = 2.0
    copy_wait_s: float = 45.0

    def layers_of(self, target: LoraTarget) -> int:
        """How many of `target` the model has."""
        return 1 if target.once else self.num_layers

    def has_target(self, name: str) -> bool:
        """Whether adapters may adapt the linear `name`."""
        return any(target.name == name for target in self.targets)

    @property
    def tp_size(self) -> int:
        """Over how many ranks the targets are cut."""
        return len(self.targets[0].parts[0].in_ranges)

    def target(self, name: str) -> LoraTarget:
        """The target called `name`; KeyError when the spec has none."""
        for target in self.targets:
            if target.name == name:
                return target
        raise KeyError(f"no LoRA target {name!r}; this pool has {[t.name for t in self.targets]}")
