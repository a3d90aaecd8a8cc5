"""Streams that something goes on beside, against a tiny server over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from mstar.bench.cold import ColdStart
from mstar.bench.streams import NUM_STREAMS, gap_percentile, gaps_beside, gaps_summary
from mstar.bench.subject import Subject
from mstar.errors import ConfigError


def beside(fake_server, other, max_tokens=20):
    return asyncio.run(gaps_beside(Subject.at(fake_server.base_url), 1, other, max_tokens))


def test_gaps_are_those_within_streams_while_the_other_runs(fake_server):
    seen = []

    async def other():
        before = len(fake_server.completions)
        while len(fake_server.completions) < before + 3 * NUM_STREAMS:
            await asyncio.sleep(0)
        seen.append(before)

    gaps = beside(fake_server, other)
    assert seen and gaps
    assert all(gap.at_s >= gap.length_s >= 0 for gap in gaps)
    assert len(gaps) <= 19 * len(fake_server.completions), "none lies between two streams"
    assert {body["model"] for body in fake_server.completions} == {"base"}
    assert gaps_summary(gaps)["p100_s"] == gap_percentile(gaps, 100) == max(gap.length_s for gap in gaps)


def test_what_goes_wrong_beside_is_raised(fake_server):
    async def other():
        raise ConfigError("the churn failed")

    with pytest.raises(ConfigError, match="the churn failed"):
        beside(fake_server, other)


def test_a_stream_that_fails_ends_the_measurement(fake_server, monkeypatch):
    monkeypatch.setattr("mstar.bench.streams.BASE_NAME", "unknown")

    async def other():
        raise AssertionError("it never begins")

    with pytest.raises(ConfigError, match="model_not_found"):
        beside(fake_server, other)


def test_a_cold_start_is_held_to_its_read_and_a_step():
    cold = ColdStart(warm_s=(0.03, 0.05, 0.04), cold_s=(0.07, 0.09, 0.08), read_s=(0.02, 0.02, 0.02), step_s=0.016)
    assert cold.ratio == pytest.approx(0.04 / (1.2 * 0.02 + 0.016))


def test_a_subject_is_asked_by_name_and_says_when_each_first_token_came(fake_server):
    subject = Subject.at(fake_server.base_url)
    names = subject.adapters(2)
    prompts = [subject.prompt(6, 1, "t", index) for index in range(2)]
    for rate in (None, 500.0):
        assert len(asyncio.run(subject.ttfts(names, prompts, 3, rate=rate))) == 2
    assert [(body["model"], tuple(body["prompt"]), body["max_tokens"]) for body in fake_server.completions[:2]] == [
        ("red", prompts[0], 3),
        ("green", prompts[1], 3),
    ]
    with pytest.raises(ConfigError, match="unknown: HTTP 404"):
        asyncio.run(subject.ttfts(["unknown"], prompts[:1], 3))
