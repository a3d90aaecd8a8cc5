"""Prompts and requests that several test modules use."""

from __future__ import annotations

import random

from tests.support.adapters import ADAPTERS
from tests.support.client import Ask
from tests.support.server import BASE

MODELS = (BASE, *ADAPTERS)
SAMPLINGS = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 12, "min_p": 0.02},
    {"temperature": 1.4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
)


def some_tokens(count: int, seed: int) -> tuple[int, ...]:
    """Random token ids, none of them special."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 128) for _ in range(count))


def some_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 48 tokens; every third begins like the one before it, so that prefixes are shared."""
    draw = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for index in range(count):
        tokens = some_tokens(draw.choice((1, 5, 17, 32, 48)), seed=1000 * seed + index)
        prompts.append(prompts[-1][: len(prompts[-1]) * 3 // 4] + tokens[-5:] if index % 3 == 2 else tokens)
    return prompts


def greedy(model: str, prompt: tuple[int, ...], max_tokens: int = 64, **more: bool) -> Ask:
    """A greedy request."""
    return Ask(model, prompt, max_tokens, **more)


def seeded(model: str, prompt: tuple[int, ...], index: int, max_tokens: int = 64, **more: bool) -> Ask:
    """A seeded request; `index` chooses seed and sampling fields."""
    return Ask(model, prompt, max_tokens, seed=1000 + index, fields=SAMPLINGS[index % len(SAMPLINGS)], **more)
