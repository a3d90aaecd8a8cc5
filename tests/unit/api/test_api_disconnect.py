"""A client that goes away: its streams are cancelled at once, whatever the server was waiting for. Every stream ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from mstar.conductor.types import Chunk
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.requests_and_errors import CHAT, COMPLETION
from tests.unit.api.scripted_conductor import ScriptedConductor

MakeApp = Callable[..., FastAPI]
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
TIMEOUT_S = 10.0


def play(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_gone_before_the_first_token(make_app: MakeApp, path: str, body: dict[str, Any], stream: bool, n: int):
    async def scenario() -> None:
        conductor = ScriptedConductor(lambda generation: [asyncio.Event(), Chunk((270,))])
        call = AsgiCall(make_app(conductor), path, {**body, "stream": stream, "n": n})
        await conductor.accepted.wait()
        call.disconnect()
        await call.task
        assert [played.ends for played in conductor.streams] == [["cancelled"]] * n
        assert [message.get("status") for message in call.sent if message["type"] == "http.response.start"] in ([], [499])

    play(scenario())


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("n", [1, 3])
def test_gone_in_mid_stream_while_the_next_token_is_awaited(make_app: MakeApp, path: str, body: dict[str, Any], n: int):
    async def scenario() -> None:
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), asyncio.Event(), Chunk((270,))])
        call = AsgiCall(make_app(conductor), path, {**body, "stream": True, "n": n})
        await call.until_sent(1 + n)
        call.disconnect()
        await call.task
        assert [played.ends for played in conductor.streams] == [["cancelled"]] * n
        assert not any(b"[DONE]" in message.get("body", b"") for message in call.sent)

    play(scenario())


@pytest.mark.parametrize("n", [1, 3])
def test_gone_while_it_takes_nothing(make_app: MakeApp, n: int):
    async def scenario() -> None:
        more = asyncio.Event()
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), more, Chunk((270,)), asyncio.Event()])
        call = AsgiCall(make_app(conductor), "/v1/completions", {**COMPLETION, "stream": True, "n": n})
        await call.until_sent(1 + n)
        call.stop_reading()
        more.set()
        while conductor.streams[0].num_given < 2:
            await asyncio.sleep(0)
        call.disconnect()
        await call.task
        assert [played.ends for played in conductor.streams] == [["cancelled"]] * n

    play(scenario())


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_frees_the_stream_though_the_client_takes_nothing(make_app: MakeApp, n: int):
    async def scenario() -> None:
        more = asyncio.Event()
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), more, Chunk((223,)), asyncio.Event()])
        call = AsgiCall(make_app(conductor), "/v1/completions", {**COMPLETION, "stream": True, "n": n, "stop": " "})
        await call.until_sent(1 + n)
        call.stop_reading()
        more.set()
        for played in conductor.streams:
            await played.cancelled.wait()
        assert not call.task.done()
        call.disconnect()
        await call.task
        assert [played.ends for played in conductor.streams] == [["cancelled"]] * n

    play(scenario())


def test_a_server_that_stops_cancels_what_runs(make_app: MakeApp):
    async def scenario() -> None:
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), asyncio.Event()])
        app = make_app(conductor)
        calls = [AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": stream}) for stream in (True, False)]
        await calls[0].until_sent(2)
        while len(conductor.streams) < 2:
            await asyncio.sleep(0)
        for call in calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
        assert [played.ends for played in conductor.streams] == [["cancelled"]] * 2

    play(scenario())


def test_the_other_choices_end_when_one_fails(make_app: MakeApp):
    async def scenario() -> None:
        def script(generation: Any) -> list[Any]:
            first = not conductor.streams
            return [Chunk((270,)), KeyError("one fails")] if first else [Chunk((270,)), asyncio.Event()]

        conductor = ScriptedConductor(script)
        call = AsgiCall(make_app(conductor), "/v1/completions", {**COMPLETION, "stream": True, "n": 3})
        await call.task
        assert [played.ends for played in conductor.streams] == [["failed"], ["cancelled"], ["cancelled"]]
        assert any(b"internal_error" in message.get("body", b"") for message in call.sent)

    play(scenario())


def test_the_first_token_is_sent_before_the_second_is_there(make_app: MakeApp):
    async def scenario() -> None:
        more = asyncio.Event()
        conductor = ScriptedConductor(lambda generation: [Chunk((270,)), more, Chunk((223,)), Chunk((), finish_reason="length")])
        call = AsgiCall(make_app(conductor), "/v1/completions", {**COMPLETION, "stream": True})
        await call.until_sent(2)
        assert b'"text":"hello"' in call.sent[1]["body"]
        more.set()
        await call.task
        assert call.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        assert conductor.streams[0].ends == ["length"]

    play(scenario())
