"""Per-request LoRA adapters resident in a fixed set of device slots.

The pool owns the slots' weights, decides which adapter sits in which slot (`slots.py`, pure), and says per step which slot each
token addresses; a `LoraBackend` runs the kernels against that. Slot 0 is the zero adapter. A request takes its adapter's slot on
its first admit and holds it until it is removed.

    ingest ─► host tier reads (reader thread) ─► leader: ask, reserve ─► admit on every rank ─► plan ─► deltas ─► … ─► remove

An admit with misses, the only point at which ranks talk:

    locked: resident rows take slots, candidates are listed ─► agree where copies stand ─► [wait for copies ─► agree again]
            ─► rows that failed anywhere fail here ─► candidates go to the other misses in row order
            ─► [one sum over the ranks of what DoRA's norms need] ─► weights are copied in

Step thread, but for the reader's callbacks. The lock guards names and requests; no read and no wait happens under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mstar.engine.resources.base import (
    ASKS,
    AddUp,
    AdmitOutcome,
    Agree,
    EngineResourceInfo,
    Resource,
    ResourceReqConfig,
    StepContext,
    WaitReason,
)
from mstar.engine.resources.lora.addressing import LoraAddressing
from mstar.engine.resources.lora.backends.base import GroupedRows, LayerWeights, LoraBackend
from mstar.engine.resources.lora.backends.select import default_backend
from mstar.engine.resources.lora.delta import LoraEmbeddingDelta, LoraLayerDelta
from mstar.engine.resources.lora.host_copy import HostCopy, HostReader
from mstar.engine.resources.lora.reader import Reader
from mstar.engine.resources.lora.slots import FAILED, IN_FLIGHT, READY, ZERO_SLOT, AdmitPlan, Install, Reservations, SlotTable
from mstar.engine.resources.lora.spec import LOGITS_ROWS, LoraSpec
from mstar.engine.resources.lora.step_plan import StepPlan, StepRows
from mstar.engine.resources.lora.store import LoraAdapterStore
from mstar.engine.resources.lora.weights import SlotWeights
from mstar.errors import AdapterError, CapacityError, WorkerError

Read = Callable[[str, str | None, Callable[[], bool]], HostCopy]


@dataclass(frozen=True)
class LoraStep:
    """One step as the pool sees it: its node's rows, in order. A row of no tokens takes a slot and addresses nothing (a pin)."""

    rids: tuple[str, ...]
    num_tokens: tuple[int, ...]
    num_logits: tuple[int, ...] = ()  # how many of a row's tokens give logits; read only where a target sees those rows

    @cached_property
    def rid_set(self) -> frozenset[str]:
        """The rids, for the one set check of a steady step."""
        return frozenset(self.rids)


@dataclass
class _Request:
    """A live request here; `adapter` is None for a base row and where its adapter has nothing for this pool."""

    adapter: str | None
    is_pin: bool = False


