"""A request as the front holds it: what was asked, what was sent so far, and the stream that its client reads.

Front process, asyncio loop. The front alone can resume a request: prompt, tokens sent and sampling state are all a rank needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from mstar.conductor.registry import Adapter
from mstar.conductor.types import Chunk, Generation
from mstar.errors import RequestError
from mstar.wire.front_rank import Ingest


class RequestStream:
    """The client's end of a request: chunks in order, then the end, once."""

    def __init__(self, rid: str, on_cancel: Callable[[], None]) -> None:
        self.rid = rid
        self._on_cancel = on_cancel
        self._queue: asyncio.Queue[Chunk | RequestError | None] = asyncio.Queue()
        self._ended = False

    def put(self, chunk: Chunk) -> None:
        """Conductor: the next chunk."""
        self._queue.put_nowait(chunk)

    def end(self, error: RequestError | None = None) -> None:
        """Conductor: no more chunks."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks. Raises RequestError where the request failed."""
        while not self._ended:
            item = await self._queue.get()
            if isinstance(item, Chunk):
                yield item
                continue
            self._ended = True
            if item is not None:
                raise item

    def cancel(self) -> None:
        """Stop generating; idempotent."""
        self._on_cancel()


@dataclass
class LiveRequest:
    """One accepted request that has not ended."""

    rid: str
    generation: Generation
    adapter: Adapter | None
    stream: RequestStream
    accepted_at: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    last_token_at: float | None = None
    is_open: bool = False  # ranks of the present instance were told of it
    was_open: bool = False  # ranks were told of it, of whatever instance
    is_proven: bool = False  # it had a token of the present instance
    deadline: asyncio.TimerHandle | None = None

    @property
    def label(self) -> str | None:
        """The client's name of its adapter; None is the base."""
        return self.adapter.name if self.adapter is not None else None

    def ingest(self) -> Ingest:
        """What opens it on a rank, from wherever it stands."""
        adapter = self.adapter
        return Ingest(
            rid=self.rid,
            prompt=self.generation.prompt,
            sampling=self.generation.sampling,
            output=tuple(self.output),
            adapter=adapter.generation if adapter is not None else None,
            cache_key=bytes.fromhex(adapter.digest) if adapter is not None else b"",
        )
