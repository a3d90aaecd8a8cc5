"""A conductor over ranks that are real LoRA pools in this process: `PoolRanks` stands behind the seam of `RankLinks`.

A rank does what `worker/shell.py` does with the front's messages, without steps: it loads, registers, unloads, ingests and removes. What a
rank would say of steps (tokens, failures) is said by the test. Reads are those of the pool, with a seam that a test may make fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.adapters import BaseShapes
from mstar.conductor import conductor as conductor_module
from mstar.conductor.conductor import Conductor
from mstar.conductor.links import RankLinks
from mstar.conductor.metrics import Metrics
from mstar.conductor.registry_file import RegistryFile
from mstar.conductor.types import Generation
from mstar.config import ServeConfig
from mstar.engine.resources.base import ResourceReqConfig
from mstar.engine.resources.lora.host_copy import HostCopy, HostReader
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.resources.lora.spec import LoraSpec
from mstar.errors import AdapterError, RequestError
from mstar.models.arch import load_arch
from mstar.models.lora_targets import lora_spec
from mstar.types import SamplingParams
from mstar.wire import front_rank
from tests.unit.adapters.adapter_folders import CONFIG

MAX_LORA_RANK = 16
PATIENCE_S = 30.0


class Reads:
    """One rank's reader, real, with faults: paths in `broken` cannot be read; those in `held` wait until the test lets them go."""

    def __init__(self, spec: LoraSpec, tp_rank: int) -> None:
        self._read = HostReader(spec, tp_rank, torch.float32)
        self.broken: set[str] = set()
        self.gate: Callable[[str], None] = lambda path: None
        self.paths: list[str] = []

    def __call__(self, path: str, digest: str | None, cancelled: Callable[[], bool]) -> HostCopy:
        self.paths.append(path)
        self.gate(path)
        if path in self.broken:
            raise AdapterError(f"{path} cannot be read", code="adapter_unreadable")
        return self._read(path, digest, cancelled)


