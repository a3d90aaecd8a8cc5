"""One HTTP request driven at the ASGI level, so that a test decides when the client reads and when it goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """The request runs as a task; `sent` is what the application has sent so far."""

    def __init__(self, app: ASGIApp, path: str, body: Any, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.sent: list[Message] = []
        self._progress = asyncio.Event()
        self._gone = asyncio.Event()
        self._hold = asyncio.Event()
        self._hold.set()
        raw = json.dumps(body).encode()
        self._body: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1234),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._hold.wait()
        self.sent.append(message)
        self._progress.set()

    def disconnect(self) -> None:
        """The client closes its connection."""
        self._gone.set()

    def stop_reading(self) -> None:
        """From now on `send` does not return: a client that takes nothing."""
        self._hold.clear()

    async def until_sent(self, count: int) -> None:
        """Wait until the application has sent `count` messages."""
        while len(self.sent) < count:
            self._progress.clear()
            await self._progress.wait()
