"""A real `mstar serve --device cuda` against transformers + peft, in float32: minutes on one GPU, more ranks where there are more GPUs.

    python -m pytest -m gpu tests/gpu

Collected only where `-m` asks for it (tests/conftest.py). One GPU serves TP 1; NCCL wants a GPU of its own for each rank.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.prompts import MODELS, greedy, seeded, some_prompts, some_tokens
from tests.e2e.specs import PAGES
from tests.support.adapters import ADAPTERS
from tests.support.client import ask_one, ask_together
from tests.support.processes import wait_for
from tests.support.reference import tiny_reference
from tests.support.server import BASE, ServerSpec, running_server

pytestmark = pytest.mark.gpu

CUDA = ("--device=cuda", *PAGES)
FAMILIES = ("llama2", "smollm2", "qwen3")


def cuda_spec(family: str, tp_size: int) -> ServerSpec:
    """A tiny model on GPUs."""
    return ServerSpec(f"{family}-cuda-tp{tp_size}", family, tp_size, CUDA)


def check(spec: ServerSpec, folder: Path) -> None:
    """Prompts on the base and on six adapters in two slots, greedy and seeded, at once; then nothing is held."""
    reference = tiny_reference(spec.family)
    prompts = some_prompts(6)
    reference.assert_adapters_matter(prompts[1])
    with running_server(spec.command_line(folder), folder, spec=spec) as server:
        asks = [greedy(model, prompt) for prompt in prompts for model in MODELS]
        asks += [seeded(model, prompt, index) for index, prompt in enumerate(prompts) for model in MODELS]
        random.Random(1).shuffle(asks)
        reference.check_all(ask_together(server, asks))
        reference.check_all([ask_one(server, greedy(model, prompts[0], 8, prompt_logprobs=True)) for model in MODELS])
        long = some_tokens(100, 1)
        cached = [ask_one(server, greedy(model, long, 4)).cached_tokens for model in (ADAPTERS[0], ADAPTERS[1], BASE, BASE)]
        assert cached == [0, 0, 0, 96]
        server.wait_until_idle()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_on_one_gpu_match_transformers_and_peft(family, tmp_path):
    check(cuda_spec(family, 1), tmp_path)


def test_as_many_ranks_as_there_are_gpus_match_transformers_and_peft(tmp_path):
    check(cuda_spec("llama2", min(4, torch.cuda.device_count())), tmp_path)


def test_a_bfloat16_server_on_a_gpu_answers_every_adapter_and_frees_what_it_held(tmp_path):
    spec = ServerSpec("llama2-cuda-bf16", "llama2", 1, (*CUDA, "--dtype=bfloat16"))
    with running_server(spec.command_line(tmp_path), tmp_path, spec=spec) as server:
        answers = ask_together(server, [greedy(model, some_tokens(20, 2), 32) for model in MODELS])
        assert len({answer.token_ids for answer in answers}) > 3, "adapters must differ from the base and from each other"
        wait_for("the server to be idle", server.wait_until_idle)
