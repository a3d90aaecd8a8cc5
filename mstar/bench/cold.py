"""`mstar bench cold`: what an adapter that is nowhere costs a lone request, against reading and hashing the same file alone."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from mstar.bench.peers import Contender, make_adapters, our_command, running
from mstar.bench.percentiles import median
from mstar.bench.streams import gap_percentile, gaps_beside
from mstar.bench.subject import Subject

_SLOTS = 4  # and as many places in the host tier: an adapter that was asked five adapters ago is cold
_PROMPT_TOKENS = 32
_MAX_TOKENS = 2
_STEPS_S = 2.0


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
        return (median(self.cold_s) - median(self.warm_s)) / (1.2 * median(self.read_s) + self.step_s)


def measure_cold(model: Path, rounds: int, num_adapters: int, console: Console) -> ColdStart:
    """Each adapter asked twice in a row on an idle server with fewer slots: cold, then warm.

    Raises ConfigError where the server does not start or a request fails.
    """
    adapters = make_adapters(model, num_adapters)
    warm, cold, read = [], [], []
    with running(Contender("mstar", our_command(model, adapters, _SLOTS, host_tier=_SLOTS)), console) as (url, _, _):
        subject = Subject.at(url)
        names = subject.adapters(num_adapters)
        with console.status("asking each adapter cold and warm"):
            for index in range(rounds + 1):
                for name, folder in zip(names, adapters, strict=True):
                    first = _ttft(subject, name, f"cold {index}")
                    again = _ttft(subject, name, f"warm {index}")
                    took = _read_alone(folder / "adapter_model.safetensors")
                    if index:  # the first round warms the page cache
                        cold.append(first)
                        warm.append(again)
                        read.append(took)
            steps = uvloop.run(gaps_beside(subject, 0, lambda: asyncio.sleep(_STEPS_S)))
    return ColdStart(tuple(warm), tuple(cold), tuple(read), gap_percentile(steps, 50))


def _ttft(subject: Subject, name: str, stream: str) -> float:
    return uvloop.run(subject.ttfts([name], [subject.prompt(_PROMPT_TOKENS, 0, f"{name} {stream}", 0)], _MAX_TOKENS))[0]


def _read_alone(path: Path) -> float:
    began = time.perf_counter()
    hashlib.sha256(path.read_bytes()).digest()
    return time.perf_counter() - began
