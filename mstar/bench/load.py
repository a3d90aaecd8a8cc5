"""The timed part: send planned requests, note when each token event came. One asyncio loop (uvloop in the commands), one thread.

Everything that can be done before the clock starts is: prompts, bodies and whole HTTP requests are rendered, garbage is collected and what
lives is frozen, so that no collection pause of ours shows as a gap of the server's. Every request ends exactly once, as one record.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mstar.bench.completions import CompletionReader, completion_body
from mstar.bench.http1 import Address, Client, render_post
from mstar.bench.plan import PlannedRequest
from mstar.bench.targets import Target


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, over. Times in seconds after the start of the load. `failure` is None if it counts."""

    index: int
    target: Target
    start_s: float
    end_s: float
    event_times_s: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """All records, by index, the wall time from first send to last end, and the CPU time that this process used meanwhile."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    cpu_s: float
    max_send_lag_s: float  # how late the latest send of an open loop was; 0 in a closed one


@dataclass(frozen=True, slots=True)
class Destination:
    """Where requests go and what each of them asks for besides its target and prompt."""

    address: Address
    api_key: str | None
    max_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Ready:
    planned: PlannedRequest
    wire: bytes


async def run_load(
    planned: Sequence[PlannedRequest],
    destination: Destination,
    concurrency: int | None,
    on_done: Callable[[RequestRecord], None],
) -> LoadOutcome:
    """Send all of `planned`: at most `concurrency` at once, or, if it is None, each at its offset. `on_done` hears of each end."""
    ready = [_render(request, destination) for request in planned]
    gc.collect()
    gc.freeze()
    load = _Load(destination, on_done)
    try:
        await (load.open_loop(ready) if concurrency is None else load.closed_loop(ready, concurrency))
        return load.outcome()
    finally:
        await load.client.aclose()
        gc.unfreeze()


def _render(planned: PlannedRequest, destination: Destination) -> _Ready:
    body = completion_body(planned.target.model, planned.prompt, destination.max_tokens)
    return _Ready(planned, render_post(destination.address, "/v1/completions", body, destination.api_key))


class _Load:
    """One load under way. Its clock reads 0 at the start."""

    def __init__(self, destination: Destination, on_done: Callable[[RequestRecord], None]) -> None:
        self.client = Client(destination.address, self.now)
        self._timeout_s = destination.timeout_s
        self._on_done = on_done
        self._records: list[RequestRecord] = []
        self._max_lag_s = 0.0
        self._cpu_start_s = time.process_time()
        self._start_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start_s

    async def closed_loop(self, ready: Sequence[_Ready], concurrency: int) -> None:
        waiting = iter(ready)

        async def sender() -> None:
            for request in waiting:
                await self._send(request)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(ready))):
                group.create_task(sender())

    async def open_loop(self, ready: Sequence[_Ready]) -> None:
        async with asyncio.TaskGroup() as group:
            for request in ready:
                offset_s = request.planned.offset_s
                assert offset_s is not None
                await asyncio.sleep(max(0.0, offset_s - self.now()))
                self._max_lag_s = max(self._max_lag_s, self.now() - offset_s)
                group.create_task(self._send(request))

    async def _send(self, request: _Ready) -> None:
        reader = CompletionReader()
        start_s = self.now()
        broken: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.client.send(request.wire, reader)
        except TimeoutError:
            broken = f"timed out after {self._timeout_s:g} s"
        except OSError as error:
            # a server may end its reply by closing: no failure if it had said that the text is complete
            broken = None if reader.is_finished else (error.strerror or str(error) or type(error).__name__)
        self._keep(request.planned, reader, start_s, broken)

    def _keep(self, planned: PlannedRequest, reader: CompletionReader, start_s: float, broken: str | None) -> None:
        record = RequestRecord(
            index=planned.index,
            target=planned.target,
            start_s=start_s,
            end_s=self.now(),
            event_times_s=tuple(reader.event_times),
            prompt_tokens=reader.prompt_tokens,
            output_tokens=reader.output_tokens,
            failure=broken or reader.failure(),
        )
        self._records.append(record)
        self._on_done(record)

    def outcome(self) -> LoadOutcome:
        first_s = min((record.start_s for record in self._records), default=0.0)
        last_s = max((record.end_s for record in self._records), default=0.0)
        return LoadOutcome(
            records=tuple(sorted(self._records, key=lambda record: record.index)),
            duration_s=last_s - first_s,
            cpu_s=time.process_time() - self._cpu_start_s,
            max_send_lag_s=self._max_lag_s,
        )
