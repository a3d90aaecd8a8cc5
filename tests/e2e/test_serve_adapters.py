"""Adapters over HTTP on two ranks: each request gets its own, whatever runs beside it, is cached, or is loaded meanwhile."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from tests.e2e.prompts import MODELS, greedy, seeded, some_tokens
from tests.e2e.specs import ADMIN_KEY, LLAMA, served_by
from tests.support.adapters import ADAPTERS, tiny_adapters
from tests.support.client import TokenStream, ask_alone, ask_one, ask_together, events, new_client
from tests.support.reference import TOLERANCE
from tests.support.server import BASE

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
EXTRA = "team/extra 50%"  # a name that must be escaped in a path


def load(server, name, path, **more):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}, headers=ADMIN)


def unload(server, name):
    return server.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)


@pytest.fixture
def loaded(server):
    """`EXTRA` served from the folder `extra`, until the end of the test."""
    answer = load(server, EXTRA, tiny_adapters("llama2")["extra"])
    assert answer.status_code == 200, answer.text
    yield EXTRA
    unload(server, EXTRA)


def close_to(answer, other):
    """The same tokens with log-probabilities within the tolerance."""
    same = answer.token_ids == other.token_ids
    return same and max(abs(a - b) for a, b in zip(answer.logprobs, other.logprobs, strict=True)) <= TOLERANCE


@served_by(LLAMA)
def test_c88_interleaved_streams_with_different_adapters_equal_separate_runs(server, reference):
    asks = [greedy(MODELS[0], some_tokens(18, 20), 48), greedy(MODELS[1], some_tokens(18, 20), 48)]
    asks += [seeded(MODELS[2], some_tokens(18, 20), 1, 48), greedy(MODELS[2], some_tokens(18, 20), 48)]

    async def interleaved():
        async with new_client(server) as client:
            return await asyncio.gather(*(TokenStream(client, ask).read() for ask in asks))

    together, alone = asyncio.run(interleaved()), ask_alone(server, asks)
    reference.check_all([*together, *alone])
    for one, other in zip(together, alone, strict=True):
        assert close_to(one, other)


@served_by(LLAMA)
def test_c65_a_prompt_computed_under_one_adapter_is_never_reused_under_another(server, reference):
    prompt = some_tokens(100, 21)
    cached = {}
    for model in (ADAPTERS[0], ADAPTERS[1], BASE):
        answer = ask_one(server, greedy(model, prompt, 8))
        cached[model] = answer.cached_tokens
        reference.check(answer)
    assert cached == {ADAPTERS[0]: 0, ADAPTERS[1]: 0, BASE: 0}
    for model in (ADAPTERS[0], ADAPTERS[1], BASE):
        answer = ask_one(server, greedy(model, prompt, 8))
        assert answer.cached_tokens == 96, "six whole blocks of 16 tokens were computed under this very adapter"
        reference.check(answer)
    longer = ask_one(server, greedy(BASE, (*prompt[:50], *some_tokens(20, 22)), 8))
    assert longer.cached_tokens == 48
    reference.check(longer)


@served_by(LLAMA)
def test_c39_base_rows_stay_base_in_any_mix_and_order(server, reference):
    prompt = some_tokens(15, 23)
    for models in ([ADAPTERS[0]] * 2, [BASE] * 2, [ADAPTERS[0], BASE], [BASE, ADAPTERS[1], BASE, ADAPTERS[0]], [BASE] * 2):
        reference.check_all(ask_together(server, [greedy(model, prompt, 8) for model in models]))


@served_by(LLAMA)
def test_c57_eight_requests_over_base_and_three_adapters_in_two_slots_all_get_answers(server, reference):
    asks = [seeded(model, some_tokens(40, 24), index, 24) for index in range(2) for model in (BASE, *ADAPTERS[:3])]
    answers = ask_together(server, asks)
    reference.check_all(answers)
    for rank in server.status()["ranks"]:
        assert len(rank["slots"]) == 2


@served_by(LLAMA)
def test_c86_each_route_honours_the_adapter(server, reference):
    """Completions, chat, streams of both, n > 1, list prompts, and `<base>:<adapter>`."""
    adapter, messages = ADAPTERS[3], [{"role": "user", "content": "hello"}]
    greedily = {"model": adapter, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    chat = server.post("/v1/chat/completions", greedily | {"messages": messages}).json()
    prompt = chat["prompt_token_ids"]
    reference.assert_adapters_matter(prompt)

    async def streamed(path, body):
        async with new_client(server) as client:
            shown = [choice async for event in events(client, path, greedily | body) for choice in event["choices"]]
        return [token for choice in shown for token in choice.get("token_ids") or ()]

    outputs = [
        chat["choices"][0]["token_ids"],
        asyncio.run(streamed("/v1/chat/completions", {"messages": messages})),
        asyncio.run(streamed("/v1/completions", {"prompt": prompt})),
        *(choice["token_ids"] for choice in server.post("/v1/completions", greedily | {"prompt": prompt, "n": 2}).json()["choices"]),
        *(choice["token_ids"] for choice in server.post("/v1/completions", greedily | {"prompt": [prompt] * 2}).json()["choices"]),
        server.post("/v1/completions", greedily | {"prompt": prompt, "model": f"{BASE}:{adapter}"}).json()["choices"][0]["token_ids"],
    ]
    assert len(outputs) == 8
    for output in outputs:
        assert len(output) == 8
        reference.check_greedy(prompt, output, adapter)


@served_by(LLAMA)
def test_c82_c83_the_list_shows_an_adapter_straight_after_its_load_and_drops_it_after_its_unload(server, reference, loaded):
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert list(cards) == [BASE, *sorted((*ADAPTERS, EXTRA))]
    assert cards[BASE]["parent"] is None and all(cards[name]["parent"] == BASE for name in (*ADAPTERS, EXTRA))
    for name, card in cards.items():
        assert server.get(f"/v1/models/{name.replace('%', '%25').replace(' ', '%20')}").json() == card
    answer = ask_one(server, greedy(EXTRA, some_tokens(9, 25), 16))
    reference.check_greedy(answer.ask.prompt, answer.token_ids, "extra", answer.logprobs)
    reference.assert_adapters_matter(answer.ask.prompt)
    assert unload(server, EXTRA).status_code == 200
    assert EXTRA not in [card["id"] for card in server.get("/v1/models").json()["data"]]
    gone = server.post("/v1/completions", greedy(EXTRA, (5,), 1).body())
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert unload(server, EXTRA).status_code == 404


@served_by(LLAMA)
def test_c74_loads_and_unloads_while_streams_run_leave_them_alone(server, reference):
    folder = tiny_adapters("llama2")["extra"]
    asks = [greedy(model, some_tokens(14, 26), 120) for model in (BASE, *ADAPTERS[:2])]

    async def run():
        async with new_client(server) as client:
            streams = [asyncio.ensure_future(TokenStream(client, ask).read()) for ask in asks]
            for _ in range(4):
                assert (await asyncio.to_thread(load, server, EXTRA, folder)).status_code == 200
                assert (await asyncio.to_thread(unload, server, EXTRA)).status_code == 200
            return await asyncio.gather(*streams)

    reference.check_all(asyncio.run(run()))


@served_by(LLAMA)
def test_c67_the_same_name_with_other_weights_answers_with_the_new_ones(server, reference):
    folders = tiny_adapters("llama2")
    prompt = some_tokens(40, 27)
    for folder, adapter in ((folders["extra"], "extra"), (folders["rank64"], "rank64")):
        assert load(server, "moving", folder).status_code == 200
        answer = ask_one(server, greedy("moving", prompt, 16))
        reference.check_greedy(prompt, answer.token_ids, adapter, answer.logprobs)
        refused = load(server, "moving", folders["rank1"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_already_loaded")
        assert unload(server, "moving").status_code == 200


@served_by(LLAMA)
def test_a_name_replaced_in_place_while_its_stream_runs_finishes_it_on_the_old_weights(server, reference):
    folders = tiny_adapters("llama2")
    assert load(server, "moving", folders["extra"]).status_code == 200

    async def run():
        async with new_client(server) as client:
            stream = TokenStream(client, greedy("moving", some_tokens(20, 28), 200))
            tokens = aiter(stream)
            await anext(tokens)
            replaced = await asyncio.to_thread(load, server, "moving", folders["rank64"], load_inplace=True)
            assert replaced.status_code == 200, replaced.text
            assert not stream.finish_reasons, "the stream ended before the replace: make it longer"
            async for _ in tokens:
                pass
            return stream.answer()

    before = asyncio.run(run())
    reference.check_greedy(before.ask.prompt, before.token_ids, "extra", before.logprobs)
    after = ask_one(server, greedy("moving", some_tokens(20, 28), 16))
    reference.check_greedy(after.ask.prompt, after.token_ids, "rank64", after.logprobs)
    assert unload(server, "moving").status_code == 200


@served_by(LLAMA)
def test_c16_a_truncated_adapter_is_refused_and_loads_under_the_same_name_once_it_is_whole(server, reference):
    folder = server.scratch / "cut"
    shutil.copytree(tiny_adapters("llama2")["extra"], folder)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for part in (b"", whole[:7], whole[: len(whole) // 2]):
        weights.write_bytes(part)
        refused = load(server, "cut", folder)
        assert refused.status_code == 400 and "adapter_model.safetensors" in refused.json()["error"]["message"], refused.text
    weights.write_bytes(whole)
    assert load(server, "cut", folder).status_code == 200
    answer = ask_one(server, greedy("cut", some_tokens(6, 29), 8))
    reference.check_greedy(answer.ask.prompt, answer.token_ids, "extra", answer.logprobs)
    assert unload(server, "cut").status_code == 200


@served_by(LLAMA)
def test_c89_one_folder_under_two_names_and_unloading_one_leaves_the_other(server, reference):
    folder = tiny_adapters("llama2")["extra"]
    assert load(server, "twin-a", folder).status_code == load(server, "twin-b", folder).status_code == 200
    for name in ("twin-a", "twin-b"):
        answer = ask_one(server, greedy(name, some_tokens(33, 30), 8))
        reference.check_greedy(answer.ask.prompt, answer.token_ids, "extra", answer.logprobs)
    assert unload(server, "twin-a").status_code == 200
    answer = ask_one(server, greedy("twin-b", some_tokens(33, 31), 8))
    reference.check_greedy(answer.ask.prompt, answer.token_ids, "extra", answer.logprobs)
    assert unload(server, "twin-b").status_code == 200


@served_by(LLAMA)
def test_c81_adapter_routes_want_the_admin_key(server):
    body = {"lora_name": "intruder", "lora_path": str(tiny_adapters("llama2")["extra"])}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert server.post(path, body, headers=headers).status_code == 401
    assert "intruder" not in server.get("/v1/models").text


@served_by(LLAMA)
def test_adapter_folders_outside_the_roots_are_refused(server, tmp_path):
    shutil.copytree(tiny_adapters("llama2")["extra"], tmp_path / "outside")
    (server.scratch / "link").symlink_to(tmp_path / "outside")
    for path in (tmp_path / "outside", server.scratch / ".." / tmp_path.name / "outside", server.scratch / "link", "/etc", "", "\0"):
        answer = load(server, "outside", path)
        assert answer.status_code in (400, 404), (path, answer.text)
        assert isinstance(answer.json()["error"]["code"], str)


@served_by(LLAMA)
def test_c97_requests_and_tokens_are_counted_under_their_adapter(server):
    def counts(adapter):
        requests = server.metric("mstar_requests_started_total", adapter=adapter)
        return requests, *(server.metric("mstar_request_tokens_total", adapter=adapter, kind=kind) for kind in ("prompt", "output"))

    before = {model: counts(model) for model in (BASE, ADAPTERS[4])}
    ask_one(server, greedy(ADAPTERS[4], some_tokens(11, 32), 7))
    assert counts(BASE) == before[BASE]
    assert counts(ADAPTERS[4]) == tuple(a + b for a, b in zip(before[ADAPTERS[4]], (1, 11, 7), strict=True))
