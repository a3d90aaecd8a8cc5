"""Single fields of the generation routes: bounds, refusals, and what passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.api.requests_and_errors import CHAT, COMPLETION, POST_ROUTES, assert_openai_error, one_token
from tests.unit.api.scripted_conductor import ScriptedConductor

Post = Callable[..., httpx.Response]

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
def test_a_bad_value_is_a_400_that_names_its_field(post: Post, path: str, body: dict[str, Any], field: str, value: Any):
    response = post(path, content=json.dumps({**body, field: value}), headers={"content-type": "application/json"})
    message = assert_openai_error(response, 400, "invalid_value", response.json()["error"]["param"])
    assert response.json()["error"]["param"].split(".")[0] == field
    assert field in message and len(message) < 400


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(post: Post, raw: str):
    content = f'{{"model": "tiny", "prompt": "a", "temperature": {raw}}}'
    assert_openai_error(
        post("/v1/completions", content=content, headers={"content-type": "application/json"}), 400, "invalid_value", "temperature"
    )


BAD_PROMPTS: list[Any] = [
    None, 5, True, {}, "", [], [[]], ["a", ""], [1, "a"], ["a", [1], 3], [[1], 2],
    [1.5], [True], [-1], [334], [[334]], [10**30], [[1, None]],
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_bad_prompt_is_a_400(post: Post, prompt: Any):
    assert_openai_error(post("/v1/completions", {**COMPLETION, "prompt": prompt}), 400, "invalid_value", "prompt")


@pytest.mark.parametrize("missing", ["model", "prompt", "messages"])
def test_a_missing_field_is_named(post: Post, missing: str):
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
def test_bad_messages_are_named(post: Post, messages: Any, param: str, code: str):
    raw = json.dumps({**CHAT, "messages": messages})
    response = post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert_openai_error(response, 400, code, param)


REFUSED: list[tuple[str, Any]] = [
    ("logit_bias", {"5": 1}), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]),
    ("response_format", {"type": "json_object"}), ("guided_regex", "a+"), ("lora_path", "/x"),
    ("lora", [{"id": 0, "scale": 1}]), ("lora_request", {"name": "x"}), ("adapter_id", "x"), ("adapter_id", 0),
    ("use_beam_search", True), ("prompt_embeds", "AAAA"), ("cache_salt", "x"), ("reasoning_effort", "high"), ("truncate_prompt_tokens", 5),
    ("chat_template", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_c86_a_field_that_would_change_the_answer_is_refused(post: Post, path: str, body: dict[str, Any], field: str, value: Any):
    assert_openai_error(post(path, {**body, field: value}), 400, "unsupported_parameter", field)


HARMLESS: dict[str, Any] = {
    "logit_bias": {}, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "lora_path": None, "lora": [], "user": "u",
    "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True, "safety_identifier": "s",
    "use_beam_search": False, "prompt_cache_key": "k", "brand_new_field": {"x": 1},
    "modalities": ["text"], "length_penalty": 1.0, "priority": 0,
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_fields_that_cannot_change_the_answer_pass(post: Post, path: str, body: dict[str, Any]):
    response = post(path, {**body, **HARMLESS, "tools": [{"type": "function"}], "tool_choice": "none"})
    assert response.status_code == 200, response.text
    assert post(path, {**body, **HARMLESS}).status_code == 200


def test_null_fields_mean_their_defaults(post: Post):
    conductor = ScriptedConductor(one_token)
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "max_tokens", "stream_options", "best_of", "suffix", "echo"]
    )
    assert post("/v1/completions", {**COMPLETION, **nulls}, conductor=conductor).status_code == 200
    sampling = conductor.streams[0].generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.logprobs) == (1.0, 1.0, 16, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    *("model", "prompt", "messages", "n", "stop", "seed", "max_tokens", "temperature", "logprobs", "top_logprobs", "echo", "stream"),
    *("stream_options", "suffix", "tools", "min_tokens", "tokens", "lora_name", "x"),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(POST_ROUTES),
    fuzz=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_whatever_json_comes_the_answer_is_a_200_or_an_openai_4xx(post: Post, path: str, fuzz: dict[str, Any]):
    body = {**CHAT, "prompt": "hello", **fuzz} if "chat" not in path else {**CHAT, **fuzz}
    content = json.dumps(body)
    response = post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert_openai_error(response, response.status_code, error["code"], error["param"])
