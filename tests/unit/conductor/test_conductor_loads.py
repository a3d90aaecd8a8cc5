"""Loads under way: usable on every rank, or refused with the first rank's reason."""

from __future__ import annotations

import asyncio

import pytest

from mstar.conductor.loads import PendingLoads
from mstar.errors import AdapterError
from mstar.wire.front_rank import LoadResult


def play(script):
    """Run a coroutine function on a loop of its own."""
    return asyncio.run(script())


def test_a_load_ends_when_every_rank_answered():
    async def script():
        loads = PendingLoads(3)
        load_id = loads.begin()
        waiting = asyncio.ensure_future(loads.wait(load_id, 30))
        for tp_rank in (2, 0):
            loads.answered(tp_rank, LoadResult(load_id))
            await asyncio.sleep(0)
            assert not waiting.done()
        loads.answered(0, LoadResult(load_id))  # the same rank again is no other rank
        await asyncio.sleep(0)
        assert not waiting.done()
        loads.answered(1, LoadResult(load_id))
        await waiting

    play(script)


def test_c77_a_refusal_by_any_rank_is_the_loads_and_the_lowest_ranks_reason_is_told():
    async def script():
        loads = PendingLoads(3)
        load_id = loads.begin()
        loads.answered(2, LoadResult(load_id, "torn", "rank 2 says torn", 400))
        loads.answered(0, LoadResult(load_id))
        loads.answered(1, LoadResult(load_id, "gone", "rank 1 says gone", 404))
        with pytest.raises(AdapterError, match="rank 1 says gone") as caught:
            await loads.wait(load_id, 30)
        assert (caught.value.code, caught.value.status) == ("gone", 404)

    play(script)


def test_ranks_that_do_not_answer_are_named():
    async def script():
        loads = PendingLoads(3)
        load_id = loads.begin()
        loads.answered(1, LoadResult(load_id))
        with pytest.raises(AdapterError, match=r"ranks \[0, 2\] did not answer") as caught:
            await loads.wait(load_id, 0)
        assert caught.value.status == 503
        loads.answered(0, LoadResult(load_id))  # too late: nobody waits

    play(script)


def test_loads_are_told_apart_and_answers_to_none_are_ignored():
    async def script():
        loads = PendingLoads(1)
        first, second = loads.begin(), loads.begin()
        assert first != second
        loads.answered(0, LoadResult(99))
        loads.answered(0, LoadResult(0))
        loads.answered(0, LoadResult(second, "torn", "no"))
        loads.answered(0, LoadResult(first))
        await loads.wait(first, 30)
        with pytest.raises(AdapterError):
            await loads.wait(second, 30)

    play(script)


def test_an_instance_that_goes_down_fails_every_load_under_way():
    async def script():
        loads = PendingLoads(2)
        ids = [loads.begin(), loads.begin()]
        waits = [asyncio.ensure_future(loads.wait(load_id, 30)) for load_id in ids]
        await asyncio.sleep(0)
        loads.fail_all(AdapterError("the ranks went down", code="instance_restarted", status=503))
        for result in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(result, AdapterError) and result.code == "instance_restarted"
        loads.fail_all(AdapterError("again", code="instance_restarted", status=503))
        loads.answered(0, LoadResult(ids[0]))

    play(script)
