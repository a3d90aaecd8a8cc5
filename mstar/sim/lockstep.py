"""What leader and followers do with the real lockstep, scheduler and runner: the worker's two loops without sockets and clocks.

leader     choose ─► Step to each follower's channel ─► run it ─► removes of ended rows ─► …
follower   its channel in order: Step once every request it names is here; Remove at its fence
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mstar.engine.lockstep.follower import FingerprintMismatch, FollowerSequence
from mstar.engine.lockstep.leader import LeaderSequence
from mstar.engine.lockstep.record import Ingested, Record, Recorder, Served, Unserved
from mstar.engine.resources.base import Resource
from mstar.engine.runner import StepOutcome
from mstar.engine.scheduler import Scheduler, SchedulerLimits
from mstar.errors import ProtocolError
from mstar.sim.collective import Collective
from mstar.sim.messages import Abort, Ended, Ingest, ToRank, Unload
from mstar.sim.oracle import Oracle
from mstar.sim.rank import SimRank
from mstar.sim.tiny import Generation
from mstar.sim.world import Channel, Violation, World
from mstar.types import Remove, Row, Step

_POLLS = 8  # looks for work after the last event: enough to outlast a wait for hints in each pool


class Order:
    """One message of the leader, named for its delay."""

    def __init__(self, message: Step | Remove) -> None:
        self.message = message
        self.key = f"step {message.seq}" if isinstance(message, Step) else f"remove {message.rid}"


class Hint:
    """A follower's word that its copy of `name` is in or failed."""

    def __init__(self, tp_rank: int, node: str, name: str) -> None:
        self.tp_rank = tp_rank
        self.node = node
        self.name = name
        self.key = f"hint {tp_rank} {node} {name}"


class Follower(SimRank):
    """A rank that decides nothing."""

    def __init__(self, world: World, tp_rank: int, collective: Collective, oracle: Oracle, generations: dict[str, Generation]) -> None:
        super().__init__(world, tp_rank, collective, oracle, generations)
        self._sequence = FollowerSequence()
        self._orders: deque[Step | Remove] = deque()
        self._awake = False
        self.to_leader: Channel[Hint] | None = None

    def from_leader(self, order: Order) -> None:
        """Queue what the leader sent; strings become this rank's own."""
        message = order.message
        if isinstance(message, Step):
            rows = tuple(Row(self.own(row.rid), row.start, row.num_tokens) for row in message.rows)
            preempted = tuple(self.own(rid) for rid in message.preempted)
            self._orders.append(Step(message.seq, rows, preempted, message.bucket, message.fingerprint_seq, message.fingerprint))
        else:
            self._orders.append(Remove(self.own(message.rid), message.after_tp_seq))
        self.wake()

    def admitted(self, seq: int, fingerprint: bytes) -> None:
        """See SimRank.admitted."""
        self._sequence.admitted(seq, fingerprint)

    def copy_in(self, node: str, name: str) -> None:
        """See SimRank.copy_in."""
        if self.to_leader is not None:
            self.to_leader.send(Hint(self.tp_rank, node, str(name)))

    def wake(self) -> None:
        """See SimRank.wake."""
        if not self.busy and not self._awake and self._orders:
            self._awake = True
            self.world.after(self.world.settings.turn_s, self._turn, "turn", self.tp_rank, len(self._orders), self._sequence.last_seq)

    def waiting(self) -> str:
        """See SimRank.waiting."""
        orders = [order.rid if isinstance(order, Remove) else f"step {order.seq}" for order in self._orders]
        return f"{super().waiting()}; orders {orders}"

    def _turn(self) -> None:
        self._awake = False
        while self._orders and not self.busy:
            order = self._orders[0]
            if isinstance(order, Step):
                if self._sequence.missing(order, self.runner.is_ingested):
                    return  # the ingest wakes this rank again
                self._orders.popleft()
                self._step(order)
            else:
                self._orders.popleft()
                self._land(order)

    def _step(self, step: Step) -> None:
        try:
            self._sequence.check_step(step)
        except FingerprintMismatch as error:
            raise Violation("fingerprint", f"{self.name}: {error}") from error
        except ProtocolError as error:
            raise Violation("protocol", f"{self.name}: {error}") from error
        self.execute(step, lambda outcome: None)

    def _land(self, remove: Remove) -> None:
        try:
            self._sequence.check_remove(remove)
        except ProtocolError as error:
            raise Violation("protocol", f"{self.name}: {error}") from error
        self.world.note(self.name, f"removes {remove.rid}")
        self.runner.remove(remove.rid)
        self.oracle.removed(self, str(remove.rid))


