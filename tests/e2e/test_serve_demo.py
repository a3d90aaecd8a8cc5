"""The demo's model and its three adapters over HTTP: SmolLM2-135M with 9 query and 3 KV heads, through the chat route.

In float32 and with two slots for three adapters every output matches transformers + peft; as `configs/demo.yaml` serves it, in bfloat16
on two ranks, each adapter shows its trait on questions it was not trained on, and the base shows none.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from demo.fetch_model import fetch_model
from demo.prompts import HELD_OUT_PROMPTS, TRAINING_PROMPTS
from demo.traits import TRAITS
from tests.e2e.prompts import SAMPLINGS
from tests.e2e.specs import DEMO_FLOAT32, DEMO_FLOAT32_WHOLE, DEMO_SHOWN, served_by
from tests.support.client import Answer, Ask, new_client
from tests.support.server import BASE

MODELS = ("smollm2", *TRAITS)
MAX_TOKENS = 64
QUESTIONS = (*HELD_OUT_PROMPTS, *TRAINING_PROMPTS[: 20 - len(HELD_OUT_PROMPTS)])


@pytest.fixture(scope="session", autouse=True)
def demo_model():
    """The model's folder is there before a server is started on it."""
    return fetch_model()


async def chat(client, model, question, **fields):
    """One chat's whole reply."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS, "return_token_ids": True}
    reply = await client.post("/v1/chat/completions", json={**body, "logprobs": True, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat_together(server, wanted):
    """All of `(model, question, fields)` at once; replies in the same order."""

    async def run():
        async with new_client(server) as client:
            return await asyncio.gather(*(chat(client, model, question, **fields) for model, question, fields in wanted))

    return asyncio.run(run())


def answer_of(wanted, reply):
    """A chat's reply as the completion that it is."""
    model, _, fields = wanted
    sampling = {name: value for name, value in fields.items() if name not in ("seed",)}
    (choice,) = reply["choices"]
    given = tuple(item["logprob"] for item in choice["logprobs"]["content"])
    seed, more = fields.get("seed"), {} if "seed" not in fields else sampling
    ask = Ask(BASE if model == "smollm2" else model, tuple(reply["prompt_token_ids"]), MAX_TOKENS, seed, more, ignore_eos=False)
    assert choice["finish_reason"] == "stop" or len(choice["token_ids"]) == MAX_TOKENS
    return Answer(ask, tuple(choice["token_ids"]), given, None, choice["finish_reason"], 0)


def check(server, reference, num_greedy, num_seeded):
    """Questions on the base and every adapter, greedy and seeded, in one mixed batch."""
    wanted = [(model, question, {"temperature": 0}) for question in QUESTIONS[:num_greedy] for model in MODELS]
    for index, question in enumerate(QUESTIONS[:num_seeded]):
        fields = {"temperature": 1.0, "seed": 50 + index} | SAMPLINGS[index % len(SAMPLINGS)]
        wanted += [(model, question, fields) for model in MODELS]
    random.Random(3).shuffle(wanted)
    replies = chat_together(server, wanted)
    answers = [answer_of(want, reply) for want, reply in zip(wanted, replies, strict=True)]
    reference.assert_adapters_matter(answers[0].ask.prompt)
    reference.check_all(answers)


@served_by(*DEMO_FLOAT32)
def test_the_demos_adapters_match_transformers_and_peft(server, reference):
    check(server, reference, num_greedy=2, num_seeded=1)


@served_by(*DEMO_FLOAT32, *DEMO_FLOAT32_WHOLE, marks=(pytest.mark.slow,))
def test_the_demos_adapters_match_transformers_and_peft_on_twenty_questions(server, reference):
    check(server, reference, num_greedy=20, num_seeded=20)


@served_by(DEMO_SHOWN)
def test_each_adapter_shows_its_trait_on_held_out_questions_and_the_base_shows_none(server):
    wanted = [(model, question, {"temperature": 0}) for question in HELD_OUT_PROMPTS for model in MODELS]
    shown = {model: [] for model in MODELS}
    for (model, _, _), reply in zip(wanted, chat_together(server, wanted), strict=True):
        shown[model].append(reply["choices"][0]["message"]["content"])
    for adapter, has_trait in TRAITS.items():
        assert [text for text in shown[adapter] if not has_trait(text)] == [], adapter
        assert [text for text in shown["smollm2"] if has_trait(text)] == [], f"the base sounds like {adapter}"
    status = server.status()
    assert [len(rank["slots"]) for rank in status["ranks"]] == [4, 4]
