"""`mstar bench step`: decode steps of real ranks in this one process, in alternating blocks, as ratios.

One rank at TP 1 per server setting, driven by hand through its runner: no HTTP, no sockets, no scheduler. A block is: ingest the rows,
prefill them, time `steps` decode steps one by one, remove them. Blocks of all loads take turns, every other round backwards, so
that whatever else the machine does falls on all of them alike; a ratio is the median over the rounds of the two blocks' medians.

    setting     slots                     loads (rows of a step)
    off         LoRA disabled             base
    on          one slot a row, rank 16   base · mixed (a row each: rank 8 and 16 in turn) · one (all rows on one adapter)
    cap 8, 64   one slot a row, that cap  eight (mixed, all of rank 8)
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mstar.bench.peers import make_adapters
from mstar.config import ServeConfig
from mstar.engine.resources.base import ResourceReqConfig
from mstar.launch import RankLaunch
from mstar.types import Row, SamplingParams, Step
from mstar.worker.build import Rank, build_rank

PROMPT_TOKENS = 64
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Load:
    """Rows of one setting: the adapter of each, None for the base."""

    setting: str
    name: str
    adapters: tuple[str | None, ...]


@dataclass(frozen=True)
class StepRatio:
    """How much of `base`'s speed `load` keeps: the median over the rounds, and its spread."""

    name: str
    load: str
    base: str
    kept: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class StepResult:
    """Median milliseconds of a decode step by load and round, and the ratios."""

    batch: int
    context: int
    steps: int
    median_ms: dict[str, list[float]]
    ratios: list[StepRatio]


COMPARED = (
    ("LoRA enabled, base rows / LoRA disabled", "on base", "off base"),
    ("one adapter / base", "on one", "on base"),
    ("mixed adapters / base", "on mixed", "on base"),
    ("rank cap 64, rank 8 in use / rank cap 8", "cap64 eight", "cap8 eight"),
)


def measure_steps(model: Path, batch: int, rounds: int, steps: int, threads: int | None) -> StepResult:
    """Measure all loads on `model` with `batch` rows. Raises ConfigError where the model cannot be served."""
    every = [str(path) for path in make_adapters(model, 2 * batch)]
    mixed, eights = tuple(every[:batch]), tuple(every[::2])
    loads = (
        Load("off", "base", (None,) * batch),
        Load("on", "base", (None,) * batch),
        Load("on", "one", (eights[0],) * batch),
        Load("on", "mixed", mixed),
        Load("cap8", "eight", eights),
        Load("cap64", "eight", eights),
    )
    caps = {"off": None, "on": 16, "cap8": 8, "cap64": 64}
    median_ms: dict[str, list[float]] = {f"{load.setting} {load.name}": [] for load in loads}
    with tempfile.TemporaryDirectory() as workdir:
        ranks = {setting: _Driven(_rank(model, workdir, cap, batch, threads)) for setting, cap in caps.items()}
        try:
            for load in loads:
                ranks[load.setting].block(load.adapters, 3)  # reads the adapters, warms the caches
            for index in range(rounds):
                for load in loads if index % 2 == 0 else reversed(loads):
                    times = ranks[load.setting].block(load.adapters, steps)
                    median_ms[f"{load.setting} {load.name}"].append(statistics.median(times) * 1e3)
        finally:
            for driven in ranks.values():
                driven.close()
    ratios = [_ratio(name, load, base, median_ms) for name, load, base in COMPARED]
    return StepResult(batch, PROMPT_TOKENS + steps, steps, median_ms, ratios)


def _ratio(name: str, load: str, base: str, median_ms: dict[str, list[float]]) -> StepRatio:
    kept = [of_base / of_load for of_base, of_load in zip(median_ms[base], median_ms[load], strict=True)]
    return StepRatio(name, load, base, statistics.median(kept), min(kept), max(kept))


def _rank(model: Path, workdir: str, cap: int | None, batch: int, threads: int | None) -> Rank:
    config = ServeConfig(
        model=str(model),
        threads_per_rank=threads,
        enable_lora=cap is not None,
        max_loras=batch,
        max_lora_rank=cap or 1,
        max_num_batched_tokens=max(512, batch * PROMPT_TOKENS),
        max_num_seqs=batch,
        max_model_len=_MAX_MODEL_LEN,
        num_gpu_blocks_override=batch * _MAX_MODEL_LEN // 16,
        enable_prefix_caching=False,
    )
    launch = RankLaunch(config=config, front_endpoint="", leader_endpoint="", store="", run_dir=workdir)
    return build_rank(launch, 0, lambda name: None)


class _Driven:
    """A rank and the count of its steps and requests."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._seq = itertools.count(1)
        self._numbers = itertools.count()
        self._known: set[str] = set()

    def block(self, adapters: Sequence[str | None], steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps."""
        with self._rows(adapters) as rids:
            self._step(Row(rid, 0, PROMPT_TOKENS) for rid in rids)
            times = []
            for start in range(PROMPT_TOKENS, PROMPT_TOKENS + steps):
                began = time.perf_counter()
                self._step(Row(rid, start, 1) for rid in rids)
                times.append(time.perf_counter() - began)
        return times

    def close(self) -> None:
        """Stop the rank's reader."""
        if self._rank.pool is not None:
            self._rank.pool.close()

    def _step(self, rows: Iterator[Row]) -> None:
        outcome = self._rank.runner.execute(Step(next(self._seq), tuple(rows)))
        assert not outcome.failed, outcome.failed

    @contextmanager
    def _rows(self, adapters: Sequence[str | None]) -> Iterator[list[str]]:
        pool, runner = self._rank.pool, self._rank.runner
        rids = []
        for adapter in adapters:
            if adapter is not None and adapter not in self._known:
                assert pool is not None
                pool.register_adapter(adapter, adapter)
                self._known.add(adapter)
            number = next(self._numbers)
            rids.append(f"r{number}")
            prompt = tuple((number * 131 + 17 * index) % 1000 + 100 for index in range(PROMPT_TOKENS))
            sampling = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0, ignore_eos=True)
            runner.ingest(rids[-1], ResourceReqConfig(prompt, sampling, adapter, (adapter or "").encode()))
        if pool is not None:
            pool.store.wait([adapter for adapter in adapters if adapter is not None], 60.0)
        yield rids
        for rid in rids:
            runner.remove(rid)
