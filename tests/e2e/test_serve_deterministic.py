"""`--deterministic`: the same bits whatever a request is batched with, however its prompt is cut, and after it was computed twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.prompts import MODELS, greedy, seeded, some_tokens
from tests.e2e.specs import served_by
from tests.support.client import TokenStream, ask_alone, ask_at_once, new_client
from tests.support.server import ROOT, START_TIMEOUT_S, ServerSpec

TIGHT = ("--deterministic", "--num-gpu-blocks-override=24", "--block-size=8", "--max-num-batched-tokens=24", "--max-num-seqs=12")
SPECS = tuple(
    ServerSpec(f"{family}-deterministic-tp{tp_size}-{dtype}", family, tp_size, (*TIGHT, f"--dtype={dtype}"))
    for family, tp_size, dtype in (("llama2", 1, "bfloat16"), ("llama2", 3, "float32"), ("qwen3", 2, "bfloat16"))
)


def asks():
    """Short and long prompts, each of which prefills in one step alone or in several; all adapters; greedy and seeded.

    Each wants 8 pages of 24 for what it says alone: those that fit with their prompts do not all fit in the end."""
    made = [greedy(model, some_tokens(5 + 13 * at, 80 + at), 64, prompt_logprobs=at % 2 == 0) for at, model in enumerate(MODELS)]
    return made + [seeded(model, some_tokens(60 - 8 * at, 90 + at), at, 64) for at, model in enumerate(MODELS)]


@served_by(*SPECS)
def test_tokens_and_log_probabilities_are_the_same_alone_and_in_any_batch(server):
    alone = ask_alone(server, asks())
    preempted = server.status()["ranks"][0]["preemptions"]
    together = ask_at_once(server, asks())
    assert server.status()["ranks"][0]["preemptions"] > preempted, "some were to be computed twice"
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs), one.ask
        assert one.prompt_logprobs == other.prompt_logprobs, one.ask


@served_by(SPECS[2])
def test_a_stream_that_resumes_goes_on_with_the_very_tokens_that_it_would_have_had(server):
    wanted = [greedy(model, some_tokens(30, 70), max_tokens) for model, max_tokens in zip(MODELS, (150, 60, 60), strict=False)]
    alone = ask_alone(server, wanted)

    follower = server.pids()[1]

    async def run():
        async with new_client(server) as client:
            others = [asyncio.ensure_future(TokenStream(client, ask).read()) for ask in wanted[1:]]
            longest, is_killed = TokenStream(client, wanted[0]), False
            async for _ in longest:
                if len(longest.tokens) > 5 and not is_killed:
                    os.kill(follower, signal.SIGKILL)
                    is_killed = True
            return [longest.answer(), *await asyncio.gather(*others)]

    again = asyncio.run(run())
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in alone]
    server.wait_until_ready(START_TIMEOUT_S)
    assert server.status()["instance_starts"] == 2


@pytest.mark.parametrize(("flags", "environment", "words"), [
    (("--dtype=float16",), {}, "--deterministic needs the C++ kernels"),
    ((), {"CXX": "/nonexistent/c++"}, "--deterministic needs the C++ kernels"),
    (("--lora-target-modules=q_proj", "--lora-target-modules=embed_tokens"), {}, "does not cover embed_tokens"),
])  # fmt: skip
def test_a_start_that_could_not_keep_it_is_refused(tmp_path, flags, environment, words):
    spec = ServerSpec("refused", "llama2", 1, ("--deterministic", *flags))
    given = [flag for flag in spec.command_line(tmp_path) if not (flag.startswith("--dtype") and "--dtype=float16" in flags)]
    given = [flag for flag in given if not flag.startswith("--lora-modules")] + (["--dtype=float16"] if "--dtype=float16" in flags else [])
    done = subprocess.run(
        [sys.executable, "-m", "mstar.cli", "serve", *given, "--port=0", "--max-restarts=0"],
        cwd=ROOT, env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "MSTAR_CACHE": str(tmp_path)}, capture_output=True, text=True, timeout=START_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
