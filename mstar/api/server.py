"""Serve an ASGI application over HTTP with uvicorn (httptools), inside a loop that somebody else owns.

Front process, asyncio loop. No signal handlers: the front process has its own and sets `stop`. The socket is bound before anything is
printed or spawned, so a port that is taken is a ConfigError and not a late surprise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mstar.errors import ConfigError

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than HTTP clients keep idle connections, so that none sends into a closing one

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing is captured."""
        yield


def _connections(slow_client_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's connection, but that one whose client does not read is cut after a bound.

    The transport says when its buffer is over its bound and when it has drained: what lies between costs the streams of others nothing.
    """

    class Connection(HttpToolsProtocol):
        _cut: asyncio.TimerHandle | None = None
        _left = 0  # bytes that wait for the client, at the last look

        def pause_writing(self) -> None:
            super().pause_writing()
            self._look_later()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._keep()

        def connection_lost(self, exc: Exception | None) -> None:
            self._keep()
            super().connection_lost(exc)

        def _keep(self) -> None:
            if self._cut is not None:
                self._cut.cancel()
                self._cut = None

        def _look_later(self) -> None:
            self._left = self.transport.get_write_buffer_size()
            self._cut = self.loop.call_later(slow_client_timeout_s, self._look)

        def _look(self) -> None:
            """Nothing is added while writing is paused, so a buffer that has not shrunk is one of which nothing was taken."""
            if self.transport.get_write_buffer_size() < self._left:
                self._look_later()
                return
            log.warning("client %s has taken nothing for %g s: cutting it", self.client, slow_client_timeout_s)
            self.transport.abort()

    return Connection


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
    slow_client_timeout_s: float = 60.0,
) -> None:
    """Serve until `stop` is set, then take no new connections and let running answers finish for `shutdown_timeout_s` seconds.

    A client that reads nothing of its answer for `slow_client_timeout_s`, though more waits for it, is cut.

    Serves on `sock` if given (closed at the end), else binds host and port (ConfigError). `on_ready(host, port)` is called with the
    bound address once connections are accepted. Cancelling the task stops at once.
    """
    listener = bind(host, port) if sock is None else sock
    config = uvicorn.Config(
        app,
        http=_connections(slow_client_timeout_s),
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
