"""Log-probabilities in the forms of OpenAI's two routes and of vLLM's `prompt_logprobs`. Pure but for the tokenizer.

Front process. JSON has no infinity: log-probabilities are shown no lower than -9999, as vLLM shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.api.choice import OutputToken
from mstar.api.text import TextProcessor
from mstar.types import TokenLogprob, TokenLogprobs

_LOWEST = -9999.0


class LogprobFormat:
    """Writes log-probabilities; tokens as text, or as `token_id:N` where the client asked for ids."""

    def __init__(self, text: TextProcessor, *, as_token_ids: bool = False) -> None:
        self._text = text
        self._as_token_ids = as_token_ids

    def completion(
        self, tokens: Sequence[OutputToken], num_top: int, echoed: Sequence[OutputToken] = (), base_offset: int = 0
    ) -> dict[str, list[Any]]:
        """/v1/completions: four lists over the echoed prompt tokens, then the output tokens, whose text starts at `base_offset`."""
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, base in [*((token, 0) for token in echoed), *((token, base_offset) for token in tokens)]:
            out["text_offset"].append(base + token.offset)
            out["tokens"].append(self._name(token.token_id))
            known = token.logprobs
            out["token_logprobs"].append(None if known is None else _floor(known.chosen.logprob))
            out["top_logprobs"].append(None if known is None else self._by_name(known, num_top))
        return out

    def chat(self, tokens: Sequence[OutputToken], num_top: int) -> dict[str, Any]:
        """/v1/chat/completions: `{"content": [...]}`."""
        content = [
            self._entry(token.logprobs.chosen) | {"top_logprobs": [self._entry(item) for item in token.logprobs.top[:num_top]]}
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content}

    def prompt(self, known: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: per prompt token, its id and the best alternatives' ids with logprob, rank and text."""
        return [None if item is None else self._by_id(item, num_top) for item in known]

    def _by_name(self, known: TokenLogprobs, num_top: int) -> dict[str, float]:
        named = {self._name(item.token_id): _floor(item.logprob) for item in known.top[:num_top]}
        named.setdefault(self._name(known.chosen.token_id), _floor(known.chosen.logprob))
        return named

    def _by_id(self, known: TokenLogprobs, num_top: int) -> dict[str, Any]:
        shown = {item.token_id: item for item in (known.chosen, *known.top[:num_top])}
        return {
            str(token_id): {"logprob": _floor(item.logprob), "rank": item.rank, "decoded_token": self._text.token_text(token_id)}
            for token_id, item in shown.items()
        }

    def _entry(self, item: TokenLogprob) -> dict[str, Any]:
        return {
            "token": self._name(item.token_id),
            "logprob": _floor(item.logprob),
            "bytes": list(self._text.token_bytes(item.token_id)),
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._text.token_text(token_id)


def _floor(logprob: float) -> float:
    return max(logprob, _LOWEST)
