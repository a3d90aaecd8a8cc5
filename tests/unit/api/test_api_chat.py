"""/v1/chat/completions: messages, defaults, streaming, log-probabilities; and the official client unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from mstar.api.text import TextProcessor
from mstar.conductor.types import Chunk, Generation
from mstar.types import TokenLogprob, TokenLogprobs
from tests.unit.api.requests_and_errors import CHAT, assert_openai_error, one_token
from tests.unit.api.scripted_conductor import ScriptedConductor, says

Post = Callable[..., httpx.Response]


def prompt_of(conductor: ScriptedConductor, text: TextProcessor) -> str:
    return text.decode(conductor.streams[0].generation.prompt)


def test_a_chat_in_openais_form(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(says(text, "hello there"))
    body = post("/v1/chat/completions", {**CHAT, "model": "org/json"}, conductor=conductor).json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "org/json"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello there", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert prompt_of(conductor, text) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    generation = conductor.streams[0].generation
    assert generation.model == "org/json"
    assert generation.sampling.max_tokens == 128 - len(generation.prompt)  # the rest of the context


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 5, "max_completion_tokens": 6}, 6)],
)
def test_max_completion_tokens_goes_before_max_tokens(post: Post, fields: dict[str, int], expected: int):
    conductor = ScriptedConductor(one_token)
    assert post("/v1/chat/completions", {**CHAT, **fields}, conductor=conductor).status_code == 200
    assert conductor.streams[0].generation.sampling.max_tokens == expected


def test_contents_in_parts_are_joined(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(one_token)
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]}, conductor=conductor)
    assert "one\ntwo\nthree" in prompt_of(conductor, text)


def test_continue_final_message_goes_on_with_the_assistants_words(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(one_token)
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well"}]  # type: ignore[misc]
    post("/v1/chat/completions", {**CHAT, "messages": messages, "continue_final_message": True}, conductor=conductor)
    assert prompt_of(conductor, text).endswith("assistant\nWell")
    both = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert_openai_error(post("/v1/chat/completions", both), 400, "invalid_value", "continue_final_message")


def test_template_kwargs_reach_the_template(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(one_token)
    ask = {**CHAT, "chat_template_kwargs": {"shout": True}, "add_generation_prompt": False}
    post("/v1/chat/completions", ask, conductor=conductor)
    assert prompt_of(conductor, text).endswith("LOUD")


def test_tool_calls_of_earlier_turns_keep_their_place_with_arguments_as_objects(text: TextProcessor):
    from mstar.api.messages import plain_messages
    from mstar.api.schemas import Message

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [Message(role="assistant", content=None, tool_calls=[call], name=None), Message(role="tool", content="2", tool_call_id="1")]  # type: ignore[call-arg]
    plain = plain_messages(messages)
    assert plain[0] == {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}]}
    assert plain[1] == {"role": "tool", "content": "2", "tool_call_id": "1"}


def with_logprobs(generation: Generation) -> list[Chunk]:
    known = (TokenLogprobs(TokenLogprob(270, -0.25, 1), (TokenLogprob(270, -0.25, 1), TokenLogprob(223, -2.0, 2))),)
    return [Chunk((270,), known if generation.sampling.logprobs is not None else None), Chunk((), finish_reason="length")]


def test_logprobs_in_the_chats_form(post: Post):
    conductor = ScriptedConductor(with_logprobs)
    body = post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, conductor=conductor).json()
    hello = {"token": "hello", "logprob": -0.25, "bytes": list(b"hello")}
    blank = {"token": " ", "logprob": -2.0, "bytes": [32]}
    assert body["choices"][0]["logprobs"] == {"content": [hello | {"top_logprobs": [hello, blank]}]}
    assert conductor.streams[0].generation.sampling.logprobs == 2
    plain = post("/v1/chat/completions", {**CHAT, "logprobs": True}, conductor=ScriptedConductor(with_logprobs)).json()
    assert plain["choices"][0]["logprobs"] == {"content": [hello | {"top_logprobs": []}]}


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": False, "top_logprobs": 1}])
def test_top_logprobs_needs_logprobs_and_has_a_bound(post: Post, fields: dict[str, Any]):
    assert_openai_error(post("/v1/chat/completions", {**CHAT, **fields}), 400, "invalid_value", "top_logprobs")


def test_streaming_begins_each_choice_with_the_role(post: Post, text: TextProcessor):
    ask = {**CHAT, "stream": True, "n": 2, "return_token_ids": True, "stream_options": {"include_usage": True}}
    response = post("/v1/chat/completions", ask, conductor=ScriptedConductor(says(text, "one two")))
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    for index in (0, 1):
        deltas = [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "one two"
    assert sum("prompt_token_ids" in event for event in events) == 1
    assert events[-1]["usage"]["completion_tokens"] == 2 * (len(text.encode("one two", add_special_tokens=False)) + 1)
    assert all(event["object"] == "chat.completion.chunk" for event in events)


def test_the_official_client_works_unchanged(
    make_app: Callable[..., FastAPI], client_of: Callable[..., httpx.AsyncClient], text: TextProcessor
):
    conductor = ScriptedConductor(says(text, "hello wörld 😀"))
    app = make_app(conductor, enable_runtime_lora=True, admin_key="admin", api_key="key")

    async def talk() -> None:
        async with client_of(app) as http:
            client = openai.AsyncOpenAI(api_key="key", base_url="http://test/v1", http_client=http, max_retries=0)
            chat = await client.chat.completions.create(model="pirate", messages=[{"role": "user", "content": "hi"}])
            assert chat.choices[0].message.content == "hello wörld 😀"
            assert chat.usage is not None and chat.usage.prompt_tokens_details is not None

            stream = await client.chat.completions.create(
                model="pirate",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"top_k": 5},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello wörld 😀"
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 3

            completion = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, stop="w", echo=True)
            assert [choice.text for choice in completion.choices] == ["ahello ", "ahello ", "bhello ", "bhello "]
            pieces = [chunk.choices[0].text async for chunk in await client.completions.create(model="tiny", prompt="a", stream=True)]
            assert "".join(pieces) == "hello wörld 😀"

            models = [model.id async for model in client.models.list()]
            assert models == ["tiny", "org/json", "pirate"]
            assert (await client.models.retrieve("org/json")).id == "org/json"

            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as long:
                await client.completions.create(model="tiny", prompt="a", max_tokens=1000)
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="other").models.list()

    asyncio.run(talk())
    assert all(len(stream.ends) == 1 for stream in conductor.streams)
