"""What the API asks of the conductor and what comes back: the seam between HTTP and the instance.

Front process, asyncio loop; no torch. The conductor itself is `mstar/conductor/conductor.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mstar.types import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ServedModel:
    """One name that clients may send: the base (`parent` None) or an adapter."""

    id: str
    created: int  # seconds since the epoch
    root: str  # the folder, as configured or as given to the load
    parent: str | None
    max_model_len: int | None  # tokens; the base only
    chat_template: str | None = None  # an adapter's own, where its folder has one


@dataclass(frozen=True)
class Rendered:
    """The prompt was made by a chat template: an adapter's own, or (None) the base's."""

    chat_template: str | None


@dataclass(frozen=True)
class Generation:
    """One sequence to generate: n > 1 and list prompts are several of these."""

    model: str  # the client's `model` field, as sent
    prompt: tuple[int, ...]  # token ids, at least one
    sampling: SamplingParams
    rendered: Rendered | None = None  # of a chat
    timeout_s: float | None = None  # from acceptance to the end; the server's own bound holds beside it


@dataclass(frozen=True)
class Chunk:
    """What one step gave a stream. The last chunk of a stream has a `finish_reason`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first token; None for token 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop or eos token that ended the stream; it is not in `token_ids`
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave


class Stream(Protocol):
    """An accepted request: iterate its chunks; it ends exactly once.

    Iteration raises RequestError where the request fails (its adapter could not be read, say).
    """

    rid: str

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def cancel(self) -> None:
        """Stop generating: idempotent, also after the end. The iterator then ends without another chunk."""
        ...


class ConductorApi(Protocol):
    """What the HTTP routes may ask."""

    def generate(self, generation: Generation) -> Stream:
        """Accept one sequence. Raises ModelNotFound, RequestError (too long, 429, 503 while not ready); then nothing was started."""
        ...

    def resolve(self, model: str) -> ServedModel:
        """The served name that a `model` field addresses: whole-string match first, then `<base>:<adapter>`. Raises ModelNotFound."""
        ...

    async def find(self, model: str) -> ServedModel:
        """As `resolve`; an adapter of `lora_dir` that is not served yet is loaded first. Raises what its load refuses, too."""
        ...

    def served_models(self, after: str | None = None, limit: int | None = None) -> tuple[list[ServedModel], bool]:
        """Base first, then adapters by name: at most `limit` behind the id `after`, and whether more follow."""
        ...

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False, pinned: bool = False) -> None:
        """Serve `name` from `path`; on return it is usable on every rank. Raises AdapterError / RequestError (404, 409, 400)."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Stop serving `name`. Raises RequestError 404 where it is not served."""
        ...

    async def pin_adapter(self, name: str) -> None:
        """Keep `name` in its slot until it is unpinned. Raises RequestError 404, AdapterError 409 where no slot would be left to turn."""
        ...

    async def unpin_adapter(self, name: str) -> None:
        """Let `name`'s slot turn again. Raises RequestError 404 where it is not served."""
        ...

    def not_ready_reason(self) -> str | None:
        """None while requests can be served, else why not."""
        ...

    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    async def status(self) -> dict[str, Any]:
        """`{"ranks": [{"tp_rank", "slots": [{"slot", "adapter", "holders"}], "kv": {...}, …}], …}`: a fresh answer of every rank."""
        ...
