"""A recording decided again: the real pools, page table and runner, given what the leader broadcast, without a model or a file read.

Reads succeed at once and the recorded agreements say what the ranks said, so every slot and page follows as it did. After each step the
fingerprint is held against the recorded one: equal fingerprints prove that these are the decisions that the ranks made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mstar.engine.lockstep.record import Agreed, Header, Ingested, Ran, Record, Served, Unserved
from mstar.engine.resources.base import ResourceReqConfig
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.resources.lora.backends.base import LayerWeights, LoraBackend
from mstar.engine.resources.lora.host_copy import HostCopy
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.resources.lora.reader import Reader, ReadSource
from mstar.engine.resources.lora.spec import LoraSpec
from mstar.engine.runner import ForwardInput, Runner, Sampled
from mstar.errors import CapacityError, ConfigError, RequestError
from mstar.types import Remove, Step

_NO_LIMIT = 1 << 30


class AtOnce(Reader):
    """Reads as soon as a read is queued, on the caller's thread."""

    def __init__(self) -> None:
        self._runs = False

    def start(self, source: ReadSource) -> None:
        """See Reader.start."""
        self._source = source

    def wake(self) -> None:
        """See Reader.wake."""
        if self._runs:
            return
        self._runs = True
        while (task := self._source.take()) is not None:
            self._source.run(task)
        self._runs = False

    def wait(self, timeout_s: float) -> None:
        """Never needed: no read is in flight."""

    def replace(self) -> None:
        """Never needed."""

    def close(self) -> None:
        """Nothing to stop."""


class NoBackend(LoraBackend):
    """Nothing is computed."""

    def plan(self, addressing: Any, segments: Any, ranks: Any) -> None:
        """See LoraBackend.plan."""

    def add_delta(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, plan: Any) -> torch.Tensor:
        """See LoraBackend.add_delta."""
        return y


@dataclass(frozen=True)
class SlotView:
    """One slot right after an admit. `last_used` counts admits, not time."""

    node: str
    slot: int
    weights_of: str | None
    last_used: int
    holders: tuple[str, ...]


@dataclass(frozen=True)
class StepView:
    """One step as it was decided again. `before` and `after` are the slots around its admit; `refused` where no rank took it."""

    step: Step
    ran: Ran
    agreements: tuple[Agreed, ...]
    before: tuple[SlotView, ...]
    after: tuple[SlotView, ...]
    pages: dict[str, tuple[int, ...]]
    num_free_pages: int
    num_cached_pages: int
    waits: dict[str, str]
    fingerprint: bytes
    refused: bool

    @property
    def as_recorded(self) -> bool:
        """Whether the ranks decided the same."""
        return self.fingerprint == self.ran.fingerprint


