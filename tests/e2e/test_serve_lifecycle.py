"""Processes that die or are told to stop: streams go on after a kill, a stop is clean and leaves no process."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from tests.e2e.prompts import greedy, seeded, some_tokens
from tests.e2e.specs import FRAGILE, served_by
from tests.support.adapters import ADAPTERS
from tests.support.client import TokenStream, ask_together, fetch, first_token, new_client
from tests.support.processes import descendants, still_alive, wait_for
from tests.support.server import BASE, running_server


def some_streams(client):
    """Greedy and seeded streams on the base and on more adapters than there are slots."""
    asks = [greedy(BASE, some_tokens(20, 90), 300), seeded(BASE, some_tokens(7, 91), 1, 300)]
    asks += [greedy(adapter, some_tokens(12, 92), 300) for adapter in ADAPTERS[:2]]
    asks += [seeded(adapter, some_tokens(40, 93), 3, 60) for adapter in ADAPTERS[1:4]]
    return [TokenStream(client, ask) for ask in asks]


@served_by(FRAGILE)
@pytest.mark.parametrize("victim", [1, 0], ids=["follower", "leader"])
def test_a_rank_killed_while_streams_run_loses_none_of_them(server, reference, victim):
    starts = server.status()["instance_starts"]
    pids = server.pids()

    async def run():
        async with new_client(server) as client:
            streams = some_streams(client)
            reading = [asyncio.ensure_future(stream.read()) for stream in streams]
            await asyncio.to_thread(wait_for, "streams to run", lambda: min(len(stream.tokens) for stream in streams[:2]) >= 5)
            os.kill(pids[victim], signal.SIGKILL)
            answers = await asyncio.gather(*reading)
            assert any(len(answer.token_ids) == 300 for answer in answers)
            return answers

    reference.check_all(asyncio.run(run()))
    status = server.wait_until_idle()
    assert status["instance_starts"] == starts + 1
    assert not set(server.pids()) & set(pids), "one rank's death ends the whole instance"
    reference.check_all(ask_together(server, [greedy(model, some_tokens(9, 94), 16) for model in (BASE, *ADAPTERS)]))


@served_by(FRAGILE)
def test_requests_that_come_or_go_while_the_ranks_start_again_end_as_ever(server, reference):
    """A rank dies; before the next instance is up one client leaves, new requests come, and one waits for its whole answer all along."""
    starts, pids = server.status()["instance_starts"], server.pids()

    async def run():
        async with new_client(server) as client:
            leaver, stayer = (TokenStream(client, greedy(adapter, some_tokens(30, 98), 400)) for adapter in ADAPTERS[:2])
            leaving, staying = [await first_token(stream) for stream in (leaver, stayer)]
            whole = asyncio.ensure_future(fetch(client, greedy(BASE, some_tokens(60, 99), 300, prompt_logprobs=True)))
            os.kill(pids[1], signal.SIGKILL)
            await asyncio.to_thread(wait_for, "the instance to be down", lambda: server.get("/ready").status_code == 503)
            await leaving.aclose()
            asks = [greedy(adapter, some_tokens(11, 100), 20, prompt_logprobs=True) for adapter in (BASE, *ADAPTERS)]
            came = [asyncio.ensure_future(fetch(client, ask)) for ask in asks]
            async for _ in staying:
                pass
            return [await whole, stayer.answer(), *await asyncio.gather(*came)]

    reference.check_all(asyncio.run(run()))
    assert server.wait_until_idle()["instance_starts"] == starts + 1


@served_by(FRAGILE)
def test_a_front_killed_while_streams_run_leaves_the_ranks_and_they_drop_its_requests(server, reference):
    pids, front = server.pids(), server.front_pid()

    async def run():
        async with new_client(server) as client:
            streams = some_streams(client)
            reading = [asyncio.ensure_future(stream.read()) for stream in streams]
            await asyncio.to_thread(wait_for, "streams to run", lambda: len(streams[0].tokens) >= 5)
            os.kill(front, signal.SIGKILL)
            lost = await asyncio.gather(*reading, return_exceptions=True)
        return [error for error in lost if isinstance(error, httpx.TransportError)]

    assert asyncio.run(run()), "a stream can not outlive the front that held its connection"
    server.wait_until_ready()
    assert server.pids() == pids and server.front_pid() != front
    server.wait_until_idle()
    reference.check_all(ask_together(server, [greedy(model, some_tokens(9, 95), 16) for model in (BASE, *ADAPTERS)]))


@pytest.mark.xdist_group("stops")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
def test_a_stop_lets_running_streams_finish_then_exits_0_and_leaves_no_process(kind, tmp_path):
    with running_server(FRAGILE.command_line(tmp_path), tmp_path, stop_signal=None) as server:
        processes = descendants(server.process.pid)
        assert len(processes) == 3, "the front and two ranks"

        async def run():
            async with new_client(server) as client:
                streams = [TokenStream(client, greedy(model, some_tokens(20, 96), 200)) for model in (BASE, ADAPTERS[0])]
                reading = [asyncio.ensure_future(stream.read()) for stream in streams]
                await asyncio.to_thread(wait_for, "streams to run", lambda: min(len(stream.tokens) for stream in streams) >= 2)
                server.process.send_signal(kind)
                return await asyncio.gather(*reading)

        answers = asyncio.run(run())
        assert [len(answer.token_ids) for answer in answers] == [200, 200]
        assert wait_for("the exit", lambda: server.process.poll() is not None)
        assert server.process.returncode == 0, server.log_tail()
        assert not still_alive(processes)
        assert "Traceback" not in server.log_path.read_text()


@pytest.mark.xdist_group("stops")
def test_a_second_signal_ends_a_server_whose_streams_run_on(tmp_path):
    with running_server(FRAGILE.command_line(tmp_path), tmp_path, stop_signal=None) as server:

        async def run():
            async with new_client(server) as client:
                stream = TokenStream(client, greedy(BASE, some_tokens(20, 97), 900))
                reading = asyncio.ensure_future(stream.read())
                await asyncio.to_thread(wait_for, "the stream to run", lambda: len(stream.tokens) >= 2)
                server.process.send_signal(signal.SIGINT)
                await asyncio.to_thread(wait_for, "it to begin to stop", lambda: "stopping" in server.log_tail())
                server.process.send_signal(signal.SIGINT)
                await asyncio.gather(reading, return_exceptions=True)
                return len(stream.tokens)

        assert asyncio.run(run()) < 900
        assert wait_for("the exit", lambda: server.process.poll() is not None)
        assert server.process.returncode == 0, server.log_tail()
        assert not still_alive(server.processes)
