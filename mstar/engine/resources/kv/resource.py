"""KV pages as a resource: promises on the leader, pages on every rank, block tables for the step.

A request's first admit takes pages for all tokens it brings (prompt, and output where it resumes), so a prompt that prefills in
chunks never waits half-way; each later page comes when a token needs it. A preempted request gives its pages up and comes back as if
new, its blocks perhaps still cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mstar.engine.resources.base import ASKS, AdmitOutcome, EngineResourceInfo, Resource, ResourceReqConfig, StepContext
from mstar.engine.resources.kv.pages import PageTable, block_keys
from mstar.engine.resources.kv.rows import KvRows
from mstar.types import Step


@dataclass(frozen=True)
class KvSpec:
    """How many pages, of how many tokens, and whether prefixes are shared."""

    num_pages: int
    block_size: int
    enable_prefix_caching: bool = True


@dataclass
class _Request:
    tokens: list[int]
    cache_key: bytes
    shares: bool
    keys: list[bytes] = field(default_factory=list)
    published: int = 0  # blocks of the present table that were offered to the index


@dataclass(frozen=True)
class _Promise:
    fresh: int
    matched: tuple[int, ...]


class KvResource(Resource):
    """See the module. Holds no tensors: the attention backend owns the cache that the pages lie in."""

    name = "kv"

    def __init__(self, spec: KvSpec, *, decides: bool = True) -> None:
        self.spec = spec
        self.pages = PageTable(spec.num_pages, spec.block_size)
        self._decides = decides
        self._requests: dict[str, _Request] = {}
        self._removed_early: set[str] = set()
        self._promises: dict[str, _Promise] = {}
        self._grown: list[tuple[str, int]] = []
        self._fresh: list[int] = []

    @classmethod
    def build(cls, spec: KvSpec, info: EngineResourceInfo) -> KvResource:
        """The page table of one rank."""
        return cls(spec, decides=info.decides)

    def ingest_request(self, rid: str, overrides: ResourceReqConfig | None = None) -> None:
        """Keep the request's tokens, from which its block keys are made."""
        if rid in self._removed_early:
            self._removed_early.discard(rid)
            return
        config = overrides or ResourceReqConfig()
        shares = self.spec.enable_prefix_caching and (config.sampling is None or config.sampling.prompt_logprobs is None)
        self._requests[rid] = _Request([*config.prompt, *config.output], config.cache_key, shares)

    def remove_request(self, rid: str) -> None:
        """Free its pages."""
        if self._requests.pop(rid, None) is None:
            self._removed_early.add(rid)
            return
        self._promises.pop(rid, None)
        self.pages.release(rid)

    # the leader's admission

    def cached_tokens(self, rid: str) -> int:
        """Tokens that the cache would give `rid` now; at least one is always left to compute."""
        return len(self._match(rid)) * self.spec.block_size

    def ask(self, rid: str, node_name: str, graph_walk: str) -> AdmitOutcome | None:
        """ASKS for a request that has no pages."""
        return ASKS if self._decides and not self.pages.table(rid) and rid not in self._promises else None

    def reserve(self, rid: str, node_name: str, graph_walk: str, published: Any = None) -> int | None:
        """Promise pages for all of `rid`'s tokens: as many fresh ones as the cache does not give."""
        matched = tuple(self._match(rid))
        fresh = self.pages.pages_for(len(self._requests[rid].tokens)) - len(matched)
        if fresh > self._available(matched):
            return None
        self._promises[rid] = _Promise(fresh, matched)
        return fresh

    def reserve_growth(self, rid: str, num_tokens: int) -> bool:
        """Promise the pages that a running request's next tokens need; False where there are too few."""
        fresh = self.pages.pages_for(num_tokens) - len(self.pages.table(rid))
        if fresh <= 0:
            return True
        if fresh > self._available(()):
            return False
        self._promises[rid] = _Promise(fresh, ())
        return True

    def cancel(self, rid: str) -> None:
        """Undo a promise."""
        self._promises.pop(rid, None)

    def clear_promises(self) -> None:
        """Forget all promises: their step was admitted."""
        self._promises.clear()

    def preempt(self, rid: str) -> None:
        """Take `rid`'s pages away. It comes back as if new."""
        self._promises.pop(rid, None)
        self.pages.release(rid)
        self._requests[rid].published = 0

    # a step

    def admit(self, step: Step, ctx: StepContext) -> None:
        """Preempted requests give up their pages; newcomers attach what the cache gives; then rows take fresh pages, in row order.

        Attaching first means that no fresh page is taken from under a match. Raises CapacityError; then nothing is taken.
        """
        for rid in step.preempted:
            if self.pages.table(rid):
                self.preempt(rid)
        self._grown, self._fresh = [], []
        rows = ctx.live_rows()
        new = [row for row in rows if not self.pages.table(row.rid)]
        try:
            for row in new:
                self._grown.append((row.rid, 0))
                if row.start:
                    request = self._requests[row.rid]
                    self.pages.attach(row.rid, self._keys(request)[: row.start // self.spec.block_size])
            for row in rows:
                before = len(self.pages.table(row.rid))
                whole = len(self._requests[row.rid].tokens)
                fresh = self.pages.extend(row.rid, max(row.start + row.num_tokens, whole))
                if fresh:
                    self._grown.append((row.rid, before))
                    self._fresh.extend(fresh)
        except Exception:
            self.rollback_admit(step, ctx)
            raise
        self.clear_promises()

    def rollback_admit(self, step: Step, ctx: StepContext) -> None:
        """Give back the pages that this step's admit took."""
        for rid, before in reversed(self._grown):
            self.pages.shrink(rid, before)
        self._grown, self._fresh = [], []
        self.clear_promises()

    def plan(self, step: Step, ctx: StepContext) -> KvRows:
        """The step's block tables, and the pages handed out fresh (to be blanked before use)."""
        rows = ctx.live_rows()
        return KvRows(
            block_tables=tuple(tuple(self.pages.table(row.rid)[: self.pages.pages_for(row.start + row.num_tokens)]) for row in rows),
            starts=tuple(row.start for row in rows),
            num_tokens=tuple(row.num_tokens for row in rows),
            fresh_pages=tuple(self._fresh),
        )

    def commit(self, step: Step, ctx: StepContext) -> None:
        """Offer blocks that this step filled to the index; take the sampled tokens."""
        size = self.spec.block_size
        for row in ctx.live_rows():
            request = self._requests[row.rid]
            if request.shares:
                full = (row.start + row.num_tokens) // size
                if full > request.published:
                    keys = self._keys(request)
                    for block in range(request.published, full):
                        self.pages.publish(row.rid, block, keys[block])
                    request.published = full
            token = ctx.sampled.get(row.rid)
            if token is not None:
                request.tokens.append(token)
        self._grown, self._fresh = [], []

    def digest(self) -> bytes:
        """A hash of the page table."""
        return self.pages.digest()

    def lines(self) -> list[str]:
        """The page table as text."""
        return self.pages.lines()

    def _keys(self, request: _Request) -> list[bytes]:
        if len(request.tokens) // self.spec.block_size > len(request.keys):
            request.keys = block_keys(request.cache_key, request.tokens, self.spec.block_size, request.keys)
        return request.keys

    def _match(self, rid: str) -> list[int]:
        request = self._requests[rid]
        if not request.shares:
            return []
        usable = (len(request.tokens) - 1) // self.spec.block_size
        return self.pages.match(self._keys(request)[:usable])

    def _available(self, matched: tuple[int, ...]) -> int:
        """Free pages that no promise counts on, nor `matched` itself."""
        pinned = {page for promise in self._promises.values() for page in promise.matched if self.pages.is_free(page)}
        pinned.update(page for page in matched if self.pages.is_free(page))
        return self.pages.num_free() - len(pinned) - sum(promise.fresh for promise in self._promises.values())
