"""Real pools in one process: a tiny spec, adapters made from their path, reads that a test lets through, an agreement of N ranks.

Two seams are replaced, both constructor arguments of the pool: `read` (by `Reads`) and `agree` (by `Agreement`). All else is the code
that serves. Nothing here sleeps: whoever waits is woken by the event it waits for, and `PATIENCE_S` only ends a test that would hang.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mstar.adapters import AdapterFacts, AdapterTensors, LoraPair
from mstar.distributed.shards import even_cuts
from mstar.engine.resources.base import ResourceReqConfig, StepContext
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend
from mstar.engine.resources.lora.host_copy import HostCopy, HostReader
from mstar.engine.resources.lora.pool import LoraAdapterPool, LoraStep
from mstar.engine.resources.lora.slots import IN_FLIGHT
from mstar.engine.resources.lora.spec import LoraPart, LoraSpec, LoraTarget
from mstar.errors import AdapterError
from mstar.types import Row, SamplingParams, Step

PATIENCE_S = float(os.environ.get("MSTAR_TEST_PATIENCE_S", "30"))
HIDDEN, WIDTH, LAYERS, MAX_RANK = 6, 12, 2, 4
CPU = torch.device("cpu")


# what is served


def column_part(module: str, out_features: int, tp_size: int) -> LoraPart:
    return LoraPart(module, HIDDEN, out_features, ((0, HIDDEN),) * tp_size, even_cuts(out_features, tp_size))


def row_part(module: str, in_features: int, tp_size: int) -> LoraPart:
    return LoraPart(module, in_features, HIDDEN, even_cuts(in_features, tp_size), ((0, HIDDEN),) * tp_size)


def tiny_spec(max_loras: int = 2, tp_size: int = 1, **fields: Any) -> LoraSpec:
    """Two targets over two layers: a fused column-parallel one of uneven parts, and a row-parallel one."""
    targets = (
        LoraTarget("gate_up", (column_part("mlp.gate", WIDTH, tp_size), column_part("mlp.up", HIDDEN, tp_size))),
        LoraTarget("down", (row_part("mlp.down", WIDTH, tp_size),), row_parallel=True),
    )
    fields = {"targets": targets, "num_layers": LAYERS, "max_lora_rank": MAX_RANK, "max_cpu_loras": 8, **fields}
    return LoraSpec(max_loras=max_loras, **fields)


def pair(rank: int, in_features: int, out_features: int, scaling: float, seed: int) -> LoraPair:
    draw = np.random.default_rng(seed)
    lora_a, lora_b = (draw.standard_normal(shape).astype(np.float32) for shape in ((rank, in_features), (out_features, rank)))
    return LoraPair(lora_a, lora_b, scaling, "F32")


def tensors(pairs: dict[tuple[int, str], LoraPair], digest: str = "d") -> AdapterTensors:
    facts = AdapterFacts(MappingProxyType({}), 0, 0, (), (), (), None, MappingProxyType({}))
    return AdapterTensors(facts, digest, MappingProxyType(pairs), MappingProxyType({}))


def adapter_at(spec: LoraSpec, path: str) -> AdapterTensors:
    """The adapter that lies at `path`: every part at every layer, of ranks and numbers that follow from the path. None at `/nothing`."""
    seed = zlib.crc32(path.encode())
    pairs = {
        (layer, part.module): pair(1 + (seed + layer) % MAX_RANK, part.in_features, part.out_features, 0.5, seed + 7 * layer + number)
        for layer in range(spec.num_layers)
        for number, part in enumerate(part for target in spec.targets for part in target.parts)
        if path != "/nothing"
    }
    return tensors(pairs, f"digest of {path}")


def expected_delta(spec: LoraSpec, tp_rank: int, path: str, target: str, layer: int, x: torch.Tensor) -> torch.Tensor:
    """What the adapter at `path` adds on `tp_rank`: its own arithmetic, on the rank's shard of x."""
    parts, pairs = [], adapter_at(spec, path).pairs
    for part in spec.target(target).parts:
        (in_start, in_stop), (out_start, out_stop) = part.in_ranges[tp_rank], part.out_ranges[tp_rank]
        found = pairs.get((layer, part.module))
        if found is None:
            parts.append(torch.zeros(len(x), out_stop - out_start))
            continue
        lora_a, lora_b = torch.from_numpy(found.lora_a)[:, in_start:in_stop], torch.from_numpy(found.lora_b)[out_start:out_stop]
        parts.append(found.scaling * (x @ lora_a.T) @ lora_b.T)
    return torch.cat(parts, dim=1)


