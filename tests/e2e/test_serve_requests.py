"""Requests over HTTP: each ends once whatever its client does, and nothing is held afterwards, on any rank."""

from __future__ import annotations

import asyncio
import random

from tests.e2e.prompts import MODELS, SAMPLINGS, greedy, seeded, some_tokens
from tests.e2e.specs import LLAMA, served_by
from tests.support.adapters import ADAPTERS
from tests.support.client import Ask, TokenStream, ask_one, fetch, first_token, new_client
from tests.support.processes import wait_for
from tests.support.reference import TOLERANCE
from tests.support.server import BASE, held

NUM_REQUESTS = 200
AT_ONCE = 48
LONG = 900  # tokens: at most as many steps, if nobody ends it


def random_ask(draw, index):
    fields = {} if draw.random() < 0.5 else draw.choice(SAMPLINGS)
    seed = index if fields or draw.random() < 0.3 else None
    prompt = some_tokens(draw.randint(1, 60), seed=draw.randrange(40))
    return Ask(draw.choice(MODELS), prompt, draw.randint(1, 40), seed, fields, ignore_eos=draw.random() < 0.5)


@served_by(LLAMA)
def test_200_requests_over_6_adapters_and_base_with_random_cancels_all_end_once_and_leave_nothing(server, reference):
    draw = random.Random(7)
    asks = [random_ask(draw, index) for index in range(NUM_REQUESTS)]
    fates = [draw.choice(("whole", "whole", "stream", "stream", "whole_cancelled", "stream_cancelled")) for _ in asks]
    assert {ask.model for ask in asks} == set(MODELS)
    before = server.wait_until_idle()
    started, ended = server.metric("mstar_requests_started_total"), server.metric("mstar_requests_ended_total")
    answers, partial, cancelled = asyncio.run(run_with_cancels(server, list(zip(asks, fates, strict=True)), draw))

    assert len(answers) + len(partial) + cancelled == NUM_REQUESTS
    assert len(partial) > 10 and cancelled > 10, "too few cancels to mean anything"
    for answer in answers:
        assert answer.finish_reason == "stop" or len(answer.token_ids) == answer.ask.max_tokens
    reference.check_all(answers)
    for stream in partial:
        if stream.ask.seed is None:
            reference.check_greedy(stream.ask.prompt, stream.tokens, stream.ask.adapter)
    after = server.wait_until_idle()
    for now, then in zip(after["ranks"], before["ranks"], strict=True):
        assert now["kv"]["free"] == then["kv"]["free"] == server.at_start["ranks"][0]["kv"]["free"]
        assert [slot["holders"] for slot in now["slots"]] == [0, 0]
        assert now["installs"] - now["evictions"] <= 2
    assert after["instance_starts"] == 1
    num_started = server.metric("mstar_requests_started_total") - started
    assert num_started == server.metric("mstar_requests_ended_total") - ended
    assert len(answers) + len(partial) <= num_started <= NUM_REQUESTS


async def run_with_cancels(server, planned, draw):
    """Every request with its fate: the whole answers, the streams left early, and how many others were cancelled."""
    answers, partial = [], []
    cancelled = 0
    places = asyncio.Semaphore(AT_ONCE)
    doomed: list[asyncio.Task] = []

    async def go(client, ask, fate):
        nonlocal cancelled
        async with places:
            if fate == "whole":
                answers.append(await fetch(client, ask))
            elif fate == "whole_cancelled":
                task = asyncio.ensure_future(fetch(client, ask))
                doomed.append(task)
                try:
                    answers.append(await task)
                except asyncio.CancelledError:
                    cancelled += 1
            else:
                await stream(client, ask, leave_after=draw.randint(1, 20) if fate == "stream_cancelled" else None)

    async def stream(client, ask, leave_after):
        one = TokenStream(client, ask)
        count = 0
        async for _ in one:
            count += 1
            if doomed and draw.random() < 0.2:
                doomed.pop(draw.randrange(len(doomed))).cancel()
            if count == leave_after and not one.finish_reasons:
                partial.append(one)
                break
        else:
            answers.append(one.answer())

    async with new_client(server) as client:
        running = asyncio.gather(*(go(client, ask, fate) for ask, fate in planned))
        await running
    return answers, partial, cancelled


@served_by(LLAMA)
def test_a_client_that_goes_away_frees_its_slot_and_pages_long_before_its_request_would_have_ended(server):
    before = server.wait_until_idle()

    async def leave():
        async with new_client(server) as client:
            events = await first_token(TokenStream(client, greedy(ADAPTERS[0], some_tokens(30, 1), LONG)))
            during = server.status()
            await events.aclose()
        return during

    during = asyncio.run(leave())
    for rank in during["ranks"]:
        assert [slot["holders"] for slot in rank["slots"] if slot["adapter"] == ADAPTERS[0]] == [1]
        assert rank["kv"]["used"] > 0
    after = server.wait_until_idle()
    assert after["ranks"][0]["steps"] - before["ranks"][0]["steps"] < LONG / 2


