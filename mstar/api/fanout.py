"""The sequences of one request, running side by side (n > 1, list prompts), as one stream of deltas.

Front process, asyncio loop. Invariants: all sequences are accepted or none; every accepted one is cancelled in `finally`, so it ends
exactly once whatever happened (client gone, stop string, another sequence's failure); cancel is idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from mstar.api.choice import Choice, Delta
from mstar.conductor.types import ConductorApi, Generation, Stream
from mstar.errors import RequestError


@dataclass(frozen=True)
class Job:
    """One sequence: what to generate and the choice that shows it."""

    generation: Generation
    choice: Choice


async def run_jobs(conductor: ConductorApi, jobs: Sequence[Job]) -> AsyncGenerator[tuple[Choice, Delta]]:
    """Start every job and give their deltas as they come. Raises RequestError where one is refused or fails: then all end."""
    streams: list[Stream] = []
    try:
        for job in jobs:
            streams.append(conductor.generate(job.generation))
        if len(jobs) == 1:
            async with aclosing(_deltas(jobs[0].choice, streams[0])) as deltas:
                async for item in deltas:
                    yield item
        else:
            async with aclosing(_merged(jobs, streams)) as deltas:
                async for item in deltas:
                    yield item
    finally:
        for stream in streams:
            stream.cancel()


async def _deltas(choice: Choice, stream: Stream) -> AsyncGenerator[tuple[Choice, Delta]]:
    async for chunk in stream:
        delta = choice.feed(chunk)
        if choice.finished:  # before anything waits on the client: a stop string frees its slot at once
            stream.cancel()
        yield choice, delta
        if choice.finished:
            return
    raise RequestError("The request was stopped by the server.", code="request_stopped", status=503)


async def _merged(jobs: Sequence[Job], streams: Sequence[Stream]) -> AsyncGenerator[tuple[Choice, Delta]]:
    """Deltas of several streams in the order in which they come; the first failure ends all."""
    arrived: asyncio.Queue[tuple[Choice, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(job: Job, stream: Stream) -> None:
        try:
            async with aclosing(_deltas(job.choice, stream)) as deltas:
                async for item in deltas:
                    arrived.put_nowait(item)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    pumps = [asyncio.create_task(pump(job, stream)) for job, stream in zip(jobs, streams, strict=True)]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
