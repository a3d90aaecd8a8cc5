"""A run is its spec: the same events in the same order, in any process; and a failing one gets small."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mstar.engine.resources.lora.slots import SlotTable
from mstar.errors import ConfigError
from mstar.sim.check import run
from mstar.sim.scenario import draw_scenario
from mstar.sim.shrink import format_spec, parse_spec, shrink


@pytest.mark.parametrize("seed", [3, 9, 132])
def test_a_seed_replays_to_the_same_event(seed):
    assert run(draw_scenario(seed)).digest() == run(draw_scenario(seed)).digest()


def test_a_seed_replays_to_the_same_event_in_a_process_with_other_hashes():
    program = "from mstar.sim.run import simulate; from mstar.sim.scenario import draw_scenario as d; print(simulate(d(9)).digest())"
    digests = set()
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert digests == {run(draw_scenario(9)).digest()}


def test_leaving_acts_out_does_not_move_the_others():
    whole = draw_scenario(9)
    kept = whole.ops[: len(whole.ops) // 2]
    delays = {line for line in run(whole).lines() if "ingest" in line}
    fewer = {line for line in run(whole.only([op.index for op in kept])).lines() if "ingest" in line}
    assert fewer <= delays or len(fewer & delays) >= 1


def test_a_failing_seed_shrinks_to_a_spec_that_fails_alike(monkeypatch):
    release = SlotTable.release
    monkeypatch.setattr(SlotTable, "release", lambda self, rid: None if rid.endswith("1") else release(self, rid))
    seed = next(seed for seed in range(200) if run(draw_scenario(seed)).violation)
    failed = run(draw_scenario(seed))
    small = shrink(failed, run)
    assert small.violation.kind == failed.violation.kind
    assert len(small.scenario.ops) <= min(4, len(failed.scenario.ops))
    again = run(parse_spec(format_spec(small.scenario)))
    assert (again.digest(), str(again.violation)) == (small.digest(), str(small.violation))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("x", "x"),
        ("3/a", "a"),
        ("3//colour=red", "colour"),
        ("3//gate=maybe", "True or False"),
        ("3//num_ranks=two", "two"),
    ],
)
def test_a_spec_that_means_nothing_is_refused_with_a_reason(spec, words):
    with pytest.raises(ConfigError, match=words):
        parse_spec(spec)


def test_a_spec_comes_back_from_its_text():
    scenario = draw_scenario(5).with_settings({"num_ranks": 2, "two_nodes": True, "read_s": 0.25})
    scenario = scenario.only([op.index for op in scenario.ops][:3])
    assert parse_spec(format_spec(scenario)) == scenario
    assert format_spec(draw_scenario(5)) == "5"
