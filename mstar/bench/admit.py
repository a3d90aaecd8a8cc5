"""`mstar bench admit`: what the pool costs a step, whatever is registered.

One process, one thread, real pools over a tiny model (the cost of copying weights is `bench kernel`'s matter), adapters read from memory.
A steady step is admit + plan + commit for 256 rows that hold their slots; a step with a miss has one row on an adapter that is in no slot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mstar.engine.resources.base import ResourceReqConfig, StepContext
from mstar.engine.resources.lora.host_copy import HostCopy, TargetCopy
from mstar.engine.resources.lora.pool import LoraAdapterPool, LoraStep
from mstar.engine.resources.lora.spec import LoraPart, LoraSpec, LoraTarget
from mstar.types import SamplingParams, Step

NUM_ROWS = 256
WIDTH = 16
SAMPLING = SamplingParams(max_tokens=1, seed=0)


@dataclass(frozen=True)
class AdmitCost:
    """Medians in microseconds, and the collectives of the measured steady steps."""

    num_registered: int
    num_slots: int
    steady_us: float
    miss_us: float
    steady_agreements: int


def measure_admit(num_registered: int, num_slots: int, num_steps: int = 200) -> AdmitCost:
    """The cost of steady steps and of steps with one miss, with so many adapters registered and slots on the device."""
    pool = _pool(num_slots)
    for index in range(num_registered):
        pool.register_adapter(f"a{index}", f"/nowhere/{index}")
    try:
        used = min(num_registered - 1, num_slots - 1) or 1
        rids = tuple(f"r{index}" for index in range(NUM_ROWS))
        for index, rid in enumerate(rids):
            pool.ingest_request(rid, ResourceReqConfig((1,), SAMPLING, f"a{index % used}"))
        pool.store.wait([f"a{index}" for index in range(used)], 30.0)
        step = LoraStep(rids, (1,) * NUM_ROWS)
        _run(pool, step)
        before = pool.num_agreements
        steady = _median_us(num_steps, lambda index: _run(pool, LoraStep(rids, (1,) * NUM_ROWS)))
        agreements = pool.num_agreements - before
        misses = [_miss_us(pool, rids, f"m{index}", f"a{used + index % max(1, num_registered - used)}") for index in range(num_steps)]
        return AdmitCost(num_registered, num_slots, steady, statistics.median(misses), agreements)
    finally:
        pool.close()


def measure_all(registered: Sequence[int], slots: Sequence[int]) -> list[AdmitCost]:
    """The grid."""
    return [measure_admit(count, size) for count in registered for size in slots]


def _miss_us(pool: LoraAdapterPool, rids: tuple[str, ...], rid: str, adapter: str) -> float:
    """One step in which `rid` needs a slot for `adapter`; then it is gone again."""
    pool.ingest_request(rid, ResourceReqConfig((1,), SAMPLING, adapter))
    pool.store.wait([adapter], 30.0)
    step = LoraStep((*rids[:-1], rid), (1,) * NUM_ROWS)
    began = time.perf_counter()
    _run(pool, step)
    elapsed = time.perf_counter() - began
    pool.remove_request(rid)
    return elapsed * 1e6


def _run(pool: LoraAdapterPool, step: LoraStep) -> None:
    ctx = StepContext(Step(1, ()))
    pool.admit(step, ctx)
    pool.plan(step, ctx)
    pool.commit(step, ctx)


def _median_us(num_steps: int, run: Callable[[int], None]) -> float:
    times = []
    for index in range(num_steps):
        began = time.perf_counter()
        run(index)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _pool(num_slots: int) -> LoraAdapterPool:
    cut = ((0, WIDTH),)
    target = LoraTarget("qkv_proj", (LoraPart("self_attn.q_proj", WIDTH, WIDTH, cut, cut),))
    spec = LoraSpec((target,), num_layers=1, max_loras=num_slots, max_lora_rank=4, max_cpu_loras=2 * num_slots)
    weights = TargetCopy(torch.ones(1, 1, 4, WIDTH), torch.ones(1, 4, WIDTH), torch.ones(1, 1), (4,))
    copy = HostCopy("0", {"qkv_proj": weights}, 4, 0)
    return LoraAdapterPool(spec, "cpu", read=lambda path, digest, cancelled: copy)
