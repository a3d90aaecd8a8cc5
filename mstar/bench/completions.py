"""One streamed `/v1/completions` call: the bytes that go out and what comes back. No I/O; times arrive as arguments.

What counts as a token event: a choice with text or token ids, or one with empty text that does not finish (a token whose text is still held
back, half a character for instance). A last event that only says `finish_reason` is none. One event may carry several tokens,
so the number of tokens is the server's own `usage` where it sends one, and the number of token events only where it does not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mstar.bench.prompts import Prompt
from mstar.bench.sse import SseParser

_MAX_ERROR_BYTES = 4096
_MAX_REASON_CHARS = 160


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def completion_body(model: str, prompt: Prompt, max_tokens: int) -> bytes:
    """The JSON of a greedy, streamed call for exactly `max_tokens` tokens."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class CompletionReader:
    """Takes one reply: `on_status` once, then `on_body` with each piece and the time it came, then `failure`.

    `event_times` are the times of the token events, in the caller's clock.
    """

    def __init__(self) -> None:
        self.event_times: list[float] = []
        self.prompt_tokens: int | None = None
        self._usage_tokens: int | None = None
        self._status = 0
        self._sse = SseParser()
        self._error_body = b""
        self._error: str | None = None
        self._finished = False  # a finish_reason or [DONE] came

    @property
    def output_tokens(self) -> int:
        """Tokens received: the server's own count, or one per token event."""
        return len(self.event_times) if self._usage_tokens is None else self._usage_tokens

    @property
    def is_finished(self) -> bool:
        """The server said that the text is complete."""
        return self._finished

    def on_status(self, status: int) -> None:
        """The status line came."""
        self._status = status

    def on_body(self, body: bytes, now: float) -> None:
        """A piece of the body came at `now`. Never raises: what cannot be read becomes the failure."""
        if self._status != 200:
            self._error_body = (self._error_body + body)[:_MAX_ERROR_BYTES]
            return
        for data in self._sse.feed(body):
            self._on_event(data, now)

    def _on_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            event = _decode_event(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._error = self._error or f"unreadable event: {error}"
            return
        if event.error is not None:
            self._error = self._error or f"error in the stream: {_describe_error(event.error)}"
        for choice in event.choices:
            if choice.text or choice.token_ids or (choice.text == "" and choice.finish_reason is None):
                self.event_times.append(now)
            self._finished = self._finished or choice.finish_reason is not None
        if event.usage is not None:
            self._usage_tokens = event.usage.completion_tokens
            self.prompt_tokens = event.usage.prompt_tokens

    def failure(self) -> str | None:
        """Why this reply, now over, does not count; None if it does."""
        if self._status != 200:
            return f"HTTP {self._status} {_describe_body(self._error_body)}".rstrip()
        if self._error is not None:
            return self._error[:_MAX_REASON_CHARS]
        if not self.event_times:
            return "no token event in the reply"
        return None if self._finished else "the stream ended without finish_reason or [DONE]"


def _describe_body(body: bytes) -> str:
    try:
        return _describe_error(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body.decode(errors="replace")[:_MAX_REASON_CHARS]


def _describe_error(found: Any) -> str:
    """Code and message of an error in one of the usual shapes, else its first characters."""
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        parts = [found.get("code"), found.get("message") or found.get("detail")]
        found = " ".join(str(part) for part in parts if part)
    return str(found)[:_MAX_REASON_CHARS]
