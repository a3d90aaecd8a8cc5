"""Filters and the draw, for rows that have a temperature.

Every filter is a threshold on the value, never a place in a sorted list: tokens tied at the boundary all stay, so no sort order can
tell two ranks apart. The draw lays the kept tokens side by side in token-id order, by probability, and `u` picks one:

    0 |---- id 3 ----|-- id 17 --|-------- id 40 --------|- id 99 -| 1

A vocabulary is long and what a filter keeps is short, so filters look at the best few tokens first (*candidates*) and only a row whose
kept tokens may reach beyond them goes over its whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.types import SamplingParams

_NUM_CANDIDATES = 256
_BLOCK = 256


def draw(logits: Tensor, best: Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token per row of `logits [n, vocab]` float32, whose largest values are `best [n, 1]`; `uniforms[i]` in [0, 1) picks."""
    scaled = (logits - best).div_(_column([sampling.temperature for sampling in samplings], logits))  # the best token at 0
    u = _column(uniforms, logits, torch.float64)
    filtered = [index for index, sampling in enumerate(samplings) if _filters(sampling, logits.shape[1])]
    if not filtered:
        return _place(scaled.exp_(), u)
    if len(filtered) == len(samplings):
        return _draw_filtered(scaled, samplings, u)
    unfiltered = [index for index in range(len(samplings)) if index not in set(filtered)]
    picked = dict(zip(unfiltered, _place(scaled[unfiltered].exp_(), u[unfiltered]), strict=True))
    tokens = _draw_filtered(scaled[filtered], [samplings[index] for index in filtered], u[filtered])
    picked.update(zip(filtered, tokens, strict=True))
    return [picked[index] for index in range(len(samplings))]


def _filters(sampling: SamplingParams, vocab_size: int) -> bool:
    return sampling.min_p > 0 or 0 < sampling.top_k < vocab_size or sampling.top_p < 1


def _place(weights: Tensor, u: Tensor) -> list[int]:
    """Where `u [n, 1]` falls among `weights [n, k]` laid side by side, as column indices; never on a weight of zero.

    In two levels, blocks and then one block's columns, so that no float64 copy of all weights is made.
    """
    padding = -weights.shape[1] % _BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    edges = sums.cumsum(dim=-1)
    target = u * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp_(max=sums.shape[1] - 1)
    inside = blocks.take_along_dim(block[:, :, None], dim=1)[:, 0].cumsum(dim=-1, dtype=torch.float64)
    column = torch.searchsorted(inside, target - (edges - sums).gather(1, block), right=True)
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())  # the block's last weight above zero, should rounding lead past it
    places: list[int] = (block * _BLOCK + torch.minimum(column, last))[:, 0].tolist()
    return places


def _draw_filtered(scaled: Tensor, samplings: Sequence[SamplingParams], u: Tensor) -> list[int]:
    """Draw for rows of `scaled [n, vocab]` (best token at 0), all of them filtered."""
    vocab_size = scaled.shape[1]
    longest = max(sampling.top_k + 1 if sampling.top_k > 0 else _NUM_CANDIDATES for sampling in samplings)
    values, ids = scaled.topk(min(vocab_size, longest), dim=-1)
    threshold = torch.maximum(_min_p_threshold(samplings, scaled), _top_k_threshold(samplings, values))
    if any(sampling.top_p < 1 for sampling in samplings):
        threshold = _with_top_p(threshold, scaled, values, samplings)
    is_all = values.shape[1] == vocab_size
    ids, order = ids.sort(dim=-1)
    weights = values.exp().masked_fill_(values < threshold, 0).gather(1, order)
    places = torch.tensor(_place(weights, u), device=ids.device)[:, None]
    picked: list[int] = ids.gather(1, places)[:, 0].tolist()
    beyond = [] if is_all else (threshold <= values[:, -1:])[:, 0].nonzero()[:, 0].tolist()
    if beyond:  # tokens past the candidates may be kept
        everything = scaled[beyond]
        tokens = _place(everything.exp().masked_fill_(everything < threshold[beyond], 0), u[beyond])
        for index, token_id in zip(beyond, tokens, strict=True):
            picked[index] = token_id
    return picked


def _min_p_threshold(samplings: Sequence[SamplingParams], like: Tensor) -> Tensor:
    """Tokens at least `min_p` times as probable as the best: `[n, 1]`, minus infinity where the filter is off."""
    return _column([sampling.min_p for sampling in samplings], like, torch.float64).log_().to(like)


def _top_k_threshold(samplings: Sequence[SamplingParams], values: Tensor) -> Tensor:
    """The k-th best value of `values [n, most]` (falling), `[n, 1]`; minus infinity where the filter is off or k is beyond."""
    num_values = values.shape[1]
    places = [min(sampling.top_k, num_values + 1) - 1 if sampling.top_k > 0 else num_values for sampling in samplings]
    padded = torch.cat((values, values.new_full((len(samplings), 1), float("-inf"))), dim=1)
    return padded.gather(1, torch.tensor(places, device=values.device)[:, None])


def _with_top_p(threshold: Tensor, scaled: Tensor, values: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """`threshold` raised so that what it keeps is the smallest set to reach `top_p` of what it kept before."""
    whole = values.shape[1] == scaled.shape[1]
    nucleus = [index for index, sampling in enumerate(samplings) if sampling.top_p < 1]
    lower, best = threshold[nucleus], values[nucleus]
    total = best.exp().masked_fill_(best < lower, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    beyond = [] if whole else (lower <= best[:, -1:])[:, 0].nonzero()[:, 0].tolist()
    if beyond:
        rest = scaled[[nucleus[index] for index in beyond]]
        total[beyond] = rest.exp().masked_fill_(rest < lower[beyond], 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    target = total * _column([samplings[index].top_p for index in nucleus], total, torch.float64)
    boundary, found = _boundary(best, lower, target)
    missing = [index for index in beyond if not found[index]]
    if missing:  # a flat distribution
        falling = scaled[[nucleus[index] for index in missing]].sort(dim=-1, descending=True).values
        boundary[missing] = _boundary(falling, lower[missing], target[missing])[0]
    raised = threshold.clone()
    raised[nucleus] = torch.maximum(lower, boundary)
    return raised


def _boundary(values: Tensor, lower: Tensor, target: Tensor) -> tuple[Tensor, list[bool]]:
    """The value at which `values [n, k]` (falling), of those at or above `lower`, first sum up to `target`; whether they do."""
    reached = values.exp().masked_fill_(values < lower, 0).cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(reached, target)
    found: list[bool] = (places[:, 0] < values.shape[1]).tolist()
    return values.gather(1, places.clamp_(max=values.shape[1] - 1)), found


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
