"""Many ranks of the real decision code under seeded event orders; `make sim SEEDS=…` runs more of the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.sim.check import run, run_seeds
from mstar.sim.scenario import draw_scenario
from mstar.sim.shrink import parse_spec

SEEDS_EACH = 100
FAILED = Path(__file__).with_name("failed_seeds.txt")


@pytest.mark.parametrize("part", range(14))
def test_l06_ranks_decide_alike_whatever_the_order_of_events(part):
    tally = run_seeds(part * SEEDS_EACH, SEEDS_EACH)
    assert tally.failures == []
    assert tally.num_admits > 10 * SEEDS_EACH


def failed_specs():
    lines = (line.partition("#")[0].strip() for line in FAILED.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def test_seeds_that_ever_failed_keep_every_promise_now():
    for spec in failed_specs():
        assert run(parse_spec(spec)).violation is None, spec


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_l06_many_ranks_decide_alike(num_ranks):
    for seed in (1, 7, 9):
        assert run(draw_scenario(seed).with_settings({"num_ranks": num_ranks})).violation is None


@pytest.mark.parametrize("seed", [6, 7, 9, 107])
def test_the_order_of_events_changes_neither_outcomes_nor_promises_kept(seed):
    """The same requests under other delays: each still ends, and each rank still agrees."""
    for delay_s in (0.0, 0.3, 5.0):
        changed = draw_scenario(seed).with_settings({"front_delay_s": delay_s, "leader_delay_s": delay_s / 2})
        assert run(changed).violation is None
