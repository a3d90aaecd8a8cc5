"""What a rank's reader takes from the base's weights for one adapter: equality of copies, rows' squared norms (DoRA), biases.

Reader thread. The values are those of the base's files; a bias is rounded to the served dtype, as the product holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mstar.adapters import BaseCopy, BaseFiles, BaseShapes, Dtype, LoraPair, as_float32, check_base_copies
from mstar.types import EMBEDDING

Range = tuple[int, int]  # [start, stop)
Cancelled = Callable[[], bool]


class BaseWeights:
    """The weights of `base` in `files`, served in `dtype`."""

    def __init__(self, base: BaseShapes, files: BaseFiles, dtype: torch.dtype) -> None:
        self._base = base
        self._files = files
        self._dtype = dtype

    def check_copies(self, copies: Mapping[str, BaseCopy], share: tuple[int, int], cancelled: Cancelled) -> None:
        """Raises AdapterError where a copy is not the base's weight; of each, the rows of share `i` of `n` are compared."""
        check_base_copies(copies, self._base, self._files, share, cancelled)

    def bias(self, layer: int, leaf: str, out: Range, cancelled: Cancelled) -> torch.Tensor:
        """`[out]` float32, the rows `out` of the bias as the product adds it."""
        name = self._base.weight_name(layer, leaf).removesuffix("weight") + "bias"
        pieces = [as_float32(values, dtype) for _, values, dtype in self._files.chunks(name, out, cancelled)]
        return torch.from_numpy(np.concatenate(pieces)).to(self._dtype).float() if pieces else torch.zeros(0)

    def squares(self, layer: int, leaf: str, pair: LoraPair, out: Range, inputs: Range, cancelled: Cancelled) -> torch.Tensor:
        """`[out]` float64: over the columns `inputs`, the squares of W + scaling · B A, summed for each of the rows `out`."""
        lora_a = _float(pair.lora_a[:, slice(*inputs)], pair.dtype)
        lora_b = pair.scaling * _float(pair.lora_b[slice(*out)], pair.dtype)
        name = self._base.weight_name(layer, leaf)
        total = torch.zeros(out[1] - out[0], dtype=torch.float64)
        if leaf == EMBEDDING:  # stored [in, out]: rows of the file are inputs
            for first, values, dtype in self._files.chunks(name, inputs, cancelled, out):
                columns = slice(first - inputs[0], first - inputs[0] + len(values))
                weight = torch.addmm(_float(values, dtype), lora_a[:, columns].t(), lora_b.t())
                total += torch.linalg.vector_norm(weight, dim=0).double().square()
            return total
        for first, values, dtype in self._files.chunks(name, out, cancelled, inputs):
            rows = slice(first - out[0], first - out[0] + len(values))
            weight = torch.addmm(_float(values, dtype), lora_b[rows], lora_a)
            total[rows] = torch.linalg.vector_norm(weight, dim=1).double().square()
        return total


def _float(values: NDArray[Any], dtype: Dtype) -> torch.Tensor:
    """`values` as float32."""
    return as_tensor(values, dtype).float()


def as_tensor(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """What was read, as torch sees it; BF16 comes as uint16 bit patterns. A copy where the buffer is an adapter's, which goes away."""
    own = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    return torch.from_numpy(own).view(torch.bfloat16) if dtype == "BF16" else torch.from_numpy(own)
