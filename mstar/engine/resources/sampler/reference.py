"""The plain reference of the sampler: one row, one token, float64, written apart from it. For tests and teacher-forced checks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mstar.engine.resources.sampler.sampler import GREEDY_BELOW, SampleRow
from mstar.types import SamplingParams

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def draw_interval(logits: Tensor, row: SampleRow, token_id: int, tolerance: float = 0.0) -> tuple[float, float]:
    """Where `u = uniform(seed, position)` must lie for `row` to get `token_id` from raw `logits [vocab]`: `[lo, hi)`.

    (0, 1) for the greedy choice; empty (lo == hi) where the token is filtered out. `tolerance` is how far a logit may be off:
    tokens that close to a filter's boundary count as kept or as dropped, whichever widens the interval.
    """
    values = _penalised(logits.double().cpu().numpy(), row)
    sampling = row.sampling
    if sampling.temperature < GREEDY_BELOW:
        first_best = int(np.argmax(values))
        is_best = token_id == first_best or (tolerance > 0 and values[token_id] >= values.max() - tolerance)
        return (0.0, 1.0) if is_best else (0.0, 0.0)
    scaled = (values - values.max()) / sampling.temperature
    slack = tolerance / sampling.temperature
    surely, possibly = _kept(scaled, sampling, -slack), _kept(scaled, sampling, slack)
    if not possibly[token_id]:
        return (0.0, 0.0)
    weights = np.exp(scaled)
    sure, extra = np.where(surely, weights, 0.0), np.where(possibly & ~surely, weights, 0.0)
    own = weights[token_id]
    below, above = float(sure[:token_id].sum()), float(sure[token_id + 1 :].sum())
    extra_below, extra_above = float(extra[:token_id].sum()), float(extra[token_id + 1 :].sum())
    lo = below / (below + own + above + extra_above)
    hi = (below + extra_below + own) / (below + extra_below + own + above)
    return float(lo), float(hi)


def _penalised(values: Floats, row: SampleRow) -> Floats:
    """A copy with banned ids out, then the repetition, then the frequency and presence penalties."""
    values = values.copy()
    values[list(row.banned_ids)] = -np.inf
    penalty = row.sampling.repetition_penalty
    for token_id in {*row.prompt_tokens, *row.output_tokens}:
        values[token_id] = values[token_id] / penalty if values[token_id] > 0 else values[token_id] * penalty
    for token_id in row.output_tokens:
        values[token_id] -= row.sampling.frequency_penalty
    for token_id in set(row.output_tokens):
        values[token_id] -= row.sampling.presence_penalty
    return values


def _kept(scaled: Floats, sampling: SamplingParams, slack: float) -> Bools:
    """The tokens that min_p, top_k and top_p keep. `slack` above 0 keeps more, below 0 fewer, by so much scaled logit."""
    kept = np.ones(len(scaled), dtype=np.bool_)
    if sampling.min_p > 0:
        kept &= scaled >= np.log(sampling.min_p) - slack
    if 0 < sampling.top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-sampling.top_k] - slack
    if sampling.top_p < 1:
        values = np.sort(scaled[kept])[::-1]
        share = np.cumsum(np.exp(values)) / np.exp(values).sum()
        last = min(int(np.searchsorted(share, sampling.top_p + 2 * slack)), len(values) - 1)
        kept &= scaled >= values[last] - slack
    return kept
