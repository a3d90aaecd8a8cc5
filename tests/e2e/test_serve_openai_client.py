"""The official `openai` client works unchanged."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.specs import LLAMA, served_by
from tests.support.adapters import ADAPTERS
from tests.support.server import BASE

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120, max_retries=0) as client:
        yield client


@served_by(LLAMA)
def test_the_openai_client_completes_and_chats(client):
    completion = client.completions.create(
        model=ADAPTERS[0], prompt="hello", max_tokens=5, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert completion.model == ADAPTERS[0] and completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == len(completion.choices[0].logprobs.tokens) == 5
    chat = client.chat.completions.create(model=BASE, messages=MESSAGES, max_tokens=5, seed=3, n=2, logprobs=True, top_logprobs=3)
    assert [choice.message.role for choice in chat.choices] == ["assistant"] * 2
    assert chat.choices[0].logprobs.content[0].top_logprobs
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens


@served_by(LLAMA)
def test_the_openai_client_streams_with_usage(client):
    asked = {"model": ADAPTERS[1], "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(messages=MESSAGES, **asked)
    with client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked) as stream:
        *events, last = list(stream)
    assert last.choices == [] and last.usage == whole.usage
    assert all(event.usage is None for event in events)
    assert "".join(choice.delta.content or "" for event in events for choice in event.choices) == whole.choices[0].message.content
    assert [choice.finish_reason for event in events for choice in event.choices if choice.finish_reason] == ["length"]
    with client.completions.create(prompt="hello", stream=True, stream_options={"include_usage": True}, **asked) as stream:
        *events, last = list(stream)
    assert last.usage.completion_tokens == 12
    text = "".join(choice.text for event in events for choice in event.choices)
    assert text == client.completions.create(prompt="hello", **asked).choices[0].text


@served_by(LLAMA)
def test_the_openai_client_lists_models_with_their_parents(client):
    models = list(client.models.list())
    assert [model.id for model in models] == [BASE, *sorted(ADAPTERS)]
    assert [model.parent for model in models] == [None, *[BASE] * len(ADAPTERS)]
    assert client.models.retrieve(ADAPTERS[2]).root == models[1 + sorted(ADAPTERS).index(ADAPTERS[2])].root


@served_by(LLAMA)
def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert (missing.value.code, missing.value.type, missing.value.param) == ("model_not_found", "invalid_request_error", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x", stream=True)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=BASE, prompt="x", max_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=BASE, prompt="x", temperature=-1)
