"""`mstar bench prefill` and `mstar bench cold`: what long prompts do to running streams, and what a cold adapter costs a lone request."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from mstar.bench.load import Destination, run_load
from mstar.bench.peers import BASE_NAME, Contender, make_adapters, our_command, running
from mstar.bench.percentiles import percentile
from mstar.bench.plan import PlannedRequest
from mstar.bench.prompts import token_prompt
from mstar.bench.serve import choose_pool
from mstar.bench.server import Server, ask_server
from mstar.bench.streams import Gap, gaps_beside
from mstar.bench.targets import Target
from mstar.errors import ConfigError

LONG_PROMPT = 1500
_SLOTS = 4
_SHORT_PROMPT = 32
_PAUSE_S = 6.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PrefillSide:
    """Gaps of the running streams, and TTFT of the long prompts beside them and of as long ones alone; seconds."""

    label: str
    gaps: tuple[Gap, ...]
    ttft_s: tuple[float, ...]
    ttft_alone_s: tuple[float, ...]

    def gap(self, percent: float) -> float:
        """A percentile of the gaps."""
        return percentile(sorted(gap.length_s for gap in self.gaps), percent)

    def summary(self) -> dict[str, object]:
        """All but the single gaps."""
        ttft = {"ttft_s": self.ttft_s, "ttft_alone_s": self.ttft_alone_s}
        return {"gaps": len(self.gaps), **{f"p{percent}_s": self.gap(percent) for percent in (50, 90, 99, 100)}, **ttft}


@dataclass(frozen=True)
class ColdStart:
    """Seconds: TTFT of adapters that are in a slot and of ones that are nowhere; the same files read and hashed alone; a step."""

    warm_s: tuple[float, ...]
    cold_s: tuple[float, ...]
    read_s: tuple[float, ...]
    step_s: float

    @property
    def ratio(self) -> float:
        """(cold - warm) over 1.2 times the reading plus one step: at most 1 is the bar."""
        extra_s = statistics.median(self.cold_s) - statistics.median(self.warm_s)
        return extra_s / (1.2 * statistics.median(self.read_s) + self.step_s)


def measure_prefill(model: Path, rounds: int, prompts: int, console: Console) -> list[PrefillSide]:
    """No prompt, prompts on the base, prompts on an adapter, in turn. Raises ConfigError where a server or a request fails."""
    adapters = make_adapters(model, _SLOTS)
    command = (*our_command(model, adapters, _SLOTS, host_tier=_SLOTS), "--no-enable-prefix-caching")
    gaps: dict[str, list[Gap]] = {"none": [], "base": [], "adapter": []}
    beside: dict[str, list[float]] = {label: [] for label in gaps}
    alone: dict[str, list[float]] = {label: [] for label in gaps}
    with running(Contender("mstar", command), console) as (url, _, _):
        server = ask_server(url, None)
        pool = choose_pool(server, BASE_NAME, 40_000, is_text=False)
        names = {"base": BASE_NAME, "adapter": server.adapter_names(BASE_NAME)[0]}
        for name in names.values():
            uvloop.run(_ttfts(server, pool, name, LONG_PROMPT, 1, "warm"))
        for index in range(rounds):
            for label in list(gaps) if index % 2 == 0 else reversed(list(gaps)):
                with console.status(f"round {index + 1} of {rounds}, prompts: {label}"):

                    async def other(label: str = label, index: int = index) -> None:
                        if label == "none":
                            await asyncio.sleep(_PAUSE_S)
                        else:
                            beside[label] += await _ttfts(server, pool, names[label], LONG_PROMPT, prompts, f"beside {index}")

                    gaps[label] += uvloop.run(gaps_beside(server.address, pool, index, other))
                    if label != "none":
                        alone[label] += uvloop.run(_ttfts(server, pool, names[label], LONG_PROMPT, prompts, f"alone {index}"))
    return [PrefillSide(label, tuple(gaps[label]), tuple(beside[label]), tuple(alone[label])) for label in gaps]


def measure_cold(model: Path, rounds: int, num_adapters: int, console: Console) -> ColdStart:
    """Each adapter asked twice in a row on an idle server with fewer slots: cold, then warm. Raises ConfigError as above."""
    adapters = make_adapters(model, num_adapters)
    warm, cold, read, steps = [], [], [], []
    with running(Contender("mstar", our_command(model, adapters, _SLOTS, host_tier=_SLOTS)), console) as (url, _, _):
        server = ask_server(url, None)
        pool = choose_pool(server, BASE_NAME, 40_000, is_text=False)
        names = server.adapter_names(BASE_NAME)[:num_adapters]
        with console.status("asking each adapter cold and warm"):
            for index in range(rounds + 1):
                for name, folder in zip(names, adapters, strict=True):
                    first, again = (
                        uvloop.run(_ttfts(server, pool, name, _SHORT_PROMPT, 1, f"{kind} {index}"))[0] for kind in ("cold", "warm")
                    )
                    began = time.perf_counter()
                    hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).digest()
                    took = time.perf_counter() - began
                    if index:  # the first round warms the page cache
                        cold.append(first)
                        warm.append(again)
                        read.append(took)
            steps = [gap.length_s for gap in uvloop.run(gaps_beside(server.address, pool, 0, lambda: asyncio.sleep(2)))]
    return ColdStart(tuple(warm), tuple(cold), tuple(read), statistics.median(steps))


async def _ttfts(server: Server, pool: Sequence[int], name: str, prompt_tokens: int, count: int, stream: str) -> list[float]:
    """TTFT of `count` requests one after another, each of another prompt and few tokens."""
    planned = [
        PlannedRequest(
            index, Target(name, is_adapter=name != BASE_NAME), token_prompt(pool, prompt_tokens, 7, f"{name} {stream}", index), None
        )
        for index in range(count)
    ]
    outcome = await run_load(planned, Destination(server.address, None, 2, _TIMEOUT_S), 1, lambda record: None)
    for record in outcome.records:
        if record.failure is not None:
            raise ConfigError(record.failure)
    return [record.event_times_s[0] - record.start_s for record in outcome.records]
