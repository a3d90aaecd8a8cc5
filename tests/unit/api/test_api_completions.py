"""/v1/completions: one and many prompts, n, echo, stop strings, log-probabilities, streaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mstar.api.seeds import derive_seed
from mstar.api.text import TextProcessor
from mstar.conductor.types import Chunk
from mstar.errors import RequestError
from tests.unit.api.requests_and_errors import assert_openai_error, events_of, joined, one_token
from tests.unit.api.scripted_conductor import ScriptedConductor, says

Post = Callable[..., httpx.Response]
REPLY = "hello wörld 😀 END there"


def test_a_completion_in_openais_form(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(says(text, REPLY))
    body = post("/v1/completions", {"model": "tiny", "prompt": "hello"}, conductor=conductor).json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    num_tokens = len(text.encode(REPLY, add_special_tokens=False)) + 1  # and the eos token
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": num_tokens,
        "total_tokens": num_tokens + 1,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert conductor.streams[0].ends == ["stop"]


def test_the_fields_reach_the_sampling(post: Post):
    conductor = ScriptedConductor(one_token)
    asked = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1.5},
        **{
            "repetition_penalty": 1.2,
            "seed": -1,
            "max_tokens": 7,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [9, 8, 9],
            "logprobs": 2,
        },
    }
    post("/v1/completions", {"model": "pirate", "prompt": [4, 5], **asked}, conductor=conductor)
    generation = conductor.streams[0].generation
    sampling = generation.sampling
    assert (generation.model, generation.prompt) == ("pirate", (4, 5))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.5, 1.2)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (2**63 - 1, 7, 3, True)
    assert (sampling.stop_token_ids, sampling.logprobs, sampling.prompt_logprobs) == ((9, 8), 2, None)


def test_a_nearly_zero_temperature_is_greedy(post: Post):
    conductor = ScriptedConductor(one_token)
    post("/v1/completions", {"model": "tiny", "prompt": "a", "temperature": 1e-30}, conductor=conductor)
    assert conductor.streams[0].generation.sampling.temperature == 0.0


def test_list_prompts_with_n_give_choices_in_order_with_seeds_of_their_own(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(lambda generation: says(text, "one" if len(generation.prompt) == 1 else "two")(generation))
    body = post("/v1/completions", {"model": "tiny", "prompt": ["hello", "hello world"], "n": 2, "seed": 5}, conductor=conductor).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert [stream.generation.sampling.seed for stream in conductor.streams] == [derive_seed(5, index) for index in range(4)]
    prompts = [text.encode(prompt, add_special_tokens=True) for prompt in ("hello", "hello world")]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))  # once each, not per choice
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_seeds_are_drawn_where_none_is_given(post: Post):
    conductor = ScriptedConductor(one_token)
    post("/v1/completions", {"model": "tiny", "prompt": [[3], [4], [5]]}, conductor=conductor, settings={"seed": 1})
    again = ScriptedConductor(one_token)
    post("/v1/completions", {"model": "tiny", "prompt": [[3], [4], [5]]}, conductor=again, settings={"seed": 1})
    seeds = [stream.generation.sampling.seed for stream in conductor.streams]
    assert len(set(seeds)) == 3
    assert seeds == [stream.generation.sampling.seed for stream in again.streams]


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("END", False, "hello wörld 😀 "),
        (["zzz", "😀"], False, "hello wörld "),
        ("END", True, "hello wörld 😀 END"),
        ("world", False, None),
    ],
)
def test_stop_strings_end_the_text_across_tokens_and_chunks(
    post: Post, text: TextProcessor, per_chunk: int, stream: bool, stop: Any, include: bool, expected: str | None
):
    conductor = ScriptedConductor(says(text, REPLY, per_chunk=per_chunk))
    asked = {
        "model": "tiny",
        "prompt": "a",
        "stop": stop,
        "include_stop_str_in_output": include,
        "stream": stream,
        "return_token_ids": True,
    }
    response = post("/v1/completions", asked, conductor=conductor)
    events = events_of(response) if stream else [response.json()]
    assert joined(events) == (expected or REPLY)
    last = events[-1]["choices"][0]
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    if expected is None:
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
        assert conductor.streams[0].ends == ["stop"]
        return
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop if isinstance(stop, str) else "😀")
    assert conductor.streams[0].ends in (["cancelled"], ["stop"])  # the last chunk may hold the stop string
    # Tokens are counted up to the one that completed the stop string, however many came in its chunk.
    reach = "hello wörld 😀 END" if stop == "END" else "hello wörld 😀"
    assert tuple(ids) == text.encode(REPLY, add_special_tokens=False)[: len(ids)]
    assert text.decode(ids).startswith(reach) and not text.decode(ids[:-1]).startswith(reach)
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len(ids)


def test_a_stop_string_cancels_the_stream_before_its_next_chunk(post: Post, text: TextProcessor):
    conductor = ScriptedConductor(says(text, REPLY))
    post("/v1/completions", {"model": "tiny", "prompt": "a", "stop": "w"}, conductor=conductor)
    assert conductor.streams[0].ends == ["cancelled"]
    assert conductor.streams[0].num_given == len(text.encode("hello w", add_special_tokens=False))


def test_a_stop_string_before_min_tokens_does_not_stop(post: Post, text: TextProcessor):
    ask = {"model": "tiny", "prompt": "a", "stop": "hello", "min_tokens": 3, "max_tokens": 16}
    body = post("/v1/completions", ask, conductor=ScriptedConductor(says(text, "hello one hello two"))).json()
    assert body["choices"][0]["text"] == "hello one "


def test_text_held_back_for_a_stop_string_comes_at_the_end(post: Post, text: TextProcessor):
    ask = {"model": "tiny", "prompt": "a", "stop": "ENDING", "stream": True}
    events = events_of(post("/v1/completions", ask, conductor=ScriptedConductor(says(text, "the END", stop_token_id=None))))
    assert joined(events) == "the END"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_the_requests_own_stop_token_is_named_and_shown_on_request(post: Post, text: TextProcessor):
    (bang,) = text.encode("!", add_special_tokens=False)
    script = says(text, "hello", stop_token_id=bang)
    ask = {"model": "tiny", "prompt": "a", "stop_token_ids": [bang], "return_token_ids": True}
    choice = post("/v1/completions", ask, conductor=ScriptedConductor(script)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", bang)
    assert choice["token_ids"] == [*text.encode("hello", add_special_tokens=False), bang]
    shown = post("/v1/completions", {**ask, "include_stop_str_in_output": True}, conductor=ScriptedConductor(script)).json()
    assert shown["choices"][0]["text"] == "hello!"


def test_streaming_gives_the_same_text_and_usage_last(post: Post, text: TextProcessor):
    ask = {"model": "tiny", "prompt": ["hello", "the"], "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(post("/v1/completions", ask, conductor=ScriptedConductor(says(text, REPLY))))
    assert joined(events, 0) == joined(events, 1) == REPLY
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == events[-1]["usage"]["prompt_tokens"] + events[-1]["usage"]["completion_tokens"]
    assert len({event["id"] for event in events}) == 1
    assert [choice["finish_reason"] for event in events for choice in event["choices"]].count("stop") == 2


def test_usage_with_every_event_on_request(post: Post, text: TextProcessor):
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = {"model": "tiny", "prompt": "hello", "stream": True, "stream_options": options}
    events = events_of(post("/v1/completions", ask, conductor=ScriptedConductor(says(text, "one two"))))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == counts[-2]


def test_no_usage_without_being_asked(post: Post, text: TextProcessor):
    events = events_of(
        post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True}, conductor=ScriptedConductor(says(text, "one")))
    )
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(post: Post, text: TextProcessor, stream: bool):
    ids = list(text.encode("the fox", add_special_tokens=False))
    ask = {"model": "tiny", "prompt": ["héllo ", "x"], "echo": True, "stream": stream}
    response = post("/v1/completions", ask, conductor=ScriptedConductor(says(text, "one")))
    events = events_of(response) if stream else [response.json()]
    assert (joined(events, 0), joined(events, 1)) == ("héllo one", "xone")
    of_ids = post("/v1/completions", {"model": "tiny", "prompt": ids, "echo": True}, conductor=ScriptedConductor(says(text, "one"))).json()
    assert of_ids["choices"][0]["text"] == "the foxone"


def test_when_one_of_many_is_refused_all_end_and_the_answer_is_the_refusal(post: Post):
    conductor = ScriptedConductor(one_token)
    conductor.refuse_after = 2
    for stream in (False, True):
        response = post("/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c"], "stream": stream}, conductor=conductor)
        assert_openai_error(response, 429, "too_many_requests")
        assert [played.ends for played in conductor.streams] == [["cancelled"], ["cancelled"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_before_the_first_token_is_an_http_error(post: Post, stream: bool, n: int):
    failure = RequestError("adapter 'pirate' cannot be read", code="adapter_unreadable", param="model", status=400)
    conductor = ScriptedConductor(lambda generation: [failure])
    response = post("/v1/completions", {"model": "pirate", "prompt": "a", "stream": stream, "n": n}, conductor=conductor)
    assert_openai_error(response, 400, "adapter_unreadable", "model")


@pytest.mark.parametrize(("failure", "code"), [(RequestError("gone", code="gone", status=503), "gone"), (KeyError("x"), "internal_error")])
def test_a_failure_in_mid_stream_is_an_event(post: Post, failure: Exception, code: str):
    conductor = ScriptedConductor(lambda generation: [Chunk((270,)), failure])
    events = events_of(post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True}, conductor=conductor))
    assert joined(events[:-1]) == "hello"
    assert events[-1]["error"]["code"] == code


def test_a_stream_that_ends_without_a_finish_reason_is_an_error_not_a_short_answer(post: Post):
    response = post("/v1/completions", {"model": "tiny", "prompt": "a"}, conductor=ScriptedConductor(lambda generation: [Chunk((270,))]))
    assert_openai_error(response, 503, "request_stopped")