class Replay:
    """One start of an instance, decided again record by record."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.requests: dict[str, Ingested] = {}  # open ones
        self.waits: dict[str, str] = {}
        self.unfinished: Step | None = None  # sent, and not known to have run
        self._agreements: list[Agreed] = []
        self._next_agreement = 0
        self._ran = Ran(0, b"")
        self._pools = {node.node: self._pool(node.node, node.max_loras) for node in header.nodes}
        self._kv = KvResource(KvSpec(header.num_pages, header.block_size, header.prefix_caching), decides=False)
        self._runner = Runner([*self._pools.values(), self._kv], self._model)

    def apply(self, record: Record) -> StepView | None:
        """Take one record; returns a view where it ends a step. Raises ConfigError where the records make no sense."""
        if isinstance(record, Served):
            for node, pool in self._pools.items():
                if not pool.serves(record.name):
                    pool.register_adapter(record.name, record.name, has_something=node in record.nodes)
        elif isinstance(record, Unserved):
            for pool in self._pools.values():
                pool.unload_adapter(record.name)
        elif isinstance(record, Ingested):
            self._ingest(record)
        elif isinstance(record, Remove):
            self._runner.remove(record.rid)
            self.requests.pop(record.rid, None)
            self.waits.pop(record.rid, None)
        elif isinstance(record, Step):
            self.unfinished, self._agreements = record, []
        elif isinstance(record, Agreed):
            self._agreements.append(record)
        elif isinstance(record, Ran):
            return self._run(record)
        return None

    def slots(self) -> tuple[SlotView, ...]:
        """All nodes' slots as they stand."""
        return tuple(
            SlotView(node, slot.index, slot.weights_of, slot.last_used, tuple(sorted(slot.holders)))
            for node, pool in self._pools.items()
            for slot in pool._table.slots()
        )

    def close(self) -> None:
        """End the pools."""
        for pool in self._pools.values():
            pool.close()

    def _ingest(self, record: Ingested) -> None:
        config = ResourceReqConfig(record.prompt, record.sampling, record.adapter, record.cache_key, record.output)
        self.requests[record.rid] = record
        self._runner.ingest(record.rid, config)

    def _run(self, ran: Ran) -> StepView:
        step = self.unfinished
        if step is None or step.seq != ran.seq:
            raise ConfigError(f"the recording says that step {ran.seq} ran, but not what it was")
        self._ran, self._next_agreement = ran, 0
        self.unfinished = None
        for rid, why in ran.waits.items():
            if why is None:
                self.waits.pop(rid, None)
            else:
                self.waits[rid] = why
        before = self.slots()
        after: list[SlotView] = []
        fingerprints: list[bytes] = []

        def admitted(fingerprint: bytes) -> None:
            after.extend(self.slots())
            fingerprints.append(fingerprint)

        try:
            self._runner.execute(step, admitted)
        except CapacityError:
            admitted(self._runner.fingerprint())
            refused = True
        else:
            refused = False
        return StepView(
            step=step,
            ran=ran,
            agreements=tuple(self._agreements),
            before=before,
            after=tuple(after),
            pages={rid: pages for rid in self.requests if (pages := tuple(self._kv.pages.table(rid)))},
            num_free_pages=self._kv.pages.num_free(),
            num_cached_pages=self._kv.pages.num_cached(),
            waits=dict(self.waits),
            fingerprint=fingerprints[0],
            refused=refused,
        )

    def _model(self, forward: ForwardInput) -> list[Sampled]:
        results = []
        for job in forward.jobs:
            rid = job.request.rid
            code = self._ran.failed.get(rid)
            error = None if code is None else RequestError("as recorded", code=code, status=500)
            results.append(Sampled(rid, self._ran.sampled.get(rid), error=error))
        return results

    def _pool(self, node: str, max_loras: int) -> LoraAdapterPool:
        spec = LoraSpec(targets=(), num_layers=0, max_loras=max_loras, max_lora_rank=1, max_cpu_loras=_NO_LIMIT, node_name=node)
        return LoraAdapterPool(
            spec,
            torch.device("cpu"),
            backend=NoBackend(),
            agree=lambda statuses: self._agree(node, statuses),
            decides=False,
            read=lambda path, digest, cancelled: HostCopy(digest or "", {}, 0, 0),
            reader=AtOnce(),
        )

    def _agree(self, node: str, statuses: Sequence[int]) -> list[int]:
        if self._next_agreement >= len(self._agreements):
            raise ConfigError(f"step {self._ran.seq} agrees on {len(statuses)} adapters, the recording has no further agreement")
        agreed = self._agreements[self._next_agreement]
        self._next_agreement += 1
        if agreed.node != node or len(agreed.result) < len(statuses):
            raise ConfigError(f"step {self._ran.seq}: {node} agrees on {len(statuses)} adapters, the recording has {agreed}")
        return list(agreed.result)


def sessions(records: Iterable[Record]) -> Iterator[tuple[Replay, Iterator[StepView]]]:
    """Each start of the instance with its steps; use up the steps of one before asking for the next. Raises ConfigError."""
    source = iter(records)
    header: Record | None = next(source, None)
    while header is not None:
        if not isinstance(header, Header):
            raise ConfigError("the recording does not begin with a header")
        following: list[Header] = []
        replay = Replay(header)
        yield replay, _steps(replay, source, following.append)
        replay.close()
        header = following[0] if following else None


def _steps(replay: Replay, source: Iterator[Record], found: Callable[[Header], None]) -> Iterator[StepView]:
    for record in source:
        if isinstance(record, Header):
            found(record)
            return
        view = replay.apply(record)
        if view is not None:
            yield view
