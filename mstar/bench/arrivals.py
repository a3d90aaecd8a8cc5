"""When requests are sent in an open loop. Pure and seeded.

Open loop: send times are drawn beforehand and do not wait for answers, so a server that falls behind meets a growing queue, as in life.
Closed loop (`--concurrency`) needs no schedule: each answer lets the next request go.
"""

from __future__ import annotations

from random import Random


def poisson_offsets(num_requests: int, rate_per_s: float, seed: int) -> list[float]:
    """Send times in seconds after the start, ascending, the first at 0. Gaps are exponential with mean 1 / `rate_per_s`."""
    assert num_requests >= 0 and rate_per_s > 0
    rng = Random(f"{seed}/arrivals")
    offsets: list[float] = []
    now_s = 0.0
    for _ in range(num_requests):
        offsets.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return offsets
