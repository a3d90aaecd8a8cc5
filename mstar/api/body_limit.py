"""The bound on a request's body, kept before and while it is read.

Front process, asyncio loop; pure ASGI. (FastAPI's own `max_body_size` answers in plain text; every error here has OpenAI's shape.)
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.api.errors import body_too_large, error_response


class BodyLimit:
    """Answers 413 where the announced or the real size is over `max_body_bytes`."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced_bytes(scope) > self._max_body_bytes:
            error = body_too_large()
            scope["mstar.error_code"] = error.code
            await error_response(error)(scope, receive, send)
            return
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise HTTPException(413)  # FastAPI passes these on from inside its reading of the body
            return message

        await self._app(scope, receive_bounded, send)


def _announced_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0
