"""/tokenize, /detokenize, status, metrics, and the audit of what the API counts itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mstar import __version__
from mstar.api.text import TextProcessor
from tests.unit.api.requests_and_errors import assert_openai_error
from tests.unit.api.scripted_conductor import ScriptedConductor

Post = Callable[..., httpx.Response]


def test_tokenize_and_detokenize_with_vllms_bodies(post: Post, text: TextProcessor):
    ids = list(text.encode("hello wörld", add_special_tokens=False))
    body = post("/tokenize", {"model": "pirate", "prompt": "hello wörld", "return_token_strs": True}).json()
    assert body == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": [text.token_piece(token) for token in ids]}
    assert post("/detokenize", {"model": "tiny", "tokens": ids}).json() == {"prompt": "hello wörld"}
    assert post("/tokenize", {"prompt": ""}).json() == {"count": 0, "max_model_len": 128, "tokens": []}


def test_a_chat_is_tokenized_as_it_would_be_answered(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(lambda generation: [])
    messages = [{"role": "user", "content": "hi"}]
    tokens = post("/tokenize", {"messages": messages}).json()["tokens"]
    post("/v1/chat/completions", {"model": "tiny", "messages": messages}, conductor=conductor)
    assert tuple(tokens) == conductor.streams[0].generation.prompt


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_tokenize_takes_one_of_prompt_and_messages(post: Post, body: dict[str, Any]):
    assert_openai_error(post("/tokenize", body), 400, "invalid_value", "prompt")


@pytest.mark.parametrize("tokens", [[-1], [334], [10**40]])
def test_detokenize_knows_its_vocabulary(post: Post, tokens: list[int]):
    assert_openai_error(post("/detokenize", {"tokens": tokens}), 400, "invalid_value", "tokens")


def test_what_the_server_says_of_itself(post: Post):
    assert post("/version", method="GET").json() == {"version": __version__}
    assert post("/ready", method="GET").json() == {"status": "ready"}
    assert post("/ping").json() == post("/health", method="GET").json() == {"status": "ok"}
    assert post("/mstar/status", method="GET").json()["ranks"][0]["slots"][0]["adapter"] == "pirate"
    metrics = post("/metrics", method="GET")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "mstar_requests_started_total" in metrics.text


def test_c84_requests_for_unknown_models_are_counted(make_app: Callable[..., FastAPI], client_of: Callable[..., httpx.AsyncClient]):
    import asyncio

    app = make_app(ScriptedConductor())

    async def ask() -> None:
        async with client_of(app) as client:
            await client.post("/v1/completions", json={"model": "nope", "prompt": "a"})
            await client.post("/v1/chat/completions", json={"model": "", "messages": [{"role": "user", "content": "a"}]})
            await client.get("/v1/models/nope")  # asks, and does not request

    asyncio.run(ask())
    assert app.state.metrics.registry.get_sample_value("mstar_unknown_model_requests_total") == 2


def test_the_openapi_description_is_made(post: Post):
    paths = post("/openapi.json", method="GET").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models/{model_id}"} <= set(paths)
