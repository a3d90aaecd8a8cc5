"""Reading streamed completions: SSE framing and what counts as a token event."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.bench.completions import CompletionReader, completion_body
from mstar.bench.sse import SseParser

STREAM = b": hello\r\nevent: x\r\ndata: one\r\n\r\ndata:two\n\nid: 3\ndata: a\ndata:  b\n\n\n\ndata: cut"


def choice(text="x", **fields) -> bytes:
    return event({"choices": [{"index": 0, "text": text, **fields}]})


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def read(*pieces: bytes, status: int = 200) -> CompletionReader:
    """Piece k arrives at time k."""
    reader = CompletionReader()
    reader.on_status(status)
    for now, piece in enumerate(pieces):
        reader.on_body(piece, float(now))
    return reader


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_bench_sse_events_do_not_depend_on_where_the_stream_is_cut(cuts):
    parser = SseParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [data for start, end in pairwise(edges) for data in parser.feed(STREAM[start:end])]
    assert found == [b"one", b"two", b"a\n b"]


def test_bench_request_asks_for_exactly_that_many_greedy_streamed_tokens():
    body = json.loads(completion_body("red", (5, 6), 64))
    assert body == {
        "model": "red",
        "prompt": [5, 6],
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_bench_token_events_are_stamped_as_they_arrive():
    usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
    reader = read(choice(), choice() + choice(finish_reason="length"), usage, b"data: [DONE]\n\n")
    assert reader.event_times == [0.0, 1.0, 1.0]
    assert (reader.prompt_tokens, reader.output_tokens, reader.failure()) == (9, 3, None)


def test_bench_several_tokens_in_one_event_are_counted_by_usage():
    reader = read(choice("three tokens here"), event({"choices": [], "usage": {"completion_tokens": 3}}), b"data: [DONE]\n\n")
    assert reader.event_times == [0.0]
    assert reader.output_tokens == 3


def test_bench_events_are_counted_where_there_is_no_usage():
    assert read(choice(), choice(), b"data: [DONE]\n\n").output_tokens == 2


@pytest.mark.parametrize(
    ("piece", "is_token"),
    [
        (choice("x"), True),
        (choice(""), True),  # text held back, half a character
        (choice("", token_ids=[5], finish_reason="length"), True),
        (choice("x", finish_reason="length"), True),
        (choice("", finish_reason="length"), False),
        (event({"choices": []}), False),
        (event({"choices": [], "usage": None}), False),
    ],
)
def test_bench_token_event_is_one_that_brings_a_token(piece, is_token):
    assert len(read(piece).event_times) == is_token


@pytest.mark.parametrize(
    ("pieces", "status", "reason"),
    [
        ([b'{"error":{"message":"No `x`.","code":"model_not_found"}}'], 404, "HTTP 404 model_not_found No `x`."),
        ([b'{"detail":', b'"Not Found"}'], 404, "HTTP 404 Not Found"),
        ([b"<html>"], 502, "HTTP 502 <html>"),
        ([], 500, "HTTP 500"),
        ([choice(), event({"error": {"message": "boom", "code": "worker_lost"}})], 200, "error in the stream: worker_lost boom"),
        ([b"data: {nonsense\n\n"], 200, "unreadable event"),
        ([b"data: \xff\xfe\n\n"], 200, "unreadable event"),
        ([b"data: [DONE]\n\n"], 200, "no token event in the reply"),
        ([choice()], 200, "the stream ended without finish_reason or [DONE]"),
    ],
)
def test_bench_reply_that_does_not_count_says_why(pieces, status, reason):
    failure = read(*pieces, status=status).failure()
    assert failure is not None and failure.startswith(reason)
