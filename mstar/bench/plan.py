"""What will be sent, worked out before the clock starts: targets × prompts × arrivals. Pure and seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mstar.bench.arrivals import poisson_offsets
from mstar.bench.prompts import Prompt, text_prompt, token_prompt
from mstar.bench.targets import Spread, Target, choose_targets


class Workload(msgspec.Struct, frozen=True):
    """One load, in full: with a server and a token pool it fixes every byte that is sent. Saved with the results.

    Exactly one of `concurrency` (closed loop) and `request_rate` (open loop, requests per second) is set.
    """

    targets: tuple[Target, ...]
    num_requests: int
    concurrency: int | None
    request_rate: float | None
    prompt_tokens: int
    max_tokens: int
    seed: int
    warmup: int = 0
    spread: Spread = Spread.ROUND_ROBIN
    zipf_exponent: float = 1.0
    is_text: bool = False  # prompts of words instead of token ids
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be. `offset_s` is when to send it after the start; None in a closed loop: when there is room."""

    index: int
    target: Target
    prompt: Prompt
    offset_s: float | None


def plan_load(workload: Workload, pool: Sequence[int]) -> list[PlannedRequest]:
    """The measured requests, in order of sending. `pool`: the token ids that prompts may hold (unused for text)."""
    chosen = choose_targets(workload.targets, workload.num_requests, workload.spread, workload.zipf_exponent, workload.seed)
    offsets: Sequence[float | None] = [None] * workload.num_requests
    if workload.request_rate is not None:
        offsets = poisson_offsets(workload.num_requests, workload.request_rate, workload.seed)
    return [
        PlannedRequest(index, target, _prompt(workload, pool, "load", index), offset_s)
        for index, (target, offset_s) in enumerate(zip(chosen, offsets, strict=True))
    ]


def plan_warmup(workload: Workload, pool: Sequence[int]) -> list[PlannedRequest]:
    """Requests that are sent first and not counted: the targets in turn, so that every adapter is asked for; other prompts."""
    chosen = choose_targets(workload.targets, workload.warmup, Spread.ROUND_ROBIN, 0.0, workload.seed)
    return [PlannedRequest(index, target, _prompt(workload, pool, "warmup", index), None) for index, target in enumerate(chosen)]


def _prompt(workload: Workload, pool: Sequence[int], stream: str, index: int) -> Prompt:
    if workload.is_text:
        return text_prompt(workload.prompt_tokens, workload.seed, stream, index)
    return token_prompt(pool, workload.prompt_tokens, workload.seed, stream, index)
