"""A failing run made small: fewer clients' and operators' acts, a plainer instance, the same promise broken.

A run is named by a *spec*: `972` is the run of a seed; `972/1,5` keeps two of its acts; `972/1,5/num_ranks=2,two_nodes=False` runs them
on another instance. Draws go by key, so what is kept happens much as it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mstar.errors import ConfigError
from mstar.sim.run import Outcome, simulate
from mstar.sim.scenario import Scenario, Settings, draw_scenario

MAX_RUNS = 400
_PLAINER: tuple[dict[str, Any], ...] = (
    {"num_ranks": 1},
    {"num_ranks": 2},
    {"two_nodes": False},
    {"salted_hashes": False},
    {"refusals": 0.0},
    {"greed": 0.0},
    {"slow_reads": 0.0},
    {"read_failures": 0.0},
    {"gate": False},
    {"reuse_names": False},
    {"prefix_caching": False},
    {"forward_s": 0.0},
    {"agree_delay_s": 0.0},
    {"turn_s": 0.0},
    {"hint_delay_s": 0.0},
    {"front_delay_s": 0.0},
    {"leader_delay_s": 0.0},
    {"read_s": 0.0},
)


def parse_spec(spec: str) -> Scenario:
    """The scenario of a spec. Raises ConfigError."""
    seed, _, rest = spec.strip().partition("/")
    kept, _, changes = rest.partition("/")
    try:
        scenario = draw_scenario(int(seed))
        if kept:
            scenario = scenario.only([int(index) for index in kept.split(",")])
        return scenario.with_settings(dict(_setting(change) for change in changes.split(",") if change))
    except ValueError as error:
        raise ConfigError(f"the spec {spec!r} is not SEED[/ACT,ACT…[/SETTING=VALUE,…]]: {error}") from None


def format_spec(scenario: Scenario) -> str:
    """The shortest spec of `scenario`."""
    whole = draw_scenario(scenario.seed)
    changes = ",".join(
        f"{field.name}={getattr(scenario.settings, field.name)}"
        for field in dataclasses.fields(Settings)
        if getattr(scenario.settings, field.name) != getattr(whole.settings, field.name)
    )
    kept = ",".join(str(op.index) for op in scenario.ops) if scenario.ops != whole.ops or changes else ""
    return "/".join(part for part in (str(scenario.seed), kept, changes) if part)


def shrink(outcome: Outcome, run: Callable[[Scenario], Outcome] = simulate) -> Outcome:
    """The smallest run found that breaks the same promise as `outcome`, in at most `MAX_RUNS` tries."""
    assert outcome.violation is not None
    kind = outcome.violation.kind
    best = outcome
    left = MAX_RUNS

    def attempt(scenario: Scenario) -> bool:
        nonlocal best, left
        if left <= 0 or not scenario.ops:
            return False
        left -= 1
        found = run(scenario)
        if found.violation is None or found.violation.kind != kind:
            return False
        best = found
        return True

    smaller = True
    while smaller and left > 0:
        smaller = _drop_ops(lambda: best.scenario, attempt)
        for change in _PLAINER:
            before = best.scenario
            after = before.with_settings(change)
            if after != before and not (change.get("num_ranks", 0) >= before.settings.num_ranks):
                smaller |= attempt(after)
    return best


def _drop_ops(current: Callable[[], Scenario], attempt: Callable[[Scenario], bool]) -> bool:
    """Leave out halves, quarters … single ops as long as the run still fails."""
    dropped = False
    size = max(1, len(current().ops) // 2)
    while True:
        start = 0
        while start < len(current().ops):
            indices = [op.index for op in current().ops]
            if attempt(current().only(indices[:start] + indices[start + size :])):
                dropped = True
            else:
                start += size
        if size == 1:
            return dropped
        size //= 2


def _setting(change: str) -> tuple[str, Any]:
    name, equals, value = change.partition("=")
    types = {field.name: str(field.type) for field in dataclasses.fields(Settings)}
    if not equals or name not in types:
        raise ValueError(f"{change!r} sets nothing; settings are {', '.join(types)}")
    if types[name] == "bool":
        if value not in ("True", "False"):
            raise ValueError(f"{name} is True or False, not {value!r}")
        return name, value == "True"
    return name, int(value) if types[name] == "int" else float(value)
