"""An adapter's own chat template: the chat and tokenize routes use it for that adapter alone, and say with what a prompt was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import httpx
import pytest

from mstar.api.text import TextProcessor
from mstar.conductor.types import Generation, Rendered
from mstar.errors import RequestError
from tests.unit.api.requests_and_errors import CHAT, COMPLETION, assert_openai_error, one_token
from tests.unit.api.scripted_conductor import ScriptedConductor, ScriptedStream

Post = Callable[..., httpx.Response]
TEMPLATE = "own {{ messages[0]['content'] }}"


@pytest.fixture
def conductor() -> ScriptedConductor:
    """`pirate` has a template of its own."""
    made = ScriptedConductor(one_token)
    made.adapters["pirate"] = dataclasses.replace(made.adapters["pirate"], chat_template=TEMPLATE)
    return made


def prompts(conductor: ScriptedConductor, text: TextProcessor) -> list[str]:
    return [text.decode(stream.generation.prompt) for stream in conductor.streams]


def test_each_model_is_asked_in_its_own_form(post: Post, conductor: ScriptedConductor, text: TextProcessor):
    for model in ("pirate", "tiny", "org/json", "tiny:pirate"):
        assert post("/v1/chat/completions", CHAT | {"model": model}, conductor=conductor).status_code == 200
    own, base, other, again = prompts(conductor, text)
    assert own == again == f"own {CHAT['messages'][0]['content']}" and base == other != own
    assert [stream.generation.rendered for stream in conductor.streams] == [
        Rendered(TEMPLATE),
        Rendered(None),
        Rendered(None),
        Rendered(TEMPLATE),
    ]
    for stream, model in zip(list(conductor.streams), ("pirate", "tiny"), strict=False):
        tokens = post("/tokenize", {"model": model, "messages": CHAT["messages"]}, conductor=conductor).json()["tokens"]
        assert tuple(tokens) == stream.generation.prompt


def test_a_completion_says_nothing_of_templates(post: Post, conductor: ScriptedConductor):
    assert post("/v1/completions", COMPLETION | {"model": "pirate"}, conductor=conductor).status_code == 200
    assert conductor.streams[0].generation.rendered is None


def test_a_template_that_refuses_the_messages_is_a_400(post: Post, conductor: ScriptedConductor):
    broken = dataclasses.replace(conductor.adapters["pirate"], chat_template="{{ raise_exception('only two roles') }}")
    conductor.adapters["pirate"] = broken
    response = post("/v1/chat/completions", CHAT | {"model": "pirate"}, conductor=conductor)
    assert "only two roles" in assert_openai_error(response, 400, "chat_template_error", "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_a_replace_between_rendering_and_acceptance_is_the_requests_409(post: Post, stream: bool):
    class Replaced(ScriptedConductor):
        def generate(self, generation: Generation) -> ScriptedStream:
            raise RequestError("'pirate' was replaced while this chat was read; send it again", code="adapter_replaced", status=409)

    response = post("/v1/chat/completions", CHAT | {"model": "pirate", "stream": stream}, conductor=Replaced(one_token))
    assert_openai_error(response, 409, "adapter_replaced")
