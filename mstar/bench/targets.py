"""Which model name each request asks for. Pure and seeded.

A target is a name for the `model` field: the base or an adapter. The distributions:

    base         the base alone, whatever adapters are named
    round-robin  1 2 3 … n 1 2 3 … : the most distinct adapters in every window of requests
    uniform      each request draws one, all equally likely
    zipf         each request draws one, the k-th with weight 1 / k ** exponent: a few popular adapters and a long tail
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from random import Random

from mstar.errors import ConfigError


class Spread(StrEnum):
    """How requests are spread over the targets."""

    ROUND_ROBIN = "round-robin"
    ZIPF = "zipf"
    UNIFORM = "uniform"
    BASE = "base"


@dataclass(frozen=True, slots=True)
class Target:
    """One name that requests may ask for."""

    model: str
    is_adapter: bool


def list_targets(base: str, adapters: Sequence[str], spread: Spread, *, include_base: bool) -> tuple[Target, ...]:
    """The names in play, most popular first for zipf: the base where it takes part, then the adapters as given.

    Raises ConfigError if the spread needs an adapter and there is none, or if a name occurs twice.
    """
    base_target = Target(base, is_adapter=False)
    if spread is Spread.BASE:
        return (base_target,)
    if not adapters:
        raise ConfigError(f"--distribution {spread} needs adapters: give --adapter NAME or --adapters auto, or take base")
    if len({base, *adapters}) != len(adapters) + 1:
        raise ConfigError("--adapter: a name occurs twice, or is the base's; each may occur once")
    chosen = tuple(Target(name, is_adapter=True) for name in adapters)
    return (base_target, *chosen) if include_base else chosen


def choose_targets(targets: Sequence[Target], num_requests: int, spread: Spread, zipf_exponent: float, seed: int) -> list[Target]:
    """The target of each request, in order of sending."""
    if spread in (Spread.BASE, Spread.ROUND_ROBIN):
        return list(islice(cycle(targets), num_requests))
    exponent = zipf_exponent if spread is Spread.ZIPF else 0.0
    weights = [1 / place**exponent for place in range(1, len(targets) + 1)]
    return Random(f"{seed}/targets").choices(targets, weights, k=num_requests)
