"""What comes out over HTTP is what transformers + peft compute: tiny models of every family, six adapters in two slots, any TP degree.

Bar (issue 2): every greedy token's logit within 1e-3 of the best one of the reference, every seeded draw within it of its interval, prompt
log-probabilities within it; every adapter moves the reference by a hundred times that.
"""

from __future__ import annotations

import random

import pytest

from tests.e2e.specs import QUICK, WHOLE, served_by
from tests.support.adapters import ADAPTERS
from tests.support.client import Ask, ask_alone, ask_together
from tests.support.server import BASE

MODELS = (BASE, *ADAPTERS)
SAMPLINGS = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 12, "min_p": 0.02},
    {"temperature": 1.4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
)


def some_prompts(count, seed=0):
    """Random prompts of 1 to 48 tokens; every third begins like the one before it, so that prefixes are shared."""
    draw = random.Random(seed)
    prompts = []
    for index in range(count):
        tokens = tuple(draw.randrange(3, 128) for _ in range(draw.choice((1, 5, 17, 32, 48))))
        prompts.append(prompts[-1][: len(prompts[-1]) * 3 // 4] + tokens[-5:] if index % 3 == 2 else tokens)
    return prompts


def greedy(model, prompt, **more):
    return Ask(model, prompt, **more)


def seeded(model, prompt, index, **more):
    return Ask(model, prompt, seed=1000 + index, fields=SAMPLINGS[index % len(SAMPLINGS)], **more)


def check_mixed(server, reference):
    """All prompts on the base and on every adapter, greedy and seeded, at once."""
    prompts = some_prompts(server.spec.num_prompts)
    for adapter in ADAPTERS:
        for prompt in prompts:
            reference.assert_adapter_matters(prompt, adapter)
    asks = [greedy(model, prompt) for prompt in prompts for model in MODELS]
    asks += [seeded(model, prompt, index) for index, prompt in enumerate(prompts) for model in MODELS]
    random.Random(1).shuffle(asks)
    answers = ask_together(server, asks)
    assert all(len(answer.token_ids) == 64 and answer.finish_reason == "length" for answer in answers)
    reference.check_all(answers)
    used = {answer.ask.model: answer.token_ids for answer in answers if answer.ask.prompt == prompts[0] and answer.ask.seed is None}
    assert len(set(used.values())) > 1, "all adapters gave the same text"


def check_alone(server, reference, num_prompts):
    """One request after another, with the prompt's log-probabilities: each step is one row."""
    prompts = some_prompts(num_prompts, seed=2)
    asks = [greedy(model, prompt, prompt_logprobs=True) for prompt in prompts for model in MODELS]
    asks += [seeded(model, prompt, index, prompt_logprobs=True) for index, prompt in enumerate(prompts) for model in MODELS]
    reference.check_all(ask_alone(server, asks))


@served_by(*QUICK)
def test_outputs_in_mixed_batches_match_transformers_and_peft(server, reference):
    check_mixed(server, reference)


@served_by(*QUICK)
def test_outputs_alone_match_transformers_and_peft(server, reference):
    check_alone(server, reference, num_prompts=1)


@served_by(*WHOLE, marks=(pytest.mark.slow,))
def test_outputs_of_every_family_in_mixed_batches_match_transformers_and_peft(server, reference):
    check_mixed(server, reference)


@served_by(*{spec.id: spec for spec in (*QUICK, *WHOLE)}.values(), marks=(pytest.mark.slow,))
def test_outputs_of_every_family_alone_match_transformers_and_peft(server, reference):
    check_alone(server, reference, num_prompts=20)


@served_by(QUICK[1])
def test_the_reference_notices_an_answer_of_another_adapter(server, reference):
    prompt = some_prompts(1)[0]
    answers = {model: ask_alone(server, [greedy(model, prompt)])[0] for model in MODELS}
    for model, answer in answers.items():
        for other in MODELS:
            if other != model:
                with pytest.raises(AssertionError):
                    reference.check_greedy(prompt, answer.token_ids, None if other == BASE else other, answer.logprobs)