class Leader(SimRank):
    """The rank that chooses batches."""

    def __init__(self, world: World, tp_rank: int, collective: Collective, oracle: Oracle, generations: dict[str, Generation]) -> None:
        super().__init__(world, tp_rank, collective, oracle, generations)
        settings = world.settings
        resources: list[Resource] = [*self.pools.values(), self.kv]
        limits = SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_passes)
        self.scheduler = Scheduler(limits, resources, self.kv)
        self.sequence = LeaderSequence()
        self.to_followers: list[Channel[Order]] = []
        self.ended: Channel[Ended] | None = None
        self.recorder: Recorder | None = None
        self._live: set[str] = set()
        self._max_tokens: dict[str, int] = {}
        self._again: tuple[Row, ...] = ()  # the rows of a step that was refused
        self._is_greedy = False  # the step under way was sent without promises
        self._fingerprint = b""
        self._awake = False
        self._polls = 0

    def admitted(self, seq: int, fingerprint: bytes) -> None:
        """See SimRank.admitted."""
        self.sequence.admitted(seq, fingerprint)
        self._fingerprint = fingerprint

    def ingested(self, message: Ingest) -> None:
        """Queue the request for admission."""
        rid = self.own(message.rid)
        sampling = message.config.sampling
        uses_slot = any(pool.runs_adapters([rid]) for pool in self.pools.values())
        self._live.add(message.rid)
        self._max_tokens[message.rid] = 0 if sampling is None else sampling.max_tokens
        config = message.config
        self._record(Ingested(message.rid, config.prompt, config.output, sampling, config.adapter, config.cache_key))
        num_tokens = 0 if sampling is None else len(config.prompt) + len(config.output)
        self.scheduler.add(rid, num_tokens, uses_slot=uses_slot)

    def from_front(self, message: ToRank) -> None:
        """An abort waits for the end of the step under way: the leader's step thread applies it."""
        if isinstance(message, Abort) and self.busy:
            self._pending.append(lambda: self.apply(message))
            self.wake()
        else:
            super().from_front(message)

    def apply(self, message: ToRank) -> None:
        """Aborts become removes; the rest as any rank."""
        if not isinstance(message, Abort):
            super().apply(message)
            if isinstance(message, Unload):
                self._record(Unserved(message.name))
        elif message.rid in self._live:
            self._end(message.rid)

    def served(self, generation: Generation) -> None:
        """See SimRank.served."""
        self._record(Served(generation.name, generation.nodes))

    def agreed(self, node: str, result: list[int]) -> None:
        """See SimRank.agreed."""
        if self.recorder is not None:
            self.recorder.agreed(node, result)

    def heard(self, hint: Hint) -> None:
        """A follower's copy is in or failed."""
        self.pools[hint.node].note_copy(hint.tp_rank, self.own(hint.name))
        self.wake()

    def wake(self) -> None:
        """See SimRank.wake."""
        self._polls = _POLLS
        self._arm(0.0)

    def _arm(self, later_s: float) -> None:
        if not self.busy and not self._awake:
            self._awake = True
            settings = self.world.settings
            delay = self.world.draws.delay(settings.turn_s, "turn", 0, self.sequence.last_seq, len(self._live))
            self.world.at(self.world.now + later_s + delay, self._turn, "turn 0")

    def _turn(self) -> None:
        self._awake = False
        if self.busy or not self.scheduler.has_work():
            return
        self._is_greedy = False
        rows, preempted = self._choose()
        if not rows and not preempted:
            self._polls -= 1
            if self._polls > 0:
                self._arm(0.4 * self.world.settings.hint_wait_s)
            return
        step = self.sequence.step(rows, preempted)
        self.oracle.sent(step, greedy=self._is_greedy)
        shown = " ".join(f"{row.rid}[{row.start}+{row.num_tokens}]" for row in rows)
        self.world.note(self.name, f"sends step {step.seq}: {shown}{f' preempts {list(map(str, preempted))}' if preempted else ''}")
        self._record(step)
        for channel in self.to_followers:
            channel.send(Order(step))
        self.execute(step, lambda outcome: self._finish(step, outcome))

    def _choose(self) -> tuple[Sequence[Row], Sequence[str]]:
        again = tuple(row for row in self._again if str(row.rid) in self._live)
        self._again = ()
        if again:
            return again, ()
        settings = self.world.settings
        if self.world.draws.chance(settings.greed, "greed", self.sequence.last_seq):
            greedy = self.scheduler.queue.rids()[: settings.max_num_seqs]
            if greedy:
                self._is_greedy = True
                return [Row(rid, 0, 0) for rid in greedy], ()
        choice = self.scheduler.choose(self._prefill_budget)
        self.oracle.chose(self, () if choice is None else choice.rows)
        return ((), ()) if choice is None else (choice.rows, choice.preempted)

    def _prefill_budget(self, num_decodes: int) -> int | None:
        """Some steps leave prompts little or nothing, as the pace of a real leader would."""
        draws, seq = self.world.draws, self.sequence.last_seq
        return draws.below(5, "paced", seq) if num_decodes and draws.chance(0.3, "pace of prompts", seq) else None

    def _finish(self, step: Step, outcome: StepOutcome | None) -> None:
        if self.recorder is not None:
            sampled = {} if outcome is None else outcome.sampled
            failed = {} if outcome is None else {rid: error.code for rid, error in outcome.failed.items()}
            self.recorder.ran(step.seq, self._fingerprint, sampled, failed, self.scheduler.queue.waits())
        if outcome is None:
            self._again = () if self._is_greedy else step.rows
            return
        self.scheduler.committed(step.rows, outcome.sampled)
        full = []
        for token in outcome.tokens:
            request = self.runner.request(token.rid)
            assert request is not None
            self.oracle.sampled(str(token.rid), token.position, token.token_id)
            if len(request.output) >= self._max_tokens[str(token.rid)]:
                full.append((str(token.rid), len(request.output)))
        for rid, error in outcome.failed.items():
            self._tell(Ended(str(rid), error.code, 0))
            self._end(str(rid))
        for rid, num_tokens in full:
            self._tell(Ended(rid, "length", num_tokens))
            self._end(rid)

    def _record(self, record: Record) -> None:
        if self.recorder is not None:
            self.recorder.note(record)

    def _tell(self, ended: Ended) -> None:
        if self.ended is not None:
            self.ended.send(ended)

    def _end(self, rid: str) -> None:
        """The one exit path: a Remove on every rank."""
        own = self.own(rid)
        order = Order(self.sequence.remove(own))
        self._record(order.message)
        self.world.note(self.name, f"removes {rid} after step {self.sequence.last_seq}")
        for channel in self.to_followers:
            channel.send(order)
        self.runner.remove(own)
        self.scheduler.finish(own)
        self._live.discard(rid)
        self.oracle.removed(self, rid)
        self.wake()
