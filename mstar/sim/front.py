"""The conductor as ranks see it: names and generations, the order in which ingests, loads and unloads go out, the gate, the ends.

It keeps the conductor's promises to the ranks, each of which some decision leans on:
- a generation is served on every rank before a request on it is ingested anywhere;
- no request is ingested on a generation after its unload went out, so an unload waits for those at the gate;
- a load that one rank refused is taken back on all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar.engine.resources.base import ResourceReqConfig
from mstar.sim.messages import Abort, Ingest, Load, LoadAnswer, ToFront, ToRank, Unload
from mstar.sim.oracle import Oracle
from mstar.sim.scenario import Op, token_of
from mstar.sim.tiny import Generation
from mstar.sim.world import Channel, Violation, World
from mstar.types import SamplingParams


@dataclass
class _Live:
    op: Op
    generation: Generation | None


@dataclass
class _Name:
    """One client name: what it points to, the load under way, and what waits for that."""

    pointer: Generation | None = None
    retiring: Generation | None = None  # the last one that was unloaded
    loading: tuple[str, Generation] | None = None
    answers: dict[int, str] = field(default_factory=dict)
    waiting: deque[Op] = field(default_factory=deque)
    num_drawn: int = 0


class Front:
    """One front. `channels` lead to the ranks, the leader's first."""

    def __init__(self, world: World, oracle: Oracle, nodes: Sequence[str], generations: dict[str, Generation]) -> None:
        self._world = world
        self._oracle = oracle
        self._nodes = tuple(nodes)
        self._generations = generations
        self._names: dict[str, _Name] = {}
        self._live: dict[str, _Live] = {}
        self._ended: set[str] = set()
        self._inside: Counter[str] = Counter()  # generations ingested, by path
        self._gate: OrderedDict[str, _Live] = OrderedDict()
        self._unloads: list[Generation] = []  # wait for requests at the gate
        self.channels: list[Channel[ToRank]] = []

    def start(self) -> None:
        """Serve the configured names, then let clients and operators come."""
        for name in self._world.scenario.names:
            generation = self._draw(name)
            self._name(name).pointer = generation
            self._send_all(Load(f"start {name}", generation, verify=False))
        for op in self._world.scenario.ops:
            self._world.at(op.at, lambda op=op: self._do(op), "op", op.index)  # type: ignore[misc]

    def live(self) -> list[str]:
        """Requests accepted and not ended."""
        return list(self._live)

    def heard(self, message: ToFront) -> None:
        """A rank's answer."""
        if isinstance(message, LoadAnswer):
            self._answered(message)
            return
        live = self._live.get(message.rid)
        if live is None:
            return  # it ended here meanwhile
        if message.why == "length" and message.num_tokens != live.op.max_tokens:
            raise Violation("tokens", f"{message.rid} ended with {message.num_tokens} tokens, asked for {live.op.max_tokens}")
        settings = self._world.settings
        is_calm = not settings.read_failures and not settings.slow_reads and max(settings.read_s, settings.turn_s) <= 0.1
        if message.why not in ("length", "non_finite_logits") and is_calm:
            raise Violation("failures", f"{message.rid} failed with {message.why}, though every read succeeds in time")
        self._end(message.rid, message.why)

    # requests

    def _do(self, op: Op) -> None:
        self._world.note("front", f"{op.kind} {op.rid if op.kind in ('request', 'pin') else ''} {op.name or 'base'}")
        if op.kind in ("request", "pin"):
            self._accept(op)
        else:
            self._operate(op)

    def _accept(self, op: Op) -> None:
        generation = None
        if op.name is not None:
            generation = self._name(op.name).pointer
            if generation is None:
                return  # 404
        if op.kind == "pin" and sum(1 for live in self._live.values() if live.op.kind == "pin") >= self._world.settings.max_loras - 1:
            return  # refused
        live = _Live(op, generation)
        self._live[op.rid] = live
        self._oracle.accepted(op.rid, generation, pin=op.kind == "pin", num_tokens=op.num_resumed)
        if op.ends_after is not None:
            self._world.at(self._world.now + op.ends_after, lambda: self._cancel(op.rid), "ends", op.index)
        if generation is not None and self._world.settings.gate and not self._fits(generation):
            self._gate[op.rid] = live
        else:
            self._ingest(live)

    def _fits(self, generation: Generation) -> bool:
        return generation.path in self._inside or len(self._inside) < self._world.settings.max_cpu_loras

    def _ingest(self, live: _Live) -> None:
        op, generation = live.op, live.generation
        config = ResourceReqConfig(op.prompt)
        if op.kind == "request":
            sampling = SamplingParams(op.max_tokens, seed=0, prompt_logprobs=0 if op.scores_prompt else None)
            output = tuple(token_of(op.rid, position) for position in range(op.num_resumed))
            config = dataclasses.replace(config, sampling=sampling, output=output)
        if generation is not None:
            self._inside[generation.path] += 1
            config = dataclasses.replace(config, adapter=generation.name, cache_key=generation.cache_key)
        self._send_all(Ingest(op.rid, config))

    def _cancel(self, rid: str) -> None:
        if rid in self._live:
            if rid not in self._gate:
                self.channels[0].send(Abort(rid))
            else:
                self._oracle.withdrawn(rid)
            self._end(rid, "cancelled")

    def _end(self, rid: str, why: str) -> None:
        """The one exit of every accepted request."""
        if rid in self._ended:
            raise Violation("ends", f"{rid} ended twice")
        self._ended.add(rid)
        self._world.note("front", f"{rid} ends: {why}")
        live = self._live.pop(rid)
        if self._gate.pop(rid, None) is None and live.generation is not None:
            self._inside[live.generation.path] -= 1
            if not self._inside[live.generation.path]:
                del self._inside[live.generation.path]
        for waiting, other in list(self._gate.items()):
            if other.generation is not None and self._fits(other.generation):
                del self._gate[waiting]
                self._ingest(other)
        self._send_unloads()

    # adapters

    def _operate(self, op: Op) -> None:
        name = self._name(op.name or "")
        name.waiting.append(op)
        self._next(name)

    def _next(self, name: _Name) -> None:
        reuses = self._world.settings.reuse_names
        while name.waiting and name.loading is None and not (reuses and name.retiring in self._unloads):
            op = name.waiting.popleft()
            if op.kind == "unload":
                self._unload(name)
            elif op.kind == "replace" and reuses and name.pointer is not None:
                name.waiting.appendleft(op)  # one name has one generation at a time: load when the old one's unload went out
                self._unload(name)
            elif op.kind == "replace" or name.pointer is None:
                self._load(name, op)

    def _load(self, name: _Name, op: Op) -> None:
        generation = self._draw(op.name or "")
        load_id = f"l{op.index}"
        name.loading, name.answers = (load_id, generation), {}
        if op.ends_after is not None:
            self._world.at(self._world.now + op.ends_after, lambda: self._give_up(name, load_id), "gives up", op.index)
        self._send_all(Load(load_id, generation, verify=self._world.draws.chance(0.7, "verify", op.index)))

    def _answered(self, answer: LoadAnswer) -> None:
        for name in self._names.values():
            if name.loading is not None and name.loading[0] == answer.load_id:
                name.answers[answer.tp_rank] = answer.refusal
                if len(name.answers) == self._world.settings.num_ranks:
                    self._loaded(name)
                return

    def _loaded(self, name: _Name) -> None:
        assert name.loading is not None
        generation = name.loading[1]
        name.loading = None
        if "adapter_unloaded" in name.answers.values():
            raise Violation("loads", f"{generation.path} was refused as unloaded, but no unload was sent after it: {name.answers}")
        if any(name.answers.values()):
            self._world.note("front", f"{generation.path} was refused: {name.answers}")
            self._send_all(Unload(generation.name, generation.path))
        else:
            self._unload(name)
            name.pointer = generation
        self._next(name)

    def _give_up(self, name: _Name, load_id: str) -> None:
        if name.loading is not None and name.loading[0] == load_id:
            generation = name.loading[1]
            name.loading = None
            self._send_all(Unload(generation.name, generation.path))
            self._next(name)

    def _unload(self, name: _Name) -> None:
        if name.pointer is not None:
            self._unloads.append(name.pointer)
            name.retiring, name.pointer = name.pointer, None
            self._send_unloads()

    def _send_unloads(self) -> None:
        """Those that no request at the gate waits on."""
        for generation in list(self._unloads):
            waits = any(live.generation == generation for live in self._gate.values())
            if not waits or self._world.settings.early_unload:
                self._unloads.remove(generation)
                self._send_all(Unload(generation.name, generation.path))
                for name in self._names.values():
                    if name.retiring == generation:
                        self._next(name)

    # inside

    def _name(self, name: str) -> _Name:
        return self._names.setdefault(name, _Name())

    def _draw(self, name: str) -> Generation:
        """A generation never used before; sometimes with the weights of the one before."""
        state = self._name(name)
        state.num_drawn += 1
        draws, version = self._world.draws, state.num_drawn
        path = f"{name}@{version}"
        weights = version - 1 if version > 1 and draws.chance(0.2, "same weights", path) else version
        nodes = tuple(node for node in self._nodes if draws.chance(0.9 if node == "llm" else 0.6, "node", name, weights, node))
        number = int(name[1:])
        mark = 32 * (number + 1) + 2 * weights + (number + weights) % 2  # odd marks have the larger rank
        generation = Generation(name if self._world.settings.reuse_names else path, path, mark, nodes)
        self._generations[path] = generation
        return generation

    def _send_all(self, message: ToRank) -> None:
        for channel in self.channels:
            channel.send(message)
