"""The resource cycle of one step on one rank: admit, plan, forward, sample, commit.

Step thread; the same on leader and followers. The runner knows resources by their protocol and the model by one callable, so the
simulator drives it without a model.

    admit (resources in order) ─► fingerprint ─► fence ─► plan ─► forward ─► sample ─► commit

Between the sending of a step and its commit only the load agreement and a check of the gathered logits may fail a row; anything else
raised here ends the process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mstar.engine.requests import RequestState, request_state
from mstar.engine.resources.base import AdmitOutcome, Resource, ResourceReqConfig, StepContext
from mstar.engine.resources.lora.pool import LoraAdapterPool, LoraStep
from mstar.errors import CapacityError, RequestError
from mstar.types import Row, Step, TokenLogprobs


@dataclass(frozen=True)
class SampleJob:
    """One row that samples in this step, or whose prompt positions are scored.

    `first_logit` is the index of its first position among the step's packed tokens; `num_logits` positions are wanted; `samples`
    says whether the last of them gives a token.
    """

    request: RequestState
    row: Row
    first_logit: int
    num_logits: int
    samples: bool


@dataclass(frozen=True)
class Sampled:
    """What the model gave one row. `error` is set where its logits are not numbers; `token_id` is None where the row only scored."""

    rid: str
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    error: RequestError | None = None


@dataclass(frozen=True)
class ForwardInput:
    """The step's packed rows, host side: tokens, positions, and which rows give logits."""

    tokens: list[int]
    positions: list[int]
    jobs: list[SampleJob]
    plan_results: Mapping[str, Any]


Model = Callable[[ForwardInput], list[Sampled]]


@dataclass(frozen=True)
class NewToken:
    """One token that a step gave a request. `position` counts its output tokens from 0."""

    rid: str
    position: int
    token_id: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


@dataclass(frozen=True)
class StepOutcome:
    """What a step did. `failed` rows end with their error; the same on every rank."""

    step: Step
    fingerprint: bytes
    tokens: list[NewToken]
    failed: dict[str, RequestError]
    sampled: dict[str, int]
    admit_s: float
    step_s: float


@dataclass
class RunnerStats:
    """Counters of one rank, for its own account."""

    num_steps: int = 0
    num_tokens: int = 0
    longest_admit_s: float = 0.0
    busy_s: float = 0.0
    last: StepOutcome | None = field(default=None, repr=False)


