"""The stub model of a simulated rank: gives token ids that every rank can foretell, and checks what a forward would have read.

It reads each token's mark through the real layer delta, addressing and slot weights; and on the leader it keeps what each KV page
holds, so that a row that reads another request's keys is found.
"""

from __future__ import annotations

from typing import Protocol

import torch

from mstar.engine.resources.kv.resource import KvResource
from mstar.engine.resources.kv.rows import KvRows
from mstar.engine.resources.lora.delta import LoraLayerDelta
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.runner import ForwardInput, Runner, Sampled, SampleJob
from mstar.errors import RequestError
from mstar.sim.oracle import Oracle
from mstar.sim.scenario import token_of
from mstar.sim.tiny import TARGET
from mstar.sim.world import Violation, World
from mstar.types import Row

_ROUNDING = 0.01  # of a mark; two marks differ by one, a stale row adds a quarter


class ModelRank(Protocol):
    """The rank that runs the model."""

    tp_rank: int
    world: World
    pools: dict[str, LoraAdapterPool]
    runner: Runner
    kv: KvResource

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def live_rows(self) -> list[Row]:
        """The step's rows that run."""
        ...

    def park(self, why: str) -> None:
        """Block the step thread."""
        ...

    def unpark(self, why: str) -> None:
        """Go on."""
        ...


class TinyModel:
    """See the module; called on the step thread."""

    def __init__(self, rank: ModelRank, oracle: Oracle) -> None:
        self._rank = rank
        self._oracle = oracle
        self._deltas: dict[str, LoraLayerDelta] = {}
        self._pages: dict[tuple[int, int], int] = {}  # (page, offset) -> what lies there

    def __call__(self, step: ForwardInput) -> list[Sampled]:
        """The next token of each row that samples."""
        rows = self._rank.live_rows
        self._check_marks(rows)
        if self._rank.tp_rank == 0:
            self._check_pages(rows, step.plan_results["kv"])
        world = self._rank.world
        if world.settings.forward_s:
            key = ("forward", self._rank.tp_rank, rows[0].rid, rows[0].start)
            world.after(world.settings.forward_s, lambda: self._rank.unpark("forward"), *key)
            self._rank.park("forward")
        return [self._sample(job) for job in step.jobs]

    def _sample(self, job: SampleJob) -> Sampled:
        """The token that was foretold; logits that are no numbers are so on every rank."""
        rid, position = job.request.rid, len(job.request.output)
        if not job.samples:
            return Sampled(rid, None)
        if self._rank.world.draws.chance(0.01, "not finite", rid, position):
            error = RequestError("the logits of this request are not finite numbers", code="non_finite_logits", status=500)
            return Sampled(rid, None, error=error)
        return Sampled(rid, token_of(rid, position))

    def _check_marks(self, rows: list[Row]) -> None:
        """Every token of every row meets its own adapter's weights."""
        num_tokens = sum(row.num_tokens for row in rows)
        for node, pool in self._rank.pools.items():
            delta = self._deltas.get(node)
            if delta is None:
                delta = self._deltas[node] = pool.layer_delta(TARGET, 0)
            expected = [self._oracle.mark(row.rid, node) for row in rows for _ in range(row.num_tokens)]
            if not any(expected) and not pool.active:
                continue
            found = delta(torch.zeros(num_tokens, 1), torch.ones(num_tokens, 1))[:, 0].tolist()
            if any(abs(one - other) > _ROUNDING for one, other in zip(found, expected, strict=True)):
                shown = [f"{row.rid}×{row.num_tokens}" for row in rows]
                raise Violation("weights", f"{self._rank.name}, {node}, rows {shown}: read marks {found}, expected {expected}")

    def _check_pages(self, rows: list[Row], plan: KvRows) -> None:
        """What a row finds below its start is what it computed, or what one with the same weights and tokens did."""
        size = self._rank.kv.spec.block_size
        contents = []
        for row in rows:
            request = self._rank.runner.request(row.rid)
            assert request is not None
            chain = hash(self._oracle.cache_key(row.rid))
            chains = []
            for token in request.tokens(0, row.start + row.num_tokens):
                chain = hash((chain, token))
                chains.append(chain)
            contents.append(chains)
        for row, table, chains in zip(rows, plan.block_tables, contents, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                self._pages[table[position // size], position % size] = chains[position]
        for row, table, chains in zip(rows, plan.block_tables, contents, strict=True):
            for position, content in enumerate(chains):
                if self._pages.get((table[position // size], position % size)) != content:
                    raise Violation("pages", f"{row.rid} at position {position}: page {table[position // size]} holds another's keys")
