"""What requests come in a planned run: when, on which adapter, how long. Drawn once, as arrays.

A trace file has a request a line, `#` starts a comment: `adapter`, or `seconds,adapter`, or `seconds,adapter,prompt,output`. An empty
adapter or `base` is the base model. What a line leaves out is drawn as the other options say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mstar.errors import ConfigError

BASE = -1
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WorkloadSpec:
    """The options. `popularity` is `uniform`, `zipf:S` (weight of the k-th adapter 1/k**S) or a trace file."""

    num_requests: int
    num_adapters: int
    popularity: str
    rate_per_s: float
    base_share: float
    prompt_tokens: int
    output_tokens: int
    seed: int


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests by arrival. `adapters` index `names`; BASE is none. Lengths are at least 1."""

    names: tuple[str, ...]
    arrivals_s: Floats
    adapters: Ints
    prompts: Ints
    outputs: Ints

    def __len__(self) -> int:
        return len(self.arrivals_s)


def make_workload(spec: WorkloadSpec) -> Workload:
    """Draw a workload. Raises ConfigError."""
    rng = np.random.default_rng(spec.seed)
    kind, _, value = spec.popularity.partition(":")
    if kind == "uniform" and not value:
        weights = np.ones(spec.num_adapters, dtype=np.float64)
    elif kind == "zipf":
        weights = np.power(np.arange(1.0, spec.num_adapters + 1), -_exponent(value))
    else:
        return _read_trace(Path(spec.popularity), spec, rng)
    count = spec.num_requests
    cdf = np.cumsum(weights) / weights.sum()
    adapters = np.searchsorted(cdf, rng.random(count)).clip(max=spec.num_adapters - 1)
    adapters[rng.random(count) < spec.base_share] = BASE
    return Workload(
        names=tuple(f"adapter-{index}" for index in range(spec.num_adapters)),
        arrivals_s=np.cumsum(rng.exponential(1 / spec.rate_per_s, count)),
        adapters=adapters.astype(np.int64),
        prompts=_lengths(rng, spec.prompt_tokens, count),
        outputs=_lengths(rng, spec.output_tokens, count),
    )


def read_times_s(median_s: float, p99_s: float, ranks: int, seed: int) -> Iterator[tuple[float, float]]:
    """Read times without end: log-normal by median and 99th percentile. Each is (one rank's, the slowest of `ranks`)."""
    sigma = float(np.log(p99_s / median_s)) / 2.3263 if median_s > 0 else 0.0
    rng = np.random.default_rng([seed, 1])
    while True:
        draws = median_s * np.exp(sigma * rng.standard_normal((1024, ranks)))
        yield from zip(draws[:, 0].tolist(), draws.max(axis=1).tolist(), strict=True)


def _exponent(text: str) -> float:
    try:
        return float(text) if text else 1.0
    except ValueError:
        raise ConfigError(f"popularity zipf:{text}: the exponent is a number, as in zipf:1.1") from None


def _lengths(rng: np.random.Generator, mean: int, count: int) -> Ints:
    """Geometric with the given mean, as lengths of texts roughly are."""
    return rng.geometric(1 / mean, count).astype(np.int64)


def _read_trace(path: Path, spec: WorkloadSpec, rng: np.random.Generator) -> Workload:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"popularity {spec.popularity!r} is not uniform, zipf:S or a readable trace file: {error}") from None
    lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    if not lines:
        raise ConfigError(f"the trace {path} has no requests")
    lines = lines[: spec.num_requests]
    names: dict[str, int] = {}
    arrivals = np.cumsum(rng.exponential(1 / spec.rate_per_s, len(lines)))
    adapters = np.full(len(lines), BASE, dtype=np.int64)
    prompts, outputs = _lengths(rng, spec.prompt_tokens, len(lines)), _lengths(rng, spec.output_tokens, len(lines))
    for index, line in enumerate(lines):
        parts = [part.strip() for part in line.split(",")]
        try:
            if len(parts) not in (1, 2, 4):
                raise ValueError(f"{len(parts)} fields")
            if len(parts) > 1:
                arrivals[index] = float(parts[0])
            if len(parts) == 4:
                prompts[index], outputs[index] = max(1, int(parts[2])), max(1, int(parts[3]))
        except ValueError as error:
            raise ConfigError(
                f"{path}, request {index + 1} {line!r}: want adapter | s,adapter | s,adapter,prompt,output ({error})"
            ) from None
        name = parts[0] if len(parts) == 1 else parts[1]
        if name and name != "base":
            adapters[index] = names.setdefault(name, len(names))
    order = np.argsort(arrivals, kind="stable")
    return Workload(tuple(names), arrivals[order], adapters[order], prompts[order], outputs[order])
