"""The leader's choice of the next step: decodes first, then prefill chunks, then newcomers, within the step's token budget.

What prompts may take of it beside decodes is for `prefill_budget` to say (pacing.py).

Pure: no torch, clock, threads or randomness. The result is broadcast; no follower recomputes it.

    waiting ──admit──► running (prefill in chunks) ──► running (decode) ──finish──► gone
       ▲                    │                               │
       └────── preempted, youngest first, where pages run out ┘   (keeps its slot, loses its pages, keeps its arrival)

A running request may take pages only from younger ones, so the oldest always gets on. A preempted one waits for pages alone, so it
counts as no user of slots in the queue: one that waits for its slot must never keep it from coming back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mstar.engine.admission import AdmissionQueue, Verdict
from mstar.engine.resources.base import Resource
from mstar.engine.resources.kv.resource import KvResource
from mstar.types import Row

NODE = "llm"
WALK = "step"


def unbounded(num_decodes: int) -> int | None:
    """Prompts take what is left."""
    del num_decodes
    return None


@dataclass(frozen=True)
class SchedulerLimits:
    """Most rows and tokens of one step; how often one that waits may be passed."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_passes: int


@dataclass
class Scheduled:
    """One request as the scheduler sees it. `known` tokens exist (prompt and output), `computed` of them are in KV pages."""

    rid: str
    order: int
    known: int
    uses_slot: bool
    computed: int = 0

    @property
    def remaining(self) -> int:
        """Tokens yet to compute before the next one can be sampled."""
        return self.known - self.computed


@dataclass(frozen=True)
class StepChoice:
    """The rows of the next step, and who gives up pages for them. Rows without tokens are pins, or fail at their admit.

    Pages that were given up must be broadcast even where no row can use them now: then there are no rows.
    """

    rows: tuple[Row, ...]
    preempted: tuple[str, ...]


class Scheduler:
    """Waiting and running requests of one instance, on its leader.

    `resources` are asked in order, slots before pages; `kv` is among them.
    """

    def __init__(self, limits: SchedulerLimits, resources: Sequence[Resource], kv: KvResource) -> None:
        self._limits = limits
        self._resources = resources
        self._kv = kv
        self._requests: dict[str, Scheduled] = {}
        self._running: dict[str, Scheduled] = {}
        self._next_order = 0
        self.queue = AdmissionQueue(limits.max_passes)
        self.num_preemptions = 0

    def add(self, rid: str, num_tokens: int, *, uses_slot: bool) -> None:
        """A request was ingested on the leader. `num_tokens` exist already; 0 for a pin."""
        request = Scheduled(rid, self._next_order, num_tokens, uses_slot)
        self._next_order += 1
        self._requests[rid] = request
        self.queue.push(rid, request.order, uses_slot=uses_slot)

    def finish(self, rid: str) -> None:
        """The request ended, wherever it was."""
        self._requests.pop(rid, None)
        self._running.pop(rid, None)
        self.queue.remove(rid)

    def has_work(self) -> bool:
        """Whether any request may run or be admitted; a pin that holds its slot does neither."""
        return len(self.queue) > 0 or any(request.known for request in self._running.values())

    def running(self) -> list[str]:
        """Running requests in order of admission."""
        return list(self._running)

    def committed(self, rows: Sequence[Row], sampled: dict[str, int]) -> None:
        """The step's rows are computed; `sampled` requests have one token more."""
        for row in rows:
            request = self._requests.get(row.rid)
            if request is not None:
                request.computed = row.start + row.num_tokens
                request.known += row.rid in sampled

    def choose(self, prefill_budget: Callable[[int], int | None] = unbounded) -> StepChoice | None:
        """The next step, or None where no row can run now.

        `prefill_budget`: most prompt tokens beside that many decoding rows, None for no bound; never 0 where none decodes.
        """
        self._kv.clear_promises()
        rows: list[Row] = []
        preempted: list[str] = []
        budget = self._limits.max_num_batched_tokens
        ordered = sorted(self._running.values(), key=lambda request: (request.remaining > 1, request.order))
        is_bounded = False
        for request in ordered:
            if request.remaining > 1 and not is_bounded:
                budget, is_bounded = _bounded(budget, prefill_budget(len(rows))), True
            if request.rid not in self._running or request.remaining < 1:
                continue
            count = min(request.remaining, budget)
            if count < 1 or not self._grow(request, preempted):
                continue
            rows.append(Row(request.rid, request.computed, count))
            budget -= count
        if not preempted:
            self._admit(rows, budget if is_bounded else _bounded(budget, prefill_budget(len(rows))))
        return StepChoice(tuple(rows), tuple(preempted)) if rows or preempted else None

    def _grow(self, request: Scheduled, preempted: list[str]) -> bool:
        """Promise the pages for what `request` knows, preempting younger ones; False where it had to give way itself."""
        while not self._kv.reserve_growth(request.rid, request.known):
            victim = max((other for other in self._running.values() if other.known), key=lambda other: other.order)
            self._preempt(victim, preempted)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Scheduled, preempted: list[str]) -> None:
        self._kv.preempt(victim.rid)
        del self._running[victim.rid]
        victim.computed = 0
        self.queue.push(victim.rid, victim.order, uses_slot=False)
        preempted.append(victim.rid)
        self.num_preemptions += 1

    def _admit(self, rows: list[Row], budget: int) -> None:
        left = budget
        places = self._limits.max_num_seqs - sum(1 for request in self._running.values() if request.known)

        def attempt(rid: str) -> Verdict:
            nonlocal left, places
            request = self._requests[rid]
            if request.known and (left < 1 or places < 1):
                return Verdict.FULL
            verdict, fails = self._reserve(rid, num_tokens=request.known)
            if verdict is not Verdict.ADMITTED:
                return verdict
            count = 0
            if not fails and request.known:
                request.computed = self._kv.cached_tokens(rid)
                count = min(request.remaining, left)
            rows.append(Row(rid, request.computed, count))
            left -= count
            places -= request.known > 0
            self._running[rid] = request
            return verdict

        self.queue.admit(attempt)

    def _reserve(self, rid: str, *, num_tokens: int) -> tuple[Verdict, bool]:
        """All resources or none. The second value: the row goes in without tokens, and its admit fails it on every rank."""
        asking: list[Resource] = []
        fails = False
        for resource in self._resources:
            if resource is self._kv and (fails or not num_tokens):
                continue
            outcome = resource.ask(rid, NODE, WALK)
            if outcome is None:
                continue
            if outcome.error is not None:
                fails = True  # in one node's pool; its admit in an earlier node's takes a slot all the same
            else:
                asking.append(resource)
        reserved: list[Resource] = []
        for resource in asking:
            if resource.reserve(rid, NODE, WALK) is None:
                for earlier in reserved:
                    earlier.cancel(rid)
                return Verdict.waits(resource.waits_for(rid)), False
            reserved.append(resource)
        return Verdict.ADMITTED, fails


def _bounded(budget: int, bound: int | None) -> int:
    return budget if bound is None else min(budget, bound)
