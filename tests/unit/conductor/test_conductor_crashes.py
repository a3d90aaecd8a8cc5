"""Crashes with requests inside and outside the gate: whoever is tested alone, each request is told to the ranks of an instance once at most."""

from __future__ import annotations

import asyncio
import random

import pytest

from mstar.conductor.conductor import MAX_PROMPT_LOGPROBS
from mstar.conductor.types import Generation
from mstar.errors import RequestError
from mstar.types import SamplingParams, TokenLogprob, TokenLogprobs
from mstar.wire import front_rank
from mstar.wire.channel import MAX_FRAME_BYTES, Sender
from tests.unit.conductor.pool_ranks import generation, served

SMALL = {"max_loras": 1, "max_cpu_loras": 1}


def told(ranks):
    """The requests that the present ranks were told of, in order."""
    return [message.rid for message in ranks.of(front_rank.Ingest)]


def token(ranks, rid, position=0, reason=None):
    ranks.on_message(0, front_rank.Tokens(1, (front_rank.TokenOut(rid, position, 5, finish_reason=reason),)))
    if reason is not None:
        for pool in ranks.pools:
            pool.remove_request(rid)


def test_a_request_that_waits_at_the_gate_is_neither_tested_nor_told_twice(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, **SMALL) as (conductor, ranks):
            for name in "AB":
                await conductor.load_adapter(name, str(folders[name]))
            r1, r2, w3 = (conductor.generate(generation(name)).rid for name in "AAB")
            for _ in range(2):
                ranks.on_message(0, front_rank.Began(1, (r1, r2)))
                ranks.die()
                ranks.begin(conductor._config)
            newcomer = conductor.generate(generation("base")).rid
            assert told(ranks) == [r1], "r1 is tested alone: r2 waits for its turn, w3 at the gate, the newcomer behind r2"
            ranks.on_message(0, front_rank.Began(1, (r1,)))
            token(ranks, r1)
            token(ranks, r2)
            assert told(ranks) == [r1, r2, newcomer]
            for rid in (r1, r2):
                token(ranks, rid, 1, "stop")
            assert told(ranks) == [r1, r2, newcomer], "out of the gate, behind the newcomer under test"
            token(ranks, newcomer)
            assert told(ranks) == [r1, r2, newcomer, w3]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(60))
def test_whatever_crashes_when_every_request_is_told_of_once_and_ends(seed, model, folders, monkeypatch):
    draw = random.Random(seed)

    async def run():
        async with served(model, monkeypatch, **SMALL) as (conductor, ranks):
            for name in "AB":
                await conductor.load_adapter(name, str(folders[name]))
            streams, position = [], {}
            for _ in range(40):
                act = draw.choice(("ask", "ask", "token", "token", "begin", "crash"))
                live = [rid for rid in told(ranks) if rid in conductor._requests]
                if act == "ask":
                    streams.append(conductor.generate(generation(draw.choice(("A", "B", "base")))))
                elif act == "token" and live:
                    rid = draw.choice(live)
                    position[rid] = position.get(rid, -1) + 1
                    token(ranks, rid, position[rid])
                elif act == "begin" and live:
                    ranks.on_message(0, front_rank.Began(1, tuple(draw.sample(live, draw.randint(1, len(live))))))
                elif act == "crash":
                    ranks.die()
                    if draw.random() < 0.5:
                        streams.append(conductor.generate(generation(draw.choice(("A", "B", "base")))))
                    ranks.begin(conductor._config)
                assert len(told(ranks)) == len(set(told(ranks)))
            while live := [rid for rid in told(ranks) if rid in conductor._requests]:
                position[live[0]] = position.get(live[0], -1) + 1
                token(ranks, live[0], position[live[0]], "stop")
                assert len(told(ranks)) == len(set(told(ranks)))
            assert not conductor._requests, "a request is left that no rank will ever hear of"

    asyncio.run(run())


def test_an_answer_that_would_not_fit_into_a_frame_is_refused_before_it_ends_a_rank(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, _):
            conductor._max_model_len = 1 << 20
            prompt = (5,) * 30_000
            conductor.generate(Generation("base", prompt, SamplingParams(max_tokens=1, seed=1, prompt_logprobs=1)))
            with pytest.raises(RequestError) as caught:
                conductor.generate(Generation("base", prompt, SamplingParams(max_tokens=1, seed=1, prompt_logprobs=20)))
            assert (caught.value.code, caught.value.status) == ("too_many_prompt_logprobs", 400)

    asyncio.run(run())


def test_the_largest_answer_that_is_let_through_fits_into_a_frame():
    row = TokenLogprobs(TokenLogprob(49_000, -12.345678, 49_000), tuple(TokenLogprob(49_000, -12.345678, 20) for _ in range(20)))
    rows = (row,) * (MAX_PROMPT_LOGPROBS // 21)
    frame = Sender("e").seal(front_rank.Tokens(1, (front_rank.TokenOut("r", 0, 1, prompt_logprobs=rows),)))
    assert len(frame) < MAX_FRAME_BYTES
