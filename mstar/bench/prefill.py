"""`mstar bench prefill`: what long prompts do to running streams, and what those prompts wait for it.

    none      no prompt: a pause
    base      prompts of 1,500 tokens on the base, one after another beside the streams; then as many alone
    adapter   the same on an adapter

One server without a prefix cache; the three take turns.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console

from mstar.bench.peers import BASE_NAME, Contender, make_adapters, our_command, running
from mstar.bench.streams import Gap, gaps_beside, gaps_summary
from mstar.bench.subject import Subject

_PROMPT_TOKENS = 1500
_MAX_TOKENS = 2
_PAUSE_S = 6.0


@dataclass
class PrefillSide:
    """One of the three: gaps of the running streams, and TTFT in seconds of the prompts beside them and of as long ones alone."""

    label: str
    model: str | None
    gaps: list[Gap] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    ttft_alone_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """All but the single gaps."""
        return {**gaps_summary(self.gaps), "ttft_s": self.ttft_s, "ttft_alone_s": self.ttft_alone_s}

    def turn(self, subject: Subject, index: int, prompts: int) -> None:
        """The prompts beside streams, then alone."""

        async def beside() -> None:
            if self.model is None:
                await asyncio.sleep(_PAUSE_S)
            else:
                self.ttft_s += await self._ask(subject, prompts, f"beside {index}")

        self.gaps += uvloop.run(gaps_beside(subject, index, beside))
        if self.model is not None:
            self.ttft_alone_s += uvloop.run(self._ask(subject, prompts, f"alone {index}"))

    def warm(self, subject: Subject) -> None:
        """One prompt that does not count."""
        uvloop.run(self._ask(subject, 1, "warm"))

    async def _ask(self, subject: Subject, count: int, stream: str) -> list[float]:
        model = self.model or BASE_NAME
        prompts = [subject.prompt(_PROMPT_TOKENS, 0, f"{model} {stream}", index) for index in range(count)]
        return await subject.ttfts([model] * count, prompts, _MAX_TOKENS)


def measure_prefill(model: Path, rounds: int, prompts: int, console: Console) -> list[PrefillSide]:
    """The three sides, that without a prompt first. Raises ConfigError where the server does not start or a request fails."""
    adapters = make_adapters(model, 1)
    command = (*our_command(model, adapters, max_loras=1, host_tier=1), "--no-enable-prefix-caching")
    with running(Contender("mstar", command), console) as (url, _, _):
        subject = Subject.at(url)
        sides = [PrefillSide("none", None), PrefillSide("base", BASE_NAME), PrefillSide("adapter", subject.adapters(1)[0])]
        for side in sides:
            side.warm(subject)
        for index in range(rounds):
            for side in sides if index % 2 == 0 else reversed(sides):
                with console.status(f"round {index + 1} of {rounds}, prompts: {side.label}"):
                    side.turn(subject, index, prompts)
    return sides
