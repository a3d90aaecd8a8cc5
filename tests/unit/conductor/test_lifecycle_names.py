"""Names, their limit, pages of them, and pins: what holds while loads run side by side, and what a long list may cost."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from mstar.conductor.registry import Adapter, Registry
from mstar.errors import AdapterError, ModelNotFound
from mstar.wire import front_rank
from tests.unit.conductor.pool_ranks import PATIENCE_S, served


def adapter(name: str) -> Adapter:
    return Adapter(name, f"{name}@f.1", f"/a/{name}", f"/a/{name}", "d" * 64, 1)


def test_c61_a_new_name_per_training_step_is_refused_at_the_limit_and_never_hangs(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_registered_loras=8) as (conductor, _):
            for number in range(1, 101):
                load = conductor.load_adapter(f"v{number}", str(folders["A"]))
                if number <= 8:
                    await load
                    continue
                with pytest.raises(AdapterError) as caught:
                    await load
                assert caught.value.code == "adapter_limit_reached"
                assert "8 adapters are served, max_registered_loras allows 8; unload one first" in caught.value.message
            await conductor.unload_adapter("v3")
            await conductor.load_adapter("v101", str(folders["A"]))

    asyncio.run(run())


def test_c61_the_limit_holds_for_loads_that_run_side_by_side(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_registered_loras=3) as (conductor, ranks):
            loads = [conductor.load_adapter(f"v{number}", str(folders["A"])) for number in range(10)]
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            assert outcomes.count(None) == 3
            refused = [outcome for outcome in outcomes if outcome is not None]
            assert {error.code for error in refused} == {"adapter_limit_reached"}
            assert len(ranks.kept()[0]) == 3 and len(conductor.served_models()[0]) == 4

    asyncio.run(run())


def test_a_load_that_fails_frees_its_place_under_the_limit(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_registered_loras=1) as (conductor, ranks):
            ranks.reads[1].broken.add(str(folders["A"]))
            for _ in range(3):
                with pytest.raises(AdapterError) as caught:
                    await conductor.load_adapter("x", str(folders["A"]))
                assert caught.value.code == "adapter_unreadable"
            await conductor.load_adapter("y", str(folders["B"]))

    asyncio.run(run())


def test_a_pinned_load_has_its_place_before_the_ranks_read_and_two_at_once_do_not_share_one(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_loras=2) as (conductor, ranks):
            loads = [conductor.load_adapter(name, str(folders[name.upper()]), pinned=True) for name in "ab"]
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            assert outcomes.count(None) == 1
            (refused,) = [outcome for outcome in outcomes if outcome is not None]
            assert (refused.code, refused.status) == ("adapter_pin_limit", 409)
            winner = "ab"[outcomes.index(None)]
            assert [model.id for model in conductor.served_models()[0]] == ["base", winner]
            assert len(ranks.kept()[0]) == 1 and conductor._lifecycle.pinned() == [winner]

    asyncio.run(run())


def test_a_pin_waits_for_nothing_and_a_pin_during_a_pinned_load_is_refused(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_loras=2) as (conductor, ranks):
            await conductor.load_adapter("a", str(folders["A"]))
            go = threading.Event()
            ranks.reads[0].gate = lambda path: go.wait(PATIENCE_S)
            loading = asyncio.ensure_future(conductor.load_adapter("b", str(folders["B"]), pinned=True))
            while len(ranks.of(front_rank.Load)) < 2:
                await asyncio.to_thread(lambda: None)
            with pytest.raises(AdapterError) as caught:
                await conductor.pin_adapter("a")
            assert caught.value.code == "adapter_pin_limit"
            go.set()
            await loading
            assert conductor._lifecycle.pinned() == ["b"]

    asyncio.run(run())


def test_a_pin_follows_a_replace_and_ends_with_unpin_and_unload(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_loras=2) as (conductor, ranks):
            await conductor.load_adapter("x", str(folders["A"]), pinned=True)
            await conductor.load_adapter("x", str(folders["B"]), load_inplace=True)
            old, new = (message.adapter for message in ranks.of(front_rank.Ingest))
            assert old != new and conductor._lifecycle.pinned() == ["x"]
            assert len(ranks.of(front_rank.Abort)) == 1
            await conductor.unpin_adapter("x")
            await conductor.unpin_adapter("x")
            assert conductor._lifecycle.pinned() == [] and len(ranks.of(front_rank.Abort)) == 2
            await conductor.pin_adapter("x")
            await conductor.unload_adapter("x")
            assert conductor._lifecycle.pinned() == [] and ranks.kept() == [[], []]

    asyncio.run(run())


def test_pages_join_to_the_list_while_names_come_and_go():
    registry = Registry("base", "f", 100)
    for number in (7, 3, 9, 0, 5, 1, 8, 2, 6, 4):
        registry.put(adapter(f"a{number}"))
    assert [found.name for found in registry.adapters()] == [f"a{number}" for number in range(10)]
    page, more = registry.page(None, 3)
    assert ([found.name for found in page], more) == (["a0", "a1", "a2"], True)
    registry.pop("a2")
    registry.pop("a5")
    registry.put(adapter("a3"))  # a replace is no second entry
    page, more = registry.page("a2", 3)
    assert ([found.name for found in page], more) == (["a3", "a4", "a6"], True)
    page, more = registry.page("a6", 3)
    assert ([found.name for found in page], more) == (["a7", "a8", "a9"], False)
    assert registry.page("zzz", 3) == ([], False) and registry.page(None, 0) == ([], True)
    with pytest.raises(ModelNotFound):
        registry.resolve("a2")


def test_c62_10000_registered_adapters_are_never_gone_through_by_a_load_a_request_or_a_page(capsys):
    """Counted, not timed: the mapping that holds them is never iterated. The times are printed for a reader."""

    class Counted(dict):
        gone_through = 0

        def __iter__(self):
            Counted.gone_through += 1
            return super().__iter__()

        keys = values = items = __iter__

    registry = Registry("base", "f", 20_000)
    registry._adapters = Counted()
    started = time.perf_counter()
    for number in range(10_000):
        registry.put(adapter(f"adapter-{number * 7919 % 10_000:05}"))
    filled = time.perf_counter()
    for number in range(1000):
        name = f"late-{number}"
        with registry.claimed(name):
            registry.put(adapter(name))
        assert registry.resolve(name) is not None
        registry.pop(name)
    loaded = time.perf_counter()
    after, pages, names = None, 0, []
    while True:
        page, more = registry.page(after, 100)
        names += [found.name for found in page]
        after, pages = names[-1], pages + 1
        if not more:
            break
    paged = time.perf_counter()
    assert names == sorted(names) and len(names) == 10_000 and pages == 100
    assert Counted.gone_through == 0
    with capsys.disabled():
        sys.stderr.write(
            f"\n10,000 names: register {1e2 * (filled - started):.1f} µs each, a load and unload {1e3 * (loaded - filled):.1f} µs, "
            f"a page of 100 {1e4 * (paged - loaded):.0f} µs\n"
        )
