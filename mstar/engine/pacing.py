"""How many prompt tokens a step may take beside running streams: so many that it lasts at most a multiple of a step of decodes alone.

Pure: it is told what steps took and asked for a budget; the leader holds the clock. Followers take what the step says.

    step of decodes alone   ─► its time, by the number of rows (powers of two)
    step that also prefills ─► what each prompt token adds, the median of the last few
    budget(rows)            =  (stretch - 1) x time of decodes alone / what a token adds        never below MIN_TOKENS

Where the time of decodes alone is not known for so many rows, or was seen long ago, the budget is 0 for one step, which then shows it.
"""

from __future__ import annotations

import statistics
from collections import deque

MIN_TOKENS = 16
FRESH_STEPS = 64
_DECODE_STEPS = 9
_PREFILL_STEPS = 5


class PrefillPace:
    """The budget of one leader. `stretch`: how many times a step of decodes alone a step may last; 0 for no bound."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._step = 0
        self._decodes: dict[int, deque[float]] = {}
        self._seen_at: dict[int, int] = {}
        self._token_s: deque[float] = deque(maxlen=_PREFILL_STEPS)

    def observe(self, num_prefill: int, num_decodes: int, seconds: float) -> None:
        """A step took `seconds`: prompt tokens of rows that take several, and rows that take one."""
        self._step += 1
        bucket = num_decodes.bit_length()
        if not num_prefill:
            self._decodes.setdefault(bucket, deque(maxlen=_DECODE_STEPS)).append(seconds)
            self._seen_at[bucket] = self._step
        elif not num_decodes or bucket in self._decodes:
            alone_s = statistics.median(self._decodes[bucket]) if num_decodes else 0.0
            self._token_s.append(max(seconds - alone_s, 0.0) / num_prefill)

    def budget(self, num_decodes: int) -> int | None:
        """Most prompt tokens beside so many decoding rows; None for no bound."""
        if not self._stretch or not num_decodes:
            return None
        bucket = num_decodes.bit_length()
        if bucket not in self._decodes or self._step - self._seen_at[bucket] >= FRESH_STEPS:
            return 0
        if not self._token_s:
            return MIN_TOKENS
        token_s = statistics.median(self._token_s)
        room_s = (self._stretch - 1) * statistics.median(self._decodes[bucket])
        return max(MIN_TOKENS, int(room_s / token_s)) if token_s else None
