"""Loads on two real ranks: all or nothing, what lies there now and not what lay there, and every race has one winner."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.adapters.conftest import ADMIN, ROOM, WEIGHTS
from tests.e2e.prompts import greedy, some_tokens
from tests.support.client import TokenStream, new_client
from tests.support.processes import wait_for
from tests.support.server import BASE

pytestmark = pytest.mark.xdist_group("adapter-life")


def test_unreadable_on_rank_1_alone_fails_the_load_keeps_nothing_and_a_retry_after_the_repair_works(life):
    folder = life.copy("extra", "half-readable")
    for tp_rank in (1, 0):
        pids = life.server.pids()
        life.faults.fail(tp_rank, folder)
        message = life.refused(life.load("x", folder), 400, "adapter_unreadable")
        assert WEIGHTS in message and "Input/output error" in message
        assert life.names() == [] and life.server.pids() == pids
        gone = life.server.post("/v1/completions", greedy("x", (5,), 1).body())
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        life.faults.mend()
        life.loaded("x", folder)
        life.answers_with("x", "extra", some_tokens(9, 200 + tp_rank))
        assert life.unload("x").status_code == 200


@pytest.mark.parametrize("change", ["other weights", "cut"])
def test_a_file_that_changes_between_the_fronts_check_and_a_ranks_read_is_refused_and_kills_nothing(life, change):
    folder = life.copy("extra", "moving")
    pids = life.server.pids()
    life.faults.hold(1, folder)

    async def run():
        async with new_client(life.server) as client:
            stream = asyncio.ensure_future(TokenStream(client, greedy(BASE, some_tokens(12, 210), 100)).read())
            loading = asyncio.ensure_future(asyncio.to_thread(life.load, "x", folder))
            await asyncio.to_thread(life.faults.wait_held, 1)
            with (folder / WEIGHTS).open("r+b") as file:
                if change == "cut":
                    file.truncate(1000)
                else:
                    file.seek(-400, os.SEEK_END)
                    file.write(bytes(400))
            life.faults.mend()
            return await loading, await stream

    refused, streamed = asyncio.run(run())
    code = refused.json()["error"]["code"]
    life.refused(refused, 400, code)
    assert code == "adapter_changed" or (change == "cut" and code == "adapter_file_invalid"), (
        code
    )  # cut under rank 0's read, or before rank 1's
    life.reference.check(streamed)
    assert life.server.pids() == pids and life.names() == []
    life.copy("rank64", "moving")
    life.loaded("x", folder)
    life.answers_with("x", "rank64", some_tokens(9, 211))


def test_a_served_adapter_whose_file_changes_fails_its_request_and_nobody_elses(life):
    """It was read at the load and let go; the read for the request finds other bytes than the digest says."""
    folder = life.copy("extra", "rewritten")
    life.loaded("x", folder)
    shutil.copy(life.folders["rank64"] / WEIGHTS, folder / WEIGHTS)
    failed = life.server.post("/v1/completions", greedy("x", some_tokens(5, 212), 4).body())
    assert failed.status_code in (400, 500) and failed.json()["error"]["code"].startswith("adapter_"), failed.text
    life.answers_with("rank1", "rank1", some_tokens(5, 212))
    life.copy("extra", "rewritten")
    life.answers_with("x", "extra", some_tokens(5, 212))


def test_concurrent_loads_of_one_name_have_one_winner_the_same_weights_are_fine_others_are_409(life):
    folders = [life.folders[name] for name in ("extra", "rank64", "rank1")]
    for attempt in range(4):
        order = [folders[(attempt + number) % 3] for number in range(9)]
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda folder: life.load("x", folder), order))
        winners = {folder.name for folder, answer in zip(order, answers, strict=True) if answer.status_code == 200}
        assert len(winners) == 1
        for folder, answer in zip(order, answers, strict=True):
            if folder.name not in winners:
                life.refused(answer, 409, "adapter_already_loaded")
        life.answers_with("x", winners.pop(), some_tokens(7, 213))
        with ThreadPoolExecutor(5) as pool:
            assert sorted(answer.status_code for answer in pool.map(lambda _: life.unload("x"), range(5))) == [200, 404, 404, 404, 404]


def test_1000_random_interleavings_of_loads_unloads_pins_and_requests_never_give_a_500(life):
    """After them, every name that is served answers with the weights of the folder that the list says."""
    draw = random.Random(1)
    folders = [life.folders[name] for name in ("extra", "rank64", "rank5-qkv")]
    names, statuses = ("x", "y", "z"), {}

    def call():
        name = draw.choice(names)
        body = {"lora_name": name}
        kind = draw.choice(("load", "load", "load", "inplace", "inplace", "unload", "unload", "pin", "unpin", "ask", "ask"))
        if kind in ("load", "inplace"):
            load = {"lora_path": str(draw.choice(folders)), "load_inplace": kind == "inplace", "pinned": draw.random() < 0.2}
            return "/v1/load_lora_adapter", body | load
        if kind == "ask":
            return "/v1/completions", greedy(name, some_tokens(6, 214), 2).body()
        return f"/v1/{kind}_lora_adapter", body

    async def run():
        async with new_client(life.server) as client:
            calls = [call() for _ in range(1000)]

            async def worker():
                while calls:
                    path, body = calls.pop()
                    answer = await client.post(path, json=body, headers=ADMIN)
                    code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
                    statuses[path.split("/")[2], answer.status_code, code] = answer.text

            await asyncio.gather(*(worker() for _ in range(8)))

    asyncio.run(run())
    allowed = {
        ("load_lora_adapter", 200, ""),
        ("load_lora_adapter", 409, "adapter_already_loaded"),
        ("load_lora_adapter", 409, "adapter_pin_limit"),
        ("pin_lora_adapter", 409, "adapter_pin_limit"),
        ("completions", 200, ""),
        ("completions", 404, "model_not_found"),
        *((f"{kind}_lora_adapter", 200, "") for kind in ("unload", "pin", "unpin")),
        *((f"{kind}_lora_adapter", 404, "adapter_not_found") for kind in ("unload", "pin", "unpin")),
    }
    assert set(statuses) <= allowed, {key: text for key, text in statuses.items() if key not in allowed}
    assert len(statuses) >= 8, statuses.keys()
    cards = {card["id"]: card for card in life.server.get("/v1/models").json()["data"]}
    for name in names:
        if name in cards:
            life.answers_with(name, cards[name]["root"].rpartition("/")[2], some_tokens(21, 215))


def test_c61_v1_to_v100_with_room_for_eight_gives_an_explicit_error_and_never_a_hang(life):
    def load(number):
        return life.load(f"v{number}", life.folders["extra"])

    answers = [load(number) for number in range(1, 101)]
    assert [answer.status_code for answer in answers[:ROOM]] == [200] * ROOM
    for answer in answers[ROOM:]:
        message = life.refused(answer, 400, "adapter_limit_reached")
        assert message.startswith("14 adapters are served, max_registered_loras allows 14")
    assert life.unload("v2").status_code == load(101).status_code == 200
    for name in life.names():
        life.unload(name)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(load, range(1, 41)))
    assert [answer.status_code for answer in answers].count(200) == ROOM == len(life.names())
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200} == {"adapter_limit_reached"}


def test_a_load_while_the_ranks_start_again_is_503_at_once_and_works_once_they_are_up(life):
    os.kill(life.server.pids()[1], signal.SIGKILL)
    wait_for("the instance to be down", lambda: life.server.get("/ready").status_code == 503)
    message = life.refused(life.load("x", life.folders["extra"]), 503, "server_not_ready")
    assert message == "the ranks are not ready; try again" and life.names() == []
    life.server.wait_until_ready()
    life.loaded("x", life.folders["extra"])
    life.answers_with("x", "extra", some_tokens(9, 221))


def test_a_failed_replace_leaves_the_old_serving_and_running(life):
    folder = life.copy("rank64", "broken")
    life.faults.fail(1, folder)
    life.loaded("x", life.folders["extra"])

    async def run():
        async with new_client(life.server) as client:
            stream = TokenStream(client, greedy("x", some_tokens(20, 216), 150))
            tokens = aiter(stream)
            await anext(tokens)
            refused = await asyncio.to_thread(life.load, "x", folder, load_inplace=True)
            async for _ in tokens:
                pass
            return refused, stream.answer()

    refused, streamed = asyncio.run(run())
    life.refused(refused, 400, "adapter_unreadable")
    life.reference.check_greedy(streamed.ask.prompt, streamed.token_ids, "extra", streamed.logprobs)
    life.answers_with("x", "extra", some_tokens(20, 217))


def test_replaces_under_load_are_atomic_each_answer_is_wholly_of_one_of_the_two(life):
    prompt = some_tokens(18, 218)
    life.loaded("x", life.folders["extra"])

    async def run():
        async with new_client(life.server) as client:
            streams = []
            for folder in ("rank64", "extra", "rank64", "extra"):
                streams += [asyncio.ensure_future(TokenStream(client, greedy("x", prompt, 24)).read()) for _ in range(3)]
                replaced = await asyncio.to_thread(life.load, "x", life.folders[folder], load_inplace=True)
                assert replaced.status_code == 200, replaced.text
            return await asyncio.gather(*streams)

    for answer in asyncio.run(run()):
        matching = []
        for adapter in ("extra", "rank64"):
            try:
                life.reference.check_greedy(prompt, answer.token_ids, adapter, answer.logprobs)
                matching.append(adapter)
            except AssertionError:
                pass
        assert len(matching) == 1, f"an answer is of neither adapter: {answer.token_ids}"


def test_an_unchanged_digest_is_no_load(life):
    life.loaded("x", life.folders["extra"])
    life.answers_with("x", "extra", some_tokens(9, 219))
    before = life.server.status()["ranks"]
    life.loaded("x", life.copy("extra", "the same"), load_inplace=True)
    after = life.server.status()["ranks"]
    for one, other in zip(before, after, strict=True):
        for key in ("slots", "host_adapters", "installs", "reads"):
            assert one[key] == other[key]


def test_a_name_loaded_again_never_answers_from_the_old_weights_pages_or_prefixes(life):
    prompt = some_tokens(64, 220)
    for adapter in ("extra", "rank64", "extra"):
        life.loaded("x", life.folders[adapter])
        life.answers_with("x", adapter, prompt)
        assert life.answers_with("x", adapter, prompt) == 48, "its own prefix is shared"
        assert life.unload("x").status_code == 200
    life.loaded("x", life.folders["extra"])
    life.loaded("x", life.folders["rank5-qkv"], load_inplace=True)
    assert life.answers_with("x", "rank5-qkv", some_tokens(64, 221)) == 0
    life.answers_with("x", "rank5-qkv", prompt)
