"""A planned run: the real slot table, reservations, admission queue and host tier under a drawn workload, without tensors.

Time is virtual. A step takes `step_s + token_s * tokens`, plus installs and agreements. Between two events (an arrival, a read's end, a
row's last token) steps are alike and taken in one leap: the cost of a run grows with its requests and reads, not with its tokens.

    arrivals ─► gate ─► host tier reads ─► queue: reserve ─► step: admit ─► prefill in chunks ─► decode ─► release

KV pages are not planned: give the server enough for `max_num_seqs` rows. One rank decides, with the slowest rank's reads. With `check`,
every rank has its own table, tier and reads, agrees as real ranks do, and must decide alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from mstar.engine.admission import AdmissionQueue, Verdict
from mstar.engine.resources.lora.slots import IN_FLIGHT, READY, AdmitPlan, Reservations, SlotTable
from mstar.sim.tally import Tally
from mstar.sim.tier import Gate, TimedReader, timed_store
from mstar.sim.workload import BASE, Workload, read_times_s
from mstar.sim.world import Violation


@dataclass(frozen=True)
class PlanSpec:
    """The instance. Times are seconds; `host_tier` counts adapters."""

    slots: int
    host_tier: int
    ranks: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_passes: int = 16
    max_waiting: int = 1024
    step_s: float = 0.020
    token_s: float = 0.00005
    install_s: float = 0.002
    agree_s: float = 0.0005
    read_s: float = 0.1
    read_p99_s: float = 0.4
    hint_wait_s: float = 2.0
    seed: int = 0
    check: bool = False


@dataclass
class _Row:
    request: int
    rid: str
    adapter: str | None
    arrival_s: float
    prompt: int
    output: int
    prefill_left: int
    ready_s: float | None = None  # when the leader first found its own copy in


class Planner:
    """Runs one workload on one instance."""

    def __init__(self, spec: PlanSpec, workload: Workload, progress: Callable[[int], None] = lambda done: None) -> None:
        self._spec = spec
        self._workload = workload
        self._progress = progress
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._next_arrival = 0
        num_ranks, per_draw = (spec.ranks, 1) if spec.check else (1, spec.ranks)
        self._tables = [SlotTable(spec.slots) for _ in range(num_ranks)]
        self._readers = [
            TimedReader(read_times_s(spec.read_s, spec.read_p99_s, per_draw, spec.seed + rank), self._after) for rank in range(num_ranks)
        ]
        self._stores = [timed_store(spec.host_tier, reader, self._copy_in) for reader in self._readers]
        for store in self._stores:
            for name in workload.names:
                store.serve(name, name)
        self._reservations = Reservations(self._tables[0])
        self._queue = AdmissionQueue(spec.max_passes)
        self._gate = Gate(spec.host_tier)
        self._waiting: dict[str, _Row] = {}  # ingested, not admitted
        self._reading: dict[str, list[_Row]] = {}  # those of them whose adapter the leader still reads
        self._prefilling: list[_Row] = []
        self._decoding: list[tuple[int, int, _Row]] = []  # by the step that gives the last token
        self._num_steps = 0
        self._changed = False
        self.tally = Tally(len(workload))

    def run(self) -> Tally:
        """Until every request ended. Raises Violation where ranks decide differently (`check`)."""
        while True:
            self._take_events()
            admitted = self._admit() if self._changed else []
            if admitted or self._prefilling or self._decoding:
                self._step(admitted)
            elif (due := self._next_due()) is not None:
                self._now = due
            else:
                break
        num_reads = sum(store.counts()[0] for store in self._stores) // len(self._stores)
        self.tally.finish(self._now, self._queue.longest_pass_over, num_reads, self._readers[0].busy_s)
        return self.tally

    # time

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + delay_s, self._num_events, action))

    def _next_due(self) -> float | None:
        due = self._events[0][0] if self._events else math.inf
        if self._next_arrival < len(self._workload):
            due = min(due, float(self._workload.arrivals_s[self._next_arrival]))
        return due if due < math.inf else None

    def _take_events(self) -> None:
        arrivals = self._workload.arrivals_s
        while self._next_arrival < len(arrivals) and arrivals[self._next_arrival] <= self._now:
            self._arrive(self._next_arrival)
            self._next_arrival += 1
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()

    def _copy_in(self, name: str) -> None:
        self._wake()
        if self._stores[0].state(name) == READY:
            for row in self._reading.pop(name, ()):
                self._queue.push(row.rid, row.request, uses_slot=True)

    def _wake(self) -> None:
        self._changed = True

    # requests

    def _arrive(self, request: int) -> None:
        workload = self._workload
        if not request % 1000:
            self._progress(request)
        if len(self._waiting) + self._gate.num_waiting >= self._spec.max_waiting:
            self.tally.num_refused += 1
            return
        index = int(workload.adapters[request])
        adapter = None if index == BASE else workload.names[index]
        if adapter is None or self._gate.enter(request, adapter):
            self._ingest(request, adapter)

    def _ingest(self, request: int, adapter: str | None) -> None:
        workload = self._workload
        rid = str(request)
        prompt, output = int(workload.prompts[request]), int(workload.outputs[request])
        self._waiting[rid] = _Row(request, rid, adapter, float(workload.arrivals_s[request]), prompt, output, prompt)
        if adapter is not None:
            for store in self._stores:
                store.hold(adapter)
            if self._stores[0].state(adapter) != READY:  # in the queue it would only be asked again and again, and delay nobody
                self._reading.setdefault(adapter, []).append(self._waiting[rid])
                return
        self._queue.push(rid, request, uses_slot=adapter is not None)
        self._wake()

    def _end(self, row: _Row) -> None:
        self.tally.ended(row.prompt, row.output)
        if row.adapter is not None:
            for table, store in zip(self._tables, self._stores, strict=True):
                table.release(row.rid)
                store.drop(row.adapter)
            for request in self._gate.leave(row.adapter):
                self._ingest(request, self._workload.names[int(self._workload.adapters[request])])
        self._changed = True

    # a step

    def _admit(self) -> list[_Row]:
        """What the leader's scheduler does with its queue; `answers` only saves asking again: within one choice they stand."""
        self._changed = False
        spec = self._spec
        places = spec.max_num_seqs - len(self._prefilling) - len(self._decoding)
        left = spec.max_num_batched_tokens - len(self._decoding) - sum(row.prefill_left for row in self._prefilling)
        answers: dict[str, Verdict] = {}
        admitted: list[_Row] = []

        def attempt(rid: str) -> Verdict:
            nonlocal places, left
            if places < 1 or left < 1:
                return Verdict.FULL
            row = self._waiting[rid]
            if row.adapter is not None:
                answer = answers.get(row.adapter)
                if answer is None:
                    answer = self._ask(row, row.adapter)
                    answers[row.adapter] = answer
                if answer is not Verdict.ADMITTED:
                    return answer
                self._reservations.promise(rid, row.adapter)
            admitted.append(row)
            places -= 1
            left -= row.prefill_left
            return Verdict.ADMITTED

        self._queue.admit(attempt)
        for row in admitted:
            del self._waiting[row.rid]
        return admitted

    def _ask(self, row: _Row, adapter: str) -> Verdict:
        """The leader's copy is in. Once every follower's is, or the bound for their hints is over: whether there is a slot."""
        if not all(store.state(adapter) == READY for store in self._stores[1:]):
            if row.ready_s is None:
                row.ready_s = self._now
                self._after(self._spec.hint_wait_s, self._wake)
            if self._now < row.ready_s + self._spec.hint_wait_s:
                return Verdict.WAITS_READ
        return Verdict.ADMITTED if self._reservations.fits(adapter) else Verdict.WAITS_SLOT

    def _step(self, admitted: list[_Row]) -> None:
        began = self._now
        if admitted:
            self._take_slots(admitted)
        self._prefilling += admitted
        num_decoding = len(self._decoding)
        budget = left = self._spec.max_num_batched_tokens - num_decoding
        done: list[_Row] = []
        for row in self._prefilling:
            count = min(row.prefill_left, left)
            row.prefill_left -= count
            left -= count
            if not row.prefill_left:
                done.append(row)
            if not left:
                self._changed = True  # the next step has room for others
                break
        step_s = self._spec.step_s + self._spec.token_s * (num_decoding + budget - left)
        leap = 1 if admitted or budget > left else self._leap(step_s)
        self._num_steps += leap
        self._now += leap * step_s
        self.tally.stepped(leap, self._now - began, self._tables[0].num_held(), num_decoding + len(self._prefilling))
        for row in done:
            self._prefilling.remove(row)
            self.tally.first_token(self._now - row.arrival_s)
            heapq.heappush(self._decoding, (self._num_steps + row.output - 1, row.request, row))
            self._changed = True
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._decoding)[2])

    def _leap(self, step_s: float) -> int:
        """Steps until something can change: a row's last token, or the first event that falls due."""
        steps = self._decoding[0][0] - self._num_steps
        due = self._next_due()
        if due is not None:
            steps = min(steps, math.ceil((due - self._now) / step_s))
        return max(1, steps)

    def _take_slots(self, admitted: list[_Row]) -> None:
        """Every rank's admit of the newcomers, with the time that installs, agreements and late copies add to the step."""
        self.tally.num_admits += 1
        waits_s = [self._now - row.arrival_s for row in admitted]
        rows = [(row.rid, row.adapter) for row in admitted if row.adapter is not None]
        plans = [AdmitPlan(table, rows) for table in self._tables]
        misses = plans[0].misses
        stall_s, agreements = 0.0, 0
        if misses:
            agreements = 1
            waits = self._agreed(plans)
            if waits:
                stall_s = self._wait_for(waits)
                agreements = 2
                self._agreed(plans)
        installs, *_others = [plan.finish() for plan in plans]
        for row in admitted:
            self._reservations.drop(row.rid)
        missed = {rid for install in installs for rid in install.rids}
        for row, wait_s in zip(admitted, waits_s, strict=True):
            self.tally.admitted(wait_s, None if row.adapter is None else row.rid not in missed)
        if installs or agreements:
            num_evictions = sum(1 for install in installs if install.evicted is not None)
            self.tally.installed(len(installs), num_evictions, agreements if self._spec.ranks > 1 else 0, stall_s)
        if self._spec.check and len({table.digest() for table in self._tables}) > 1:
            raise Violation("divergence", "\n".join("".join(table.lines()) for table in self._tables))
        self._now += len(installs) * self._spec.install_s + (agreements * self._spec.agree_s if self._spec.ranks > 1 else 0.0)

    def _agreed(self, plans: list[AdmitPlan]) -> tuple[str, ...]:
        """One agreement on every rank; returns the copies that all then wait for."""
        vectors = [plan.statuses(store.state) for plan, store in zip(plans, self._stores, strict=True)]
        result = [max(column) for column in zip(*vectors, strict=True)]
        waits, *_others = [plan.agreed(result) for plan in plans]
        return waits

    def _wait_for(self, names: tuple[str, ...]) -> float:
        """Followers wait for their copies, and so does the step; returns how long."""
        began = self._now
        for store in self._stores:
            store.urge(names)
        while any(store.state(name) == IN_FLIGHT for store in self._stores for name in names):
            due, _number, action = heapq.heappop(self._events)
            self._now = max(self._now, due)
            action()
        return self._now - began
