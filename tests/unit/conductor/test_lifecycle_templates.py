"""What lies beside an adapter's tensors: its chat template is its own, tokens of its own are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from mstar.conductor.types import Rendered
from mstar.config import LoraModule
from mstar.errors import AdapterError, RequestError
from mstar.wire import front_rank
from tests.unit.adapters.adapter_folders import hand_folder, pair
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


@pytest.mark.parametrize("how", ["load", "replace"])
def test_a_template_that_cannot_be_compiled_is_refused_at_the_load_and_what_was_served_stays(model, folders, monkeypatch, how):
    beside(folders["A"], "{% for m in messages %}{{ m.content }}")

    async def run():
        async with served(model, monkeypatch) as (conductor, ranks):
            if how == "replace":
                await conductor.load_adapter("a", str(folders["B"]))
            sent = [list(messages) for messages in ranks.sent]
            with pytest.raises(AdapterError) as caught:
                await conductor.load_adapter("a", str(folders["A"]), load_inplace=how == "replace")
            assert (caught.value.code, caught.value.status) == ("adapter_chat_template_invalid", 400)
            assert "chat_template.jinja" in caught.value.message and "endfor" in caught.value.message
            assert ranks.sent == sent
            if how == "replace":
                assert conductor.resolve("a").root == str(folders["B"])
            beside(folders["A"], "{% for m in messages %}{{ m.content }}{% endfor %}")
            await conductor.load_adapter("a", str(folders["A"]), load_inplace=how == "replace")

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


def test_c07_copies_of_base_weights_are_one_line_in_the_log(model, folders, monkeypatch, caplog):
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    copies = {f"base_model.model.{name}.base_layer.weight": np.zeros((64, 64), dtype=np.float32) for name in names}
    folder = hand_folder(folders["A"].with_name("copies"), pair() | copies)

    async def run():
        async with served(model, monkeypatch) as (conductor, _):
            with caplog.at_level(logging.WARNING):
                await conductor._lifecycle.configure(LoraModule(name="a", path=str(folder)))
            (line,) = [record.getMessage() for record in caplog.records]
            assert line.startswith("adapter a: 2 copies of base weights") and all(name in line for name in names)

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