class PoolRanks(RankLinks):
    """All ranks of an instance. `sent` is every message, by rank, in order."""

    def __init__(self, endpoint: str, front_epoch: str, tp_size: int, **callbacks: Any) -> None:
        self.tp_size = tp_size
        self.on_up, self.on_down, self.on_message = callbacks["on_up"], callbacks["on_down"], callbacks["on_message"]
        self.sent: list[list[front_rank.ToRank]] = [[] for _ in range(tp_size)]
        self.pools: list[LoraAdapterPool] = []
        self.reads: list[Reads] = []
        self.up = False
        self.answers_loads = True

    @property
    def is_up(self) -> bool:
        return self.up

    @property
    def num_ready(self) -> int:
        return self.tp_size if self.up else 0

    def silent(self) -> str | None:
        return None

    def begin(self, config: ServeConfig) -> None:
        """Fresh ranks, with empty tables."""
        self.loop = asyncio.get_running_loop()
        arch = load_arch(config.model)
        base = BaseShapes.from_config(json.loads((Path(config.model) / "config.json").read_text()))
        spec = dataclasses.replace(
            lora_spec(arch, self.tp_size, max_loras=config.max_loras, max_lora_rank=MAX_LORA_RANK, max_cpu_loras=config.host_tier_size),
            base=base,
            roots=config.read_roots,
            max_cpu_lora_bytes=config.max_cpu_lora_bytes,
        )
        self.close_pools()
        self.reads = [Reads(spec, tp_rank) for tp_rank in range(self.tp_size)]
        self.pools = [
            LoraAdapterPool(
                spec, "cpu", tp_rank, self.tp_size, agree=lambda statuses: statuses, decides=tp_rank == 0, read=self.reads[tp_rank]
            )
            for tp_rank in range(self.tp_size)
        ]
        self.sent = [[] for _ in range(self.tp_size)]
        self.up = True
        self.on_up(tuple(front_rank.RankReady(rank, self.tp_size, 1000 + rank, 64, 128, 0, 0, "torch") for rank in range(self.tp_size)))

    def die(self, reason: str = "killed") -> None:
        """The ranks are gone."""
        self.up = False
        self.on_down(reason)

    def start(self) -> None:
        """Nothing to listen to."""

    async def close(self) -> None:
        self.close_pools()

    def close_pools(self) -> None:
        for pool in self.pools:
            pool.close()

    def send_all(self, message: front_rank.ToRank) -> None:
        for tp_rank in range(self.tp_size):
            self.send(tp_rank, message)

    def send(self, tp_rank: int, message: front_rank.ToRank) -> None:
        if not self.up:
            return
        self.sent[tp_rank].append(message)
        pool = self.pools[tp_rank]
        if isinstance(message, front_rank.Ingest):
            config = ResourceReqConfig(message.prompt, message.sampling, message.adapter, message.cache_key, message.output)
            pool.ingest_request(message.rid, config)
        elif isinstance(message, front_rank.Load):
            self._load(tp_rank, message)
        elif isinstance(message, front_rank.Unload):
            pool.unload_adapter(message.name)
        elif isinstance(message, front_rank.Abort):
            for each in self.pools:
                each.remove_request(message.rid)

    def _load(self, tp_rank: int, message: front_rank.Load) -> None:
        pool = self.pools[tp_rank]
        try:
            if not message.verify:
                pool.register_adapter(message.name, message.path, message.digest, has_something=message.has_something)
                self._answer(tp_rank, message.load_id, None)
                return
            future = pool.load_adapter_async(message.name, message.path, message.digest)
        except RequestError as error:
            self._answer(tp_rank, message.load_id, error)
            return
        if self.answers_loads:
            future.add_done_callback(lambda done: self._answer_from_reader(tp_rank, message.load_id, done))

    def _answer_from_reader(self, tp_rank: int, load_id: int, done: Future[None]) -> None:
        self.loop.call_soon_threadsafe(self._answer, tp_rank, load_id, done.exception())

    def _answer(self, tp_rank: int, load_id: int, error: BaseException | None) -> None:
        if error is None:
            self.on_message(tp_rank, front_rank.LoadResult(load_id))
        else:
            assert isinstance(error, RequestError), error
            self.on_message(tp_rank, front_rank.LoadResult(load_id, error.code, error.message, error.status))

    # what tests ask

    def of(self, kind: type, tp_rank: int = 0) -> list[Any]:
        """The messages of one kind that a rank was sent."""
        return [message for message in self.sent[tp_rank] if isinstance(message, kind)]

    def kept(self) -> list[list[str]]:
        """Per rank, everything that it keeps under some generation: served names, loads under way, retiring ones."""
        return [
            sorted({*pool.store._served, *pool._loading, *pool._retiring, *pool._has_something, *pool.store._entries})
            for pool in self.pools
        ]

    def finish(self, rid: str) -> None:
        """The request's last token: it ends, and the ranks remove it."""
        self.on_message(0, front_rank.Tokens(1, (front_rank.TokenOut(rid, 0, 5, finish_reason="stop"),)))
        for pool in self.pools:
            pool.remove_request(rid)


@asynccontextmanager
async def served(
    model: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int = 2, registry_file_object: RegistryFile | None = None, **settings: Any
) -> AsyncIterator[tuple[Conductor, PoolRanks]]:
    """A started conductor over ready ranks. Adapters may lie beside the model's folder."""
    monkeypatch.setattr(conductor_module, "RankLinks", PoolRanks)
    settings = {"max_loras": 2, "max_lora_rank": MAX_LORA_RANK, "lora_root": (str(model.parent),), **settings}
    config = ServeConfig(model=str(model), served_model_name="base", tensor_parallel_size=tp_size, max_model_len=128, **settings)
    conductor = Conductor(config, "inproc://unused", Metrics("base"), registry_file_object)
    links = conductor._links
    assert isinstance(links, PoolRanks)
    await conductor.start()
    links.begin(config)
    try:
        yield conductor, links
    finally:
        await links.close()


def generation(model: str) -> Generation:
    """A small request."""
    return Generation(model, (5, 6, 7), SamplingParams(max_tokens=4, seed=1))


def save_config(folder: Path) -> Path:
    """A model folder that has what a conductor reads: its config.json."""
    folder.mkdir(parents=True)
    further = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **further, "eos_token_id": 2}))
    return folder
