"""How many prompt tokens a step takes beside running streams."""

from __future__ import annotations

from mstar.engine.pacing import FRESH_STEPS, MIN_TOKENS, PrefillPace

DECODE_S, TOKEN_S = 0.020, 0.0005


def learned(stretch=2.0, num_decodes=4):
    pace = PrefillPace(stretch)
    pace.observe(0, num_decodes, DECODE_S)
    pace.observe(100, num_decodes, DECODE_S + 100 * TOKEN_S)
    return pace


def test_nothing_bounds_a_prompt_that_nobody_runs_beside():
    assert PrefillPace(2.0).budget(0) is None and learned().budget(0) is None


def test_a_stretch_of_0_bounds_nothing():
    assert learned(stretch=0).budget(4) is None


def test_the_budget_fills_the_step_up_to_the_stretch():
    assert learned(2.0).budget(4) in (39, 40)  # 20 ms more at half a millisecond a token
    assert learned(3.0).budget(4) in (79, 80)


def test_prompts_always_get_on():
    assert learned(1.0).budget(4) == MIN_TOKENS


def test_what_a_step_of_decodes_alone_takes_is_measured_before_a_prompt_joins():
    pace = PrefillPace(2.0)
    pace.observe(512, 0, 512 * TOKEN_S)
    assert pace.budget(4) == 0
    pace.observe(0, 4, DECODE_S)
    assert pace.budget(4) in (39, 40), "prompts alone told what a token costs"
    assert pace.budget(32) == 0, "so many rows were not seen yet"


def test_it_is_measured_again_after_many_steps():
    pace = learned()
    for _ in range(FRESH_STEPS - 1):
        assert pace.budget(4) > 0
        pace.observe(40, 4, DECODE_S + 40 * TOKEN_S)
    assert pace.budget(4) == 0
    pace.observe(0, 4, 2 * DECODE_S)
    assert pace.budget(4) > 0


def test_one_slow_step_changes_little():
    pace = learned()
    for _ in range(4):
        pace.observe(0, 4, DECODE_S)
        pace.observe(40, 4, DECODE_S + 40 * TOKEN_S)
    pace.observe(0, 4, 5.0)
    pace.observe(40, 4, 5.0)
    assert pace.budget(4) in (39, 40)
