"""Token ids to text, one at a time, as the whole would have decoded. Pure (given a decode function).

Front process. One token is not one piece of text: a character may be spread over up to four tokens, and decoders of the Llama kind drop
the blank before the first token that they see. So a short window is decoded each time, and what it adds is the new text:

    ids   [ already given out … | pending ]        text   decode(window) minus decode(already given out)

The window starts with the end of the prompt. While the text ends in U+FFFD a character may be incomplete and waits (the method of
TGI and vLLM); a character has at most four bytes, so no more than `_MAX_PENDING` tokens wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
_MAX_WINDOW = 64
PROMPT_TAIL = 6  # tokens of the prompt that suffice as context


class Detokenizer:
    """Incremental decode of one sequence."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt[-PROMPT_TAIL:])
        self._num_given = len(self._window)
        # A character cut by the end of the prompt is given out whole once it is complete.
        self._given_text = decode(self._window).rstrip(_REPLACEMENT)
        self.num_chars = 0  # of text given out so far

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_given < _MAX_PENDING:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """The rest, with U+FFFD where a character stayed incomplete."""
        return self._give(self._decode(self._window)) if len(self._window) > self._num_given else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given_text) :]
        tail = self._window[self._num_given :]
        tail_text = self._decode(tail)
        if tail_text or len(self._window) > _MAX_WINDOW:  # only special tokens: the older window stays, an empty one would drop a blank
            self._window, text = tail, tail_text
        self._num_given = len(self._window)
        self._given_text = text
        self.num_chars += len(new)
        return new
