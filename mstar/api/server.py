"""Serve an ASGI application over HTTP with uvicorn (httptools), inside a loop that somebody else owns.

Front process, asyncio loop. No signal handlers: the front process has its own and sets `stop`. The socket is bound before anything is
printed or spawned, so a port that is taken is a ConfigError and not a late surprise.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from mstar.errors import ConfigError

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than HTTP clients keep idle connections, so that none sends into a closing one


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing is captured."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"host {host!r}, port {port}: cannot listen there: {error.strerror or error}") from None


async def serve_app(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    sock: socket.socket | None = None,
    on_ready: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
    shutdown_timeout_s: float = 30.0,
) -> None:
    """Serve until `stop` is set, then take no new connections and let running answers finish for `shutdown_timeout_s` seconds.

    Serves on `sock` if given (closed at the end), else binds host and port (ConfigError). `on_ready(host, port)` is called with the
    bound address once connections are accepted. Cancelling the task stops at once.
    """
    listener = bind(host, port) if sock is None else sock
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout_s)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _started(server, serving)
        if on_ready is not None:
            address = listener.getsockname()
            on_ready(str(address[0]), int(address[1]))
        await _until(serving, stop)
        server.should_exit = True
        await serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


async def _started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:  # uvicorn has no event for it; a few rounds of the loop
        if serving.done():
            serving.result()
            raise RuntimeError("the HTTP server ended before it had started")
        await asyncio.sleep(0.001)


async def _until(serving: asyncio.Task[None], stop: asyncio.Event | None) -> None:
    if stop is None:
        await asyncio.wait([serving])
        return
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
