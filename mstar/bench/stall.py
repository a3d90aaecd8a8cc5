"""`mstar bench stall`: do cold adapters hold running streams up?

    cold      few slots, a host tier as small: every request of the churn reads its adapter and evicts another
    resident  as many slots as adapters, all of them in: the same requests, no read

Both servers stay up and take turns, a pair per round. In each turn 4 base streams run; beside them every adapter is asked once for a few
tokens. What counts are the gaps between two tokens of those streams while the churn runs, pooled over all rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import uvloop
from rich.console import Console

from mstar.bench.load import Destination, LoadOutcome, RequestRecord, run_load
from mstar.bench.peers import BASE_NAME, Contender, make_adapters, our_command, running
from mstar.bench.percentiles import percentile
from mstar.bench.plan import PlannedRequest
from mstar.bench.prompts import token_prompt
from mstar.bench.serve import choose_pool
from mstar.bench.server import ask_server
from mstar.bench.targets import Target
from mstar.errors import ConfigError

NUM_STREAMS = 4
_STREAM_TOKENS = 800
_CHURN_CONCURRENCY = 2
_CHURN_TOKENS = 8
_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Side:
    """One of the two servers: pooled gaps in seconds, and the leader's own account of the whole run."""

    label: str
    gaps_s: tuple[float, ...]
    churn_s: float
    num_reads: int
    longest_admit_s: float
    blocked_on_reads_s: float

    def gap(self, percent: float) -> float:
        """A percentile of the gaps."""
        return percentile(sorted(self.gaps_s), percent)


def measure_stalls(model: Path, num_adapters: int, slots: int, rounds: int, console: Console) -> tuple[Side, Side]:
    """The cold side and the resident one. Raises ConfigError where a server does not start or a request fails."""
    adapters = make_adapters(model, num_adapters)
    with contextlib.ExitStack() as stack:
        sides = []
        for label, max_loras in (("cold", slots), ("resident", num_adapters)):
            command = (*our_command(model, adapters, max_loras, host_tier=max_loras), "--max-passes", "1000")
            url, _, _ = stack.enter_context(running(Contender(f"mstar, {label}", command), console))
            sides.append(_Turns(label, url))
        for side in sides:
            side.turn(num_adapters, seed=0)  # warm: every adapter once
            side.forget()
        for index in range(rounds):
            for side in sides if index % 2 == 0 else reversed(sides):
                with console.status(f"round {index + 1} of {rounds}, {side.label}"):
                    side.turn(num_adapters, seed=1 + index)
        cold, resident = (side.result() for side in sides)
    return cold, resident


class _Turns:
    """One server and what was seen of it."""

    def __init__(self, label: str, url: str) -> None:
        self.label = label
        self._url = url
        self._server = ask_server(url, None)
        self._pool = choose_pool(self._server, BASE_NAME, 40_000, is_text=False)
        self._gaps: list[float] = []
        self._churn_s = 0.0
        self._reads_before = self._reads()

    def forget(self) -> None:
        self._gaps.clear()
        self._churn_s = 0.0
        self._reads_before = self._reads()

    def turn(self, num_adapters: int, seed: int) -> None:
        """One load: streams, and the churn beside them from their first tokens on."""
        streams, churn = uvloop.run(self._run(num_adapters, seed))
        failed = [record.failure for record in (*streams, *churn.records) if record.failure is not None]
        if failed:
            raise ConfigError(f"{self.label}: {failed[0]}")
        self._churn_s += churn.duration_s
        first_s = churn.records[0].start_s
        for record in streams:
            times = [time_s for time_s in record.event_times_s if first_s <= time_s <= first_s + churn.duration_s]
            self._gaps += [after - before for before, after in pairwise(times)]

    def result(self) -> Side:
        rank = self._status()
        return Side(
            self.label,
            tuple(self._gaps),
            self._churn_s,
            self._reads() - self._reads_before,
            rank["longest_admit_s"],
            rank["blocked_on_reads_s"],
        )

    async def _run(self, num_adapters: int, seed: int) -> tuple[Sequence[RequestRecord], LoadOutcome]:
        def planned(count: int, target: Callable[[int], Target], stream: str) -> list[PlannedRequest]:
            prompts = [token_prompt(self._pool, _PROMPT_TOKENS, seed, stream, index) for index in range(count)]
            return [PlannedRequest(index, target(index), prompt, None) for index, prompt in enumerate(prompts)]

        names = self._server.adapter_names(BASE_NAME)[:num_adapters]
        base = planned(NUM_STREAMS, lambda index: Target(BASE_NAME, is_adapter=False), "streams")
        asked = planned(num_adapters, lambda index: Target(names[index], is_adapter=True), "churn")
        both = [
            run_load(base, self._destination(_STREAM_TOKENS), NUM_STREAMS, lambda record: None),
            run_load(asked, self._destination(_CHURN_TOKENS), _CHURN_CONCURRENCY, lambda record: None),
        ]
        streams, churn = await asyncio.gather(*both)
        return streams.records, churn

    def _destination(self, max_tokens: int) -> Destination:
        return Destination(self._server.address, None, max_tokens, 600.0)

    def _status(self) -> dict[str, float]:
        leader: dict[str, float] = httpx.get(f"{self._url}/mstar/status", timeout=30).json()["ranks"][0]
        return leader

    def _reads(self) -> int:
        return int(self._status()["reads"])
