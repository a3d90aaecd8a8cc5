"""Adapters by hub id, against a hub in this process.

The client library reads its environment once, so what depends on that is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar.adapters import hub as hub_module
from mstar.adapters.catalogue import refuse
from mstar.adapters.hub import HubId, Snapshot, parse_hub_id
from mstar.conductor import sources
from mstar.errors import AdapterError, ConfigError
from tests.support.fake_hub import FakeHub, fake_hub
from tests.unit.adapters.adapter_folders import hand_folder, pair
from tests.unit.conductor.pool_ranks import served

ROOT = Path(__file__).resolve().parents[3]
FETCHES = """
import json, sys
from mstar.adapters.hub import fetch, parse_hub_id
from mstar.errors import AdapterError
for text in sys.argv[1:]:
    try:
        found = fetch(parse_hub_id(text))
        said = {"folder": str(found.folder), "place": str(found.place), "files": sorted(path.name for path in found.folder.iterdir())}
    except AdapterError as error:
        said = {"code": error.code, "status": error.status, "message": error.message}
    print(json.dumps(said))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as running:
        folder = hand_folder(tmp_path / "pirate", pair())
        (folder / "README.md").write_text("much")
        (folder / "optimizer.pt").write_bytes(b"a pickle")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        running.publish("org/pirate", folder)
        yield running


