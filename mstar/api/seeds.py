"""Seeds of requests and of their choices: pure but for the generator's own state.

Front process. A seed is 0 … 2**63-1, as `SamplingParams.seed` wants it. A request's first choice uses the request's seed itself; the
others use a mix of (seed, index), so that n choices differ and the same request gives the same choices again.
The mix is SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import random

_MASK64 = (1 << 64) - 1
_MAX_SEED = (1 << 63) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: `seed` itself for choice 0, else a mix of both."""
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) & _MAX_SEED


def fold_seed(seed: int) -> int:
    """A client's 64-bit seed as 0 … 2**63-1: negative ones (OpenAI allows them) keep their low 63 bits."""
    return seed & _MAX_SEED


class SeedSource:
    """Draws the seeds that clients leave out; the same `seed` gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> int:
        """The next seed, 0 … 2**63-1."""
        return self._random.getrandbits(63)
