"""The registry on disk: every change is there at once, a torn line costs only itself, and pins come back."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from mstar.conductor import registry_file as registry_file_module
from mstar.conductor.registry import Adapter, Registry
from mstar.conductor.registry_file import RegistryFile
from mstar.conductor.sources import AdapterSources
from mstar.wire import front_rank
from tests.unit.conductor.pool_ranks import served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def adapter(name: str, digest: str = "d", **fields) -> Adapter:
    return Adapter(name, f"{name}@f.{digest}", f"/a/{name}", f"a/{name}", digest, 1, **fields)


def attached(path: Path, run: str = "r") -> Registry:
    """A registry that writes every change to `path`."""
    registry, file = Registry("base", "f", 1000), RegistryFile(path, run)
    for found in file.load()[1]:
        registry.put(found)
    file.begin(registry.adapters())
    registry.on_change = lambda name: file.changed(name, registry.get(name), len(registry), registry.adapters)
    return registry


def test_every_change_is_there_at_once_whatever_came_before(path, monkeypatch):
    monkeypatch.setattr(registry_file_module, "SLACK", 5)
    registry, draw = attached(path), random.Random(1)
    for step in range(300):
        name = draw.choice(["ümlaut", "b b", 'q"x', "d\\n"])
        if draw.random() < 0.4:
            registry.pop(name)
        else:
            registry.put(adapter(name, str(step), chat_template=draw.choice([None, "{{ x }}\n"]), pinned=draw.random() < 0.5))
        same_run, found = RegistryFile(path, "r").load()
        assert same_run and sorted(found, key=lambda item: item.name) == registry.adapters()
    assert len(path.read_bytes().splitlines()) <= 4 * 4 + 5
    assert RegistryFile(path, "another").load() == (False, RegistryFile(path, "r").load()[1])


def test_a_torn_or_edited_line_ends_what_is_used_and_never_raises(path):
    registry = attached(path)
    for name in "abc":
        registry.put(adapter(name))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        _, found = RegistryFile(path, "r").load()
        kept = whole[:cut].count(b"\n")
        if kept:
            assert [item.name for item in found] == list("abc")[: kept - 1]
    path.write_bytes(lines[0] + lines[1] + lines[2].replace(b"/a/b", b"/a/x") + lines[3])
    assert [item.name for item in RegistryFile(path, "r").load()[1]] == ["a"]
    draw = random.Random(2)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(damaged)
        RegistryFile(path, "r").load()


def test_where_the_newest_is_not_usable_the_one_before_is(path):
    attached(path).put(adapter("a"))
    attached(path).put(adapter("b"))
    path.write_bytes(b"\x00\xff")
    assert [item.name for item in RegistryFile(path, "r").load()[1]] == ["a"]
    path.with_name("registry.last").unlink()
    assert RegistryFile(path, "r").load() == (False, [])
    path.unlink()
    assert RegistryFile(path, "r").load() == (False, [])


def test_a_disk_that_refuses_is_logged_and_serving_goes_on(tmp_path, caplog):
    registry = attached(tmp_path / "no" / "folder")
    registry.put(adapter("a"))
    assert registry.get("a") is not None and caplog.text.count("could not be written") == 2


def test_a_change_writes_one_line_however_many_are_registered(path):
    registry = attached(path)
    for number in range(900):
        registry.put(adapter(f"a{number}"))
    size = path.stat().st_size
    registry.put(adapter("late"))
    assert path.stat().st_size - size < 300


def test_a_new_front_of_the_same_run_serves_and_pins_what_the_one_before_did(model, folders, monkeypatch, path):
    async def run():
        async with served(model, monkeypatch, registry_file_object=RegistryFile(path, "r")) as (conductor, ranks):
            await conductor.load_adapter("a", str(folders["A"]), pinned=True)
            await conductor.load_adapter("b", str(folders["B"]))
            loaded = [message.name for message in ranks.of(front_rank.Load)]
        async with served(model, monkeypatch, registry_file_object=RegistryFile(path, "r")) as (conductor, ranks):
            assert [(message.name, message.verify) for message in ranks.of(front_rank.Load)] == [(name, False) for name in loaded]
            assert conductor._lifecycle.pinned() == ["a"]
            assert [message.adapter for message in ranks.of(front_rank.Ingest)] == loaded[:1]
            await conductor.unpin_adapter("a")
        async with served(model, monkeypatch, registry_file_object=RegistryFile(path, "r")) as (conductor, ranks):
            assert conductor._lifecycle.pinned() == [] and ranks.of(front_rank.Ingest) == []
        async with served(model, monkeypatch, max_loras=1, registry_file_object=RegistryFile(path, "later")) as (conductor, ranks):
            names = [message.name for message in ranks.of(front_rank.Load)]
            assert [name.rpartition("@")[0] for name in names] == ["a", "b"] and not set(names) & set(loaded)

    asyncio.run(run())


def test_a_pin_that_has_no_room_after_a_restart_is_logged_and_the_adapter_still_served(model, folders, monkeypatch, path, caplog):
    async def run():
        async with served(model, monkeypatch, registry_file_object=RegistryFile(path, "r")) as (conductor, _):
            await conductor.load_adapter("a", str(folders["A"]), pinned=True)
        async with served(model, monkeypatch, max_loras=1, registry_file_object=RegistryFile(path, "later")) as (conductor, _):
            assert conductor.resolve("a").id == "a" and conductor._lifecycle.pinned() == []
            assert "a was pinned and is not any more" in caplog.text

    asyncio.run(run())


@pytest.mark.parametrize("run", ["r", "another"])
def test_c62_10000_adapters_come_back_at_a_start_without_a_look_at_any_folder(model, folders, monkeypatch, path, run):
    """Their folders are not even there; a load beside them is one message to each rank, and a page is a page."""
    RegistryFile(path, "r").begin(adapter(f"old-{number:05}") for number in range(10_000))

    async def main():
        examined = []
        monkeypatch.setattr(AdapterSources, "_examine", count(examined, AdapterSources._examine))
        async with served(model, monkeypatch, registry_file_object=RegistryFile(path, run), max_registered_loras=10_001) as (
            conductor,
            ranks,
        ):
            assert examined == [] and all(reads.paths == [] for reads in ranks.reads)
            assert [len(ranks.of(front_rank.Load, rank)) for rank in (0, 1)] == [10_000, 10_000]
            await conductor.load_adapter("new", str(folders["A"]))
            assert examined == [folders["A"]] and len(ranks.of(front_rank.Load)) == 10_001
            page, more = conductor.served_models("old-04999", 20)
            assert [card.id for card in page] == [f"old-{number:05}" for number in range(5000, 5020)] and more
            assert conductor.resolve("old-09999").root == "a/old-09999"

    asyncio.run(main())


def count(seen, call):
    def counting(self, folder, roots):
        seen.append(folder)
        return call(self, folder, roots)

    return counting