def fetch(hub: FakeHub, home: Path, *ids: str, **env: str) -> list[dict[str, Any]]:
    """What `fetch` of each id gives in a fresh process."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    result = subprocess.run(
        [sys.executable, "-c", FETCHES, *ids],
        cwd=ROOT,
        env={**clean, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "%|" not in result.stderr, "no progress bars in a server's log"
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Org-1/My_adapter.v2", HubId("Org-1/My_adapter.v2")),
        ("org/name@main", HubId("org/name", "main")),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        *(
            (text, None)
            for text in ("name", "a/b/c", "/org/name", "org/", "../name", "org/..", "org/.name", "org/a..b", "org/a--b", "org/-x")
        ),
        *(
            (text, None)
            for text in ("org/name@", "org/name@..", "org/name@a..b", "org/na me", "org/name\n", "örg/name", "o/" + "x" * 97, "")
        ),
    ],
)
def test_what_looks_like_a_hub_id(text, expected):
    assert parse_hub_id(text) == expected


def test_only_an_adapters_own_files_are_fetched_into_the_hubs_cache(hub, tmp_path):
    (found,) = fetch(hub, tmp_path / "home", "org/pirate")
    assert found["files"] == ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"]
    assert Path(found["place"]) == tmp_path / "home/hub/models--org--pirate" and found["folder"].startswith(found["place"])
    assert sorted(hub.fetched()) == found["files"]


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_each_commit_has_a_folder_of_its_own(hub, tmp_path):
    first = hub.commit("org/pirate", "main")
    hub.publish("org/pirate", hand_folder(tmp_path / "v2", pair(seed=2)), "v2")
    main, other, by_commit = fetch(hub, tmp_path / "home", "org/pirate", "org/pirate@v2", f"org/pirate@{first}")
    assert main["folder"] == by_commit["folder"] != other["folder"]


def test_refusals_say_what_is_missing(hub, tmp_path):
    hub.publish("org/model", tmp_path / "empty", **{"config.json": b"{}", "model.safetensors": b"x"})
    hub.publish("org/pickled", tmp_path / "empty", **{"adapter_config.json": b"{}", "adapter_model.bin": b"a pickle"})
    hub.publish("org/gated", tmp_path / "pirate")
    hub.gated.add("org/gated")
    hub.publish("org/private", tmp_path / "pirate")
    hub.private["org/private"] = "hf_right"
    said = fetch(hub, tmp_path / "home", "org/nope", "org/pirate@v9", "org/model", "org/pickled", "org/gated", "org/private")
    assert [(item["code"], item["status"]) for item in said] == [
        ("adapter_hub_not_found", 404),
        ("adapter_hub_not_found", 404),
        ("adapter_hub_no_adapter", 400),
        ("adapter_hub_no_adapter", 400),
        ("adapter_hub_not_found", 404),
        ("adapter_hub_not_found", 404),
    ]
    assert [item["message"].partition(", but ")[0] for item in said] == [
        "The hub shows this server no repository org/nope",
        'The hub shows this server no revision "v9" of org/pirate',
        "The hub's repository org/model has no adapter_config.json",
        "The hub's repository org/pickled has no adapter_model.safetensors",
        "The hub shows this server no files of org/gated, which is gated",
        "The hub shows this server no repository org/private",
    ]
    assert hub.fetched() == [], "a repository without an adapter is not fetched"
    (opened,) = fetch(hub, tmp_path / "home", "org/private", HF_TOKEN="hf_right")
    assert "folder" in opened


def test_without_a_hub_the_cache_serves_and_what_is_not_in_it_is_503(hub, tmp_path):
    home = tmp_path / "home"
    (found,) = fetch(hub, home, "org/pirate")
    again, offline = fetch(hub, home, "org/pirate", "org/other", HF_HUB_OFFLINE="1")
    assert again["folder"] == found["folder"]
    assert (offline["code"], offline["status"]) == ("adapter_hub_unreachable", 503)
    assert "HF_HUB_OFFLINE is set" in offline["message"]
    hub.failing = 503
    again, down = fetch(hub, home, "org/pirate", "org/other")
    assert again["folder"] == found["folder"]
    assert (down["code"], down["status"]) == ("adapter_hub_unreachable", 503) and "it answered 503" in down["message"]
    (closed,) = fetch(hub, home, "org/other", HF_ENDPOINT="http://127.0.0.1:9")
    assert (closed["code"], closed["status"]) == ("adapter_hub_unreachable", 503) and "ConnectError" in closed["message"]
    assert "127.0.0.1" not in closed["message"]


def test_too_much_is_refused_before_it_is_fetched(hub, monkeypatch):
    class File:
        filename, file_size = "adapter_model.safetensors", hub_module.MAX_FETCH_BYTES

    class Config:
        filename, file_size = "adapter_config.json", 1

    with pytest.raises(Exception, match="at most 8589934592 are fetched"):
        hub_module._check_listing(HubId("org/big"), [File, Config])


# as paths of loads


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """`fetch` replaced: gives the folder beside the model's with the repository's name; notes ids and threads."""
    calls: list[tuple[str, str]] = []

    def fake(hub_id: HubId) -> Snapshot:
        calls.append((str(hub_id), threading.current_thread().name))
        folder = tmp_path / "cache" / hub_id.repo / "snapshots" / (hub_id.revision or "main")
        if not folder.is_dir():
            raise refuse("hub_not_found", what=f"repository {hub_id.repo}")
        return Snapshot(folder, folder.parent.parent)

    monkeypatch.setattr(sources, "fetch", fake)
    return calls


def test_a_hub_id_is_fetched_off_the_loop_and_its_links_may_lead_into_its_own_cache(model, folders, monkeypatch, tmp_path, fetched, caplog):
    snapshot, blobs = tmp_path / "cache/org/pirate/snapshots/main", tmp_path / "cache/org/pirate/blobs"
    shutil.copytree(folders["A"], snapshot)
    blobs.mkdir()
    (snapshot / "adapter_model.safetensors").rename(blobs / "1")
    (snapshot / "adapter_model.safetensors").symlink_to("../../blobs/1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    async def run():
        settings = {"lora_root": (str(tmp_path / "roots"),), "enable_hub_adapters": True}
        async with served(model, monkeypatch, **settings) as (conductor, _):
            with caplog.at_level(logging.INFO, "mstar"):
                await conductor.load_adapter("x", "org/pirate")
            card = conductor.resolve("x")
            assert card.root == "org/pirate"
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("y", str(snapshot))
            assert caught.value.code == "adapter_path_not_allowed", "the cache is no folder that clients may name"
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("y", "org/nope@v1")
            assert (caught.value.code, caught.value.status) == ("adapter_hub_not_found", 404)

    asyncio.run(run())
    assert [text for text, _ in fetched] == ["org/pirate", "org/nope@v1"]
    assert all(name.startswith("fetch ") for _, name in fetched)
    assert "hub: fetching org/pirate" in caplog.text and "hub: org/pirate is in" in caplog.text


def test_a_folder_below_the_roots_wins_over_a_hub_id_and_without_the_flag_nothing_is_fetched(
    model, folders, monkeypatch, tmp_path, fetched
):
    shutil.copytree(folders["B"], tmp_path / "org/pirate")

    async def run():
        async with served(model, monkeypatch, enable_hub_adapters=True) as (conductor, _):
            await conductor.load_adapter("x", "org/pirate")
        async with served(model, monkeypatch) as (conductor, _):
            for path in ("org/other", "https://huggingface.co/org/pirate", "../org/pirate"):
                with pytest.raises(AdapterError) as caught:
                    await conductor.load_adapter("x", path)
                assert caught.value.code in ("adapter_path_not_allowed", "adapter_not_found")

    asyncio.run(run())
    assert fetched == []


def test_a_configured_adapter_may_be_a_hub_id_and_a_missing_one_is_a_readable_refusal_to_start(
    model, folders, monkeypatch, tmp_path, fetched
):
    shutil.copytree(folders["A"], tmp_path / "cache/org/pirate/snapshots/main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    async def run():
        settings = {"enable_hub_adapters": True, "lora_root": ()}
        async with served(model, monkeypatch, **settings, lora_modules=("x=org/pirate",)) as (conductor, _):
            assert conductor.resolve("x").root == "org/pirate" and conductor._config.adapter_roots == ()
        with pytest.raises(ConfigError, match=r"lora_modules 'y': The hub shows this server no repository org/nope"):
            async with served(model, monkeypatch, **settings, lora_modules=("y=org/nope",)):
                pass

    asyncio.run(run())
