"""Requests as the tests make them, over HTTP: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mstar.types import SamplingParams
from tests.support.processes import wait_for
from tests.support.server import BASE, REQUEST_TIMEOUT_S, Server

TIMEOUT = httpx.Timeout(REQUEST_TIMEOUT_S)


@dataclass(frozen=True)
class Ask:
    """One completion of token ids. `model` is `BASE` or an adapter; without a `seed` it is greedy."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int = 64
    seed: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of the body; of sampling, where it is seeded
    prompt_logprobs: bool = False
    ignore_eos: bool = True

    @property
    def adapter(self) -> str | None:
        """What the reference is asked for."""
        return None if self.model == BASE else self.model

    def body(self, **more: Any) -> dict[str, Any]:
        """The body of POST /v1/completions."""
        sampling: dict[str, Any] = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        wanted: dict[str, Any] = {"logprobs": 0, "return_token_ids": True}
        if self.prompt_logprobs:
            wanted["prompt_logprobs"] = 0
        head = {"model": self.model, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos}
        return {**head, **sampling, **wanted, **self.fields, **more}

    def sampling(self) -> SamplingParams:
        """The same as the ranks see it."""
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: self.body()[name] for name in names if name in self.body()}
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed or 0, ignore_eos=self.ignore_eos, **given)


@dataclass(frozen=True)
class Answer:
    """What came back. `token_ids` hold the stop token where one ended it, `logprobs` do not."""

    ask: Ask
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float | None, ...] | None
    finish_reason: str
    cached_tokens: int


def answer_of(ask: Ask, reply: dict[str, Any]) -> Answer:
    """Read a whole reply."""
    (choice,) = reply["choices"]
    known = choice.get("prompt_logprobs")
    scores = None
    if known is not None:
        scores = tuple(None if item is None else item[str(token)]["logprob"] for token, item in zip(ask.prompt, known, strict=True))
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert reply["usage"]["prompt_tokens"] == len(ask.prompt)
    return Answer(
        ask,
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        scores,
        choice["finish_reason"],
        reply["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def new_client(server: Server) -> httpx.AsyncClient:
    """A client without a bound on connections."""
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))


async def fetch(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """One whole answer."""
    reply = await client.post("/v1/completions", json=ask.body())
    assert reply.status_code == 200, f"{ask}: {reply.status_code} {reply.text}"
    return answer_of(ask, reply.json())


def ask_one(server: Server, ask: Ask) -> Answer:
    """One whole answer, with nothing else going on."""
    return ask_alone(server, [ask])[0]


def ask_alone(server: Server, asks: Iterable[Ask]) -> list[Answer]:
    """Whole answers, one request after another."""

    async def run() -> list[Answer]:
        async with new_client(server) as client:
            return [await fetch(client, ask) for ask in asks]

    return asyncio.run(run())


def ask_together(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """Whole answers, all at once."""

    async def run() -> list[Answer]:
        async with new_client(server) as client:
            return await asyncio.gather(*(fetch(client, ask) for ask in asks))

    return asyncio.run(run())


def ask_at_once(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """Whole answers of requests that the ranks meet all in one step: they stand still until the front has taken every one."""
    before = server.metric("mstar_requests_started_total")
    stopped = server.pids()

    def all_taken() -> bool:
        return server.metric("mstar_requests_started_total") - before == len(asks)

    async def run() -> list[Answer]:
        async with new_client(server) as client:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            try:
                answers = asyncio.gather(*(fetch(client, ask) for ask in asks))
                await asyncio.to_thread(wait_for, "the front to take every request", all_taken)
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            return await answers

    return asyncio.run(run())


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream up to its one `[DONE]`, after which nothing may come. Leaving the loop early closes the connection."""
    async with client.stream("POST", path, json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            await reply.aread()
        assert reply.status_code == 200, reply.text
        done = False
        async for line in reply.aiter_lines():
            if not line:
                continue
            assert line.startswith("data: ") and not done, line
            if line == "data: [DONE]":
                done = True
                continue
            yield json.loads(line.removeprefix("data: "))
        assert done, "the stream ended without [DONE]"


class TokenStream:
    """A stream of one completion's tokens: iterate it for what each event brings; `tokens` are all so far."""

    def __init__(self, client: httpx.AsyncClient, ask: Ask) -> None:
        self.ask = ask
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reasons: list[str] = []
        self._events = events(client, "/v1/completions", ask.body())

    async def __aiter__(self) -> AsyncGenerator[list[int]]:
        try:
            async for event in self._events:
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.tokens += choice["token_ids"]
                    self.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                    if choice["finish_reason"] is not None:
                        self.finish_reasons.append(choice["finish_reason"])
                    yield choice["token_ids"]
        finally:
            await self._events.aclose()

    async def read(self) -> Answer:
        """All of it."""
        async for _ in self:
            pass
        return self.answer()

    def answer(self) -> Answer:
        """What an ended stream gave; it must have ended once."""
        assert len(self.finish_reasons) == 1, self.finish_reasons
        return Answer(self.ask, tuple(self.tokens), tuple(self.logprobs), None, self.finish_reasons[0], 0)


async def first_token(stream: TokenStream) -> AsyncGenerator[list[int]]:
    """Open the stream up to its first token; what is returned goes on from there, and its `aclose` makes the client go away."""
    rest = aiter(stream)
    await anext(rest)
    return rest
