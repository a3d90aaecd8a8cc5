"""Stop strings: text in, text out that can no longer be part of a stop string. Pure.

Front process. The rule is the one of a reader who gets the text character by character and stops at the first character that
completes any stop string (the longest where several end there); how the text was cut into pieces never changes the result.

    stops ["END"]   in  "a E" "ND b"      out "a " then stop
    held back       "E": it may be the start of a stop string
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back what may still become a stop string. Once `matched` is set, nothing more comes out."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece; give what is certain. Not `armed` (before min_tokens): text passes and completes nothing."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text, self._held = self._held + text, ""
        if not armed:
            return text
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            return text[: start + len(self.matched)] if self._include_stop else text[:start]
        cut = self._held_start(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The end of the text: what was held back is not a stop string after all."""
        text, self._held = self._held, ""
        return text if self.matched is None else ""

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, the longest of those; None without one."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _held_start(self, text: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string; len(text) without one."""
        cut = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < cut:
                if stop.startswith(text[at:]):
                    cut = at
                    break
                at = text.find(stop[0], at + 1)
        return cut