# the two seams


class Reads:
    """The reader of one rank. A held path's read begins and then blocks until the test lets it through or fails it."""

    def __init__(self, spec: LoraSpec, tp_rank: int = 0) -> None:
        self._spec = spec
        self._cut = HostReader(spec, tp_rank, torch.float32).cut
        self._change = threading.Condition()
        self._held: set[str] = set()
        self._refused: dict[str, str] = {}
        self._changed: set[str] = set()
        self.began: list[str] = []  # paths, in the order in which their reads began
        self.threads: set[str] = set()

    def __call__(self, path: str, digest: str | None, cancelled: Callable[[], bool]) -> HostCopy:
        with self._change:
            self.began.append(path)
            self.threads.add(threading.current_thread().name)
            self._change.notify_all()
            self._change.wait_for(lambda: path not in self._held, PATIENCE_S)
            refusal = self._refused.get(path)
        if refusal is not None:
            raise AdapterError(refusal, code="adapter_refused")
        read = adapter_at(self._spec, f"{path} as it is now" if path in self._changed else path)
        if digest is not None and digest != read.digest:
            raise AdapterError(f"{path} is not what was checked", code="adapter_changed")
        return self._cut(read)

    def hold(self, *paths: str) -> None:
        with self._change:
            self._held.update(paths)

    def let(self, *paths: str) -> None:
        with self._change:
            self._held.difference_update(paths or tuple(self._held))
            self._change.notify_all()

    def fail(self, path: str, message: str = "cannot be read") -> None:
        """Reads of `path` that have not ended yet fail from now on; a held one ends now."""
        with self._change:
            self._refused[path] = message
            self._held.discard(path)
            self._change.notify_all()

    def change(self, path: str) -> None:
        """Other weights lie at `path` from now on."""
        self._changed.add(path)

    def mend(self, path: str) -> None:
        with self._change:
            self._refused.pop(path, None)

    def wait_began(self, path: str, times: int = 1) -> None:
        with self._change:
            assert self._change.wait_for(lambda: self.began.count(path) >= times, PATIENCE_S), f"no read of {path} began"


class OutOfStep(AssertionError):
    """A rank agrees on something that another rank has nothing to agree on."""


class Agreement:
    """The elementwise maximum over ranks, as one collective gives it. `rounds` keeps every vector of every rank."""

    def __init__(self, tp_size: int) -> None:
        self._tp_size = tp_size
        self._change = threading.Condition()
        self._given: dict[int, list[int]] = {}
        self._left: set[int] = set()
        self.rounds: list[list[list[int]]] = []

    def of(self, tp_rank: int) -> Callable[[list[int]], list[int]]:
        return lambda statuses: self._agree(tp_rank, statuses)

    def begin(self) -> None:
        self._left.clear()

    def leave(self, tp_rank: int) -> None:
        """The rank's admit ended: whoever still waits for it in a collective waits in vain."""
        with self._change:
            self._left.add(tp_rank)
            self._change.notify_all()

    def wait_round(self, number: int) -> list[list[int]]:
        with self._change:
            assert self._change.wait_for(lambda: len(self.rounds) >= number, PATIENCE_S), f"agreement {number} never came"
            return self.rounds[number - 1]

    def _agree(self, tp_rank: int, statuses: list[int]) -> list[int]:
        with self._change:
            mine = len(self.rounds)
            self._given[tp_rank] = list(statuses)
            if len(self._given) == self._tp_size:
                self.rounds.append([self._given[rank] for rank in range(self._tp_size)])
                self._given = {}
                self._change.notify_all()
            came = self._change.wait_for(lambda: len(self.rounds) > mine or bool(self._left), PATIENCE_S)
            if not came or len(self.rounds) <= mine:
                raise OutOfStep(f"rank {tp_rank} agrees on {statuses}, but ranks {sorted(self._left)} do not")
            vectors = self.rounds[mine]
        if len({len(vector) for vector in vectors}) > 1:
            raise OutOfStep(f"ranks agree on vectors of different lengths: {vectors}")
        return [max(column) for column in zip(*vectors, strict=True)]


