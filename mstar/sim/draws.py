"""Every random choice of a simulated run, drawn by what it is about instead of one after another.

The delay of "ingest r3 to rank 1" is a function of the seed and of those words alone. So a run that drops request r2 still delays
r3 alike, which is what makes shrinking a failing run short and its replay exact.
"""

from __future__ import annotations

import hashlib

_SPAN = 1 << 53


class Draws:
    """Numbers of one seed. Equal keys give equal numbers, in any process and in any order."""

    def __init__(self, seed: int) -> None:
        self._state = hashlib.blake2b(f"mstar-sim {seed}".encode(), digest_size=8)

    def unit(self, *key: object) -> float:
        """A number in [0, 1)."""
        state = self._state.copy()
        state.update("\0".join(map(str, key)).encode())
        return (int.from_bytes(state.digest(), "little") % _SPAN) / _SPAN

    def below(self, bound: int, *key: object) -> int:
        """An integer in [0, bound)."""
        return int(self.unit(*key) * bound)

    def between(self, low: int, high: int, *key: object) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1, *key)

    def chance(self, probability: float, *key: object) -> bool:
        """True with `probability`."""
        return probability > 0 and self.unit(*key) < probability

    def delay(self, scale_s: float, *key: object) -> float:
        """Seconds from a hundredth of `scale_s` to ten times as much, each decade as likely as another; 0 where the scale is 0."""
        if scale_s <= 0:
            return 0.0
        exponent: float = 3 * self.unit(*key) - 2
        factor: float = 10.0**exponent
        return scale_s * factor