class LoraAdapterPool(Resource):
    """See the module. `rank` and `world_size` are the TP rank and degree of the lockstep instance.

    `agree` takes this rank's vector (0 ready, 1 in flight, 2 failed; one entry per miss) and returns the elementwise maximum over the
    ranks; it is needed where `world_size` is above 1. `add_up` sums a float64 tensor elementwise over the ranks, for adapters with DoRA:
    called in their admit, after the last agreement and before any slot's weights change, on every rank alike. `read` reads a folder
    and `reader` says when, both replaced in tests.
    """

    def __init__(
        self,
        spec: LoraSpec,
        device: torch.device | str,
        rank: int = 0,
        world_size: int = 1,
        backend: LoraBackend | None = None,
        dtype: torch.dtype | None = None,
        agree: Agree | None = None,
        decides: bool = True,  # noqa: FBT001, FBT002 - the reference page's signature
        *,
        read: Read | None = None,
        on_copy: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        reader: Reader | None = None,
        add_up: AddUp | None = None,
    ) -> None:
        if agree is None and world_size > 1:
            raise ValueError("a pool of several ranks needs `agree`")
        self.name = f"lora.{spec.node_name}"  # a pool per node: each has its own plan in a step
        self.spec = spec
        self.device = torch.device(device)
        self.rank = rank
        self.world_size = world_size
        self.decides = decides
        self.dtype = dtype or torch.float32
        self.backend = backend or default_backend(self.device, self.dtype)
        self.num_installs = 0
        self.num_evictions = 0
        self.num_agreements = 0
        self.blocked_s = 0.0  # of the step thread, waiting for a read inside an admit
        self._agree: Agree = agree or (lambda statuses: statuses)
        self._add_up = add_up
        self._clock = clock
        self._on_copy = on_copy or (lambda name: None)
        self._lock = threading.RLock()
        self._table = SlotTable(spec.max_loras)
        self._reservations = Reservations(self._table)
        self._weights = SlotWeights(spec, rank, self.dtype, self.device)
        self._store: LoraAdapterStore[HostCopy] = LoraAdapterStore(
            read or HostReader(spec, rank, self.dtype),
            capacity=spec.max_cpu_loras,
            max_bytes=spec.max_cpu_lora_bytes,
            size_of=lambda copy: copy.size_bytes,
            read_timeout_s=spec.read_timeout_s,
            on_change=self._on_copy,
            clock=clock,
            reader=reader,
        )
        self._has_something: dict[str, bool] = {}  # served name -> whether its adapter has targets here
        self._loading: dict[str, Future[None]] = {}  # by name, the one load of it that still counts
        self._retiring: set[str] = set()
        self._requests: dict[str, _Request] = {}
        self._removed_early: set[str] = set()
        self._live: dict[str, int] = {}  # adapter -> live requests naming it
        self._settled: set[str] = set()  # rids that hold their slot or need none
        self._waits: dict[str, WaitReason] = {}
        self._hints: dict[str, set[int]] = {}
        self._hints_until: dict[str, float] = {}
        self._taken: tuple[str, ...] = ()
        self._step_plan = StepPlan(spec, self._weights, self.backend, self.device)
        for name, path in spec.adapters.items():
            self.register_adapter(name, path)

    @classmethod
    def build(cls, spec: LoraSpec, info: EngineResourceInfo) -> LoraAdapterPool:
        """The pool of one node on one rank."""
        return cls(
            spec, info.device, info.tp_rank, info.tp_size, dtype=info.dtype, agree=info.agree, decides=info.decides, add_up=info.add_up
        )

    @property
    def store(self) -> LoraAdapterStore[HostCopy]:
        """The host tier."""
        return self._store

    @property
    def active(self) -> bool:
        """Whether the current step has a row on an adapter, as this thread sees it."""
        return self._step_plan.is_active

    @property
    def size_bytes(self) -> int:
        """Device bytes of all slots on this rank."""
        return self._weights.size_bytes

    @property
    def force_double_buffer(self) -> bool:
        """On a device that reads the layout asynchronously: the runner must fence before the host buffer is reused."""
        return self.device.type != "cpu"

    # adapters: applied whenever their message arrives; nothing here that an admit decides from

    def register_adapter(self, name: str, path: str, digest: str | None = None, *, has_something: bool = True) -> None:
        """Serve `name` from a folder that was checked before; read it when a request first names it. Raises AdapterError (409)."""
        with self._lock:
            self._refuse_taken(name)
            self._store.serve(name, path, digest)
            self._has_something[name] = has_something

    def load_adapter_async(self, name: str, path: str, digest: str | None = None) -> Future[None]:
        """Serve `name` from `path` once it was read, on the reader thread, and checked against spec and `digest`.

        The read is not kept. The future fails with AdapterError if the name is served already, is still retiring from an unload,
        or cannot be read; a refusal visible now raises here.
        """
        done: Future[None] = Future()
        with self._lock:
            self._refuse_taken(name)
            self._loading[name] = done
        checked = self._store.check(path, digest)
        checked.add_done_callback(lambda future: self._loaded(name, path, digest, future, done))
        return done

    def unload_adapter(self, name: str) -> bool:
        """Stop serving `name` to new requests; live ones run to the end on its weights. Returns whether it was forgotten now.

        An adapter that this pool does not serve is a no-op (False); one still loading is not served when its read ends.
        """
        with self._lock:
            self._loading.pop(name, None)
            if not self._store.serves(name):
                return False
            if self._live.get(name):
                self._retiring.add(name)
                return False
            self._forget(name)
            return True

    def has_something(self, name: str) -> bool:
        """Whether a served adapter has targets in this pool."""
        with self._lock:
            return self._has_something.get(name, True)

    def serves(self, name: str) -> bool:
        """Whether new requests may name it."""
        with self._lock:
            return self._store.serves(name) and name not in self._retiring

    # requests

    def ingest_request(self, rid: str, overrides: ResourceReqConfig | None = None) -> None:
        """Open the request's state, once per request, and start reading its adapter if this rank has no copy.

        A copy that is in already (or failed, for another request) is reported at once: no read will report it for this one.
        """
        with self._lock:
            if rid in self._removed_early:
                self._removed_early.discard(rid)
                return
            adapter = overrides.adapter if overrides is not None else None
            if adapter is None or not self._has_something.get(adapter, True):
                self._requests[rid] = _Request(None)
                self._settled.add(rid)
                return
            is_pin = overrides is not None and overrides.sampling is None
            self._requests[rid] = _Request(adapter, is_pin)
            self._live[adapter] = self._live.get(adapter, 0) + 1
            self._store.hold(adapter, pinned=is_pin)
            settled = self._store.state(adapter) != IN_FLIGHT
        if settled:
            self._on_copy(adapter)

    def remove_request(self, rid: str) -> None:
        """End the request: its slot has one holder less. Before its ingest, leave a mark that the ingest consumes."""
        with self._lock:
            request = self._requests.pop(rid, None)
            if request is None:
                self._removed_early.add(rid)
                return
            self._settled.discard(rid)
            self._reservations.drop(rid)
            self._waits.pop(rid, None)
            self._table.release(rid)
            adapter = request.adapter
            if adapter is None:
                return
            self._store.drop(adapter, pinned=request.is_pin)
            self._live[adapter] -= 1
            if not self._live[adapter]:
                del self._live[adapter]
                self._hints.pop(adapter, None)
                self._hints_until.pop(adapter, None)
                if adapter in self._retiring:
                    self._forget(adapter)

    def runs_adapters(self, rids: Iterable[str]) -> bool:
        """Whether any of `rids` names an adapter with something for this pool; the same on every rank."""
        with self._lock:
            return any(self._requests[rid].adapter is not None for rid in rids)

    # the leader's admission

    def ask(self, rid: str, node_name: str, graph_walk: str) -> AdmitOutcome | None:
        """ASKS for a row that will need a slot, or the outcome that fails a row whose adapter failed to read.

        None on a rank that does not decide, for a base row, for a row that holds its slot or a reservation, and for an adapter with
        nothing for this pool.
        """
        if not self.decides:
            return None
        with self._lock:
            adapter = self._requests[rid].adapter
            if adapter is None or rid in self._settled or rid in self._reservations:
                return None
            if self._has_failed(adapter):
                return AdmitOutcome(self._store.error(adapter))
            return ASKS

    def reserve(self, rid: str, node_name: str, graph_walk: str, published: Any = None) -> int | None:
        """Count `rid`'s adapter against the free slots, once this rank's copy is in and the followers hinted theirs.

        Returns the slots newly counted: 1, or 0 where it shares one, and 0 at once for a row whose adapter failed to read and is in
        no slot, which its admit fails on every rank. None: the row waits, `waits_for` says for what.
        """
        with self._lock:
            adapter = self._requests[rid].adapter
            if not self.decides or adapter is None or self._has_failed(adapter):
                return 0
            if not self._copies_in(adapter):
                self._waits[rid] = "read"
                return None
            if not self._reservations.fits(adapter):
                self._waits[rid] = "slot"
                return None
            self._waits.pop(rid, None)
            return self._reservations.promise(rid, adapter)

    def cancel(self, rid: str) -> None:
        """Undo `reserve`: another resource has no room for the row."""
        with self._lock:
            self._reservations.drop(rid)

    def waits_for(self, rid: str) -> WaitReason:
        """What the last `reserve` that returned None waits for: its adapter's read, or a slot."""
        return self._waits.get(rid, "slot")

    def note_copy(self, tp_rank: int, name: str) -> None:
        """A follower's copy of `name` is in or failed. A hint: it only delays reservations, and for `hint_wait_s` at most.

        It may come before the request that it is about: the follower hears of that from the front, on a channel of its own.
        """
        with self._lock:
            if name in self._live or self._store.serves(name):
                self._hints.setdefault(name, set()).add(tp_rank)

    # a step

    def admit(self, step: LoraStep, ctx: StepContext) -> None:
        """Give each row whose adapter is not resident yet a slot, loading it there.

        One set check where every row holds its slot. Raises CapacityError, on every rank alike, where reservations were not kept;
        then nothing is taken. Rows whose adapter failed to read on any rank are put in `ctx.failed`.
        """
        self._taken = ()
        if step.rid_set <= self._settled:
            return
        with self._lock:
            rows = self._rows_to_settle(step, ctx)
            plan = AdmitPlan(self._table, rows)
        if plan.misses:
            self._agree_on(plan)
        with self._lock:
            installs = plan.finish()
        self._install(installs)
        with self._lock:
            self._settle(rows, plan.failed, ctx)

    def rollback_admit(self, step: LoraStep, ctx: StepContext) -> None:
        """Give back the slots this step's admit took. What it loaded stays resident, unheld, as a cache."""
        with self._lock:
            self._table.give_back(self._taken)
            self._settled.difference_update(self._taken)
            self._taken = ()

    def plan(self, step: LoraStep, ctx: StepContext) -> LoraAddressing | None:
        """Group the step's tokens by slot; None for a step with no adapter row, which then does no LoRA work at all."""
        key = (step, tuple(ctx.failed), self._table.digest())
        return self._step_plan.make(key, lambda: self._step_rows(step, ctx))

    def commit(self, step: LoraStep, ctx: StepContext) -> None:
        """The step was consumed: forwards until the next plan are base-only."""
        self._step_plan.end()

    # what layers read

    def addressing(self, grouping: int = 1) -> LoraAddressing:
        """This step's addressing for rows of `grouping` (`LoraTarget.row_grouping`), for a backend to run against.

        Raises KeyError in a step with no adapter row, and for a grouping that no target has.
        """
        return self._step_plan.addressings[grouping]

    def kernel_plan(self, grouping: int) -> Any:
        """What the backend planned for this step, or None where nothing is added (no adapter row, or `base_only`)."""
        return self._step_plan.kernel_plans.get(grouping) if self.active else None

    def grouped_rows(self, grouping: int) -> GroupedRows:
        """The addressing of rows of `grouping` with what the host knows of it; KeyError where `kernel_plan` is None."""
        return self._step_plan.grouped[grouping]

    def layer_delta(self, target: str, layer_idx: int) -> LoraLayerDelta:
        """What a layer calls to add `target`'s delta at stack layer `layer_idx` (0 for head and embedding)."""
        kind = LoraEmbeddingDelta if self.spec.target(target).is_embedding else LoraLayerDelta
        return kind(self, target, layer_idx)

    def layer_weights(self, target: str, layer_idx: int) -> LayerWeights:
        """Views of every slot's weights at one target and layer."""
        return self._weights.layer(target, layer_idx)

    def layer_ranks(self, target: str, layer_idx: int) -> torch.Tensor:
        """`[slots]` int64, slot 0 included: each slot's rank at one target and stack layer, 0 where its adapter adds nothing."""
        return self._weights.layer_ranks(target, layer_idx)

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """A forward outside any step (a compile's warm-up) on this thread, as a base-only step: deltas add nothing.

        A compile traced here takes the base-only branch, so the first step with an adapter row compiles its own.
        """
        with self._step_plan.left_out():
            yield

    # about

    def slots(self) -> list[tuple[int, str | None, int]]:
        """Per slot from 1: its index, the adapter that a request would find there (None: none), its holders."""
        with self._lock:
            rows = []
            for slot in self._table.slots():
                named = slot.weights_of is not None and self._table.slot_of_adapter(slot.weights_of) == slot.index
                rows.append((slot.index, slot.weights_of if named else None, len(slot.holders)))
            return rows

    def digest(self) -> bytes:
        """A hash of the slot table as it stands."""
        return self._table.digest()

    def lines(self) -> list[str]:
        """The slot table as text."""
        return self._table.lines()

    def close(self) -> None:
        """Stop the reader."""
        self._store.close()

    # inside

    def _refuse_taken(self, name: str) -> None:
        if name in self._retiring:
            raise AdapterError(f"the adapter {name!r} is still retiring from an unload; try again", code="adapter_retiring", status=409)
        if self._store.serves(name) or name in self._loading:
            raise AdapterError(f"the adapter {name!r} is served already", code="adapter_already_loaded", status=409)

    def _loaded(self, name: str, path: str, digest: str | None, checked: Future[HostCopy], done: Future[None]) -> None:
        """Reader thread: a load's read ended."""
        try:
            copy = checked.result()
            with self._lock:
                if self._loading.get(name) is not done:
                    raise AdapterError(f"the adapter {name!r} was unloaded while it loaded", code="adapter_unloaded", status=409)
                del self._loading[name]
                self._store.serve(name, path, digest or copy.digest, copy.size_bytes)
                self._has_something[name] = bool(copy.targets)
        except Exception as error:  # the future carries it to whoever loads
            with self._lock:
                if self._loading.get(name) is done:
                    del self._loading[name]
            done.set_exception(error)
            return
        done.set_result(None)

    def _forget(self, name: str) -> None:
        self._store.forget(name)
        self._table.forget(name)
        self._has_something.pop(name, None)
        self._hints.pop(name, None)
        self._retiring.discard(name)

    def _has_failed(self, adapter: str) -> bool:
        """Failed to read here, and in no slot on which it could still run."""
        return self._store.state(adapter) == FAILED and self._table.slot_of_adapter(adapter) is None

    def _copies_in(self, adapter: str) -> bool:
        state = self._store.state(adapter)
        if state != READY:
            return state == FAILED  # resident, so it counts like any other
        if len(self._hints.get(adapter, ())) >= self.world_size - 1:
            return True
        now = self._clock()
        return now >= self._hints_until.setdefault(adapter, now + self.spec.hint_wait_s)

    def _rows_to_settle(self, step: LoraStep, ctx: StepContext) -> list[tuple[str, str]]:
        """Rows without their slot, but for those that an earlier node's pool failed in this step: they run nowhere."""
        rows = []
        for rid in step.rids:
            if rid not in self._settled and rid not in ctx.failed:
                adapter = self._requests[rid].adapter
                if adapter is not None:
                    rows.append((rid, adapter))
        return rows

    def _step_rows(self, step: LoraStep, ctx: StepContext) -> StepRows:
        """The step's rows that compute something, with the slot of each."""
        if any(target.row_grouping == LOGITS_ROWS for target in self.spec.targets):
            assert step.num_logits, "a pool that adapts the head must be told which rows give logits"
        rows = StepRows([], [], [])
        for index, (rid, count) in enumerate(zip(step.rids, step.num_tokens, strict=True)):
            if count and rid not in ctx.failed:
                rows.slots.append(self._table.slot_of_request(rid) or ZERO_SLOT)
                rows.num_tokens.append(count)
                rows.num_logits.append(step.num_logits[index] if step.num_logits else 0)
        return rows

    def _agree_on(self, plan: AdmitPlan) -> None:
        self.num_agreements += 1
        waits = plan.agreed(self._agree(plan.statuses(self._store.state)))
        if waits:
            began = self._clock()
            self._store.wait(waits, self.spec.copy_wait_s)
            self.blocked_s += self._clock() - began
            self.num_agreements += 1
            plan.agreed(self._agree(plan.statuses(self._settled_state)))

    def _settled_state(self, name: str) -> int:
        """A copy still in flight after the wait has failed: its bound is over."""
        state = self._store.state(name)
        return state if state == READY else FAILED

    def _install(self, installs: Sequence[Install]) -> None:
        """Fill the slots, in row order. Where copies need the other ranks' squares (DoRA), one sum for all of them comes first."""
        copies = [self._store.copy(install.adapter) for install in installs]
        adding = [copy for copy in copies if copy.adds_squares]
        summed = iter(self._summed(self._weights.squares(adding)) if adding else ())
        for install, copy in zip(installs, copies, strict=True):
            self._weights.install(install.slot, copy, next(summed) if copy.adds_squares else None)
            self.num_installs += 1
            self.num_evictions += install.evicted is not None

    def _summed(self, squares: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return squares
        if self._add_up is None:
            raise WorkerError("a pool of several ranks needs `add_up` to install an adapter with DoRA")
        return self._add_up(squares)

    def _settle(self, rows: Sequence[tuple[str, str]], failed: set[str], ctx: StepContext) -> None:
        taken = []
        for rid, adapter in rows:
            self._reservations.drop(rid)
            if self._table.slot_of_request(rid) is not None:
                self._settled.add(rid)
                taken.append(rid)
            elif adapter in failed:
                ctx.failed[rid] = AdmitOutcome(self._store.error(adapter))
            else:
                raise CapacityError(f"no slot was found for {rid}")
        self._taken = tuple(taken)
