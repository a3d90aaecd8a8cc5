"""`mstar bench serve`: one load against one running server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import uvloop
from rich.console import Console

from mstar.bench.load import Destination, LoadOutcome, RequestRecord, run_load
from mstar.bench.plan import Workload, plan_load, plan_warmup
from mstar.bench.prompts import middle_ids
from mstar.bench.results import RunResult, ServeResult
from mstar.bench.server import Server, ask_token_pool
from mstar.bench.summary import summarize_run
from mstar.bench.tables import LoadProgress, load_progress
from mstar.bench.targets import Spread, list_targets
from mstar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """Who is asked and with which prompts: what `serve` and `suite` have in common."""

    base: str
    adapters: tuple[str, ...]
    pool: Sequence[int]  # token ids that prompts may hold; empty for text
    prompt_tokens: int
    max_tokens: int
    seed: int
    is_text: bool
    timeout_s: float

    def with_load(self, adapters: Sequence[str], seed: int) -> Choice:
        """The same with other adapters and another seed."""
        return replace(self, adapters=tuple(adapters), seed=seed)


@dataclass(frozen=True, slots=True)
class Pace:
    """How many requests, how fast, over whom. Exactly one of `concurrency` and `request_rate` is set."""

    num_requests: int
    concurrency: int | None
    request_rate: float | None
    warmup: int
    spread: Spread
    zipf_exponent: float = 1.0
    include_base: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, over: its numbers and what they were made of."""

    run: RunResult
    records: tuple[RequestRecord, ...]


def choose_adapters(server: Server, base: str, named: Sequence[str], auto: str | None) -> tuple[str, ...]:
    """The adapters in play: those named, or with `auto` all that are served. Raises ConfigError if that is none or unclear."""
    if auto is None:
        return tuple(named)
    if auto != "auto" or named:
        raise ConfigError("--adapters takes only `auto`, and not beside --adapter NAME")
    served = server.adapter_names(base)
    if not served:
        raise ConfigError(f"--adapters auto: {server.address.url}/v1/models lists no adapter (an entry with a parent)")
    return served


def choose_pool(server: Server, base: str, vocab_size: int | None, *, is_text: bool) -> Sequence[int]:
    """The token ids that prompts may hold. Raises ConfigError if there is no way to know."""
    if is_text:
        return ()
    return middle_ids(vocab_size) if vocab_size is not None else ask_token_pool(server, base)


def make_workload(choice: Choice, pace: Pace) -> Workload:
    """The load that `pace` makes of `choice`. Raises ConfigError if the spread and the adapters do not go together."""
    return Workload(
        targets=list_targets(choice.base, choice.adapters, pace.spread, include_base=pace.include_base),
        num_requests=pace.num_requests,
        concurrency=pace.concurrency,
        request_rate=pace.request_rate,
        prompt_tokens=choice.prompt_tokens,
        max_tokens=choice.max_tokens,
        seed=choice.seed,
        warmup=pace.warmup,
        spread=pace.spread,
        zipf_exponent=pace.zipf_exponent,
        is_text=choice.is_text,
        timeout_s=choice.timeout_s,
    )


def measure(server: Server, workload: Workload, pool: Sequence[int], progress: LoadProgress, name: str) -> Measured:
    """Warm up, then run the load once, on an event loop of its own."""
    destination = Destination(server.address, server.api_key, workload.max_tokens, workload.timeout_s)
    warmup, planned = plan_warmup(workload, pool), plan_load(workload, pool)

    async def run() -> tuple[str, LoadOutcome]:
        if warmup:
            progress.begin(f"{name} warm-up")
            await run_load(warmup, destination, workload.concurrency or len(workload.targets), progress.on_done)
        progress.begin(name)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        return started_at, await run_load(planned, destination, workload.concurrency, progress.on_done)

    started_at, outcome = uvloop.run(run())
    return Measured(summarize_run(outcome, workload.max_tokens, started_at), outcome.records)


def run_serve(server: Server, workload: Workload, pool: Sequence[int], console: Console, label: str, command: str) -> ServeResult:
    """One load, measured under a progress bar on `console`. The result holds all records."""
    with load_progress(console, workload.warmup + workload.num_requests) as progress:
        measured = measure(server, workload, pool, progress, label)
    return ServeResult(label, command, server.address.url, server.version, workload, measured.run, measured.records)
