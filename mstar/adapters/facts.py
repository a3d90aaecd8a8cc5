"""What is known of an adapter: `AdapterFacts` from its header, `AdapterTensors` from its bytes.

Plain frozen data that the CLI prints, the front checks requests by and a rank fills slots from. Shapes are global; arrays are
read-only and on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mstar.types import PROJECTIONS

ModuleKey = tuple[int, str]  # (layer index, path below the layer such as `self_attn.q_proj`); (0, `lm_head`), (0, `embed_tokens`)
Dtype = Literal["F32", "F16", "BF16"]


@dataclass(frozen=True)
class AdapterLimits:
    """What this server takes. `roots` are the folders that adapters, and what links in them lead to, may lie in.

    `target_modules` are the leaf names that it applies adapters to; `slot_dtype` is what A and B are cast to.
    """

    max_lora_rank: int
    roots: tuple[Path, ...]
    target_modules: tuple[str, ...] = PROJECTIONS
    slot_dtype: Dtype = "F32"


@dataclass(frozen=True)
class ModuleFacts:
    """One adapted projection. `scaling` is what `B @ A` is multiplied by; `kinds` are the kinds of tensors it has."""

    rank: int
    scaling: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class BaseCopyFacts:
    """A copy of a base weight in the adapter's file, to be ignored if equal to the base's weight `module` and else refused."""

    key: str
    module: str
    shape: tuple[int, int]
    dtype: Dtype


@dataclass(frozen=True)
class AdapterFacts:
    """All that config and header tell of an adapter that may be served.

    `size_bytes` is the sum of the weight files, `files` the names that the digest covers. `chat_template` and `added_tokens` come
    from the tokenizer's files beside it and are read by `inspect_adapter` alone.
    """

    modules: Mapping[ModuleKey, ModuleFacts]
    max_rank: int
    size_bytes: int
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    base_copies: tuple[BaseCopyFacts, ...]
    chat_template: str | None
    added_tokens: Mapping[str, int]


@dataclass(frozen=True)
class LoraPair:
    """The two factors of one projection: delta weight = `scaling * lora_b @ lora_a`.

    `lora_a [r, in]`, `lora_b [out, r]`: float32, float16, or for BF16 the bit patterns as uint16. Read-only. For an embedding `in` is
    the vocabulary. `bias [out]` takes the place of the base's bias; `magnitude [out]` (DoRA) is the length that each row of
    `weight + delta weight` is brought to; both float32, None where the adapter has none.
    """

    lora_a: NDArray[Any]
    lora_b: NDArray[Any]
    scaling: float
    dtype: Dtype
    bias: NDArray[np.float32] | None = None
    magnitude: NDArray[np.float32] | None = None

    @property
    def rank(self) -> int:
        """The `r` of this pair."""
        return int(self.lora_a.shape[0])


@dataclass(frozen=True)
class BaseCopy:
    """The values of a copy of a base weight, `[out, in]` (`[vocab, hidden]` for an embedding); BF16 as uint16. Read-only."""

    module: str
    values: NDArray[Any]
    dtype: Dtype


@dataclass(frozen=True)
class AdapterTensors:
    """One adapter as read and checked. The arrays are views on the buffers of the read: they live as long as one of them."""

    facts: AdapterFacts
    digest: str
    pairs: Mapping[ModuleKey, LoraPair]
    base_copies: Mapping[str, BaseCopy]  # by the key in the file


def as_float32(values: NDArray[Any], dtype: Dtype) -> NDArray[np.float32]:
    """`values` of `dtype` as float32, exactly (a widening); a new array unless it already is."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
