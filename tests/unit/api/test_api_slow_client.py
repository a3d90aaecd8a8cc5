"""A client that does not read its stream is cut after a bound; streams beside it do not notice."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

from mstar.api.server import _connections, serve_app
from mstar.conductor.types import Chunk
from tests.unit.api.requests_and_errors import COMPLETION
from tests.unit.api.scripted_conductor import ScriptedConductor

BOUND_S = 30.0
MUCH = 60_000  # events: more than the sockets' buffers take


@asynccontextmanager
async def served(app, slow_client_timeout_s):
    ready = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve_app(
            app,
            "127.0.0.1",
            0,
            on_ready=lambda host, port: ready.set_result((host, port)),
            stop=stop,
            shutdown_timeout_s=1.0,
            slow_client_timeout_s=slow_client_timeout_s,
        )
    )
    try:
        yield await ready
    finally:
        stop.set()
        await serving


def send_request(address):
    """A client with a small buffer that has sent its request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def test_a_client_that_reads_nothing_is_cut_and_its_stream_cancelled_while_another_gets_all(make_app):
    async def run():
        conductor = ScriptedConductor(lambda generation: [*[Chunk((270,))] * MUCH, asyncio.Event()])  # ends by a cancel alone
        async with asyncio.timeout(BOUND_S), served(make_app(conductor), 0.5) as address:
            slow = send_request(address)
            await conductor.accepted.wait()
            conductor.script = lambda generation: [*[Chunk((270,))] * 50, Chunk((), finish_reason="length")]
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address)
                body = json.dumps(COMPLETION).encode()
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n")
                writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert b'"length"' in await reader.read()
                writer.close()
            await conductor.streams[0].cancelled.wait()
            assert conductor.streams[0].ends == ["cancelled"]
            slow.close()

    asyncio.run(run())


def test_a_client_that_pauses_for_less_than_the_bound_gets_all(make_app):
    async def run():
        conductor = ScriptedConductor(lambda generation: [*[Chunk((270,))] * 5000, Chunk((), finish_reason="length")])
        async with asyncio.timeout(BOUND_S), served(make_app(conductor), BOUND_S) as address:
            client = send_request(address)
            await conductor.accepted.wait()
            await asyncio.sleep(0.3)
            got = b""
            client.setblocking(False)
            while b"[DONE]" not in got:
                got += await asyncio.get_running_loop().sock_recv(client, 1 << 20)
            assert conductor.streams[0].ends == ["length"] and got.count(b"data: {") == 5001
            client.close()

    asyncio.run(run())


def test_a_client_that_takes_a_little_within_each_bound_is_not_cut_however_long_it_takes():
    class Transport:
        """An answer of which 10 bytes are taken between two looks, and from a point on nothing."""

        def __init__(self):
            self.left, self.is_aborted = 1000, asyncio.Event()

        def get_write_buffer_size(self):
            self.left -= 10 if self.left > 500 else 0
            return self.left

        def abort(self):
            self.is_aborted.set()

    async def run():
        connection = object.__new__(_connections(0.001))
        connection.loop, connection.transport, connection.client = asyncio.get_running_loop(), Transport(), ("x", 1)
        connection._look_later()
        async with asyncio.timeout(BOUND_S):
            await connection.transport.is_aborted.wait()
        assert connection.transport.left == 500

    asyncio.run(run())
