"""Log-probabilities of output and prompt tokens on /v1/completions, and scoring without output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mstar.api.text import TextProcessor
from mstar.conductor.types import Chunk, Generation
from mstar.types import TokenLogprob, TokenLogprobs
from tests.unit.api.requests_and_errors import events_of, joined
from tests.unit.api.scripted_conductor import ScriptedConductor

Post = Callable[..., httpx.Response]


def logprobs_of(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    """Made-up values: the chosen token is second best, 7 and 8 are the alternatives."""
    return tuple(
        TokenLogprobs(
            TokenLogprob(token, -1.5, 2), (TokenLogprob(7, -0.5, 1), TokenLogprob(token, -1.5, 2), TokenLogprob(8, float("-inf"), 3))
        )
        for token in token_ids
    )


def scored(generation: Generation) -> list[Chunk]:
    prompt_logprobs = None
    if generation.sampling.prompt_logprobs is not None:
        prompt_logprobs = (None, *logprobs_of(*generation.prompt[1:]))
    wanted = generation.sampling.logprobs is not None
    first = Chunk((270,), logprobs_of(270) if wanted else None, prompt_logprobs)
    return [first, Chunk((223,), logprobs_of(223) if wanted else None), Chunk((), finish_reason="length")]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_with_echo_cover_the_prompt_and_the_output(post: Post, text: TextProcessor, stream: bool):
    prompt = list(text.encode("hello the", add_special_tokens=False))
    ask = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
    response = post("/v1/completions", ask, conductor=ScriptedConductor(scored))
    events = events_of(response) if stream else [response.json()]
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        for key, values in shown.items():
            values += event["choices"][0]["logprobs"][key]
    assert shown["tokens"] == ["hello", " the", "hello", " "]
    assert shown["text_offset"] == [0, 5, 9, 14]
    assert shown["token_logprobs"] == [None, -1.5, -1.5, -1.5]
    assert shown["top_logprobs"][0] is None
    assert shown["top_logprobs"][2] == {text.token_text(7): -0.5, "hello": -1.5}  # one alternative, and the chosen one
    assert "".join(shown["tokens"]) == joined(events)


def test_logprobs_0_shows_the_chosen_token_alone_and_infinity_is_floored(post: Post):
    ask = {"model": "tiny", "prompt": "a"}
    none = post("/v1/completions", {**ask, "logprobs": 0}, conductor=ScriptedConductor(scored)).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{"hello": -1.5}, {" ": -1.5}]
    three = post("/v1/completions", {**ask, "logprobs": 3}, conductor=ScriptedConductor(scored)).json()["choices"][0]["logprobs"]
    assert min(three["top_logprobs"][0].values()) == -9999.0
    as_ids = post("/v1/completions", {**ask, "logprobs": 0, "return_tokens_as_token_ids": True}, conductor=ScriptedConductor(scored)).json()
    assert as_ids["choices"][0]["logprobs"]["tokens"] == ["token_id:270", "token_id:223"]


def test_max_tokens_0_with_echo_scores_the_prompt_and_shows_no_output(post: Post):
    ask = {"model": "tiny", "prompt": [270, 223], "echo": True, "logprobs": 0, "max_tokens": 0}
    body = post("/v1/completions", ask, conductor=ScriptedConductor(scored)).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hello ", "length")
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_in_vllms_form(post: Post, text: TextProcessor):
    ask = {"model": "tiny", "prompt": [270, 223], "prompt_logprobs": 1}
    choice = post("/v1/completions", ask, conductor=ScriptedConductor(scored)).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "223": {"logprob": -1.5, "rank": 2, "decoded_token": " "},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": text.token_text(7)},
        },
    ]
    assert choice["logprobs"] is None
