"""What other engines answered with 200 or 500, over HTTP on two real ranks: a 4xx with its code, and nobody else notices.

Seen on other engines: an adapter of NaNs was served and then broke other tenants' answers; a single A or B of the wrong shape, an extra
layer, and an `r` unlike the tensors were served; every other bad adapter was a 500.
"""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.adapters.conftest import WEIGHTS
from tests.e2e.prompts import greedy, some_tokens
from tests.support.client import TokenStream, ask_together, new_client
from tests.support.server import BASE

pytestmark = pytest.mark.xdist_group("adapter-life")

Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def tensors(change):
    def edit(folder):
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file({key: value.contiguous() for key, value in held.items()}, folder / WEIGHTS)

    return edit


def fields(**values):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def put(key, make):
    return tensors(lambda held: held.update({key: make(held)}))


def beside(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def padded(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + bytes(8))


def pickled(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


BAD = {
    "nan_everywhere": ("adapter_non_finite", tensors(lambda held: [value.fill_(float("nan")) for value in held.values()])),
    "one_infinity": ("adapter_non_finite", tensors(lambda held: held[B].view(-1)[-1:].fill_(float("inf")))),
    "a_of_the_wrong_shape": ("adapter_shape_mismatch", put(A, lambda held: torch.zeros(6, 65))),
    "b_of_the_wrong_shape": ("adapter_shape_mismatch", put(B, lambda held: torch.zeros(63, 6))),
    "a_transposed": ("adapter_shape_mismatch", put(A, lambda held: held[A].T)),
    "an_extra_layer": (
        "adapter_layer_out_of_range",
        tensors(lambda held: held.update({key.replace("layers.0", "layers.7"): held[key].clone() for key in (A, B)})),
    ),
    "r_unlike_the_tensors": ("adapter_rank_mismatch", fields(r=12)),
    "r_of_zero": ("adapter_config_invalid", fields(r=0)),
    "alpha_of_null": ("adapter_config_invalid", fields(lora_alpha=None)),
    "half_a_pair": ("adapter_half_pair", tensors(lambda held: held.pop(A))),
    "a_module_of_another_model": (
        "adapter_unknown_keys",
        put("base_model.model.transformer.h.0.c_attn.lora_A.weight", lambda held: held[A] + 0),
    ),
    "no_lora_tensors": ("adapter_no_lora_tensors", tensors(lambda held: held.clear())),
    "zero_size": ("adapter_zero_size", put(A, lambda held: torch.zeros(0, 64))),
    "float64": ("adapter_dtype_unsupported", put(A, lambda held: held[A].double())),
    "rank_over_the_cap": ("adapter_rank_too_large", tensors(lambda held: held.update({A: torch.zeros(65, 64), B: torch.zeros(64, 65)}))),
    "dora_without_magnitudes": ("adapter_dora_mismatch", fields(use_dora=True)),
    "pissa": ("adapter_init_unsupported", fields(init_lora_weights="pissa")),
    "ia3": ("adapter_config_invalid", fields(peft_type="IA3")),
    "bias_all": ("adapter_bias_unsupported", fields(bias="all")),
    "cut": ("adapter_file_invalid", cut),
    "padded": ("adapter_file_invalid", padded),
    "a_web_page": ("adapter_file_invalid", beside(WEIGHTS, b"<!DOCTYPE html>")),
    "header_that_overflows": ("adapter_file_invalid", beside(WEIGHTS, b"\xff" * 8 + b"{}")),
    "pickle": ("adapter_pickle_refused", pickled),
    "no_config": ("adapter_config_missing", lambda folder: (folder / "adapter_config.json").unlink()),
    "config_that_is_a_list": ("adapter_config_invalid", beside("adapter_config.json", b"[]")),
    "template_without_its_end": ("adapter_chat_template_invalid", beside("chat_template.jinja", b"{% for m in messages %}")),
}


def test_bad_adapters_are_4xx_by_name_while_streams_run_and_break_nobody(life):
    """Each beside a stream of the base or of an adapter; afterwards the name is free and a good folder serves under it."""
    pids = life.server.pids()

    async def run():
        streams = []
        async with new_client(life.server) as client:
            for number, (name, (code, edit)) in enumerate(BAD.items()):
                folder = life.copy("extra", f"bad-{name}")
                edit(folder)
                streams.append(TokenStream(client, greedy((BASE, "rank64", "rank1")[number % 3], some_tokens(12, 500 + number), 60)))
                tokens = aiter(streams[-1])
                await anext(tokens)
                message = life.refused(await asyncio.to_thread(life.load, "x", folder), 400, code)
                assert message.endswith(".") and ", but " in message, (name, message)
                async for _ in tokens:
                    pass
        return [stream.answer() for stream in streams]

    life.reference.check_all(asyncio.run(run()))
    assert life.names() == [] and life.server.pids() == pids
    assert ask_unknown(life) == 404
    life.loaded("x", life.folders["extra"])
    life.answers_with("x", "extra", some_tokens(9, 510))
    life.reference.check_all(ask_together(life.server, [greedy(model, some_tokens(9, 511), 16) for model in (BASE, "rank64", "rank1")]))


def test_bad_adapters_named_in_a_lora_dir_are_the_requests_own_4xx(life):
    """Loaded by name: never a 500, never an answer of the base, and the folder serves after its repair."""
    for name in ("nan_everywhere", "a_of_the_wrong_shape", "an_extra_layer", "r_unlike_the_tensors", "pickle"):
        code, edit = BAD[name]
        folder = life.lora_dir / "lazy-bad"
        shutil.copytree(life.folders["extra"], folder)
        edit(folder)
        answer = life.server.post("/v1/completions", greedy("lazy-bad", (5, 6), 2).body())
        life.refused(answer, 400, code)
        shutil.rmtree(folder)
    shutil.copytree(life.folders["extra"], folder)
    life.answers_with("lazy-bad", "extra", some_tokens(9, 512))
    life.unload("lazy-bad")
    shutil.rmtree(folder)


def ask_unknown(life):
    return life.server.post("/v1/completions", greedy("x", (5,), 1).body()).status_code
