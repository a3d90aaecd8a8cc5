"""Few KV pages and small steps: preemption, chunked prefill and the prefix cache change nothing in what comes out."""

from __future__ import annotations

import asyncio

from tests.e2e.prompts import MODELS, greedy, seeded, some_tokens
from tests.e2e.specs import TIGHT, served_by
from tests.support.adapters import ADAPTERS
from tests.support.client import TokenStream, ask_alone, ask_at_once, ask_one, ask_together, new_client
from tests.support.server import BASE


@served_by(TIGHT)
def test_c66_preempted_requests_come_back_and_match_the_reference(server, reference):
    """24 pages of 8 tokens; seven requests want 7 pages each."""
    asks = [greedy(model, some_tokens(9, 40 + index), 40) for index, model in enumerate(MODELS)]
    asks += [seeded(model, some_tokens(9, 40 + index), index, 40) for index, model in enumerate(MODELS)]
    before = server.status()["ranks"][0]["preemptions"]
    answers = ask_at_once(server, asks)
    assert server.status()["ranks"][0]["preemptions"] > before
    reference.check_all(answers)
    reference.check_all(ask_alone(server, [greedy(model, some_tokens(9, 40), 8) for model in MODELS]))


@served_by(TIGHT)
def test_c66_requests_of_one_adapter_that_share_a_prefix_are_preempted_and_match_the_reference(server, reference):
    shared = some_tokens(17, 50)
    models = (ADAPTERS[0], ADAPTERS[0], BASE, BASE, ADAPTERS[1], ADAPTERS[1], BASE, ADAPTERS[0])
    asks = [greedy(model, (*shared, *some_tokens(3, 51 + index)), 48) for index, model in enumerate(models)]
    before = server.status()["ranks"][0]["preemptions"]
    reference.check_all(ask_at_once(server, asks))
    assert server.status()["ranks"][0]["preemptions"] > before


@served_by(TIGHT)
def test_c50_long_prompts_prefill_in_chunks_beside_running_streams(server, reference):
    """24 tokens a step: prompts of 100 tokens take five steps; they hold their slots meanwhile."""
    prompts = [some_tokens(100, 60 + index) for index in range(3)]
    before = server.status()["ranks"][0]["steps"]

    async def run():
        async with new_client(server) as client:
            stream = asyncio.ensure_future(TokenStream(client, seeded(BASE, some_tokens(6, 63), 2, 60)).read())
            asks = [greedy(model, prompt, 6) for model, prompt in zip(ADAPTERS, prompts, strict=False)]
            long = [asyncio.ensure_future(TokenStream(client, ask).read()) for ask in asks]
            return await asyncio.gather(stream, *long)

    answers = asyncio.run(run())
    assert server.status()["ranks"][0]["steps"] - before >= 3 * 5
    reference.check_all(answers)


@served_by(TIGHT)
def test_prompt_logprobs_over_chunks_match_the_reference(server, reference):
    asks = [greedy(model, some_tokens(90, 70), 3, prompt_logprobs=True) for model in (BASE, ADAPTERS[5])]
    reference.check_all(ask_together(server, asks))


@served_by(TIGHT)
def test_cached_pages_are_given_up_when_others_need_them(server, reference):
    prompt = some_tokens(80, 71)
    assert ask_one(server, greedy(BASE, prompt, 2)).cached_tokens == 0
    again = ask_one(server, greedy(BASE, prompt, 2))
    assert again.cached_tokens == 72  # a whole block less than all: one token at least is computed
    others = ask_together(server, [greedy(BASE, some_tokens(90, 72 + index), 20) for index in range(4)])
    last = ask_one(server, greedy(BASE, prompt, 2))
    assert last.cached_tokens < 72
    reference.check_all([again, *others, last])


@served_by(TIGHT)
def test_a_request_as_long_as_all_pages_runs_alone(server, reference):
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 24 * 8
    answers = ask_together(server, [greedy(BASE, some_tokens(150, 80), 42), greedy(ADAPTERS[0], some_tokens(150, 81), 42)])
    reference.check_all(answers)
    refused = server.post("/v1/completions", greedy(BASE, some_tokens(150, 80), 43).body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
