"""How answers leave: JSON, server-sent events, and what happens when the client goes away.

Front process, asyncio loop. Invariant: while an answer is made, the connection is watched without polling; the moment the client is
gone the work is cancelled, whose `finally` cancels the streams. A stream's status line is sent with its first event, so whatever refuses
the request before its first token is still a proper HTTP error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from mstar.api.errors import error_body, internal_error
from mstar.errors import RequestError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_encode = msgspec.json.encode
_DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499  # nginx's status: nobody reads it, logs show it


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """UTF-8 JSON."""
        return _encode(content)


async def answer(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """Run `work` to a JSON answer; cancel it if the client goes away first. What it raises is raised here."""
    task = asyncio.ensure_future(work)
    if not await _finished_before_disconnect(task, request.receive):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JsonResponse(task.result())


class EventStream(Response):
    """An answer as server-sent events: one `data:` line per item of `events`, then `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. An error before the first one is raised (and becomes an HTTP error), later ones are events."""
        task = asyncio.ensure_future(self._send_all(send))
        if await _finished_before_disconnect(task, receive):
            task.result()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await self._send(send, b"data: " + _encode(event) + b"\n\n")
            except Exception as error:
                if not self._started:
                    raise
                if not isinstance(error, RequestError):
                    logger.exception("a stream failed")
                    error = internal_error()
                await self._send(send, b"data: " + _encode(error_body(error)) + b"\n\n")
        await self._send(send, _DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _finished_before_disconnect(task: asyncio.Future[Any], receive: Receive) -> bool:
    """Wait for `task`, or for the client to go: then cancel the task and wait until its `finally` blocks are through."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
