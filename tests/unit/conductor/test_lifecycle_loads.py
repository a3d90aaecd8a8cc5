"""Loads over ranks that are real pools: all or nothing, one winner, what is replaced and what stays."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from mstar.errors import AdapterError, ModelNotFound, RequestError
from mstar.wire import front_rank
from tests.unit.adapters.adapter_folders import hand_folder, pair
from tests.unit.conductor.pool_ranks import PATIENCE_S, generation, served

WEIGHTS = "adapter_model.safetensors"


def code_of(error: BaseException) -> str:
    assert isinstance(error, RequestError), error
    return error.code


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_unreadable_on_one_rank_alone_fails_the_load_and_no_rank_keeps_anything(model, folders, monkeypatch, tp_rank):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            before = ranks.kept()
            ranks.reads[tp_rank].broken.add(str(folders["A"]))
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("a", str(folders["A"]))
            assert caught.value.code == "adapter_unreadable"
            assert ranks.kept() == before == [[], []]
            with pytest.raises(ModelNotFound):
                conductor.resolve("a")
            ranks.reads[tp_rank].broken.clear()
            await conductor.load_adapter("a", str(folders["A"]))
            assert conductor.resolve("a").root == str(folders["A"])
            (first,), (second,) = ranks.kept()
            assert first == second and first.startswith("a@")

    asyncio.run(run())


def test_a_file_that_changes_between_the_fronts_check_and_a_ranks_read_is_refused_by_its_digest(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            begun, go = threading.Semaphore(0), threading.Event()
            for reads in ranks.reads:  # both: one that reads while the file is written may find half of it
                reads.gate = lambda path: (begun.release(), go.wait(PATIENCE_S))
            loading = asyncio.ensure_future(conductor.load_adapter("a", str(folders["A"])))
            for _ in ranks.reads:
                assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
            shutil.copy(folders["B"] / WEIGHTS, folders["A"] / WEIGHTS)
            go.set()
            with pytest.raises(AdapterError) as caught:
                await loading
            assert caught.value.code == "adapter_changed"
            assert ranks.kept() == [[], []]
            for reads in ranks.reads:
                reads.gate = lambda path: None
            await conductor.load_adapter("a", str(folders["A"]))

    asyncio.run(run())


def test_a_rank_that_never_answers_ends_the_load_and_is_told_to_forget_it(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, lora_read_timeout_s=0.05) as (conductor, ranks):
            ranks.answers_loads = False
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("a", str(folders["A"]))
            assert (caught.value.code, caught.value.status) == ("adapter_load_timeout", 503)
            for rank in range(2):
                assert [message.name for message in ranks.of(front_rank.Unload, rank)] == [ranks.of(front_rank.Load, rank)[0].name]

    asyncio.run(run())


def test_an_instance_that_dies_during_a_load_ends_it_with_503_and_nothing_is_served(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            go = threading.Event()
            ranks.reads[0].gate = lambda path: go.wait(PATIENCE_S)
            loading = asyncio.ensure_future(conductor.load_adapter("a", str(folders["A"])))
            while not ranks.of(front_rank.Load):
                await asyncio.sleep(0)
                await asyncio.to_thread(lambda: None)
            ranks.die()
            go.set()
            with pytest.raises(AdapterError) as caught:
                await loading
            assert (caught.value.code, caught.value.status) == ("instance_restarted", 503)
            with pytest.raises(ModelNotFound):
                conductor.resolve("a")
            ranks.begin(conductor._config)
            assert ranks.of(front_rank.Load) == []
            await conductor.load_adapter("a", str(folders["A"]))

    asyncio.run(run())


@pytest.mark.parametrize("when", ["starting", "down"])
def test_a_load_while_the_ranks_are_not_there_is_503_at_once_whatever_it_names(model, folders, monkeypatch, when):
    """Before any file is looked at, and also behind a load of the same name that is under way."""

    async def run():
        async with served(model, monkeypatch, lora_dir=str(folders["A"].parent)) as (conductor, ranks):
            if when == "starting":
                ranks.up = False
            else:
                await conductor.load_adapter("kept", str(folders["B"]))
                ranks.die()
            looked = []
            monkeypatch.setattr(conductor._lifecycle._sources, "find", looked.append)
            for path in (folders["A"], model.parent / "nothing-there", "/etc"):
                with pytest.raises(AdapterError) as caught:
                    await conductor.load_adapter("a", str(path), load_inplace=True)
                assert (caught.value.code, caught.value.status) == ("server_not_ready", 503)
            with pytest.raises(AdapterError) as caught:
                await conductor.find("C")
            assert (caught.value.code, caught.value.status) == ("server_not_ready", 503)
            async with conductor._lifecycle._lock("a"):
                with pytest.raises(AdapterError) as caught:
                    await asyncio.wait_for(conductor.load_adapter("a", str(folders["A"])), PATIENCE_S)
                assert caught.value.code == "server_not_ready"
            assert looked == []

    asyncio.run(run())


def test_an_adapter_over_the_host_tiers_bytes_is_a_4xx_with_the_arithmetic_and_its_name_stays_free(model, folders, tmp_path, monkeypatch):
    large = hand_folder(
        tmp_path / "large", {key: half for layer in (0, 1) for key, half in pair(layer, "mlp.gate_up_proj", rank=16).items()}, r=16
    )

    async def run():
        async with served(model, monkeypatch, max_cpu_lora_bytes=10_000) as (conductor, ranks):
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("x", str(large))
            assert (caught.value.code, caught.value.status) == ("adapter_exceeds_host_tier", 400)
            # 2 layers x (2 A of 16 x 64 and a B of 16 x 128 on each of two ranks) in float32, and a scale a part
            assert caught.value.message == (
                f"The adapter's copy on this rank takes {2 * (2 * 16 * 64 + 16 * 128) * 4 + 2 * 2 * 4} bytes, "
                "but this server's `max_cpu_lora_bytes` is 10000."
            )
            assert ranks.kept() == [[], []]
            await conductor.load_adapter("x", str(folders["A"]))

    asyncio.run(run())


def test_concurrent_loads_of_one_name_have_one_winner_and_the_same_weights_are_no_conflict(model, folders, monkeypatch):
    shutil.copytree(folders["A"], folders["A"].with_name("A2"))

    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            paths = [folders["A"], folders["B"], folders["A"], folders["A"].with_name("A2"), folders["C"]]
            outcomes = await asyncio.gather(*(conductor.load_adapter("x", str(path)) for path in paths), return_exceptions=True)
            winner = outcomes.index(None)
            assert len(ranks.of(front_rank.Load)) == 1
            digest = ranks.of(front_rank.Load)[0].digest
            for path, outcome in zip(paths, outcomes, strict=True):
                same = path.name[0] == paths[winner].name[0]
                assert outcome is None if same else (code_of(outcome), outcome.status) == ("adapter_already_loaded", 409)
            assert len(ranks.kept()[0]) == 1 and len(digest) == 64

    asyncio.run(run())


def test_c72_an_unload_during_a_load_waits_for_it_and_wins(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            loading = asyncio.ensure_future(conductor.load_adapter("x", str(folders["A"])))
            await asyncio.sleep(0)
            unloading = asyncio.ensure_future(conductor.unload_adapter("x"))
            await asyncio.gather(loading, unloading)
            assert ranks.kept() == [[], []]
            with pytest.raises(ModelNotFound):
                conductor.generate(generation("x"))
            with pytest.raises(RequestError) as caught:
                await conductor.unload_adapter("x")
            assert caught.value.status == 404

    asyncio.run(run())


def test_replace_in_place_loads_the_new_before_it_unloads_the_old_and_keeps_the_old_where_it_fails(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            await conductor.load_adapter("x", str(folders["A"]))
            old = ranks.of(front_rank.Load)[0].name
            ranks.reads[1].broken.add(str(folders["B"]))
            with pytest.raises(AdapterError):
                await conductor.load_adapter("x", str(folders["B"]), load_inplace=True)
            assert conductor.resolve("x").root == str(folders["A"]) and ranks.kept() == [[old], [old]]
            conductor.generate(generation("x"))
            assert ranks.of(front_rank.Ingest)[-1].adapter == old
            await conductor.load_adapter("x", str(folders["C"]), load_inplace=True)
            new = ranks.of(front_rank.Load)[-1].name
            assert new != old and conductor.resolve("x").root == str(folders["C"])
            last = [message for message in ranks.sent[1] if isinstance(message, front_rank.Load | front_rank.Unload)][-2:]
            assert [type(message).__name__ for message in last] == ["Load", "Unload"] and last[1].name == old
            conductor.generate(generation("x"))
            assert ranks.of(front_rank.Ingest)[-1].adapter == new

    asyncio.run(run())


def test_the_same_weights_again_change_nothing_also_in_place(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            await conductor.load_adapter("x", str(folders["A"]))
            sent = [list(messages) for messages in ranks.sent]
            await conductor.load_adapter("x", str(folders["A"]))
            await conductor.load_adapter("x", str(folders["A"]), load_inplace=True)
            assert ranks.sent == sent

    asyncio.run(run())


def test_c89_one_folder_under_two_names_and_unloading_one_leaves_the_other(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            await conductor.load_adapter("x", str(folders["A"]))
            await conductor.load_adapter("y", str(folders["A"]))
            await conductor.unload_adapter("x")
            (kept,), _ = ranks.kept()
            assert kept.startswith("y@")
            conductor.generate(generation("y"))
            with pytest.raises(ModelNotFound):
                conductor.generate(generation("x"))

    asyncio.run(run())


def test_c67_a_name_loaded_again_is_another_generation(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            for _ in range(3):
                await conductor.load_adapter("x", str(folders["A"]))
                await conductor.unload_adapter("x")
            names = [message.name for message in ranks.of(front_rank.Load)]
            assert len(set(names)) == 3 and ranks.kept() == [[], []]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["unload", "replace"])
def test_c72_a_request_that_ranks_have_not_heard_of_yet_still_runs_on_the_weights_it_was_accepted_for(model, folders, monkeypatch, how):
    """It waits in front of a full host tier while its adapter is unloaded: the ranks may forget that only after its ingest."""

    async def run():
        async with served(model, monkeypatch, max_loras=1, max_cpu_loras=1) as (conductor, ranks):
            await conductor.load_adapter("a", str(folders["A"]))
            await conductor.load_adapter("b", str(folders["B"]))
            first, waiting = conductor.generate(generation("a")), conductor.generate(generation("b"))
            generation_of_b = ranks.of(front_rank.Load)[1].name
            if how == "unload":
                await conductor.unload_adapter("b")
            else:
                await conductor.load_adapter("b", str(folders["C"]), load_inplace=True)
            assert generation_of_b not in [message.name for message in ranks.of(front_rank.Unload)]
            ranks.finish(first.rid)
            for rank in range(2):
                tail = ranks.sent[rank][-2:]
                assert [type(message).__name__ for message in tail] == ["Ingest", "Unload"], tail
                assert tail[0].rid == waiting.rid and tail[0].adapter == tail[1].name == generation_of_b
                assert ranks.pools[rank].store.state(generation_of_b) != 2, "the copy must be readable here"
            ranks.finish(waiting.rid)
            assert not any(generation_of_b in kept for kept in ranks.kept())

    asyncio.run(run())


def test_a_cancelled_waiting_request_lets_its_unloaded_adapter_go(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_loras=1, max_cpu_loras=1) as (conductor, ranks):
            await conductor.load_adapter("a", str(folders["A"]))
            await conductor.load_adapter("b", str(folders["B"]))
            conductor.generate(generation("a"))
            waiting = conductor.generate(generation("b"))
            await conductor.unload_adapter("b")
            assert ranks.of(front_rank.Unload) == []
            waiting.cancel()
            assert [message.name for message in ranks.of(front_rank.Unload)] == [ranks.of(front_rank.Load)[1].name]

    asyncio.run(run())


def test_requests_on_unloaded_and_on_waiting_adapters_resume_after_a_restart(model, folders, monkeypatch):
    async def run():
        async with served(model, monkeypatch, max_loras=1, max_cpu_loras=1) as (conductor, ranks):
            await conductor.load_adapter("a", str(folders["A"]))
            await conductor.load_adapter("b", str(folders["B"]))
            running, waiting = conductor.generate(generation("a")), conductor.generate(generation("b"))
            await conductor.unload_adapter("a")
            await conductor.unload_adapter("b")
            ranks.die()
            ranks.begin(conductor._config)
            (ingest,) = ranks.of(front_rank.Ingest)
            assert ingest.rid == running.rid
            assert [message.name for message in ranks.of(front_rank.Unload)] == [ingest.adapter], "b waits for its request"
            ranks.finish(running.rid)
            assert ranks.of(front_rank.Ingest)[-1].rid == waiting.rid
            ranks.finish(waiting.rid)
            assert ranks.kept() == [[], []]

    asyncio.run(run())


def test_warnings_and_refusals_keep_the_name_free(model, tmp_path: Path, monkeypatch):
    bad = hand_folder(tmp_path / "bad", pair(rank=17), r=17)

    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            for _ in range(3):
                with pytest.raises(AdapterError) as caught:
                    await conductor.load_adapter("x", str(bad))
                assert caught.value.code == "adapter_rank_too_large"
            assert ranks.of(front_rank.Load) == []
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("base", str(bad))
            assert caught.value.code == "adapter_name_reserved"

    asyncio.run(run())
