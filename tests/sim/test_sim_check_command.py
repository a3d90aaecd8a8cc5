"""`python -m mstar.sim.check`: one seed with its events, a spec, many seeds; the exit code says whether a promise was broken."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def check(*options):
    return subprocess.run(
        [sys.executable, "-m", "mstar.sim.check", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        timeout=240,
    )


def test_many_seeds_run_in_processes_and_say_how_fast():
    done = check("--seeds", "120", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "120 seeds," in done.stdout
    assert "0 failed" in done.stdout
    assert "seeds/s" in done.stdout


def test_one_seed_prints_its_events_and_its_spec():
    done = check("--seed", "9")
    assert done.returncode == 0
    assert "sends step 1" in done.stdout
    assert "every promise held" in done.stdout
    assert "spec 9" in done.stdout


def test_l10_a_broken_promise_is_exit_code_1_with_the_spec_that_replays_it():
    """A conductor that unloads before a request at its gate was ingested: one rank still finds the slot, the other does not."""
    spec = "165/6,8,3/num_ranks=2,prefix_caching=False,hint_delay_s=0.0,agree_delay_s=0.0,read_failures=0.0,early_unload=True"
    done = check("--replay", spec)
    assert done.returncode == 1
    assert "agreement: " in done.stdout
    assert f"spec {spec}" in done.stdout


@pytest.mark.parametrize("spec", ["x", "3//colour=red"])
def test_a_spec_that_means_nothing_is_exit_code_2(spec):
    done = check("--replay", spec)
    assert done.returncode == 2
    assert "SEED" in done.stderr
