"""Requests that are right, and what every error looks like."""

from __future__ import annotations

import json
from typing import Any

import httpx

from mstar.conductor.types import Chunk, Generation

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
POST_ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/tokenize", "/detokenize"),
)


def one_token(generation: Generation) -> list[Chunk]:
    return [Chunk((5,)), Chunk((), finish_reason="length")]


def assert_openai_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert isinstance(body["error"]["code"], str)
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    return body["error"]["message"]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)
