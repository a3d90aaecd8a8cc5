"""The HTTP server on a real socket: start, stream, client gone, body bound, stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mstar.api.server import bind, serve_app
from mstar.conductor.types import Chunk
from mstar.errors import ConfigError
from tests.unit.api.requests_and_errors import COMPLETION, assert_openai_error
from tests.unit.api.scripted_conductor import ScriptedConductor

MakeApp = Callable[..., FastAPI]
TIMEOUT_S = 20.0


def play(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


@asynccontextmanager
async def served(app: FastAPI, *, shutdown_timeout_s: float = 5.0) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[None]]]:
    """The application on a free port; ends with a graceful stop."""
    ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve_app(
            app,
            "127.0.0.1",
            0,
            on_ready=lambda host, port: ready.set_result((host, port)),
            stop=stop,
            shutdown_timeout_s=shutdown_timeout_s,
        )
    )
    host, port = await ready
    try:
        yield f"http://{host}:{port}", stop, serving
    finally:
        stop.set()
        await serving


def test_a_stream_arrives_token_by_token_and_a_stop_lets_it_finish(make_app: MakeApp):
    async def scenario() -> None:
        more = asyncio.Event()
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), more, Chunk((223,)), Chunk((), finish_reason="length")])
        async with served(make_app(conductor)) as (url, stop, serving), httpx.AsyncClient(base_url=url) as client:
            async with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
                lines = response.aiter_lines()
                first = json.loads((await anext(lines)).removeprefix("data: "))
                assert first["choices"][0]["text"] == "hello"  # while the second token does not exist yet
                stop.set()
                assert not serving.done()
                more.set()
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            await serving
        assert conductor.streams[0].ends == ["length"]

    play(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_connection_cancels_at_once(make_app: MakeApp, stream: bool):
    async def scenario() -> None:
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), asyncio.Event()])
        async with served(make_app(conductor)) as (url, _, _):
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({**COMPLETION, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await conductor.accepted.wait()
            writer.close()
            await conductor.streams[0].cancelled.wait()
            assert conductor.streams[0].ends == ["cancelled"]

    play(scenario())


def test_a_body_over_the_bound_is_answered_over_a_socket_too(make_app: MakeApp):
    async def scenario() -> None:
        async with served(make_app(ScriptedConductor(), max_body_bytes=4096)) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            for _ in range(3):
                assert_openai_error(
                    await client.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 20_000}), 413, "body_too_large"
                )
            assert (await client.get("/health")).status_code == 200

    play(scenario())


def test_a_taken_port_is_a_config_error():
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="cannot listen there: Address already in use"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_an_address_that_is_not_ours_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot listen there"):
        bind("203.0.113.1", 0)


def test_cancelling_the_server_stops_it_and_its_streams(make_app: MakeApp):
    async def scenario() -> None:
        conductor = ScriptedConductor(lambda generation: [asyncio.Event()])
        async with served(make_app(conductor), shutdown_timeout_s=1.0) as (url, stop, serving), httpx.AsyncClient(base_url=url) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await conductor.accepted.wait()
            stop.set()  # a stream that does not end keeps the server for its shutdown timeout, then it is cancelled
            await serving
            await conductor.streams[0].cancelled.wait()
            assert conductor.streams[0].ends == ["cancelled"]
            await asyncio.gather(asking, return_exceptions=True)

    play(scenario())
