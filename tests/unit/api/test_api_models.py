"""/v1/models: list and detail agree for every id; pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.unit.api.requests_and_errors import assert_openai_error
from tests.unit.api.scripted_conductor import ScriptedConductor

Post = Callable[..., httpx.Response]
NAMES = ["a", "org/json", "org/sub/x", "with space", "per%cent", "per%2Fcent", "ümlaut", "q?x#y", "tiny2", "a:b"]


def test_c82_the_list_shows_the_base_and_the_adapters_with_their_parent(post: Post):
    body = post("/v1/models", method="GET").json()
    assert body["object"] == "list" and body["has_more"] is False
    assert [(card["id"], card["parent"], card["root"]) for card in body["data"]] == [
        ("tiny", None, "/models/tiny"),
        ("org/json", "tiny", "/adapters/org/json"),
        ("pirate", "tiny", "/adapters/pirate"),
    ]
    assert body["data"][0] == {
        **{"id": "tiny", "object": "model", "created": 1700000000, "owned_by": "mstar", "root": "/models/tiny", "parent": None},
        "max_model_len": 128,
    }


@pytest.mark.parametrize("name", NAMES)
def test_c83_list_and_detail_agree_for_every_id(post: Post, name: str):
    conductor = ScriptedConductor(adapters=NAMES)
    listed = next(card for card in post("/v1/models", method="GET", conductor=conductor).json()["data"] if card["id"] == name)
    detail = post(f"/v1/models/{quote(name, safe='')}", method="GET", conductor=conductor)
    assert detail.status_code == 200
    assert detail.json() == listed


def test_an_id_with_a_slash_may_be_sent_as_it_is(post: Post):
    conductor = ScriptedConductor(adapters=NAMES)
    assert post("/v1/models/org/sub/x", method="GET", conductor=conductor).json()["id"] == "org/sub/x"
    assert post("/v1/models/per%2Fcent", method="GET", conductor=conductor).json()["id"] == "per%2Fcent"


@pytest.mark.parametrize("name", ["nope", "tiny:pirate", "PIRATE", "pirate/", "%2e%2e", "%00"])
def test_what_is_not_listed_has_no_detail(post: Post, name: str):
    assert_openai_error(post(f"/v1/models/{name}", method="GET"), 404, "model_not_found", "model")


def test_pages_join_to_the_list_while_adapters_come_and_go(post: Post):
    conductor = ScriptedConductor(adapters=[f"a{at:02}" for at in range(10)])

    def page(limit: int, after: str | None = None) -> dict[str, Any]:
        query = f"limit={limit}" + (f"&after={after}" if after is not None else "")
        return post(f"/v1/models?{query}", method="GET", conductor=conductor).json()

    first = page(4)
    assert [card["id"] for card in first["data"]] == ["tiny", "a00", "a01", "a02"]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, "tiny", "a02")
    for name in ("a02", "a05"):  # also the id that the page ended with
        del conductor.adapters[name]
    second = page(4, first["last_id"])
    assert [card["id"] for card in second["data"]] == ["a03", "a04", "a06", "a07"]
    last = page(4, second["last_id"])
    assert [card["id"] for card in last["data"]] == ["a08", "a09"] and last["has_more"] is False
    assert [card["id"] for card in page(2, "tiny")["data"]] == ["a00", "a01"]
    assert page(4, "zzz")["data"] == []


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x"])
def test_a_bad_limit_is_a_400(post: Post, limit: str):
    assert_openai_error(post(f"/v1/models?limit={limit}", method="GET"), 400, "invalid_value", "limit")


def test_limit_and_after_are_query_parameters(post: Post):
    body = post("/v1/models?limit=1&after=org/json", method="GET").json()
    assert [card["id"] for card in body["data"]] == ["pirate"]
