"""The adapter routes, the keys, and the audit line of every admin call."""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
import pytest

from mstar.errors import AdapterError
from tests.unit.api.requests_and_errors import CHAT, COMPLETION, assert_openai_error
from tests.unit.api.scripted_conductor import ScriptedConductor

Post = Callable[..., httpx.Response]
RUNTIME = {"enable_runtime_lora": True, "admin_key": "s3cret"}
ADMIN = {"authorization": "Bearer s3cret"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_load_then_unload_with_vllms_bodies_and_texts(post: Post):
    conductor = ScriptedConductor()
    loaded = post(
        LOAD, {"lora_name": "new", "lora_path": "/a/new", "load_inplace": True}, conductor=conductor, settings=RUNTIME, headers=ADMIN
    )
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert conductor.calls == [("load", "new", "/a/new", True, False)]
    listed = post("/v1/models", method="GET", conductor=conductor).json()["data"]
    assert "new" in [card["id"] for card in listed]
    gone = post(UNLOAD, {"lora_name": "new"}, conductor=conductor, settings=RUNTIME, headers=ADMIN)
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert_openai_error(post("/v1/models/new", method="GET", conductor=conductor), 404, "model_not_found", "model")


def test_c77_the_load_call_returns_the_reason(post: Post):
    conductor = ScriptedConductor()
    conductor.load_error = AdapterError("lora rank is 128, at most 64 is allowed", code="adapter_rank_too_large", param="r")
    response = post(LOAD, {"lora_name": "x", "lora_path": "/a/x"}, conductor=conductor, settings=RUNTIME, headers=ADMIN)
    assert assert_openai_error(response, 400, "adapter_rank_too_large", "r") == "lora rank is 128, at most 64 is allowed"
    missing = post(UNLOAD, {"lora_name": "x"}, conductor=conductor, settings=RUNTIME, headers=ADMIN)
    assert_openai_error(missing, 404, "adapter_not_found")


def test_an_unexpected_failure_of_a_load_is_a_500_without_its_words(post: Post):
    conductor = ScriptedConductor()
    conductor.load_error = OSError("/secret")
    response = post(LOAD, {"lora_name": "x", "lora_path": "/a/x"}, conductor=conductor, settings=RUNTIME, headers=ADMIN)
    assert "/secret" not in assert_openai_error(response, 500, "internal_error")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer"}, {"authorization": "Bearer s3cre"}, {"authorization": "Basic s3cret"}])
@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_c81_without_the_admin_key_nothing_is_done(post: Post, path: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture):
    conductor = ScriptedConductor()
    with caplog.at_level(logging.INFO, "mstar.audit"):
        response = post(path, {"lora_name": "pirate", "lora_path": "/a"}, conductor=conductor, settings=RUNTIME, headers=headers)
    assert_openai_error(response, 401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert conductor.calls == []
    assert len(caplog.records) == 1 and "-> 401 invalid_api_key" in caplog.text


def test_c81_the_api_key_does_not_open_the_adapter_routes_nor_the_admin_key_the_others(post: Post):
    settings = {**RUNTIME, "api_key": "client"}
    as_client = {"authorization": "Bearer client"}
    assert post(UNLOAD, {"lora_name": "pirate"}, settings=settings, headers=as_client).status_code == 401
    assert post(UNLOAD, {"lora_name": "pirate"}, settings=settings, headers=ADMIN).status_code == 200
    assert post("/v1/models", method="GET", settings=settings, headers=ADMIN).status_code == 401


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_c81_the_adapter_routes_are_absent_by_default(post: Post, path: str):
    conductor = ScriptedConductor()
    response = post(path, {"lora_name": "pirate", "lora_path": "/a"}, conductor=conductor, headers=ADMIN, settings={"admin_key": "s3cret"})
    assert_openai_error(response, 404, "not_found")
    assert conductor.calls == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "/a"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": "x" * 257, "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/a", "load_inplace": "yes"}, "load_inplace"),
        ({"lora_name": "x", "lora_path": "/a", "scale": 2}, "scale"),
        ({"lora_name": "x\ny", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/a\u0000b"}, "lora_path"),
    ],
)
def test_a_bad_load_body_names_its_field(post: Post, body: dict[str, object], param: str):
    conductor = ScriptedConductor()
    response = post(LOAD, body, conductor=conductor, settings=RUNTIME, headers=ADMIN)
    assert_openai_error(response, 400, response.json()["error"]["code"], param)
    assert conductor.calls == []


def test_c81_one_audit_line_for_every_admin_call(post: Post, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "mstar.audit"):
        post(LOAD, {"lora_name": "new", "lora_path": "/a/new"}, settings=RUNTIME, headers=ADMIN)
        post(UNLOAD, {"lora_name": "nope"}, settings=RUNTIME, headers=ADMIN)
        post(LOAD, content=b"{", settings=RUNTIME, headers={**ADMIN, "content-type": "application/json"})
        post(LOAD, method="GET", settings=RUNTIME, headers=ADMIN)
        broken = ScriptedConductor()
        broken.load_error = KeyError("a bug of ours")
        post(LOAD, {"lora_name": "x", "lora_path": "/x"}, conductor=broken, settings=RUNTIME, headers=ADMIN)
        post("/v1/models", method="GET", settings=RUNTIME)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "POST /v1/load_lora_adapter from 127.0.0.1 name='new' path='/a/new' inplace=False pinned=False -> 200 ok",
        "POST /v1/unload_lora_adapter from 127.0.0.1 name='nope' -> 404 adapter_not_found",
        "POST /v1/load_lora_adapter from 127.0.0.1 - -> 400 invalid_json",
        "GET /v1/load_lora_adapter from 127.0.0.1 - -> 405 method_not_allowed",
        "POST /v1/load_lora_adapter from 127.0.0.1 name='x' path='/x' inplace=False pinned=False -> 500 internal_error",
    ]
    assert not any("s3cret" in line for line in lines)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", COMPLETION),
        ("POST", "/v1/chat/completions", CHAT),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [3]}),
        ("GET", "/mstar/status", None),
        ("GET", "/openapi.json", None),
    ],
)
def test_with_an_api_key_every_route_that_serves_needs_it(post: Post, method: str, path: str, body: object):
    settings = {"api_key": "schlüssel"}
    wrong = post(path, body, method=method, settings=settings, headers={"authorization": "Bearer no"})
    assert_openai_error(wrong, 401, "invalid_api_key")
    bad_json = post(path, method=method, content=b"{", settings=settings)  # the key comes before everything else
    assert bad_json.status_code == 401
    right = {"authorization": "bearer schlüssel".encode()}
    assert post(path, body, method=method, settings=settings, headers=right).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics"])
def test_probes_and_metrics_need_no_key(post: Post, path: str):
    assert post(path, method="GET", settings={"api_key": "key"}).status_code == 200
