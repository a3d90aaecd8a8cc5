"""The only randomness of sampling: a number in [0, 1) that is a function of (seed, position) and nothing else.

Pure integer mixing, so every rank, every run and every machine gets the same number, and a resumed stream goes on where it was.
The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_CHILD_GAMMA = 0xD1B54A32D192ED03  # another odd constant, so that children and positions walk different sequences


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, for output `position >= 0` of the sequence drawn with `seed`."""
    state = _mix(seed & _MASK)
    return (_mix((state + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed, in [0, 2**63), of choice `index` of a request with n choices; choice 0 keeps `seed` itself."""
    if index == 0:
        return seed
    return _mix((_mix(seed & _MASK) + index * _CHILD_GAMMA) & _MASK) >> 1


def _mix(z: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit numbers in which every input bit moves about half of the output bits."""
    z = (z + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
