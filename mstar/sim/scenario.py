"""What happens in one simulated run: an instance's settings and what clients and operators do, both drawn from the seed.

Pure data. Times are virtual seconds; what the channels, reads and forwards add to them is drawn while the run goes (draws.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mstar.sim.draws import Draws

_SCALES = (0.0, 0.01, 0.1, 0.5, 2.0)
VOCAB = 5  # few tokens, so that prefixes are shared by chance
LONGEST = 16  # tokens of a request, prompt and output


@dataclass(frozen=True)
class Settings:
    """One instance. Each field can be set from outside, which is how a failing run is made smaller."""

    num_ranks: int
    max_loras: int
    max_cpu_loras: int
    two_nodes: bool  # a vision encoder's pool before the LLM's
    num_pages: int
    block_size: int
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_passes: int
    gate: bool  # the conductor ingests no more adapters at a time than the host tier holds
    reuse_names: bool  # adapters come back under one name inside ranks, as if no generations were drawn
    salted_hashes: bool  # strings hash differently on each rank, as they do in real processes
    front_delay_s: float
    leader_delay_s: float
    hint_delay_s: float
    read_s: float
    forward_s: float
    agree_delay_s: float
    turn_s: float
    read_failures: float  # probabilities from here on
    slow_reads: float  # … that a read outlasts its bound
    refusals: float  # … that every rank refuses a step after its admits
    greed: float  # … that the leader sends rows that it reserved nothing for
    early_unload: bool = False  # a conductor that breaks its promise: unload overtakes requests that wait at its gate
    hint_wait_s: float = 1.0
    read_timeout_s: float = 3.0
    copy_wait_s: float = 4.5


@dataclass(frozen=True)
class Op:
    """One thing a client or an operator does. `index` names it for good, also in a shortened run."""

    index: int
    at: float
    kind: Literal["request", "pin", "load", "unload", "replace"]
    name: str | None = None
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0
    num_resumed: int = 0  # output tokens that an earlier start of the instance gave
    scores_prompt: bool = False  # asks for its prompt's logprobs, so it shares no pages
    ends_after: float | None = None  # request: aborted; pin: unpinned; load: given up

    @property
    def rid(self) -> str:
        """The request's id."""
        return f"r{self.index}"


def token_of(rid: str, position: int) -> int:
    """The token that every rank samples for `rid` at output `position`."""
    return (int(rid[1:]) * 7 + position * 3) % VOCAB


@dataclass(frozen=True)
class Scenario:
    """A run before it happens. `names` are served from the start; the others come by loads."""

    seed: int
    settings: Settings
    names: tuple[str, ...]
    ops: tuple[Op, ...]

    def only(self, kept: Collection[int]) -> Scenario:
        """The same with some of its ops."""
        return dataclasses.replace(self, ops=tuple(op for op in self.ops if op.index in kept))

    def with_settings(self, changes: Mapping[str, Any]) -> Scenario:
        """The same on another instance."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changes))


def draw_scenario(seed: int) -> Scenario:
    """The run of `seed`."""
    draws = Draws(seed)
    settings = _settings(draws)
    num_names = draws.between(1, settings.max_loras + 3, "names")
    names = tuple(f"a{index}" for index in range(num_names))
    num_ops = draws.between(4, 18, "ops")
    span = num_ops * (0.05, 0.5, 3.0)[draws.below(3, "pace")]
    ops = sorted((_op(draws, index, names, settings, span) for index in range(num_ops)), key=lambda op: (op.at, op.index))
    served = tuple(name for name in names if draws.chance(0.8, "served", name))
    return Scenario(seed, settings, served, tuple(ops))


def _settings(draws: Draws) -> Settings:
    max_loras = draws.between(1, 3, "max_loras")
    block_size = draws.between(1, 4, "block_size")
    calm = draws.chance(0.3, "calm")

    def scale(what: str) -> float:
        return _SCALES[draws.below(len(_SCALES), "scale", what)]

    return Settings(
        num_ranks=(2, 2, 2, 3, 3, 4, 1)[draws.below(7, "ranks")],
        max_loras=max_loras,
        max_cpu_loras=max_loras + draws.below(3, "cpu"),
        two_nodes=draws.chance(0.25, "nodes"),
        num_pages=-(-LONGEST // block_size) + draws.below(3 if draws.chance(0.5, "tight") else 20, "pages"),
        block_size=block_size,
        prefix_caching=draws.chance(0.7, "prefix"),
        max_num_seqs=draws.between(1, 5, "seqs"),
        max_num_batched_tokens=draws.between(5, 16, "budget"),
        max_passes=draws.below(4, "passes"),
        gate=draws.chance(0.6, "gate"),
        reuse_names=draws.chance(0.3, "reuse"),
        salted_hashes=draws.chance(0.2, "salt"),
        front_delay_s=scale("front"),
        leader_delay_s=scale("leader"),
        hint_delay_s=scale("hint"),
        read_s=scale("read"),
        forward_s=scale("forward"),
        agree_delay_s=scale("agree"),
        turn_s=scale("turn"),
        read_failures=0.0 if calm else (0.0, 0.05, 0.3)[draws.below(3, "fails")],
        slow_reads=0.0 if calm else (0.0, 0.0, 0.15)[draws.below(3, "slow")],
        refusals=0.0 if calm else (0.0, 0.0, 0.1)[draws.below(3, "refusals")],
        greed=0.0 if calm else (0.0, 0.0, 0.2)[draws.below(3, "greed")],
    )


def _op(draws: Draws, index: int, names: tuple[str, ...], settings: Settings, span: float) -> Op:
    at = span * draws.unit("at", index)
    name = names[int(len(names) * draws.unit("name", index) ** 1.5)]  # the first names are asked for most
    kind = draws.unit("kind", index)
    if draws.chance(0.2, "restless operators"):
        kind /= 2.5
    leaves = draws.delay(1.0, "ends", index)
    gives_up = leaves / 3 if draws.chance(0.35, "gives up", index) else None
    if kind < 0.08:
        return Op(index, at, "load", name, ends_after=gives_up)
    if kind < 0.16:
        return Op(index, at, "unload", name)
    if kind < 0.24:
        return Op(index, at, "replace", name, ends_after=gives_up)
    if kind < 0.30:
        return Op(index, at, "pin", name, ends_after=leaves)
    prompt = tuple(draws.below(VOCAB, "token", index, place) // 3 for place in range(draws.between(1, LONGEST - 6, "prompt", index)))
    max_tokens = draws.between(1, 6, "max_tokens", index)
    return Op(
        index,
        at,
        "request",
        None if draws.chance(0.15, "base", index) else name,
        prompt,
        max_tokens=max_tokens,
        num_resumed=draws.below(max_tokens, "resumed", index) if draws.chance(0.1, "resumes", index) else 0,
        scores_prompt=draws.chance(0.08, "scores", index),
        ends_after=leaves if draws.chance(0.25, "aborts", index) else None,
    )
