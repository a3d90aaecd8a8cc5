"""A conductor that plays scripts: what a stream gives is written down by the test, no instance runs.

A script is a list of steps: a Chunk comes out, an Exception is raised, an asyncio.Event is waited for. Every stream notes how it ended,
so that tests can hold the promise "every accepted request ends exactly once".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from mstar.api.text import TextProcessor
from mstar.conductor.types import Chunk, Generation, ServedModel
from mstar.errors import ModelNotFound, RequestError

Step = Chunk | Exception | asyncio.Event
Script = Callable[[Generation], Sequence[Step]]


def says(text: TextProcessor, reply: str, *, per_chunk: int = 1, stop_token_id: int | None = 2) -> Script:
    """A script that says `reply`, so many tokens in a chunk, then ends as at an eos token."""
    ids = text.encode(reply, add_special_tokens=False)
    chunks = [Chunk(ids[at : at + per_chunk], num_cached_tokens=1) for at in range(0, len(ids), per_chunk)]
    last = Chunk((), finish_reason="length") if stop_token_id is None else Chunk((), finish_reason="stop", stop_token_id=stop_token_id)
    return lambda generation: [*chunks, last]


BASE = ServedModel(id="tiny", created=1700000000, root="/models/tiny", parent=None, max_model_len=128)


class ScriptedStream:
    """One accepted request."""

    def __init__(self, rid: str, generation: Generation, steps: Sequence[Step]) -> None:
        self.rid = rid
        self.generation = generation
        self.steps = list(steps)
        self.num_given = 0
        self.ends: list[str] = []  # exactly one entry once it is over
        self.cancelled = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._play()

    async def _play(self) -> AsyncIterator[Chunk]:
        for step in self.steps:
            if self.cancelled.is_set():
                return
            if isinstance(step, asyncio.Event):
                await self._wait(step)
            elif isinstance(step, Exception):
                self.ends.append("failed")
                raise step
            else:
                self.num_given += 1
                if step.finish_reason is not None and not self.cancelled.is_set():
                    self.ends.append(step.finish_reason)
                yield step

    async def _wait(self, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.cancelled.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def cancel(self) -> None:
        if not self.ends:
            self.ends.append("cancelled")
        self.cancelled.set()


class ScriptedConductor:
    """Plays `script` for every generation."""

    def __init__(self, script: Script = lambda generation: [], adapters: Sequence[str] = ("pirate", "org/json")) -> None:
        self.script = script
        self.adapters = {name: self._adapter(name, f"/adapters/{name}") for name in adapters}
        self.streams: list[ScriptedStream] = []
        self.refuse_after: int | None = None  # generations accepted before a 429
        self.not_ready: str | None = None
        self.load_error: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.accepted = asyncio.Event()

    @staticmethod
    def _adapter(name: str, path: str) -> ServedModel:
        return ServedModel(id=name, created=1700000001, root=path, parent=BASE.id, max_model_len=None)

    def generate(self, generation: Generation) -> ScriptedStream:
        self.resolve(generation.model)
        if self.refuse_after is not None and len(self.streams) >= self.refuse_after:
            raise RequestError("Too many requests are waiting.", code="too_many_requests", status=429)
        stream = ScriptedStream(f"r{len(self.streams)}", generation, self.script(generation))
        self.streams.append(stream)
        self.accepted.set()
        return stream

    def resolve(self, model: str) -> ServedModel:
        known = {BASE.id: BASE, **self.adapters}
        if model in known:
            return known[model]
        base, _, adapter = model.partition(":")
        if base == BASE.id and adapter in self.adapters:
            return self.adapters[adapter]
        raise ModelNotFound(model)

    async def find(self, model: str) -> ServedModel:
        return self.resolve(model)

    def served_models(self, after: str | None = None, limit: int | None = None) -> tuple[list[ServedModel], bool]:
        served = [self.adapters[name] for name in sorted(self.adapters) if after in (None, BASE.id) or name > str(after)]
        served = served if after is not None else [BASE, *served]
        return served[:limit], limit is not None and len(served) > limit

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False, pinned: bool = False) -> None:
        self.calls.append(("load", name, path, load_inplace, pinned))
        if self.load_error is not None:
            raise self.load_error
        self.adapters[name] = self._adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        self.calls.append(("unload", name))
        if name not in self.adapters:
            raise RequestError(f"The lora adapter '{name}' cannot be found.", code="adapter_not_found", status=404)
        del self.adapters[name]

    def not_ready_reason(self) -> str | None:
        return self.not_ready

    def max_model_len(self) -> int:
        assert BASE.max_model_len is not None
        return BASE.max_model_len

    async def status(self) -> dict[str, Any]:
        return {"ranks": [{"tp_rank": 0, "slots": [{"slot": 0, "adapter": "pirate", "holders": 1}]}]}
