"""A steady load: so many streams at a time, each over a random model, greedy or seeded, some left early by their client.

Every stream that was begun ends up in `Load.streams` with what its client saw; nothing is judged here.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx

from tests.e2e.prompts import MODELS, SAMPLINGS, some_tokens
from tests.support.client import Answer, Ask
from tests.support.server import Server

MUTABLE = "extra"  # loaded at runtime from a folder that faults may change
STREAM_BOUND_S = 240.0  # a stream that takes longer hangs
RETRY_S = 0.2


@dataclass
class Stream:
    """One request and all that its client saw."""

    ask: Ask
    began: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    ended: float = 0.0
    error: str = ""  # the code of the server's error, or the transport's exception
    has_done: bool = False
    was_left: bool = False  # by its client

    @property
    def is_complete(self) -> bool:
        """Ended as a stream should, once."""
        return self.has_done and not self.error and len(self.finish_reasons) == 1

    def answer(self) -> Answer:
        """What came, whole or not."""
        return Answer(self.ask, tuple(self.tokens), tuple(self.logprobs), None, "".join(self.finish_reasons), 0)


class Load:
    """Keeps `num_streams` running until stopped."""

    def __init__(
        self,
        url: str,
        num_streams: int,
        draw: random.Random,
        models: Sequence[str] = (*MODELS, MUTABLE),
        longest: int = 300,
        *,
        is_behind_proxy: bool = False,
    ) -> None:
        """`longest` is the most tokens of a stream."""
        self._is_behind_proxy = is_behind_proxy
        self._draw = draw
        self._models = models
        self._longest = longest
        self._client = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(STREAM_BOUND_S), limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._tasks = [asyncio.create_task(self._keep_running()) for _ in range(num_streams)]
        self._stopping = False
        self.streams: list[Stream] = []
        self.running: list[Stream] = []
        self.num_refused: dict[str, int] = {}
        self.last_token_at = 0.0

    async def begin(self, ask: Ask) -> Stream:
        """One more stream, read to its end. Refusals before its first token are tried again, as a client would on 503."""
        while True:
            stream = Stream(ask, time.monotonic())
            self.running.append(stream)
            try:
                async with asyncio.timeout(STREAM_BOUND_S):
                    refused = await self._read(stream)
            except TimeoutError:
                stream.error, refused = "hang", ""
            finally:
                self.running.remove(stream)
            stream.ended = time.monotonic()
            if not refused:
                self.streams.append(stream)
                return stream
            self.num_refused[refused] = self.num_refused.get(refused, 0) + 1
            await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Let what runs end, begin nothing new."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    def random_ask(self) -> Ask:
        """A request as the load makes them."""
        draw = self._draw
        fields = draw.choice(SAMPLINGS)
        seed = draw.randrange(1 << 40) if fields or draw.random() < 0.4 else None
        prompt = some_tokens(draw.randint(1, 60), seed=draw.randrange(1000))
        return Ask(draw.choice(self._models), prompt, draw.randint(40, self._longest), seed, fields)

    async def _keep_running(self) -> None:
        while not self._stopping:
            await self.begin(self.random_ask())

    async def _read(self, stream: Stream) -> str:
        """Read it to its end; returns the code of a refusal (503), else "" with everything in `stream`."""
        leave_after = self._draw.randint(1, 30) if self._draw.random() < 0.1 else None
        last = time.monotonic()
        is_answered = False
        try:
            async with self._client.stream("POST", "/v1/completions", json=stream.ask.body(stream=True)) as reply:
                is_answered = True
                if reply.status_code != 200:
                    await reply.aread()
                    code = str(reply.json()["error"]["code"])
                    if reply.status_code == 503 and code in ("server_not_ready", "not_ready"):
                        return code
                    stream.error = code
                    return ""
                async for line in reply.aiter_lines():
                    if not line:
                        continue
                    now = time.monotonic()
                    stream.longest_gap_s = max(stream.longest_gap_s, now - last)
                    last = self.last_token_at = now
                    if not self._take(stream, line.removeprefix("data: ")):
                        break
                    if len(stream.tokens) == leave_after and not stream.finish_reasons:
                        stream.was_left = True
                        break
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return "unreachable"  # nothing was accepted
        except httpx.TransportError as error:
            if self._is_behind_proxy and not is_answered:
                return "unreachable"  # the proxy accepts whether or not anybody listens behind it
            stream.error = type(error).__name__
        if not stream.has_done and not stream.was_left and not stream.error:
            stream.error = "ended without [DONE]"
        return ""

    @staticmethod
    def _take(stream: Stream, data: str) -> bool:
        if stream.has_done:
            stream.error = "something came after [DONE]"
            return False
        if data == "[DONE]":
            stream.has_done = True
            return True
        event = json.loads(data)
        if "error" in event:
            stream.error = str(event["error"]["code"])
            return True
        for choice in event["choices"]:
            stream.tokens += choice["token_ids"]
            stream.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
            if choice["finish_reason"] is not None:
                stream.finish_reasons.append(choice["finish_reason"])
        return True


async def load_and_unload(server: Server, load: Load, name: str, path: str, headers: dict[str, str]) -> None:
    """Again and again: load an adapter under `name`, ask it once, unload it. A restart may refuse any of these with 503."""
    async with httpx.AsyncClient(base_url=server.url, timeout=httpx.Timeout(STREAM_BOUND_S)) as client:
        while True:
            try:
                reply = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, headers=headers)
                assert reply.status_code in (200, 503), reply.text
                if reply.status_code == 200:
                    await load.begin(replace(load.random_ask(), model=name, max_tokens=20))
                reply = await client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=headers)
                assert reply.status_code in (200, 404, 503), reply.text
            except httpx.TransportError:
                pass  # the front was killed
            await asyncio.sleep(0.5)
