"""What comes out over HTTP is what transformers + peft compute: tiny models of every family, six adapters in two slots, any TP degree.

Bar (issue 2): every greedy token's logit within 1e-3 of the best one of the reference, every seeded draw within it of its interval, prompt
log-probabilities within it; every adapter moves the reference by a hundred times that.
"""

from __future__ import annotations

import random

import pytest

from tests.e2e.prompts import MODELS, greedy, seeded, some_prompts
from tests.e2e.specs import DEGREES, EVERY_FAMILY, LLAMA, OTHERS, served_by
from tests.support.client import ask_alone, ask_one, ask_together
from tests.support.server import BASE

SLOW = (pytest.mark.slow,)


def check_mixed(server, reference, num_prompts):
    """All prompts on the base and on every adapter, greedy and seeded, at once."""
    prompts = some_prompts(num_prompts)
    for prompt in prompts:
        reference.assert_adapters_matter(prompt)
    asks = [greedy(model, prompt) for prompt in prompts for model in MODELS]
    asks += [seeded(model, prompt, index) for index, prompt in enumerate(prompts) for model in MODELS]
    random.Random(1).shuffle(asks)
    answers = ask_together(server, asks)
    assert all(len(answer.token_ids) == 64 and answer.finish_reason == "length" for answer in answers)
    reference.check_all(answers)


def check_alone(server, reference, num_prompts, num_tokens):
    """One request after another, with the prompt's log-probabilities: each step is one row."""
    prompts = some_prompts(num_prompts, seed=2)
    asks = [greedy(model, prompt, num_tokens, prompt_logprobs=True) for prompt in prompts for model in MODELS]
    asks += [seeded(model, prompt, index, num_tokens, prompt_logprobs=True) for index, prompt in enumerate(prompts) for model in MODELS]
    reference.check_all(ask_alone(server, asks))


@served_by(*DEGREES)
def test_outputs_in_mixed_batches_at_every_degree_match_transformers_and_peft(server, reference):
    check_mixed(server, reference, num_prompts=20)


@served_by(*OTHERS)
def test_outputs_of_every_family_in_mixed_batches_match_transformers_and_peft(server, reference):
    check_mixed(server, reference, num_prompts=6)


@served_by(*DEGREES, *OTHERS)
def test_outputs_alone_match_transformers_and_peft(server, reference):
    check_alone(server, reference, num_prompts=1, num_tokens=8)


@served_by(*(spec for spec in EVERY_FAMILY if spec not in DEGREES), marks=SLOW)
def test_outputs_of_every_family_at_every_degree_in_mixed_batches_match_transformers_and_peft(server, reference):
    check_mixed(server, reference, num_prompts=20)


@served_by(*EVERY_FAMILY, marks=SLOW)
def test_outputs_of_every_family_at_every_degree_alone_match_transformers_and_peft(server, reference):
    check_alone(server, reference, num_prompts=20, num_tokens=64)


@served_by(LLAMA)
def test_the_reference_notices_the_answer_of_another_adapter(server, reference):
    prompt = some_prompts(1)[0]
    for model, other in zip(MODELS, (*MODELS[1:], MODELS[0]), strict=True):
        answer = ask_one(server, greedy(model, prompt, 8))
        reference.check(answer)
        wrong = None if other == BASE else other
        with pytest.raises(AssertionError):
            reference.check_greedy(prompt, answer.token_ids, wrong)
        with pytest.raises(AssertionError):
            reference.check_prompt((*prompt, *answer.token_ids), (None, *[-1.0] * (len(prompt) - 1), *answer.logprobs), answer.ask.adapter)
