"""What must hold after every admit, on every rank, and at the end: the judge of a simulated run.

It is told what each rank did and looks at tables through what pools and page tables show. It decides nothing.

    after an admit    tables equal on all ranks at one seq, and equal to the reference; refused on all or none; the same rows failed
    in a forward      each token meets its own adapter's weights (forward.py)
    at the end        every request ended exactly once, everything is released
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol

from mstar.engine.resources.kv.resource import KvResource
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.runner import Runner
from mstar.engine.scheduler import Scheduler
from mstar.errors import CapacityError
from mstar.sim.collective import Collective
from mstar.sim.reference import ReferenceTable
from mstar.sim.scenario import token_of
from mstar.sim.tiny import Generation
from mstar.sim.world import Violation, World
from mstar.types import Row, Step


class WatchedRank(Protocol):
    """What the oracle sees of a rank."""

    tp_rank: int
    pools: dict[str, LoraAdapterPool]
    kv: KvResource
    runner: Runner

    @property
    def name(self) -> str:
        """For reports."""
        ...


class WatchedLeader(WatchedRank, Protocol):
    """What the oracle sees of the leader."""

    scheduler: Scheduler


class Oracle:
    """One run's judge."""

    def __init__(self, world: World, nodes: Iterable[str], collective: Collective) -> None:
        self._world = world
        self._collective = collective
        self._tables = {node: ReferenceTable(world.settings.max_loras) for node in nodes}
        self._generation_of: dict[str, Generation | None] = {}
        self._last_seq = 0  # of the reference
        self._failed: dict[int, tuple[str, ...]] = {}
        self._refused: dict[int, str] = {}
        self._lines: dict[int, tuple[str, list[str]]] = {}
        self._greedy: set[int] = set()
        self._pins: set[str] = set()
        self._pages: dict[int, dict[str, int]] = {}
        self._removes: dict[int, Counter[str]] = defaultdict(Counter)
        self._tokens: Counter[str] = Counter()
        self.num_admits = 0

    # what is true

    def accepted(self, rid: str, generation: Generation | None, *, pin: bool, num_tokens: int) -> None:
        """The front accepted a request on `generation` (None: the base) that has `num_tokens` output tokens already."""
        self._generation_of[rid] = generation
        self._tokens[rid] = num_tokens
        if pin:
            self._pins.add(rid)

    def withdrawn(self, rid: str) -> None:
        """A request ended before any rank heard of it."""
        del self._generation_of[rid]

    def mark(self, rid: str, node: str) -> float:
        """The weights that `rid` must meet at a node; 0 for none."""
        generation = self._generation_of[str(rid)]
        return float(generation.mark) if generation is not None and node in generation.nodes else 0.0

    def cache_key(self, rid: str) -> bytes:
        """Whose keys `rid` may read."""
        generation = self._generation_of[str(rid)]
        return b"" if generation is None else generation.cache_key

    # what happens

    def chose(self, leader: WatchedLeader, rows: Iterable[Row]) -> None:
        """The leader made its promises for a step of `rows`."""
        rids = {row.rid for row in rows}
        for node, pool in leader.pools.items():
            promised = pool._reservations.promised() + self._tables[node].num_held()
            if promised > self._world.settings.max_loras:
                raise Violation(
                    "reservations", f"{node}: {promised} slots are held or promised, there are {self._world.settings.max_loras}"
                )
            idle = [rid for rid in _promised(pool) if rid not in rids]
            if idle:
                raise Violation("reservations", f"{node}: {idle} were promised a slot without being in the step")
        passes = leader.scheduler.queue.longest_pass_over
        if passes > self._world.settings.max_passes:
            raise Violation("fairness", f"a request was passed {passes} times, the bound is {self._world.settings.max_passes}")

    def sent(self, step: Step, *, greedy: bool) -> None:
        """The leader sends a step. `greedy`: it reserved nothing for it."""
        settings = self._world.settings
        if greedy:
            self._greedy.add(step.seq)
        num_tokens = sum(row.num_tokens for row in step.rows)
        rids = [row.rid for row in step.rows]
        num_seqs = sum(1 for row in step.rows if row.num_tokens)
        if len(set(rids)) != len(rids) or num_seqs > settings.max_num_seqs or num_tokens > settings.max_num_batched_tokens:
            raise Violation("step", f"step {step.seq} has rows {rids} and {num_tokens} tokens")

    def begins(self, rank: WatchedRank, step: Step) -> None:
        """A rank starts on `step`."""
        self._pages[rank.tp_rank] = {str(row.rid): len(rank.kv.pages.table(row.rid)) for row in step.rows if row.rid not in step.preempted}

    def waits(self, rank: WatchedRank, node: str, seq: int) -> None:
        """A rank is about to wait for a copy: only after the instance agreed where every copy stands."""
        results = self._collective.results.get((seq, node), [])
        if len(results) != 1 or 1 not in results[0]:
            raise Violation("agreement", f"{rank.name}, step {seq}, {node}: waits for a copy after agreements {results}")

    def admitted(self, rank: WatchedRank, step: Step, failed: Mapping[str, object]) -> None:
        """A rank's admits of `step` are done; `failed` rows run no further."""
        self._advance(step)
        if step.seq in self._refused:
            raise Violation("refusal", f"{rank.name} took step {step.seq}, which must be refused: {self._refused[step.seq]}")
        rids = tuple(sorted(str(rid) for rid in failed))
        if rids != self._failed[step.seq]:
            raise Violation("failures", f"{rank.name}, step {step.seq}: rows {rids} failed, expected {self._failed[step.seq]}")
        empty = [row.rid for row in step.rows if not row.num_tokens and row.rid not in failed and str(row.rid) not in self._pins]
        if empty and step.seq not in self._greedy:
            raise Violation("failures", f"step {step.seq}: rows {empty} were let through to fail, and did not")
        self._compare(rank, step)

    def refused(self, rank: WatchedRank, step: Step, refusal: CapacityError) -> None:
        """A rank refused `step` and rolled its admits back."""
        self._advance(step)
        if step.seq not in self._refused:
            raise Violation("refusal", f"{rank.name} refused step {step.seq}: {refusal}")
        pages = {rid: len(rank.kv.pages.table(rid)) for rid in self._pages[rank.tp_rank]}
        if not self._world.settings.salted_hashes and pages != self._pages[rank.tp_rank]:
            raise Violation("refusal", f"{rank.name}, step {step.seq}: rows have {pages} pages, before it {self._pages[rank.tp_rank]}")
        self._compare(rank, step)

    def removed(self, rank: WatchedRank, rid: str) -> None:
        """A remove landed on a rank; the leader's is the one that counts for the reference."""
        self._removes[rank.tp_rank][rid] += 1
        if rank.tp_rank == 0:
            for table in self._tables.values():
                table.give_back([rid])

    def sampled(self, rid: str, position: int, token_id: int) -> None:
        """The leader got a token."""
        if position != self._tokens[rid] or token_id != token_of(rid, position):
            raise Violation("tokens", f"{rid} got token {token_id} at position {position}, expected one at {self._tokens[rid]}")
        self._tokens[rid] += 1

    # at the end

    def finish(self, ranks: Iterable[WatchedRank], live: Iterable[str], waiting: str) -> None:
        """Nothing can happen any more: no request may be live, no rank may hold anything. `waiting` says who waits for what."""
        left = sorted(live)
        if left:
            raise Violation("deadlock", f"{left} never end; {waiting}")
        for rank in ranks:
            counts = self._removes[rank.tp_rank]
            wrong = {rid: counts[rid] for rid in self._generation_of if counts[rid] != 1}
            if wrong:
                raise Violation("ends", f"{rank.name}: removes by request, each must be 1: {wrong}")
            self._released(rank)

    def _released(self, rank: WatchedRank) -> None:
        held = {node: live for node, pool in rank.pools.items() if (live := _num_live(pool))}
        slots = [line for pool in rank.pools.values() for line in pool.slots() if line[2]]
        used = rank.kv.pages.num_pages - rank.kv.pages.num_free()
        if held or slots or used or rank.runner.num_requests:
            raise Violation("leak", f"{rank.name}: live {held}, slots {slots}, {used} pages, {rank.runner.num_requests} requests are left")

    # inside

    def _advance(self, step: Step) -> None:
        """Let the reference do what `step` must do, once."""
        if step.seq <= self._last_seq:
            return
        if step.seq != self._last_seq + 1:
            raise Violation("order", f"step {step.seq} was admitted after step {self._last_seq}")
        self._last_seq = step.seq
        failed: list[str] = []
        taken: dict[str, tuple[str, ...]] = {}
        refusal = ""
        for node, table in self._tables.items():
            rows = [(rid, generation) for rid, generation in self._named(step, node) if rid not in failed]
            agreements = self._collective.results.get((step.seq, node), [])
            expected = table.admit(rows, agreements)
            if expected.num_agreements != len(agreements):
                raise Violation("agreement", f"step {step.seq}, {node}: {len(agreements)} agreements, expected {expected.num_agreements}")
            if expected.refused:
                refusal = f"{node} has too few slots"
                break
            taken[node] = expected.taken
            failed.extend(expected.failed)
        if refusal and step.seq not in self._greedy:
            raise Violation("promise", f"step {step.seq}: {refusal} for rows that were promised one")
        if not refusal and self._world.draws.chance(self._world.settings.refusals, "refuses", step.seq):
            refusal = "the page table refuses"
        if refusal:
            self._refused[step.seq] = refusal
            for node, rids in reversed(taken.items()):
                self._tables[node].give_back(rids)
        self._failed[step.seq] = tuple(sorted(failed))

    def _named(self, step: Step, node: str) -> list[tuple[str, Generation]]:
        named = []
        for row in step.rows:
            generation = self._generation_of[str(row.rid)]
            if generation is not None and node in generation.nodes:
                named.append((str(row.rid), generation))
        return named

    def _compare(self, rank: WatchedRank, step: Step) -> None:
        """This rank's tables against the reference, and against those of the first rank at this seq."""
        self.num_admits += 1
        for node, pool in rank.pools.items():
            found = pool.lines()
            if rank.tp_rank == 0 or step.seq not in self._lines:
                expected = self._tables[node].lines()
                if found != expected:
                    raise Violation("slots", f"{rank.name}, {node}, after the admit of step {step.seq}:\n{_differences(found, expected)}")
        lines = [line for pool in rank.pools.values() for line in pool.lines()] + rank.kv.lines()
        lines += [f"digests {[pool.digest().hex() for pool in rank.pools.values()]} {rank.kv.digest().hex()}\n"]
        first = self._lines.setdefault(step.seq, (rank.name, lines))
        if lines != first[1]:
            raise Violation("divergence", f"step {step.seq}, {rank.name} against {first[0]}:\n{_differences(lines, first[1])}")


def _promised(pool: LoraAdapterPool) -> list[str]:
    """Requests with a promise of a slot; no server needs to ask."""
    return list(pool._reservations._adapter_of)


def _num_live(pool: LoraAdapterPool) -> int:
    """Requests open in the pool and marks of early removes."""
    return len(pool._requests) + len(pool._removed_early) + len(pool._live)


def _differences(found: list[str], expected: list[str]) -> str:
    pairs = [*zip(found, expected, strict=False)]
    shown = [f"  found    {one}  expected {other}" for one, other in pairs if one != other]
    shown += [f"  found    {line}" for line in found[len(pairs) :]] + [f"  expected {line}" for line in expected[len(pairs) :]]
    return "".join(shown)
