"""The leader's loop on one rank without sockets: scheduler, runner, pool and pages as they serve, over a model that counts.

`step` is what `mstar/worker/leader.py` does between two looks into its inbox. After each step the promises of the engine are checked.
"""

from __future__ import annotations

from collections.abc import Callable

from mstar.engine.lockstep.leader import LeaderSequence
from mstar.engine.resources.base import Resource
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.runner import ForwardInput, Runner, Sampled, StepOutcome
from mstar.engine.scheduler import Scheduler, SchedulerLimits, StepChoice, unbounded
from tests.unit.engine.lora_pools import Instance, wants


def count_tokens(step: ForwardInput) -> list[Sampled]:
    """A model whose next token is the number of tokens so far."""
    return [Sampled(job.request.rid, job.request.num_tokens if job.samples else None) for job in step.jobs]


class LeaderLoop:
    """One leader over `instance`'s single rank."""

    def __init__(
        self, instance: Instance, *, num_pages=64, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_passes=4, caching=True
    ):
        self.instance, self.pool = instance, instance.pool
        self.kv = KvResource(KvSpec(num_pages, block_size, caching))
        resources: list[Resource] = [self.pool, self.kv]
        self.runner = Runner(resources, count_tokens)
        self.scheduler = Scheduler(SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_passes), resources, self.kv)
        self.sequence = LeaderSequence()
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_tokens: dict[str, int] = {}
        self.adapter_of: dict[str, str | None] = {}
        self.choices: list[StepChoice] = []
        self.outcomes: list[StepOutcome] = []
        self.ended: dict[str, str] = {}  # rid -> why

    def add(self, rid: str, adapter: str | None, *, tokens: int = 3, max_tokens: int = 2, settled: bool = True, offset: int = 0) -> None:
        config = wants(adapter, tokens, max_tokens, cache_key=(adapter or "").encode())
        if offset:  # prompts that share no prefix
            config = wants(adapter, max_tokens=max_tokens)
            config = type(config)(tuple(range(offset, offset + tokens)), config.sampling, adapter, (adapter or "").encode())
        self.runner.ingest(rid, config)
        self._added(rid, adapter, tokens, max_tokens, settled=settled)

    def add_pin(self, rid: str, adapter: str) -> None:
        """A request without tokens that holds its adapter's slot."""
        self.runner.ingest(rid, type(wants(adapter))((), None, adapter))
        self._added(rid, adapter, 0, 0, settled=True)

    def _added(self, rid: str, adapter: str | None, tokens: int, max_tokens: int, *, settled: bool) -> None:
        if adapter is not None and settled:
            self.instance.leader.wait_read(adapter)
        self.adapter_of[rid], self.max_tokens[rid] = adapter, max_tokens
        self.scheduler.add(rid, tokens, uses_slot=self.pool.runs_adapters([rid]))

    def end(self, rid: str, why: str) -> None:
        """The one exit path."""
        assert rid not in self.ended
        self.ended[rid] = why
        self.runner.remove(rid)
        self.scheduler.finish(rid)

    def step(self, prefill_budget: Callable[[int], int | None] = unbounded) -> StepChoice | None:
        choice = self.scheduler.choose(prefill_budget)
        if choice is None:
            return None
        self.choices.append(choice)
        step = self.sequence.step(choice.rows, choice.preempted)
        outcome = self.runner.execute(step)
        self.outcomes.append(outcome)
        self.scheduler.committed(step.rows, outcome.sampled)
        self.check(choice)
        for rid in outcome.failed:
            self.end(rid, "failed")
        for token in outcome.tokens:
            if token.position + 1 >= self.max_tokens[token.rid]:
                self.end(token.rid, "length")
        return choice

    def run(self, steps: int = 400) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not self.scheduler.has_work():
                return
            assert self.step() is not None, f"nothing can run, yet {self.scheduler.queue.rids()} wait"
        raise AssertionError(f"not finished after {steps} steps: waiting {self.scheduler.queue.rids()}")

    def check(self, choice: StepChoice) -> None:
        """What holds after every step."""
        failed = self.outcomes[-1].failed
        with_tokens = [row for row in choice.rows if row.num_tokens]
        assert len(with_tokens) <= self.max_num_seqs and sum(row.num_tokens for row in with_tokens) <= self.max_num_batched_tokens
        held = self.instance.leader.holders()
        for row in choice.rows:
            adapter = self.adapter_of[row.rid]
            if row.rid not in failed and adapter is not None:
                assert held.get(adapter, 0) > 0, f"{row.rid} ran without a slot for {adapter}"
        for rid in self.scheduler.queue.rids():
            assert not self.kv.pages.table(rid), f"{rid} waits and holds pages"

    def rows(self, choice: StepChoice | None) -> list[str]:
        return [] if choice is None else [row.rid for row in choice.rows]
