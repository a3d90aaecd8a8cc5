"""Running streams that something goes on beside: what they see are the gaps between their tokens.

    streams  ──── first tokens ────┬───────────────────────────────┬── cut
    other                          └── a load, a pause, … ─────────┘
    gaps                              counted from here to here

A stream that reaches its end meanwhile is followed by another; gaps are within streams only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from mstar.bench.completions import CompletionReader, completion_body
from mstar.bench.http1 import Client, render_post
from mstar.bench.peers import BASE_NAME
from mstar.bench.percentiles import percentile
from mstar.bench.subject import Subject
from mstar.errors import ConfigError

NUM_STREAMS = 4
STREAM_TOKENS = 1900
PROMPT_TOKENS = 32
_FIRST_TOKENS = 5
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Gap:
    """One gap: when it ended after `other` began, and how long it was, in seconds."""

    at_s: float
    length_s: float


def gap_percentile(gaps: Sequence[Gap], percent: float) -> float:
    """A percentile of their lengths, in seconds."""
    return percentile(sorted(gap.length_s for gap in gaps), percent)


def gaps_summary(gaps: Sequence[Gap]) -> dict[str, float]:
    """Their number and percentiles, for JSON."""
    return {"gaps": len(gaps), **{f"p{percent}_s": gap_percentile(gaps, percent) for percent in (50, 90, 99, 100)}}


async def gaps_beside(subject: Subject, seed: int, other: Callable[[], Awaitable[object]], max_tokens: int = STREAM_TOKENS) -> list[Gap]:
    """Run `NUM_STREAMS` greedy streams of the base for as long as `other` takes. Raises ConfigError where a stream fails."""
    readers: list[list[CompletionReader]] = [[] for _ in range(NUM_STREAMS)]
    address = subject.server.address
    client = Client(address, time.perf_counter)

    async def stream(number: int) -> None:
        for turn in range(1 << 30):
            prompt = subject.prompt(PROMPT_TOKENS, seed, f"stream {number}", turn)
            reader = CompletionReader()
            readers[number].append(reader)
            await client.send(render_post(address, "/v1/completions", completion_body(BASE_NAME, prompt, max_tokens), None), reader)
            if (failure := reader.failure()) is not None:
                raise ConfigError(f"a stream failed: {failure}")

    streams = asyncio.gather(*map(stream, range(NUM_STREAMS)))
    try:
        await _first_tokens(readers, streams)
        began = time.perf_counter()
        beside = asyncio.ensure_future(_as_coroutine(other))
        await asyncio.wait((beside, streams), return_when=asyncio.FIRST_COMPLETED)
        if streams.done():
            beside.cancel()
            await streams
        await beside
        ended = time.perf_counter()
    finally:
        streams.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConfigError, OSError):
            await streams
        await client.aclose()
    return [
        Gap(after - began, after - before)
        for reader in chain.from_iterable(readers)
        for before, after in pairwise(reader.event_times)
        if began <= before and after <= ended
    ]


async def _as_coroutine(other: Callable[[], Awaitable[object]]) -> None:
    await other()


async def _first_tokens(readers: Sequence[Sequence[CompletionReader]], streams: asyncio.Future[list[None]]) -> None:
    """Until every stream has a few tokens: what their own prompts cost is over then."""
    until = time.perf_counter() + _START_TIMEOUT_S
    while not all(any(len(reader.event_times) >= _FIRST_TOKENS for reader in one) for one in readers):
        if streams.done():
            await streams
        if time.perf_counter() > until:
            raise ConfigError(f"the streams did not start within {_START_TIMEOUT_S:g} s")
        await asyncio.sleep(0.02)
