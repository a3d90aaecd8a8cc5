"""Every row of what is served, as logits: equal to transformers + peft in float32 within 1e-3 at TP 1 to 4, in mixed batches.

What peft writes itself is `ROWS`; further forms of the same adapters, which peft does not write (fused names, other prefixes, other
dtypes, shards), are made from its folders and must answer as those do. DoRA, biases, head and embedding have files of their own here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.adapters.adapter_folders import ROWS
from tests.unit.engine.resources.lora.peft_reference import TOLERANCE, WEIGHTS, Request, Served, edit, peft_folder, peft_logits
from tests.unit.models.tiny import make_model, some_tokens

FAMILIES = ("llama2", "smollm2")  # 4 query and 2 KV heads; 9 and 3, tied, uneven cuts at TP 2
AT_ONCE = 6  # adapters in one step
Tensors = dict[str, torch.Tensor]


def with_one_a(*parts: str) -> Callable[[torch.nn.Module], None]:
    """Train the parts with one A, as a fused module has it."""

    def change(model: torch.nn.Module) -> None:
        for layer in model.get_base_model().model.layers:
            modules = [getattr(block, part) for block in (layer.self_attn, layer.mlp) for part in parts if hasattr(block, part)]
            for module in modules[1:]:
                module.lora_A["default"].weight.copy_(modules[0].lora_A["default"].weight)

    return change


def fused(leaf: str, *parts: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for key in [key for key in tensors if f".{parts[0]}.lora_A" in key]:
            halves = [key.replace(parts[0], part) for part in parts]
            out[key.replace(parts[0], leaf)] = tensors[key]
            out[key.replace(parts[0], leaf).replace("lora_A", "lora_B")] = torch.cat(
                [tensors[half.replace("lora_A", "lora_B")] for half in halves]
            )
            for half in halves:
                del out[half], out[half.replace("lora_A", "lora_B")]
        return out

    return change


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(key): value for key, value in tensors.items()}


def sharded(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {key: f"adapter_model-{number % 3:05}.safetensors" for number, key in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({key: value for key, value in tensors.items() if places[key] == file}, folder / file)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def mixed(tensors: Tensors) -> Tensors:
    """Every third tensor of another dtype; values that all of them hold."""
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return {key: tensors[key].to(kinds[number % 3]) for number, key in enumerate(sorted(tensors))}


@dataclass(frozen=True)
class Form:
    """A folder made by peft, and one that is made from it and must answer alike."""

    lora: dict
    make: Callable[[Path], object]
    change: Callable[[torch.nn.Module], None] | None = None


def tensors_as(change: Callable[[Tensors], Tensors]) -> Callable[[Path], object]:
    return lambda folder: edit(folder, change)


def halved(model: torch.nn.Module) -> None:
    """Values that float16 and bfloat16 hold exactly."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.round(parameter * 64) / 64)


def widen(model: torch.nn.Module) -> None:
    """So that an adapter on a few modules moves the logits, too."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.mul_(2)


QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FORMS = {
    "c13_c33_fused_qkv": Form({"target_modules": list(QKV)}, tensors_as(fused("qkv_proj", *QKV)), with_one_a(*QKV)),
    "c13_c33_fused_gate_up": Form(
        {"target_modules": list(GATE_UP), "r": 5}, tensors_as(fused("gate_up_proj", *GATE_UP)), with_one_a(*GATE_UP)
    ),
    "c03_no_prefix": Form({"target_modules": ["q_proj", "o_proj"]}, tensors_as(renamed(lambda key: key.removeprefix("base_model.model.")))),
    "c03_language_model": Form(
        {"target_modules": ["q_proj", "o_proj"]},
        tensors_as(renamed(lambda key: key.replace("base_model.model.model.", "language_model.model."))),
    ),
    "c03_both": Form(
        {"target_modules": ["down_proj"]},
        tensors_as(renamed(lambda key: key.replace("base_model.model.model.", "base_model.model.model.language_model."))),
    ),
    "float16": Form({"target_modules": ["q_proj", "down_proj"]}, tensors_as(lambda t: {k: v.half() for k, v in t.items()}), halved),
    "bfloat16": Form({"target_modules": ["q_proj", "down_proj"]}, tensors_as(lambda t: {k: v.bfloat16() for k, v in t.items()}), halved),
    "c24_mixed_dtypes": Form({"target_modules": "all-linear"}, tensors_as(mixed), halved),
    "shards": Form({"target_modules": "all-linear", "r": 3}, sharded),
    "c10_targets_in_the_config_in_another_order_and_form": Form(
        {"target_modules": ["q_proj", "v_proj"]},
        lambda folder: config_with(folder, target_modules=["self_attn.v_proj", "self_attn.q_proj"]),
    ),
    "c11_targets_that_are_no_regex": Form({"target_modules": ["k_proj"]}, lambda folder: config_with(folder, target_modules="*no(regex")),
    "c18_a_base_that_is_gone": Form(
        {"target_modules": ["q_proj"]}, lambda folder: config_with(folder, base_model_name_or_path="gone/gone")
    ),
}


def config_with(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@dataclass(frozen=True)
class Case:
    """What is asked of an adapter and what peft says."""

    name: str
    folder: Path
    tokens: list[int]
    expected: torch.Tensor
    base: torch.Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    """The model's folder, and per row what peft says."""
    place = tmp_path_factory.mktemp(request.param)
    base = place / "base"
    make_model(request.param, base)
    cases = []
    for seed, (name, fields) in enumerate(ROWS.items()):
        folder = peft_folder(base, place / name, seed, widen, **{**fields, "init_lora_weights": True})
        config_with(folder, init_lora_weights=fields.get("init_lora_weights", True))
        cases.append(case(name, base, folder, folder, seed))
    for seed, (name, form) in enumerate(FORMS.items()):
        original = peft_folder(base, place / f"{name}-of-peft", 100 + seed, form.change, **form.lora)
        folder = Path(shutil.copytree(original, place / name))
        form.make(folder)
        cases.append(case(name, base, original, folder, seed))
    return base, cases


def case(name: str, base: Path, of_peft: Path, folder: Path, seed: int) -> Case:
    vocab = json.loads((base / "config.json").read_text())["vocab_size"]
    tokens = some_tokens(6 + seed % 5, seed=seed, vocab_size=vocab)
    return Case(name, folder, tokens, peft_logits(base, of_peft, tokens), peft_logits(base, None, tokens))


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_c29_every_served_row_equals_peft_in_logits_in_mixed_batches(made, tp_size):
    """At every degree, and base rows beside them as if there were no LoRA (C26: also over a vocabulary of 130, cut unevenly)."""
    base, cases = made
    instance = Served(base, tp_size, max_loras=AT_ONCE, max_cpu_loras=2 * AT_ONCE, max_lora_rank=16)
    try:
        for start in range(0, len(cases), AT_ONCE):
            batch = cases[start : start + AT_ONCE]
            answers = instance.run(*[Request(None, batch[0].tokens), *(Request(each.folder, each.tokens) for each in batch)])
            torch.testing.assert_close(answers[0], batch[0].base, atol=TOLERANCE, rtol=0)
            for each, logits in zip(batch, answers[1:], strict=True):
                torch.testing.assert_close(logits, each.expected, atol=TOLERANCE, rtol=0, msg=lambda text, of=each: f"{of.name}: {text}")
                moved = (each.expected - each.base).abs().max()
                assert moved > 50 * TOLERANCE, f"{each.name} moves the logits by {moved:g} alone"
    finally:
        instance.close()
