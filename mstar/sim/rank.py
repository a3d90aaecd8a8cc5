"""One simulated rank: the real pools, page table and runner, and how the front's messages reach them.

Leader and follower (leader.py, follower.py) add what each does on its own, as `mstar/worker` does with sockets and a model.
A rank is *busy* from the start of a step to its end. What the front sends meanwhile is applied at once or after the step, as drawn:
the pool takes it at any time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.resources.lora.host_copy import HostCopy
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.runner import Runner, StepOutcome
from mstar.errors import AdapterError, CapacityError, RequestError
from mstar.sim import baton
from mstar.sim.collective import Collective
from mstar.sim.forward import TinyModel
from mstar.sim.messages import Ingest, Load, LoadAnswer, ToRank, Unload
from mstar.sim.oracle import Oracle
from mstar.sim.probe import ProbedKv, SaltedStr
from mstar.sim.reader import SteppedReader
from mstar.sim.tiny import Generation, MarkBackend, checked_copy, tiny_spec
from mstar.sim.world import Violation, World
from mstar.types import Row, Step

NODES = ("vision", "llm")  # graph order


class SimRank:
    """What leader and follower share."""

    def __init__(self, world: World, tp_rank: int, collective: Collective, oracle: Oracle, generations: dict[str, Generation]) -> None:
        self.world = world
        self.tp_rank = tp_rank
        self.oracle = oracle
        self.busy = False
        self.to_front: Callable[[LoadAnswer], None] = lambda answer: None
        self._collective = collective
        self._generations = generations  # by path
        self._thread = baton.borrow()
        self._parked = ""
        self._seq = 0
        self._pending: deque[Callable[[], None]] = deque()
        self._own: dict[str, str] = {}
        self._after_step: Callable[[StepOutcome | None], None] = lambda outcome: None
        self._outcome: StepOutcome | None = None
        settings = world.settings
        self.readers: dict[str, SteppedReader] = {}
        self.pools = {node: self._pool(node) for node in (NODES if settings.two_nodes else NODES[1:])}
        spec = KvSpec(settings.num_pages, settings.block_size, settings.prefix_caching)
        refuses = functools.partial(world.draws.chance, settings.refusals, "refuses")
        self._probe = ProbedKv(spec, decides=tp_rank == 0, refuses=refuses)
        self.kv: KvResource = self._probe
        self.model = TinyModel(self, oracle)
        self.runner = Runner([*self.pools.values(), self.kv], self.model)

    @property
    def name(self) -> str:
        """For the trace."""
        return f"rank {self.tp_rank}"

    def own(self, text: str) -> str:
        """`text` as this rank's process would have decoded it."""
        if not self.world.settings.salted_hashes:
            return text
        plain = str(text)
        found = self._own.get(plain)
        if found is None:
            found = self._own[plain] = SaltedStr(plain, self.tp_rank)
        return found

    # the step thread

    def execute(self, step: Step, done: Callable[[StepOutcome | None], None]) -> None:
        """Run `step`; `done` gets its outcome, None where every rank refused it."""
        self.busy = True
        self._seq = step.seq
        self._after_step = done
        self.world.note(self.name, f"step {step.seq} begins")
        self.oracle.begins(self, step)
        self._took_baton(ended=self._thread.start(lambda: self._execute(step)))

    def park(self, why: str) -> None:
        """On the step thread: wait for `unpark(why)`."""
        self._parked = why
        self._thread.park()

    def unpark(self, why: str) -> None:
        """Go on, if the step thread still waits for `why`."""
        if self._parked == why:
            self._parked = ""
            self._took_baton(ended=self._thread.resume())

    def waits_for_copy(self, node: str) -> None:
        """See reader.WaitingRank."""
        self.oracle.waits(self, node, self._seq)

    def close(self) -> None:
        """Unwind a step under way; the rank is of no further use."""
        baton.give_back(self._thread)

    def waiting(self) -> str:
        """What this rank waits for, for the report of a deadlock."""
        return f"{self.name}: {'in step ' + str(self._seq) + ', waits for ' + self._parked if self.busy else 'idle'}"

    def admitted(self, seq: int, fingerprint: bytes) -> None:
        """Right after the admit of `seq`: the lockstep's note, then the oracle."""
        raise NotImplementedError

    def wake(self) -> None:
        """Something came: look for work a moment later."""
        raise NotImplementedError

    def ingested(self, message: Ingest) -> None:
        """A request was opened here."""

    def served(self, generation: Generation) -> None:
        """New requests may name it here."""

    def copy_in(self, node: str, name: str) -> None:
        """A node's copy of `name` is in or failed here."""

    def agreed(self, node: str, result: list[int]) -> None:
        """An agreement ended here."""

    @property
    def live_rows(self) -> list[Row]:
        """The rows of the step under way that run."""
        ctx = self._probe.ctx
        return [] if ctx is None else list(ctx.live_rows())

    def _execute(self, step: Step) -> None:
        try:
            self._outcome = self.runner.execute(step, lambda fingerprint: self._admitted(step, fingerprint))
        except CapacityError as refusal:
            self._outcome = None
            self.oracle.refused(self, step, refusal)
            self.admitted(step.seq, self.runner.fingerprint())

    def _admitted(self, step: Step, fingerprint: bytes) -> None:
        self.admitted(step.seq, fingerprint)
        ctx = self._probe.ctx
        assert ctx is not None
        self.oracle.admitted(self, step, ctx.failed)

    def _took_baton(self, *, ended: bool) -> None:
        if not ended:
            return
        error = self._thread.error
        if error is not None:
            if isinstance(error, Violation):
                raise error
            raise Violation("crash", f"{self.name}, step {self._seq}: {type(error).__name__}: {error}") from error
        self.busy = False
        self.world.note(self.name, f"step {self._seq} ends{'' if self._outcome is not None else ', refused'}")
        self._after_step(self._outcome)
        self._apply_pending()
        self.wake()

    # the front's messages

    def from_front(self, message: ToRank) -> None:
        """Apply it now, or after the step under way."""
        draws = self.world.draws
        if self.busy and (self._pending or draws.chance(0.4, "later", message.key, self.tp_rank)):
            self._pending.append(lambda: self.apply(message))
        else:
            self.apply(message)
            if draws.chance(0.2, "stats", message.key, self.tp_rank) and not self.busy:
                self.runner.fingerprint()  # looking must change nothing
        self.wake()

    def tick(self) -> None:
        """See reader.WaitingRank."""
        if self.busy:
            self._pending.append(self.tick)
            return
        for pool in self.pools.values():
            pool.store.expire()
        self.wake()

    def apply(self, message: ToRank) -> None:
        """What either role does with a message of the front."""
        if isinstance(message, Ingest):
            adapter = message.config.adapter
            config = dataclasses.replace(message.config, adapter=None if adapter is None else self.own(adapter))
            self.runner.ingest(self.own(message.rid), config)
            self.ingested(message)
        elif isinstance(message, Load):
            self._load(message)
        elif isinstance(message, Unload):
            for pool in self.pools.values():
                pool.unload_adapter(self.own(message.name))
        else:
            raise Violation("front", f"{message.key} came to {self.name}")

    def _apply_pending(self) -> None:
        while self._pending:
            self._pending.popleft()()

    def _load(self, message: Load) -> None:
        """All pools serve it, or the answer is a refusal and none does."""
        generation, name = message.generation, self.own(message.generation.name)
        futures: list[Future[None]] = []
        try:
            for node, pool in self.pools.items():
                if message.verify:
                    futures.append(pool.load_adapter_async(name, generation.path, generation.digest))
                else:
                    pool.register_adapter(name, generation.path, generation.digest, has_something=node in generation.nodes)
        except RequestError as refused:
            self._answer(message, refused)
            return
        left = len(futures)
        if not left:
            self._answer(message, None)

        def loaded(future: Future[None]) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._answer(message, next((error for done in futures if (error := done.exception()) is not None), None))

        for future in futures:
            future.add_done_callback(loaded)

    def _answer(self, message: Load, error: BaseException | None) -> None:
        refusal = "" if error is None else getattr(error, "code", type(error).__name__)
        if not refusal:
            self.served(message.generation)
        self.to_front(LoadAnswer(message.load_id, self.tp_rank, refusal))

    # building

    def _pool(self, node: str) -> LoraAdapterPool:
        settings = self.world.settings
        reader = self.readers[node] = SteppedReader(self.world, self, f"{self.name} {node}", node)

        def read(path: str, digest: str | None, cancelled: Callable[[], bool]) -> HostCopy:
            if reader.fails():
                raise AdapterError(f"{path} cannot be read on {self.name}", code="adapter_read_failed", status=500)
            return checked_copy(self._generations[path], node, digest, settings.num_ranks)

        spec = tiny_spec(
            node, settings.num_ranks, max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras,
            read_timeout_s=settings.read_timeout_s, hint_wait_s=settings.hint_wait_s, copy_wait_s=settings.copy_wait_s,
        )  # fmt: skip
        return LoraAdapterPool(
            spec,
            torch.device("cpu"),
            self.tp_rank,
            settings.num_ranks,
            MarkBackend(),
            agree=lambda statuses: self._agree(node, statuses),
            add_up=lambda values: self._collective.add_up(self, self._seq, node, values),
            decides=self.tp_rank == 0,
            read=read,
            on_copy=lambda name: self._copy_in(node, name),
            clock=lambda: self.world.now,
            reader=reader,
        )

    def _agree(self, node: str, statuses: list[int]) -> list[int]:
        result = self._collective.agree(self, self._seq, node, statuses)
        self.agreed(node, result[: len(statuses)])
        return result

    def _copy_in(self, node: str, name: str) -> None:
        self.copy_in(node, name)
        self.wake()
