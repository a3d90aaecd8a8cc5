"""Which LoRA backend a pool takes where none is given."""

from __future__ import annotations

import torch

from mstar.engine.resources.lora.backends.base import LoraBackend
from mstar.engine.resources.lora.backends.cpu_backend import CpuLoraBackend
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend


def default_backend(device: torch.device, dtype: torch.dtype) -> LoraBackend:
    """The C++ kernel on a CPU that has a compiler, else plain torch."""
    native = CpuLoraBackend.create(dtype) if device.type == "cpu" else None
    return native or TorchLoraBackend()