class Runner:
    """Drives `resources` (in admit order: slots before pages) and `model` through one step after another.

    `fence` returns once the device has done all that was given to it. It is called before each plan where a resource forces double
    buffering, since a plan may overwrite a host buffer that the last step's copy still reads.
    """

    def __init__(self, resources: Sequence[Resource], model: Model, fence: Callable[[], None] | None = None) -> None:
        self._resources = tuple(resources)
        self._model = model
        self._fence = (fence or torch.cuda.synchronize) if any(item.force_double_buffer for item in self._resources) else None
        self._requests: dict[str, RequestState] = {}
        self._ingested: set[str] = set()
        self._removed_early: set[str] = set()
        self._last_ids = b""
        self.stats = RunnerStats()

    # requests

    def ingest(self, rid: str, config: ResourceReqConfig) -> None:
        """Open the request in every resource, once. A remove that came first leaves nothing open."""
        for resource in self._resources:
            resource.ingest_request(rid, config)
        if rid in self._removed_early:
            self._removed_early.discard(rid)
            return
        self._ingested.add(rid)
        state = request_state(rid, config)
        if state is not None:
            self._requests[rid] = state

    def remove(self, rid: str) -> None:
        """End the request in every resource. No step is in flight here: `execute` returns only after its commit."""
        for resource in self._resources:
            resource.remove_request(rid)
        if rid in self._ingested:
            self._ingested.discard(rid)
            self._requests.pop(rid, None)
        else:
            self._removed_early.add(rid)

    def is_ingested(self, rid: str) -> bool:
        """Whether the request is open here."""
        return rid in self._ingested

    @property
    def num_requests(self) -> int:
        """Requests open here."""
        return len(self._ingested)

    def request(self, rid: str) -> RequestState | None:
        """A live request with tokens."""
        return self._requests.get(rid)

    # a step

    def execute(self, step: Step, admitted: Callable[[bytes], None] = lambda fingerprint: None) -> StepOutcome:
        """Run one step to its commit. `admitted` is called with the fingerprint right after the admit."""
        began = time.perf_counter()
        ctx = StepContext(step)
        self._admit(ctx)
        fingerprint = self.fingerprint()
        admitted(fingerprint)
        admit_s = time.perf_counter() - began
        if self._fence is not None:
            self._fence()
        for resource in self._resources:
            ctx.plan_results[resource.name] = resource.plan(self._view(resource, ctx), ctx)
        results = self._model(self._forward_input(ctx)) if ctx.live_rows() else []
        tokens, failed = self._take(ctx, results)
        for resource in self._resources:
            resource.commit(self._view(resource, ctx), ctx)
        self._last_ids = ",".join(f"{rid}:{token}" for rid, token in ctx.sampled.items()).encode()
        outcome = StepOutcome(step, fingerprint, tokens, failed, dict(ctx.sampled), admit_s, time.perf_counter() - began)
        self._account(outcome, sum(row.num_tokens for row in ctx.live_rows()))
        return outcome

    def fingerprint(self) -> bytes:
        """A hash of what admits decide from, as it stands now, and of the ids that the last committed step sampled."""
        state = hashlib.blake2b(digest_size=16)
        for resource in self._resources:
            state.update(resource.digest())
            state.update(b"|")
        state.update(self._last_ids)
        return state.digest()

    def lines(self) -> list[str]:
        """The same state as text: what is dumped where two ranks differ."""
        lines = [line for resource in self._resources for line in resource.lines()]
        return [*lines, f"last ids {self._last_ids.decode()}\n"]

    def _admit(self, ctx: StepContext) -> None:
        done: list[Resource] = []
        try:
            for resource in self._resources:
                resource.admit(self._view(resource, ctx), ctx)
                done.append(resource)
        except CapacityError:
            for resource in reversed(done):
                resource.rollback_admit(self._view(resource, ctx), ctx)
            raise

    def _view(self, resource: Resource, ctx: StepContext) -> Any:
        """The step as a resource's node sees it, made once a step."""
        if not isinstance(resource, LoraAdapterPool):
            return ctx.step
        view = ctx.views.get(resource.name)
        if view is None:
            rows = ctx.step.rows
            view = LoraStep(
                tuple(row.rid for row in rows), tuple(row.num_tokens for row in rows), tuple(self._num_logits(row) for row in rows)
            )
            ctx.views[resource.name] = view
        return view

    def _num_logits(self, row: Row) -> int:
        """How many of the row's positions give logits, from its end: all where its prompt is scored, one where it samples."""
        request = self._requests.get(row.rid)
        if request is None or not row.num_tokens:
            return 0
        if _scores(request, row):
            return row.num_tokens
        return int(row.start + row.num_tokens == request.num_tokens)

    def _forward_input(self, ctx: StepContext) -> ForwardInput:
        tokens: list[int] = []
        positions: list[int] = []
        jobs: list[SampleJob] = []
        for row in ctx.live_rows():
            request = self._requests[row.rid]
            end = row.start + row.num_tokens
            if row.start == 0 and _scores(request, row):
                request.prompt_logprobs.clear()  # recomputed after a preemption
            count = self._num_logits(row)
            if count:
                jobs.append(SampleJob(request, row, len(tokens) + row.num_tokens - count, count, end == request.num_tokens))
            tokens.extend(request.tokens(row.start, row.num_tokens))
            positions.extend(range(row.start, end))
        return ForwardInput(tokens, positions, jobs, ctx.plan_results)

    def _take(self, ctx: StepContext, results: Sequence[Sampled]) -> tuple[list[NewToken], dict[str, RequestError]]:
        failed = {rid: outcome.error for rid, outcome in ctx.failed.items() if outcome.error is not None}
        tokens = []
        for result in results:
            request = self._requests[result.rid]
            if result.error is not None:
                failed[result.rid] = result.error
                ctx.failed[result.rid] = AdmitOutcome(result.error)  # no resource keeps anything of what it computed
                continue
            request.prompt_logprobs.extend(result.prompt_logprobs)
            if result.token_id is None:
                continue
            position = len(request.output)
            request.output.append(result.token_id)
            ctx.sampled[result.rid] = result.token_id
            scored = position == 0 and request.sampling.prompt_logprobs is not None
            tokens.append(
                NewToken(result.rid, position, result.token_id, result.logprobs, (None, *request.prompt_logprobs) if scored else None)
            )
        return tokens, failed

    def _account(self, outcome: StepOutcome, num_tokens: int) -> None:
        self.stats.num_steps += 1
        self.stats.num_tokens += num_tokens
        self.stats.longest_admit_s = max(self.stats.longest_admit_s, outcome.admit_s)
        self.stats.busy_s += outcome.step_s
        self.stats.last = outcome


def _scores(request: RequestState, row: Row) -> bool:
    """Whether the row's positions are scored: its client wants the prompt's logprobs."""
    return request.sampling.prompt_logprobs is not None and not request.output and row.start < len(request.prompt)
