"""Who may call what: the API key, the admin key, and the audit line of every admin call.

Front process, asyncio loop; pure ASGI, before routing and before a body is read. Invariant: one audit line per call of an adapter route,
whatever became of it. Keys are compared in constant time.
"""

from __future__ import annotations

import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.api.adapters import ADMIN_PATHS
from mstar.api.errors import error_response
from mstar.config import ServeConfig
from mstar.errors import RequestError

audit_logger = logging.getLogger("mstar.audit")
audit_logger.setLevel(logging.INFO)  # whatever log_level is

_OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/version", "/metrics"))


class Guard:
    """Lets a request through, or answers 401."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._api_key = config.api_key
        self._admin_key = config.admin_key if config.enable_runtime_lora else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._admin_key is not None and scope["path"] in ADMIN_PATHS:
            await self._admin(scope, receive, send, self._admin_key)
        elif self._api_key is None or scope["path"] in _OPEN_PATHS or _has_key(scope, self._api_key):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, receive, send, "API key")

    async def _admin(self, scope: Scope, receive: Receive, send: Send, key: str) -> None:
        status = 500  # where an error of ours leaves before any answer

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if _has_key(scope, key):
                await self._app(scope, receive, send_noting_status)
            else:
                await _refuse(scope, receive, send_noting_status, "admin key")
        finally:
            client = scope.get("client") or ("?",)
            code = scope.get("mstar.error_code", "ok" if status == 200 else "internal_error")
            audit_logger.info(
                "%s %s from %s %s -> %d %s", scope["method"], scope["path"], client[0], scope.get("mstar.audit", "-"), status, code
            )


def _has_key(scope: Scope, key: str) -> bool:
    sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = sent.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode())


async def _refuse(scope: Scope, receive: Receive, send: Send, what: str) -> None:
    error = RequestError(f"Incorrect or missing {what}: send 'Authorization: Bearer <{what}>'.", code="invalid_api_key", status=401)
    scope["mstar.error_code"] = error.code
    await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
