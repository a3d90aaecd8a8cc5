"""`lora_dir`: adapters loaded by the request that first names them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest

from mstar.conductor.lazy import may_be_folder
from mstar.errors import AdapterError, ModelNotFound
from mstar.wire import front_rank
from tests.unit.adapters.adapter_folders import hand_folder, pair
from tests.unit.conductor.pool_ranks import PATIENCE_S, generation, served


@pytest.fixture
def lazy(tmp_path: Path) -> Path:
    """A folder of adapters to be loaded by name, and what must not be reached through it."""
    folder = tmp_path / "lazy"
    for seed, name in enumerate(("pirate", "json", ".hidden", "ümlaut x")):
        hand_folder(folder / name, pair(seed=seed))
    hand_folder(tmp_path / "outside", pair(seed=9))
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "inner").symlink_to(folder / "pirate")
    (folder / "notes.txt").write_text("not a folder")
    (folder / "no-adapter").mkdir()
    return folder


def test_the_first_request_loads_it_and_only_then_it_is_listed(model, lazy, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_root=(), lora_dir=str(lazy)) as (conductor, ranks):
            assert ranks.of(front_rank.Load) == []
            with pytest.raises(ModelNotFound):
                conductor.resolve("pirate")
            assert (await conductor.find("pirate")).id == "pirate"
            assert [card.id for card in conductor.served_models()[0]] == ["base", "pirate"]
            assert (await conductor.find("base:json")).id == "json"
            assert (await conductor.find("ümlaut x")).root == str(lazy / "ümlaut x")
            conductor.generate(generation("json"))
            loads = len(ranks.of(front_rank.Load))
            await conductor.find("pirate")
            assert len(ranks.of(front_rank.Load)) == loads == 3

    asyncio.run(run())


def test_however_many_requests_name_it_first_it_is_loaded_once(model, lazy, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_dir=str(lazy)) as (conductor, ranks):
            cards = await asyncio.gather(*(conductor.find("pirate") for _ in range(50)))
            assert {card.id for card in cards} == {"pirate"}
            assert len(ranks.of(front_rank.Load)) == 1 and [len(reads.paths) for reads in ranks.reads] == [1, 1]

    asyncio.run(run())


def test_a_refusal_reaches_every_request_that_waited_and_after_the_repair_it_loads(model, lazy, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_root=(), lora_dir=str(lazy)) as (conductor, ranks):
            ranks.reads[1].broken.add(str(lazy / "json"))
            outcomes = await asyncio.gather(*(conductor.find("json") for _ in range(5)), return_exceptions=True)
            assert [getattr(outcome, "code", outcome) for outcome in outcomes] == ["adapter_unreadable"] * 5
            assert len(ranks.of(front_rank.Load)) == 1 and ranks.kept() == [[], []]
            ranks.reads[1].broken.clear()
            assert (await conductor.find("json")).id == "json"
            with pytest.raises(AdapterError) as caught:
                await conductor.find("no-adapter")
            assert (caught.value.code, caught.value.status) == ("adapter_config_missing", 400)
            with pytest.raises(AdapterError) as caught:
                await conductor.find("link")
            assert caught.value.code == "adapter_path_not_allowed"
            assert (await conductor.find("inner")).id == "inner", "a link to another folder of lora_dir stays inside"

    asyncio.run(run())


@pytest.mark.parametrize(
    "name",
    ["nope", "notes.txt", ".hidden", "..", ".", "../outside", "pirate/", "pirate/../json", "a\\b", "x\0y", "x\ny", "", "x" * 300, "\ud800"],
)
def test_what_is_no_folder_of_it_is_404_and_nothing_is_loaded(model, lazy, monkeypatch, name):
    async def run():
        async with served(model, monkeypatch, lora_dir=str(lazy)) as (conductor, ranks):
            with pytest.raises(ModelNotFound):
                await conductor.find(name)
            assert ranks.of(front_rank.Load) == []

    asyncio.run(run())


def test_names_that_could_lead_elsewhere_are_never_looked_up(lazy, monkeypatch):
    looked_up = []
    monkeypatch.setattr(os, "stat", lambda path, *_, **__: looked_up.append(path))
    for name in ("..", ".hidden", "../outside", "/etc", "a/b", "a\\b", "\0"):
        assert not may_be_folder(name)
    assert looked_up == []


def test_a_client_that_goes_away_leaves_the_load_to_the_others(model, lazy, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_dir=str(lazy)) as (conductor, ranks):
            go = threading.Event()
            ranks.reads[0].gate = lambda path: go.wait(PATIENCE_S)
            first, second = (asyncio.ensure_future(conductor.find("pirate")) for _ in range(2))
            while not ranks.of(front_rank.Load):
                await asyncio.to_thread(lambda: None)
            first.cancel()
            go.set()
            assert (await second).id == "pirate"
            with pytest.raises(asyncio.CancelledError):
                await first

    asyncio.run(run())


def test_a_load_by_hand_that_is_faster_is_what_the_request_gets(model, lazy, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_dir=str(lazy)) as (conductor, ranks):
            by_hand = asyncio.ensure_future(conductor.load_adapter("pirate", str(folders["D"])))
            await asyncio.sleep(0)
            assert (await conductor.find("pirate")).root == str(folders["D"])
            await by_hand
            assert len(ranks.of(front_rank.Load)) == 1

    asyncio.run(run())


def test_an_unloaded_name_is_loaded_again_from_what_then_lies_there(model, lazy, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_dir=str(lazy)) as (conductor, ranks):
            await conductor.find("pirate")
            await conductor.unload_adapter("pirate")
            shutil.copy(lazy / "json" / "adapter_model.safetensors", lazy / "pirate" / "adapter_model.safetensors")
            await conductor.find("pirate")
            first, second = ranks.of(front_rank.Load)
            assert first.digest != second.digest and first.name != second.name

    asyncio.run(run())


def test_a_folder_that_appears_while_serving_is_found_without_any_listing(model, lazy, monkeypatch):
    async def run():
        monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("lora_dir must not be listed"))
        async with served(model, monkeypatch, lora_dir=str(lazy)) as (conductor, _):
            with pytest.raises(ModelNotFound):
                await conductor.find("late")
            shutil.copytree(lazy / "json", lazy / "late")
            assert (await conductor.find("late")).id == "late"

    asyncio.run(run())