@served_by(LLAMA)
def test_a_client_that_goes_away_without_streaming_frees_its_slot_and_pages(server):
    before = server.wait_until_idle()

    async def leave():
        async with new_client(server) as client:
            task = asyncio.ensure_future(fetch(client, greedy(ADAPTERS[1], some_tokens(30, 2), LONG)))
            await asyncio.to_thread(wait_for, "the request to hold a slot", lambda: holders(server, ADAPTERS[1]))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert server.wait_until_idle()["ranks"][0]["steps"] - before["ranks"][0]["steps"] < LONG / 2


def holders(server, adapter):
    """How many requests hold the adapter's slot on the leader."""
    return sum(slot["holders"] for slot in server.status()["ranks"][0]["slots"] if slot["adapter"] == adapter)


@served_by(LLAMA)
def test_a_client_that_goes_away_lets_the_one_that_waits_for_its_slot_run(server, reference):
    """Two slots are held by long streams and a third adapter waits; base requests pass it (C52)."""

    async def run():
        async with new_client(server) as client:
            streams = [TokenStream(client, greedy(adapter, some_tokens(20, 3), LONG)) for adapter in ADAPTERS[:2]]
            leaving, staying = [await first_token(stream) for stream in streams]
            waiting = asyncio.ensure_future(fetch(client, greedy(ADAPTERS[2], some_tokens(20, 3), 8)))
            await asyncio.to_thread(wait_for, "the third adapter to wait", lambda: server.status()["ranks"][0]["waiting"] == 1)
            passing = await fetch(client, greedy(BASE, some_tokens(20, 3), 8))
            assert not waiting.done()
            await leaving.aclose()
            got = await waiting
            assert not streams[1].finish_reasons, "the other slot's stream should have gone on meanwhile"
            await staying.aclose()
            return [got, passing]

    reference.check_all(asyncio.run(run()))


@served_by(LLAMA)
def test_c69_aborts_while_waiting_while_prefilling_and_while_decoding_release_once_and_all_others_get_answers(server, reference):
    """30 requests, of which 20 are aborted, in whichever phase each is."""

    async def run():
        async with new_client(server) as client:
            blockers = [TokenStream(client, greedy(adapter, some_tokens(10, 4), LONG)) for adapter in ADAPTERS[:2]]
            blocking = [await first_token(stream) for stream in blockers]
            waiting = [asyncio.ensure_future(fetch(client, greedy(adapter, some_tokens(9, 5), 5))) for adapter in ADAPTERS[2:] * 2]
            await asyncio.to_thread(wait_for, "eight to wait", lambda: server.status()["ranks"][0]["waiting"] == len(waiting))
            prefilling = [asyncio.ensure_future(fetch(client, greedy(BASE, some_tokens(LONG, 6 + index), 9))) for index in range(8)]
            decoding = [TokenStream(client, seeded(model, some_tokens(12, 7), 1, LONG)) for model in (BASE, *ADAPTERS[:2]) * 2]
            opened = [await first_token(stream) for stream in decoding]
            aborted = [*waiting[:6], *prefilling[:6]]
            for task in aborted:
                task.cancel()
            for events in (*opened, *blocking):
                await events.aclose()
            survivors = await asyncio.gather(*waiting[6:], *prefilling[6:])
            await asyncio.gather(*aborted, return_exceptions=True)
            return [*survivors, *(task.result() for task in aborted if not task.cancelled())]

    reference.check_all(asyncio.run(run()))
    assert not held(server.wait_until_idle())


@served_by(LLAMA)
def test_a_connection_dropped_in_the_middle_of_a_body_holds_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")

    async def drop():
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    asyncio.run(drop())
    assert not held(server.wait_until_idle())


@served_by(LLAMA)
def test_stop_strings_n_and_list_prompts_end_every_sequence_once(server):
    body = {"model": ADAPTERS[0], "prompt": [list(some_tokens(8, 8)), list(some_tokens(3, 9))], "n": 3, "seed": 5, "max_tokens": 40}
    reply = server.post("/v1/completions", body | {"return_token_ids": True, "stop": ["e", "t"]}).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for choice in reply["choices"]:
        assert choice["finish_reason"] in ("stop", "length")
        assert "e" not in choice["text"] and "t" not in choice["text"]
    assert len({tuple(choice["token_ids"]) for choice in reply["choices"]}) > 3
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in reply["choices"])


@served_by(LLAMA)
def test_c44_an_adapter_answers_alike_each_time(server):
    ask = greedy(ADAPTERS[5], some_tokens(24, 10), 32)
    first, *others = [ask_one(server, ask) for _ in range(4)]
    assert {other.cached_tokens for other in others} == {16}
    for other in others:  # with the same pages cached, so that every step has the same shape
        assert (other.token_ids, other.logprobs) == (others[0].token_ids, others[0].logprobs)
    assert first.token_ids == others[0].token_ids
    assert max(abs(a - b) for a, b in zip(first.logprobs, others[0].logprobs, strict=True)) <= TOLERANCE
