"""Builds one rank: collectives, weights, slots, pages, sockets. In the order in which memory is taken: slots before pages."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mstar.adapters import BaseShapes
from mstar.config import ServeConfig
from mstar.distributed.comm import CommGroup, init_comm
from mstar.distributed.linear import Delta
from mstar.distributed.shards import plan_heads
from mstar.engine.resources.attention.select import default_attention
from mstar.engine.resources.base import Resource
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.runner import Runner
from mstar.errors import ConfigError
from mstar.launch import RankLaunch
from mstar.models.arch import ModelArch, load_arch
from mstar.models.loader import load_decoder, weights_bytes
from mstar.models.lora_targets import lora_spec
from mstar.worker.fixed_order import require_fixed_order
from mstar.worker.meeting import Meeting
from mstar.worker.model import TorchModel

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadAgreement:
    """The load agreement: one MAX all-reduce of a vector of fixed size, since a step has at most as many misses as rows.

    `on_result` sees each outcome, without the padding.
    """

    def __init__(self, comm: CommGroup, width: int) -> None:
        self._comm = comm
        self._width = width
        self.on_result: Callable[[list[int]], None] = lambda result: None

    def __call__(self, statuses: list[int]) -> list[int]:
        """The elementwise maximum over the ranks. Raises WorkerError when a rank is gone or the bound is over."""
        padding = [0] * (self._width - len(statuses))
        result = self._comm.agree_max([*statuses, *padding])[: len(statuses)]
        self.on_result(result)
        return result


@dataclass(frozen=True)
class Rank:
    """One rank, ready to step."""

    launch: RankLaunch
    meeting: Meeting
    config: ServeConfig
    tp_rank: int
    arch: ModelArch
    comm: CommGroup
    runner: Runner
    pool: LoraAdapterPool | None
    kv: KvResource
    agreement: LoadAgreement
    max_model_len: int
    weights_bytes: int
    slots_bytes: int


def build_rank(launch: RankLaunch, tp_rank: int, on_copy: Callable[[str], None]) -> Rank:
    """Join the instance and load this rank's shard. Raises ConfigError, WorkerError."""
    config = launch.config
    tp_size = config.tensor_parallel_size
    torch.set_num_threads(config.threads_per_rank or max(1, (os.cpu_count() or 1) // tp_size))
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", tp_rank % torch.cuda.device_count())
    meeting = Meeting(launch.store, tp_rank, tp_size, config.start_timeout_s)
    store = meeting.store if meeting.store is not None else launch.store
    comm = init_comm(tp_rank, tp_size, store, device, config.stuck_rank_timeout_s, config.agreement_timeout_s)
    arch = load_arch(config.model)
    dtype = DTYPES[arch.dtype if config.dtype == "auto" else config.dtype]
    max_model_len = config.max_model_len or min(arch.max_position_embeddings, 8192)
    agreement = LoadAgreement(comm, config.max_num_seqs)
    pool = _build_pool(config, arch, comm, agreement, dtype, device, on_copy) if config.enable_lora else None
    heads = plan_heads(arch.num_heads, arch.num_kv_heads, tp_size)
    first, last = heads.kv_ranges[tp_rank]
    page_bytes = KvCache.page_bytes(arch.num_layers, config.block_size, last - first, arch.head_dim, dtype)
    wanted = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // tp_size // page_bytes
    num_pages = comm.all_reduce_min(wanted)
    if num_pages * config.block_size < max_model_len:  # preflight sees to it; a request that never fits would block the queue
        room = num_pages * config.block_size
        raise ConfigError(f"max_model_len is {max_model_len}, but {num_pages} KV pages of {config.block_size} hold {room} tokens")
    cache = KvCache(arch.num_layers, num_pages, config.block_size, last - first, arch.head_dim, dtype, device)
    attention = default_attention(cache, heads.kv_of_query(tp_rank), arch.head_dim**-0.5, arch.windows)
    deltas = None if pool is None else partial(_delta, pool)
    decoder = load_decoder(config.model, arch, comm, dtype, device, max_model_len, attention, deltas)
    if config.deterministic:
        require_fixed_order(config, decoder, attention, pool, comm)
    kv = KvResource(KvSpec(num_pages, config.block_size, config.enable_prefix_caching), decides=tp_rank == 0)
    resources: list[Resource] = [kv] if pool is None else [pool, kv]
    fence = partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
    runner = Runner(resources, TorchModel(decoder, attention, arch.eos_token_ids, device), fence)
    held = weights_bytes(decoder)
    slots = 0 if pool is None else pool.size_bytes
    log.info(
        "TP rank %d: %.0f MB weights, %.0f MB slots (%d adapters of rank %d), %d KV pages of %d tokens (%.0f MB), %s on %s, %d threads",
        tp_rank, held / 1e6, slots / 1e6, config.max_loras, config.max_lora_rank, num_pages, config.block_size,
        num_pages * page_bytes / 1e6, str(dtype).removeprefix("torch."), device, torch.get_num_threads(),
    )  # fmt: skip
    return Rank(launch, meeting, config, tp_rank, arch, comm, runner, pool, kv, agreement, max_model_len, held, slots)


def _delta(pool: LoraAdapterPool, target: str, layer_idx: int) -> Delta | None:
    """What the decoder calls at one linear; None where this server's adapters do not adapt it."""
    return pool.layer_delta(target, layer_idx) if pool.spec.has_target(target) else None


def _build_pool(
    config: ServeConfig,
    arch: ModelArch,
    comm: CommGroup,
    agreement: LoadAgreement,
    dtype: torch.dtype,
    device: torch.device,
    on_copy: Callable[[str], None],
) -> LoraAdapterPool:
    spec = lora_spec(
        arch,
        comm.tp_size,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_cpu_loras=config.host_tier_size,
        target_modules=config.lora_target_modules,
    )
    base = BaseShapes.from_config(json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8")))
    spec = dataclasses.replace(
        spec,
        base=base,
        base_folder=config.model,
        max_cpu_lora_bytes=config.max_cpu_lora_bytes,
        roots=config.read_roots,
        read_timeout_s=config.lora_read_timeout_s,
        hint_wait_s=config.hint_wait_s,
        copy_wait_s=(config.lora_read_timeout_s + config.agreement_timeout_s) / 2,
    )
    return LoraAdapterPool(
        spec,
        device,
        comm.tp_rank,
        comm.tp_size,
        dtype=dtype,
        agree=agreement,
        add_up=comm.agree_sum,
        decides=comm.tp_rank == 0,
        on_copy=on_copy,
    )
