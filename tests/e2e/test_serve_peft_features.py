"""DoRA, trained biases, head and embedding over HTTP on real ranks: prompts and outputs score as in transformers + peft.

What each feature computes, at every degree, is tested in tests/unit/engine/resources/lora; here the whole way from the flag and the
load to the tokens, with the sum that ranks make for DoRA over gloo.
"""

from __future__ import annotations

import pytest
import torch

from tests.e2e.prompts import greedy, some_prompts
from tests.e2e.specs import ADMIN, ADMIN_KEY, PAGES, served_by
from tests.support.client import ask_alone, ask_together
from tests.support.reference import MOVES_AT_LEAST, Reference
from tests.support.server import BASE, ServerSpec
from tests.support.tiny_models import tiny_model
from tests.unit.engine.resources.lora.peft_reference import ALL, peft_folder

MODULES = f"--lora-target-modules={','.join(ALL)}"
SPECS = tuple(ServerSpec(f"qwen2-features-tp{tp_size}", "qwen2", tp_size, (*PAGES, *ADMIN, MODULES)) for tp_size in (2, 3))
FEATURES = {
    "dora": {"use_dora": True, "target_modules": ["q_proj", "o_proj", "down_proj"]},
    "everything": {"use_dora": True, "bias": "lora_only", "target_modules": list(ALL)},
    "biases": {"bias": "lora_only", "target_modules": ["q_proj", "k_proj", "v_proj"]},
    "ends": {"target_modules": ["lm_head", "embed_tokens"]},
}


def trained(model):
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.mul_(torch.rand_like(parameter) + 0.5)
        if name.endswith("base_layer.bias"):
            parameter.normal_(std=0.5)


@pytest.fixture
def folders(server):
    """Four adapters, loaded while the server runs."""
    made = {}
    for seed, (name, lora) in enumerate(FEATURES.items()):
        made[name] = server.scratch / name
        if not made[name].exists():
            peft_folder(tiny_model("qwen2"), made[name], seed, trained, **lora)
        body = {"lora_name": name, "lora_path": str(made[name])}
        answer = server.post("/v1/load_lora_adapter", body, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        assert answer.status_code == 200, answer.text
    return made


@served_by(*SPECS)
def test_features_in_mixed_batches_and_alone_match_transformers_and_peft(server, folders):
    prompts = some_prompts(4, seed=5)
    asks = [greedy(model, prompt, 16, prompt_logprobs=True) for prompt in prompts for model in (BASE, *folders)]
    answers = [*ask_together(server, asks), *ask_alone(server, asks[-len(folders) - 1 :])]
    base = Reference(tiny_model("qwen2"), {"ends": folders["ends"]})  # whose biases are the base's own
    base.check_all([answer for answer in answers if answer.ask.model == BASE])
    for name, folder in folders.items():
        reference = Reference(tiny_model("qwen2"), {name: folder})  # one each: peft takes one adapter with biases at a time
        moved = (reference.logits(prompts[0], name) - base.logits(prompts[0], None)).abs().max()
        assert moved >= MOVES_AT_LEAST, (name, moved)
        reference.check_all([answer for answer in answers if answer.ask.model == name])
