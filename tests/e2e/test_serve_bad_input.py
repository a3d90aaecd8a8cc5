"""Whatever a client sends gets an answer in OpenAI's error shape and ends no process."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.e2e.prompts import greedy, some_tokens
from tests.e2e.specs import LLAMA, served_by
from tests.support.client import ask_one
from tests.support.server import BASE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK = {"model": BASE, "prompt": [5, 6], "max_tokens": 2}
HELLO = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
UNKNOWN = ("nobody", "", " ", "BASE", "base ", f"{BASE}:nobody", f"{BASE}:", "rank1:base", "../rank1", "a" * 5000, "\0", "é\n")

BAD_FIELDS = [
    *({"temperature": value} for value in (-1, "hot", True, 1e300)),
    *({"top_p": value} for value in (0, 1.1, -1, "all", [])),
    *({"top_k": value} for value in (-2, 1.5, 1 << 40, "all")),
    *({"max_tokens": value} for value in (0, -1, 1.5, "many", 10**30)),
    *({"n": value} for value in (0, -1, 129, 10**12, 2.5)),
    *({"seed": value} for value in (1 << 64, "x", 1.5)),
    *({"logprobs": value} for value in (-1, 21, 10**9, "all")),
    *({"stop": value} for value in (5, [""], ["x"] * 17, [["x"]], {"a": 1})),
    *({"stop_token_ids": value} for value in ([128], [-1], ["x"], [1 << 70], 5)),
    *({"repetition_penalty": value} for value in (0, -1, 1e9)),
    *({"presence_penalty": value} for value in (3, "x")),
    *({"prompt": value} for value in ([], "", [[]], [128], [-1], [1 << 70], [1.5], [True], {"a": 1}, 5, None, [[[5]]])),
    *({"prompt": value} for value in ([5] * 1025, "x" * 200_000, [[5] * 2000])),
    {"stream_options": {"include_usage": True}},
    {"stream": "yes"},
    {"min_tokens": 3},
    {"lora_path": "/tmp"},
    {"response_format": {"type": "json_object"}},
    {"best_of": 2},
    {"suffix": "x"},
]
BAD_CHATS = [
    *({"messages": value} for value in ([], None, "hello", [5], [{}], [{"role": "user"}] * 0, [{"role": 5, "content": "x"}])),
    *({"messages": [{"role": "user", "content": value}]} for value in (5, [{"type": "image_url"}], [{"type": "text"}], ["x" * 5000])),
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"top_logprobs": 5},
    {"tools": [{"type": "function"}]},
    {"chat_template_kwargs": {"messages": []}},
]
RAW_BODIES = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe{}",
    b'{"model": "base", "prompt": "x", "max_tokens": NaN}',
    b'{"model": "base", "prompt": "x", "temperature": Infinity}',
    b'{"model": "base", "prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"model":' * 5000,
    b'{"model": "base", "prompt": [' + b"1" * 10_000 + b"]}",
]
NO_TEXT = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"prompt": 5}',
    b'{"tokens": "x"}',
    b'{"tokens": [-1]}',
    b"{}",
]


def refused(answer, *statuses):
    """The error of an answer that must be a refusal in OpenAI's shape."""
    asked = answer.request.content[:200]
    assert answer.status_code in (statuses or (400, 404, 413, 415, 422)), (answer.status_code, answer.text[:500], asked)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["code"], str) and isinstance(error["type"], str)
    assert "Traceback" not in error["message"] and len(error["message"]) < 2000
    return error


@pytest.fixture
def unharmed(server):
    """After the test the same processes run and answer."""
    before = [server.front_pid(), *server.pids()]
    yield
    assert [server.front_pid(), *server.pids()] == before
    assert server.status()["instance_starts"] == 1
    assert len(ask_one(server, greedy(BASE, some_tokens(5, 1), 3)).token_ids) == 3


@served_by(LLAMA)
def test_c84_an_unknown_model_is_404_on_every_route_and_the_base_never_answers_for_it(server, unharmed):
    counted = server.metric("mstar_unknown_model_requests_total")
    for name in UNKNOWN:
        for path, body in ((COMPLETIONS, OK), (CHAT, HELLO), (COMPLETIONS, OK | {"stream": True}), (CHAT, HELLO | {"stream": True})):
            error = refused(server.post(path, body | {"model": name}), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert server.metric("mstar_unknown_model_requests_total") == counted + 4 * len(UNKNOWN)
    assert refused(server.get("/v1/models/nobody"), 404)["code"] == "model_not_found"


@served_by(LLAMA)
def test_bad_fields_are_refused_in_openais_shape(server, unharmed):
    for fields in BAD_FIELDS:
        refused(server.post(COMPLETIONS, OK | fields), 400)
    for fields in BAD_CHATS:
        content = json.dumps(HELLO | fields).encode()
        refused(server.post(CHAT, content=content, headers={"Content-Type": "application/json"}), 400)


@served_by(LLAMA)
def test_bodies_that_are_not_a_request_are_refused_in_openais_shape(server, unharmed):
    for paths, bodies in (((COMPLETIONS, CHAT), RAW_BODIES), (("/tokenize", "/detokenize"), NO_TEXT)):
        for path in paths:
            for content in bodies:
                refused(server.post(path, content=content, headers={"Content-Type": "application/json"}))
    refused(server.post(COMPLETIONS, content=b" " * (9 << 20), headers={"Content-Type": "application/json"}), 413)
    refused(server.post("/v1/nothing", {}), 404)
    refused(server.get(COMPLETIONS), 405)


@served_by(LLAMA)
def test_bytes_that_are_not_http_end_no_process(server, unharmed):
    host, port = server.url.removeprefix("http://").split(":")
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    lying = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}GET"

    for data in (b"\0" * 1000, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000, chunked, lying):
        with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(OSError):  # it may hang up on us
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
