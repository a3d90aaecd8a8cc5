"""A request that kills the ranks whenever it runs: it ends with its own error, all others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.prompts import greedy, seeded, some_tokens
from tests.support.adapters import ADAPTERS
from tests.support.client import Ask, TokenStream, ask_one, new_client
from tests.support.processes import wait_for
from tests.support.reference import tiny_reference
from tests.support.server import BASE, START_TIMEOUT_S, ServerSpec, running_server

PLANTED = Path(__file__).parents[1] / "support/planted"
DEADLY = (66, 67, 66, 67, 66)
# The planted fault sees the tokens of one step: half of DEADLY in each of two steps would kill nobody.
WHOLE_PROMPTS = ("--prefill-stretch=0", "--max-num-batched-tokens=4096")
SPEC = ServerSpec("poison", "llama2", 2, ("--num-gpu-blocks-override=512", "--max-num-seqs=32", *WHOLE_PROMPTS))

pytestmark = pytest.mark.xdist_group("chaos")


def deadly(model: str) -> Ask:
    return greedy(model, (*some_tokens(9, 70), *DEADLY, *some_tokens(3, 71)), 50)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.setenv("MSTAR_TEST_POISON", ",".join(map(str, DEADLY)))
    with running_server(SPEC.command_line(tmp_path), tmp_path, spec=SPEC) as running:
        yield running


def test_a_poisoned_request_ends_with_its_own_500_and_the_others_go_on(server):
    async def run():
        async with new_client(server) as client:
            streams = [TokenStream(client, greedy(model, some_tokens(15, 72), 200)) for model in (BASE, *ADAPTERS[:3])]
            streams += [TokenStream(client, seeded(model, some_tokens(8, 73), 5, 200)) for model in (BASE, ADAPTERS[1])]
            reading = [asyncio.ensure_future(stream.read()) for stream in streams]
            await asyncio.to_thread(wait_for, "streams to run", lambda: sum(len(stream.tokens) >= 3 for stream in streams) >= 4)
            poisoned = await client.post("/v1/completions", json=deadly(ADAPTERS[0]).body())
            return poisoned, await asyncio.gather(*reading)

    poisoned, answers = asyncio.run(run())
    assert poisoned.status_code == 500 and poisoned.json()["error"]["code"] == "request_crashed_worker", poisoned.text
    assert [len(answer.token_ids) for answer in answers] == [200] * 6
    reference = tiny_reference("llama2")
    reference.check_all(answers)
    status = server.wait_until_idle()
    assert 4 <= status["instance_starts"] <= 5, "three crashes show it, or four"
    reference.check(ask_one(server, greedy(ADAPTERS[0], some_tokens(15, 74), 10)))


def test_a_poisoned_stream_that_is_alone_ends_with_an_error_too_and_the_server_serves_on(server):
    reply = server.post("/v1/completions", deadly(BASE).body(stream=True))
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "request_crashed_worker", reply.text
    server.wait_until_ready(START_TIMEOUT_S)  # it ended at the crash; the ranks are on their way
    assert server.wait_until_idle()["instance_starts"] == 4
    tiny_reference("llama2").check(ask_one(server, greedy(BASE, some_tokens(15, 75), 10)))