# ranks


@dataclass
class Clock:
    """Seconds that only the test lets pass."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rank:
    """One rank's pool with its seams."""

    pool: LoraAdapterPool
    reads: Reads
    clock: Clock
    hints: list[str] = field(default_factory=list)  # names whose copy the pool reported
    change: threading.Condition = field(default_factory=threading.Condition)

    def report(self, name: str) -> None:
        with self.change:
            self.hints.append(name)
            self.change.notify_all()

    def wait_read(self, name: str) -> None:
        """Until the read of `name` ended here, well or not."""
        with self.change:
            ended = self.change.wait_for(lambda: self.pool.store.state(name) != IN_FLIGHT, PATIENCE_S)
        assert ended, f"the read of {name} never ended"

    def wait_hint(self, name: str) -> None:
        """Until the pool reported `name`, which it does a moment after the read ended."""
        with self.change:
            assert self.change.wait_for(lambda: name in self.hints, PATIENCE_S), f"no hint of {name} came"

    def holders(self) -> dict[str, int]:
        """Resident adapters and how many requests hold each."""
        return {name: held for _, name, held in self.pool.slots() if name is not None}

    def slot_of(self, name: str) -> int | None:
        return next((slot for slot, found, _ in self.pool.slots() if found == name), None)

    def ask(self, rid: str) -> Any:
        return self.pool.ask(rid, "llm", "step")

    def reserve(self, rid: str) -> int | None:
        return self.pool.reserve(rid, "llm", "step", None)

    def delta(self, rids: Sequence[str], target: str = "down", layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan a step of one token per row and run one delta on zeros: (input, what was added)."""
        step, ctx = lora_step(*rids)
        self.pool.plan(step, ctx)
        spec, tp_rank = self.pool.spec, self.pool.rank
        x = torch.randn(len(rids), spec.target(target).in_size(tp_rank), generator=torch.Generator().manual_seed(1))
        y = torch.zeros(len(rids), sum(spec.target(target).out_sizes(tp_rank)))
        return x, self.pool.layer_delta(target, layer)(y, x)

    def assert_step_runs(self, **paths: str | None) -> None:
        """One step of all these rows: each runs on the weights at its path, whatever the others' ranks and targets are."""
        for target in self.pool.spec.targets:
            for layer in range(self.pool.spec.num_layers):
                x, added = self.delta(list(paths), target.name, layer)
                for row, (rid, path) in enumerate(paths.items()):
                    mine = slice(row, row + 1)
                    expected = expected_delta(self.pool.spec, self.pool.rank, path or "/nothing", target.name, layer, x[mine])
                    torch.testing.assert_close(added[mine], expected, msg=lambda text, rid=rid: f"{rid} does not run on its own: {text}")

    def assert_runs(self, rid: str, path: str | None) -> None:
        """`rid` runs on the weights at `path` (None: on the base alone), in every target and layer."""
        self.assert_step_runs(**{rid: path})


def lora_step(*rids: str, tokens: int | Sequence[int] = 1) -> tuple[LoraStep, StepContext]:
    """One step as pool and runner see it."""
    counts = (tokens,) * len(rids) if isinstance(tokens, int) else tuple(tokens)
    step = Step(1, tuple(Row(rid, 0, count) for rid, count in zip(rids, counts, strict=True)))
    return LoraStep(tuple(rids), counts), StepContext(step)


def path_of(name: str) -> str:
    return f"/adapters/{name}"


def wants(adapter: str | None, tokens: int = 3, max_tokens: int = 8, **fields: Any) -> ResourceReqConfig:
    """A request as it is ingested."""
    return ResourceReqConfig(tuple(range(tokens)), SamplingParams(max_tokens, seed=1), adapter, **fields)


class Instance:
    """The pools of one node on N ranks in lockstep; rank 0 decides."""

    def __init__(self, tp_size: int = 1, adapters: str = "ABCDEF", **spec: Any) -> None:
        self.agreement = Agreement(tp_size)
        self.ranks: list[Rank] = []
        for tp_rank in range(tp_size):
            rank_spec = tiny_spec(tp_size=tp_size, **spec)
            clock, reads = Clock(), Reads(rank_spec, tp_rank)
            reports: list[Rank] = []
            pool = LoraAdapterPool(
                rank_spec, CPU, tp_rank, tp_size, agree=self.agreement.of(tp_rank), decides=tp_rank == 0,
                backend=TorchLoraBackend(), read=reads, on_copy=lambda name, to=reports: to[0].report(name), clock=clock,
            )  # fmt: skip
            reports.append(Rank(pool, reads, clock))
            self.ranks.append(reports[0])
        for name in adapters:
            self.serve(name)

    @property
    def leader(self) -> Rank:
        return self.ranks[0]

    @property
    def pool(self) -> LoraAdapterPool:
        """The leader's."""
        return self.leader.pool

    def serve(self, name: str, path: str | None = None, **fields: Any) -> None:
        for rank in self.ranks:
            rank.pool.register_adapter(name, path or path_of(name), **fields)

    def ingest(self, rid: str, adapter: str | None, *, settled: bool = True) -> None:
        """On every rank; waits for the reads unless told not to."""
        for rank in self.ranks:
            rank.pool.ingest_request(rid, wants(adapter))
        if settled and adapter is not None:
            for rank in self.ranks:
                rank.wait_read(adapter)

    def remove(self, *rids: str) -> None:
        for rid in rids:
            for rank in self.ranks:
                rank.pool.remove_request(rid)

    def begin_admit(self, *rids: str, tokens: int | Sequence[int] = 1) -> Future[list[StepContext]]:
        """Every rank admits the same rows, each on a thread of its own. The future ends when all did."""
        self.agreement.begin()
        done: Future[list[StepContext]] = Future()
        contexts: dict[int, StepContext] = {}
        errors: dict[int, BaseException] = {}

        def admit(tp_rank: int) -> None:
            step, ctx = lora_step(*rids, tokens=tokens)
            try:
                self.ranks[tp_rank].pool.admit(step, ctx)
            except BaseException as error:  # the caller gets it
                errors[tp_rank] = error
            contexts[tp_rank] = ctx
            self.agreement.leave(tp_rank)

        threads = [threading.Thread(target=admit, args=(tp_rank,), daemon=True) for tp_rank in range(len(self.ranks))]

        def gather() -> None:
            for thread in threads:
                thread.join()
            if errors:
                done.set_exception(errors[min(errors)])
            else:
                done.set_result([contexts[tp_rank] for tp_rank in range(len(self.ranks))])

        for thread in [*threads, threading.Thread(target=gather, daemon=True)]:
            thread.start()
        return done

    def admit(self, *rids: str, tokens: int | Sequence[int] = 1) -> list[StepContext]:
        return self.begin_admit(*rids, tokens=tokens).result(PATIENCE_S)

    def run(self, rid: str, adapter: str) -> None:
        """Ingest and admit one request."""
        self.ingest(rid, adapter)
        self.admit(rid)

    def assert_alike(self) -> None:
        """Every rank's slot table is the same."""
        tables = [rank.pool.lines() for rank in self.ranks]
        assert all(table == tables[0] for table in tables), tables
        assert len({rank.pool.digest() for rank in self.ranks}) == 1

    def close(self) -> None:
        for rank in self.ranks:
            rank.reads.let()
            rank.pool.close()


def promptly(call: Callable[[], Any]) -> Any:
    """Run `call` on another thread and return what it returns: fails where something holds it up."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # the caller gets it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(PATIENCE_S)
