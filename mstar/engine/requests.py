"""Requests as every rank knows them: what was asked, and the tokens so far.

Step thread. The same on every rank at the same step: output tokens come from the sampler, which every rank runs alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mstar.engine.resources.base import ResourceReqConfig
from mstar.types import SamplingParams, TokenLogprobs


@dataclass
class RequestState:
    """One live request. `num_resumed` output tokens were sent before this instance started."""

    rid: str
    prompt: tuple[int, ...]
    output: list[int]
    sampling: SamplingParams
    num_resumed: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist: prompt and output."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, count: int) -> list[int]:
        """Tokens at positions [start, start + count) of prompt + output."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : start - split + count]
        stop = start + count
        return [*self.prompt[start:stop], *self.output[: max(0, stop - split)]]


def request_state(rid: str, config: ResourceReqConfig) -> RequestState | None:
    """The state of a request with tokens; None for one without (a pin)."""
    if config.sampling is None:
        return None
    return RequestState(rid, config.prompt, list(config.output), config.sampling, num_resumed=len(config.output))
