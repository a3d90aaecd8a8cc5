"""What lies beside an adapter's tensors: its chat template is its own, tokens of its own are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from mstar.conductor.types import Rendered
from mstar.errors import AdapterError, RequestError
from mstar.wire import front_rank
from tests.unit.conductor.pool_ranks import generation, served

TOKENS = {"<|im_start|>": 1, "<|im_end|>": 2}


def beside(folder: Path, template: str | None = None, **decoder: str) -> None:
    """Files of a tokenizer beside the adapter; `decoder` maps `id` (with a leading underscore) to a token."""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    added = {key.removeprefix("_"): {"content": token} for key, token in decoder.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def test_the_folders_template_is_served_with_its_name_and_the_bases_stays_none(model, folders, monkeypatch):
    beside(folders["A"], "A: {{ messages }}")

    async def run():
        async with served(model, monkeypatch) as (conductor, _):
            await conductor.load_adapter("a", str(folders["A"]))
            await conductor.load_adapter("b", str(folders["B"]))
            assert conductor.resolve("a").chat_template == "A: {{ messages }}"
            assert conductor.resolve("b").chat_template is conductor.resolve("base").chat_template is None

    asyncio.run(run())


def test_a_template_that_changed_is_another_adapter_to_a_plain_load_and_swapped_in_place_without_the_ranks(model, folders, monkeypatch):
    beside(folders["A"], "old")

    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            await conductor.load_adapter("a", str(folders["A"]))
            running = conductor.generate(generation("a"))
            beside(folders["A"], "new")
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("a", str(folders["A"]))
            assert caught.value.status == 409 and "another chat template" in caught.value.message
            sent = [list(messages) for messages in ranks.sent]
            await conductor.load_adapter("a", str(folders["A"]), load_inplace=True)
            assert ranks.sent == sent and conductor.resolve("a").chat_template == "new"
            ranks.die()
            ranks.begin(conductor._config)
            assert ranks.of(front_rank.Unload) == [], "the running request's generation is still the served one"
            assert [message.rid for message in ranks.of(front_rank.Ingest)] == [running.rid]

    asyncio.run(run())


def test_a_chat_rendered_with_a_template_that_is_not_served_any_more_is_refused(model, folders, monkeypatch):
    beside(folders["A"], "old")

    async def run():
        async with served(model, monkeypatch) as (conductor, _):
            await conductor.load_adapter("a", str(folders["A"]))
            chat = dataclasses.replace(generation("a"), rendered=Rendered(conductor.resolve("a").chat_template))
            conductor.generate(chat)
            await conductor.load_adapter("a", str(folders["B"]), load_inplace=True)
            with pytest.raises(RequestError) as caught:
                conductor.generate(chat)
            assert (caught.value.code, caught.value.status) == ("adapter_replaced", 409)
            conductor.generate(dataclasses.replace(chat, rendered=Rendered(None)))
            conductor.generate(generation("a"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        ({"_1": "<|im_start|>", "_2": "<|im_end|>"}, None),
        ({}, None),
        ({"_1": "<|im_start|>", "_5": "<|tool|>"}, 'adds "<|tool|>" with the id 5, which the served tokenizer does not have'),
        ({"_2": "<|im_start|>"}, 'adds "<|im_start|>" with the id 2, which the served tokenizer has with the id 1'),
    ],
)
def test_tokens_that_the_served_tokenizer_does_not_have_are_refused(model, folders, monkeypatch, decoder, found):
    beside(folders["A"], **decoder)

    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            conductor.use_tokens(TOKENS.get)
            load = conductor.load_adapter("a", str(folders["A"]))
            if found is None:
                await load
                return
            with pytest.raises(AdapterError) as caught:
                await load
            assert (caught.value.code, caught.value.status) == ("adapter_added_tokens", 400) and found in caught.value.message
            assert ranks.of(front_rank.Load) == []

    asyncio.run(run())
