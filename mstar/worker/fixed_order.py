"""`--deterministic`: what must hold so that a request's bits depend on nothing but itself.

Our CPU kernels take every sum of a token in an order that its own shapes fix: not the threads, not what else is in the batch, not how
its prompt was cut into chunks or whether it was computed a second time. So the mode costs nothing there; all it does is to refuse a
start in which any part of a step would go another way.
"""

from __future__ import annotations

from mstar.config import ServeConfig
from mstar.distributed.comm import CommGroup
from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.cpu_backend import CpuAttention
from mstar.engine.resources.lora.backends.cpu_backend import CpuLoraBackend
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.errors import ConfigError
from mstar.models.decoder import Decoder


def require_fixed_order(
    config: ServeConfig, decoder: Decoder, attention: AttentionBackend, pool: LoraAdapterPool | None, comm: CommGroup
) -> None:
    """Raises ConfigError with the first part of a step that has no fixed order."""
    kernels = "needs the C++ kernels: a CPU, bfloat16 or float32, and a C++ compiler (the log says why there is none)"
    if not (decoder.has_fixed_order and isinstance(attention, CpuAttention)):
        raise ConfigError(f"--deterministic {kernels}")
    if pool is not None and not isinstance(pool.backend, CpuLoraBackend):
        raise ConfigError(f"--deterministic {kernels}")
    if "embed_tokens" in config.lora_target_modules:
        raise ConfigError("--deterministic does not cover embed_tokens in lora_target_modules")
    if comm.tp_size > 2 and comm.host_memory is None:  # two summands have one order
        raise ConfigError("--deterministic needs all ranks on one host where there are more than two: sums over TCP have no fixed order")
