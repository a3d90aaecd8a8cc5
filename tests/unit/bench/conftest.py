"""A tiny OpenAI-like server over real sockets: one thread, one asyncio loop, a port of the kernel's choice, no waiting between tokens.

What it does with a request is chosen by the `model` that it names, see `_complete`.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

ADAPTERS = ("red", "green", "blue")


@dataclass
class FakeServer:
    base_url: str = ""
    num_connections: int = 0
    completions: list[dict] = field(default_factory=list)  # bodies, in order of arrival
    authorization: set[str] = field(default_factory=set)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                self.authorization.add(fields.get("authorization", ""))
                may_stay = self.answer(head.split(" ")[1], json.loads(body or "{}"), writer)
                await writer.drain()
                if not may_stay:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/completions":
            self.completions.append(body)
            return _complete(body, writer)
        found = {
            "/v1/models": {"data": [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in ADAPTERS)]},
            "/version": {"version": "fake 1.0"},
            "/tokenize": {"tokens": list(range(1000, 1064))},
        }.get(path)
        _send_json(writer, "404 Not Found" if found is None else "200 OK", found or {"detail": "Not Found"})
        return True


def _send_json(writer: asyncio.StreamWriter, status: str, body: object) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n".encode() + data)


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _complete(body: dict, writer: asyncio.StreamWriter) -> bool:
    """Stream `max_tokens` tokens. Returns whether the connection stays open."""
    model, num_tokens = body["model"], body["max_tokens"]
    if model == "unknown":
        error = {"message": "The model `unknown` does not exist.", "code": "model_not_found"}
        _send_json(writer, "404 Not Found", {"error": error})
        return True
    is_chunked = model != "closes"  # else the end of the body is the end of the connection

    def send(data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + b"Transfer-Encoding: chunked\r\n" * is_chunked + b"\r\n")
    for position in range(num_tokens):
        if model == "breaks" and position == num_tokens // 2:
            return False
        is_last = position == num_tokens - 1
        send(_event({"choices": [{"index": 0, "text": "x", "finish_reason": "length" if is_last else None}]}))
    send(_event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}}))
    send(b"data: [DONE]\n\n")
    if is_chunked:
        writer.write(b"0\r\n\r\n")
    # "goes" promises to keep the connection and then closes it: the client meets a stale one
    return is_chunked and model != "goes"


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(fake.talk, "127.0.0.1", 0)
        fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        talks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()
