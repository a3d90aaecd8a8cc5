"""Every error of every route has OpenAI's shape: `{"error": {message, type, param, code}}` with a string code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar.conductor.types import Chunk, Generation
from tests.unit.api.scripted_conductor import ScriptedConductor

MakeApp = Callable[..., FastAPI]
ClientOf = Callable[..., httpx.AsyncClient]

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}


def one_token(generation: Generation) -> list[Chunk]:
    return [Chunk((5,)), Chunk((), finish_reason="length")]


def assert_openai_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert isinstance(body["error"]["code"], str)
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    return body["error"]["message"]


@pytest.fixture
def post(make_app: MakeApp, client_of: ClientOf) -> Callable[..., httpx.Response]:
    """One request against a fresh application; no stream may be left running."""

    def send(
        path: str, body: Any = None, *, method: str = "POST", conductor: ScriptedConductor | None = None, **kwargs: Any
    ) -> httpx.Response:
        played = conductor or ScriptedConductor(one_token)
        settings = kwargs.pop("settings", {})

        async def call() -> httpx.Response:
            async with client_of(make_app(played, **settings)) as client:
                if body is not None:
                    kwargs["json"] = body
                return await client.request(method, path, **kwargs)

        response = asyncio.run(call())
        assert all(len(stream.ends) == 1 for stream in played.streams)
        return response

    return send


ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
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


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(("kwargs", "code"), BAD_BODIES)
def test_a_body_that_is_no_json_object_is_a_400(
    post: Callable[..., httpx.Response], method: str, path: str, kwargs: dict[str, Any], code: str
):
    headers = {"authorization": "Bearer admin", **kwargs.get("headers", {})}
    response = post(path, method=method, settings={"enable_runtime_lora": True, "admin_key": "admin"}, **{**kwargs, "headers": headers})
    assert_openai_error(response, 400, code)


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/v1/models/", "/v1/completions/", "/v1/load_lora_adapter"])
def test_an_unknown_path_is_a_404(post: Callable[..., httpx.Response], path: str):
    response = post(path, method="GET")
    if path == "/v1/models/":
        assert_openai_error(response, 404, "model_not_found", "model")
    else:
        assert_openai_error(response, 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("PUT", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/metrics")]
)
def test_a_wrong_method_is_a_405(post: Callable[..., httpx.Response], method: str, path: str):
    response = post(path, method=method)
    assert_openai_error(response, 405, "method_not_allowed")
    assert response.headers["allow"]


def test_a_body_over_the_bound_is_a_413(post: Callable[..., httpx.Response]):
    big = {**COMPLETION, "prompt": "x" * 5000}
    assert_openai_error(post("/v1/completions", big, settings={"max_body_bytes": 4096}), 413, "body_too_large")

    async def in_parts():  # no Content-Length: counted as it comes
        for _ in range(10):
            yield b"x" * 1000

    headers = {"content-type": "application/json"}
    response = post("/v1/completions", content=in_parts(), headers=headers, settings={"max_body_bytes": 4096})
    assert_openai_error(response, 413, "body_too_large")


def test_an_unexpected_error_is_a_500_that_says_nothing_of_the_inside(post: Callable[..., httpx.Response]):
    class Broken(ScriptedConductor):
        def served_models(self) -> Any:
            raise KeyError("/secret/path")

    message = assert_openai_error(post("/v1/models", method="GET", conductor=Broken()), 500, "internal_error")
    assert "secret" not in message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_in_a_stream_before_its_first_token_is_a_500(post: Callable[..., httpx.Response], path: str, stream: bool):
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
def test_c84_an_unknown_model_is_a_404_on_every_route(post: Callable[..., httpx.Response], path: str, body: dict[str, Any], model: str):
    message = assert_openai_error(post(path, {**body, "model": model}), 404, "model_not_found", "model")
    assert message.startswith("The model `") and len(message) < 500


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", "1"), ("temperature", True), ("temperature", 10**400), ("temperature", []),
    ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 1e30),
    ("n", 0), ("n", 129), ("n", "2"), ("n", True), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", 0),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0), ("min_tokens", -1), ("min_tokens", 100_000),
    ("stop", 5), ("stop", ["a"] * 17), ("stop", [""]), ("stop", ""), ("stop", ["x" * 1001]), ("stop", [1]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [334]), ("stop_token_ids", ["1"]), ("stop_token_ids", [1] * 129), ("stop_token_ids", 3),
    ("stream", "yes"), ("ignore_eos", 1), ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("stream_options", {"include_usage": True}),
    ("skip_special_tokens", "no"), ("model", None), ("model", 3),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_bad_value_is_a_400_that_names_its_field(
    post: Callable[..., httpx.Response], path: str, body: dict[str, Any], field: str, value: Any
):
    response = post(path, content=json.dumps({**body, field: value}), headers={"content-type": "application/json"})
    message = assert_openai_error(response, 400, "invalid_value", response.json()["error"]["param"])
    assert response.json()["error"]["param"].split(".")[0] == field
    assert field in message and len(message) < 400


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(post: Callable[..., httpx.Response], raw: str):
    content = f'{{"model": "tiny", "prompt": "a", "temperature": {raw}}}'
    assert_openai_error(
        post("/v1/completions", content=content, headers={"content-type": "application/json"}), 400, "invalid_value", "temperature"
    )


BAD_PROMPTS: list[Any] = [
    None, 5, True, {}, "", [], [[]], ["a", ""], [1, "a"], ["a", [1]] + [3], [[1], 2], [1.5], [True], [-1], [334], [[334]], [10**30], [[1, None]],
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_bad_prompt_is_a_400(post: Callable[..., httpx.Response], prompt: Any):
    assert_openai_error(post("/v1/completions", {**COMPLETION, "prompt": prompt}), 400, "invalid_value", "prompt")


@pytest.mark.parametrize("missing", ["model", "prompt", "messages"])
def test_a_missing_field_is_named(post: Callable[..., httpx.Response], missing: str):
    path, body = ("/v1/chat/completions", CHAT) if missing == "messages" else ("/v1/completions", COMPLETION)
    response = post(path, {key: value for key, value in body.items() if key != missing})
    assert_openai_error(response, 400, "missing_required_parameter", missing)


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ([{"content": "x"}], "messages.0.role", "missing_required_parameter"),
        ([{"role": "", "content": "x"}], "messages.0.role", "invalid_value"),
        ([{"role": "user", "content": 5}], "messages.0.content", "invalid_value"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0", "unsupported_content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0", "unsupported_content"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "a"}]}], "messages.0.content.0", "unsupported_content"),
        ([{"role": "user", "content": "a\ud800"}], "messages", "invalid_value"),
        ([{"role": "banned", "content": "x"}], "messages", "chat_template_error"),
        ("hi", "messages", "invalid_value"),
    ],
)
def test_bad_messages_are_named(post: Callable[..., httpx.Response], messages: Any, param: str, code: str):
    raw = json.dumps({**CHAT, "messages": messages})
    response = post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert_openai_error(response, 400, code, param)


REFUSED: list[tuple[str, Any]] = [
    ("logit_bias", {"5": 1}), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]),
    ("response_format", {"type": "json_object"}), ("guided_regex", "a+"), ("lora_path", "/x"), ("lora", [{"id": 0, "scale": 1}]),
    ("lora_request", {"name": "x"}), ("adapter_id", "x"), ("adapter_id", 0), ("use_beam_search", True), ("prompt_embeds", "AAAA"), ("cache_salt", "x"),
    ("reasoning_effort", "high"), ("truncate_prompt_tokens", 5), ("chat_template", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_c86_a_field_that_would_change_the_answer_is_refused(
    post: Callable[..., httpx.Response], path: str, body: dict[str, Any], field: str, value: Any
):
    assert_openai_error(post(path, {**body, field: value}), 400, "unsupported_parameter", field)


HARMLESS: dict[str, Any] = {
    "logit_bias": {}, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "lora_path": None, "lora": [], "user": "u",
    "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True, "safety_identifier": "s", "use_beam_search": False,
    "prompt_cache_key": "k", "brand_new_field": {"x": 1}, "modalities": ["text"], "length_penalty": 1.0, "priority": 0,
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_fields_that_cannot_change_the_answer_pass(post: Callable[..., httpx.Response], path: str, body: dict[str, Any]):
    response = post(path, {**body, **HARMLESS, "tools": [{"type": "function"}], "tool_choice": "none"})
    assert response.status_code == 200, response.text
    assert post(path, {**body, **HARMLESS}).status_code == 200


def test_null_fields_mean_their_defaults(post: Callable[..., httpx.Response]):
    conductor = ScriptedConductor(one_token)
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "max_tokens", "stream_options", "best_of", "suffix", "echo"]
    )
    assert post("/v1/completions", {**COMPLETION, **nulls}, conductor=conductor).status_code == 200
    sampling = conductor.streams[0].generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.logprobs) == (1.0, 1.0, 16, None)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 128}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 200}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 100, "max_tokens": 29}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [[5], [5] * 100], "max_tokens": 29}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 128}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "hello " * 200}]}, "messages"),
    ],
)
def test_too_long_for_the_context_is_a_400_with_the_numbers(
    post: Callable[..., httpx.Response], path: str, body: dict[str, Any], param: str
):
    message = assert_openai_error(post(path, body), 400, "context_length_exceeded", param)
    assert "maximum context length is 128 tokens" in message


def test_a_429_tells_when_to_come_back(post: Callable[..., httpx.Response]):
    conductor = ScriptedConductor(one_token)
    conductor.refuse_after = 0
    response = post("/v1/completions", COMPLETION, conductor=conductor)
    assert_openai_error(response, 429, "too_many_requests")
    assert response.headers["retry-after"] == "1"


def test_not_ready_is_a_503_and_alive_a_200(post: Callable[..., httpx.Response]):
    conductor = ScriptedConductor()
    conductor.not_ready = "rank 1 is starting"
    assert "rank 1 is starting" in assert_openai_error(post("/ready", method="GET", conductor=conductor), 503, "not_ready")
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert post(path, method="GET", conductor=conductor).status_code == 200


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=5)  # fmt: skip
FIELDS = "model prompt messages n stop seed max_tokens temperature logprobs top_logprobs echo stream stream_options suffix tools min_tokens".split()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([path for _, path in ROUTES]),
    fuzz=st.dictionaries(st.sampled_from([*FIELDS, "tokens", "lora_name", "x"]), JSON, max_size=4),
)
def test_whatever_json_comes_the_answer_is_a_200_or_an_openai_4xx(post: Callable[..., httpx.Response], path: str, fuzz: dict[str, Any]):
    body = {**CHAT, "prompt": "hello", **fuzz} if "chat" not in path else {**CHAT, **fuzz}
    content = json.dumps(body)
    response = post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert_openai_error(response, response.status_code, error["code"], error["param"])
