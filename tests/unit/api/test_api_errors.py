"""Every error of every route has OpenAI's shape: `{"error": {message, type, param, code}}` with a string code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mstar.api.errors import error_response
from mstar.errors import RequestError
from tests.unit.api.requests_and_errors import CHAT, COMPLETION, POST_ROUTES, assert_openai_error, one_token
from tests.unit.api.scripted_conductor import ScriptedConductor

Post = Callable[..., httpx.Response]

BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"content": b"{", "headers": {"content-type": "application/json"}}, "invalid_json"),
    ({"content": b"", "headers": {"content-type": "application/json"}}, "invalid_json"),
    ({"content": b"[1]", "headers": {"content-type": "application/json"}}, "invalid_json"),
    ({"content": b"null", "headers": {"content-type": "application/json"}}, "invalid_json"),
    ({"content": b"\xff\xfe{", "headers": {"content-type": "application/json"}}, "invalid_request"),
    ({"content": b"[" * 200_000, "headers": {"content-type": "application/json"}}, "invalid_request"),
    ({"content": b'{"model":' + b"1" * 10_000 + b"}", "headers": {"content-type": "application/json"}}, "invalid_request"),
    ({"data": {"model": "tiny"}}, "invalid_json"),
]


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize(("kwargs", "code"), BAD_BODIES)
def test_a_body_that_is_no_json_object_is_a_400(post: Post, path: str, kwargs: dict[str, Any], code: str):
    headers = {"authorization": "Bearer admin", **kwargs.get("headers", {})}
    response = post(path, settings={"enable_runtime_lora": True, "admin_key": "admin"}, **{**kwargs, "headers": headers})
    assert_openai_error(response, 400, code)


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/v1/models/", "/v1/completions/", "/v1/load_lora_adapter"])
def test_an_unknown_path_is_a_404(post: Post, path: str):
    response = post(path, method="GET")
    if path == "/v1/models/":
        assert_openai_error(response, 404, "model_not_found", "model")
    else:
        assert_openai_error(response, 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("PUT", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/metrics")]
)
def test_a_wrong_method_is_a_405(post: Post, method: str, path: str):
    response = post(path, method=method)
    assert_openai_error(response, 405, "method_not_allowed")
    assert response.headers["allow"]


def test_a_body_over_the_bound_is_a_413(post: Post):
    big = {**COMPLETION, "prompt": "x" * 5000}
    assert_openai_error(post("/v1/completions", big, settings={"max_body_bytes": 4096}), 413, "body_too_large")

    async def in_parts():  # no Content-Length: counted as it comes
        for _ in range(10):
            yield b"x" * 1000

    headers = {"content-type": "application/json"}
    response = post("/v1/completions", content=in_parts(), headers=headers, settings={"max_body_bytes": 4096})
    assert_openai_error(response, 413, "body_too_large")


def test_an_unexpected_error_is_a_500_that_says_nothing_of_the_inside(post: Post):
    class Broken(ScriptedConductor):
        def served_models(self) -> Any:
            raise KeyError("/secret/path")

    message = assert_openai_error(post("/v1/models", method="GET", conductor=Broken()), 500, "internal_error")
    assert "secret" not in message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_in_a_stream_before_its_first_token_is_a_500(post: Post, path: str, stream: bool):
    conductor = ScriptedConductor(lambda generation: [KeyError("inside")])
    response = post(
        path, {**CHAT, "prompt": None, "stream": stream} if "chat" in path else {**COMPLETION, "stream": stream}, conductor=conductor
    )
    message = assert_openai_error(response, 500, "internal_error")
    assert "inside" not in message


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})]
)
@pytest.mark.parametrize("model", ["nope", "", "Tiny", "tiny:nope", "tiny:", "x" * 5000, "pirate\x00", "tïny"])
def test_c84_an_unknown_model_is_a_404_on_every_route(post: Post, path: str, body: dict[str, Any], model: str):
    message = assert_openai_error(post(path, {**body, "model": model}), 404, "model_not_found", "model")
    assert message.startswith("The model `") and len(message) < 500


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 128}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 200}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 100, "max_tokens": 29}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": ["a", "hello " * 5000]}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [[5], ["x"] * 100_000]}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [[5], [5] * 100], "max_tokens": 29}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 128}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "hello " * 200}]}, "messages"),
    ],
)
def test_too_long_for_the_context_is_a_400_with_the_numbers(post: Post, path: str, body: dict[str, Any], param: str):
    message = assert_openai_error(post(path, body), 400, "context_length_exceeded", param)
    assert "maximum context length is 128 tokens" in message


def test_a_429_tells_when_to_come_back(post: Post):
    conductor = ScriptedConductor(one_token)
    conductor.refuse_after = 0
    response = post("/v1/completions", COMPLETION, conductor=conductor)
    assert_openai_error(response, 429, "too_many_requests")
    assert response.headers["retry-after"] == "1"


def test_not_ready_is_a_503_and_alive_a_200(post: Post):
    conductor = ScriptedConductor()
    conductor.not_ready = "rank 1 is starting"
    assert "rank 1 is starting" in assert_openai_error(post("/ready", method="GET", conductor=conductor), 503, "not_ready")
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert post(path, method="GET", conductor=conductor).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("request_crashed_worker", 500, "false"),
        ("deadline_exceeded", 504, "false"),
        ("internal_error", 500, None),
        ("server_not_ready", 503, None),
    ],
)
def test_openais_clients_are_told_not_to_repeat_what_would_only_happen_again(code: str, status: int, said: str | None):
    assert error_response(RequestError("x", code=code, status=status)).headers.get("x-should-retry") == said
