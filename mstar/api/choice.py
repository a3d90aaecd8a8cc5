"""One sequence of a response: chunks of tokens in, pieces of text out. Pure: no I/O, no clock.

Front process. Owns: detokenising, stop strings, the count of generated tokens. A choice ends once, by the stream's own end
(`finish_reason` of the last chunk) or earlier by a stop string; the caller then cancels the stream.
Tokens are counted up to the end: a stop or eos token counts as generated (as vLLM counts it) though it has no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar.api.detokenizer import Detokenizer
from mstar.api.stops import StopMatcher
from mstar.conductor.types import Chunk, FinishReason
from mstar.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A generated token: where its text starts, in characters of the choice's output, and its log-probabilities if asked for."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Delta:
    """What a chunk adds to a choice."""

    text: str = ""
    tokens: list[OutputToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # with the stop token, which `tokens` leaves out
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or the request's own stop token that ended it

    @property
    def says_nothing(self) -> bool:
        """No text to show and no end."""
        return not self.text and self.finish_reason is None

    def add(self, later: Delta) -> None:
        """Append what came after."""
        self.text += later.text
        self.tokens += later.tokens
        self.token_ids += later.token_ids
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Choice:
    """The state of one sequence between its chunks."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        discard_output: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finished = False
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._discard_output = discard_output

    def feed(self, chunk: Chunk) -> Delta:
        """Take the stream's next chunk."""
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        delta = Delta(prompt_logprobs=chunk.prompt_logprobs)
        if self._discard_output:  # max_tokens 0: the prompt's log-probabilities were all that was wanted
            return self._end(delta, "length") if chunk.finish_reason is not None else delta
        for at, token_id in enumerate(chunk.token_ids):
            self._push(delta, token_id, None if chunk.logprobs is None else chunk.logprobs[at])
            if self._matcher.matched is not None:
                return self._end(delta, "stop", self._matcher.matched)
        if chunk.finish_reason is not None:
            self._finish(delta, chunk, chunk.finish_reason)
        return delta

    def _push(self, delta: Delta, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.num_tokens += 1
        delta.tokens.append(OutputToken(token_id, self._detokenizer.num_chars, logprobs))
        delta.token_ids.append(token_id)
        if text := self._detokenizer.push(token_id):
            delta.text += self._matcher.push(text, armed=self.num_tokens > self._min_tokens)

    def _finish(self, delta: Delta, chunk: Chunk, reason: FinishReason) -> None:
        """The stream's own end: the stop token, then whatever was held back."""
        text = ""
        if chunk.stop_token_id is not None:
            self.num_tokens += 1
            delta.token_ids.append(chunk.stop_token_id)
            if self._include_stop:
                text = self._detokenizer.push(chunk.stop_token_id)
        text += self._detokenizer.flush()
        delta.text += self._matcher.push(text) + self._matcher.flush()
        if self._matcher.matched is not None:
            self._end(delta, "stop", self._matcher.matched)
        else:
            self._end(delta, reason, chunk.stop_token_id if chunk.stop_token_id in self._stop_token_ids else None)

    def _end(self, delta: Delta, reason: FinishReason, stop_reason: str | int | None = None) -> Delta:
        self.finished = True
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        return delta
