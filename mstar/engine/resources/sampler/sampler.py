"""Which token each row gets: a function of (logits, seed, position) that every rank computes alike.

Owned by the step thread, on the gathered logits. Rows that are plainly greedy cost one argmax for the whole batch; the others
go through, in this order (vLLM's):

    banned ids -> repetition, frequency, presence penalties -> greedy: argmax, lowest id on ties
      -> temperature -> min_p -> top_k -> top_p -> draw (draw.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.sampler.draw import draw
from mstar.engine.resources.sampler.uniform import uniform
from mstar.types import SamplingParams, TokenLogprob, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM


@dataclass(frozen=True)
class SampleRow:
    """One row's request as far as sampling needs it.

    `position` is the index of the output token being chosen. `banned_ids` may not be chosen now: the stop ids while the row is
    below `min_tokens`. Prompt and output are read for penalties alone.
    """

    sampling: SamplingParams
    position: int
    prompt_tokens: Sequence[int] = ()
    output_tokens: Sequence[int] = ()
    banned_ids: Sequence[int] = ()


@dataclass(frozen=True)
class SampledToken:
    """The chosen token. `is_finite` false: the row's logits hold NaN or infinity, its token means nothing and the row must fail."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_finite: bool = True


@torch.inference_mode()
def sample_rows(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token per row of `logits [L, vocab]` float32, which is left as it is. Vectorised over the batch."""
    if not rows:
        return []
    best, best_ids = logits.max(dim=-1)
    chosen: list[int] = best_ids.tolist()
    finite: list[bool] = best.isfinite().tolist()
    special = [index for index, row in enumerate(rows) if finite[index] and not _is_plain(row)]
    if special:
        whole = len(special) == len(rows)
        picked = _pick(logits if whole else logits[special], best if whole else best[special], [rows[index] for index in special])
        for index, token_id in zip(special, picked, strict=True):
            chosen[index] = token_id
    shown = [index for index, row in enumerate(rows) if finite[index] and row.sampling.logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if shown:
        counts = [rows[index].sampling.logprobs or 0 for index in shown]
        logprobs = dict(zip(shown, _logprobs(logits[shown], [chosen[index] for index in shown], counts), strict=True))
    return [SampledToken(chosen[index], logprobs.get(index), finite[index]) for index in range(len(rows))]


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """How likely each given token was: `logits [n, vocab]` float32 are those that predict `token_ids [n]`, with `num_top` alternatives."""
    return _logprobs(logits, token_ids, [num_top] * len(token_ids)) if token_ids else []


def _is_plain(row: SampleRow) -> bool:
    return row.sampling.temperature < GREEDY_BELOW and not row.banned_ids and not _has_penalty(row.sampling)


def _has_penalty(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def _pick(logits: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The tokens of rows `logits [n, vocab]`, with `best [n]`, that need more than an argmax of the raw logits."""
    picked = [0] * len(rows)
    if any(row.banned_ids or _has_penalty(row.sampling) for row in rows):
        logits = _penalised(logits, rows)
        best, best_ids = logits.max(dim=-1)
        picked = best_ids.tolist()
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        whole = len(drawn) == len(rows)
        samplings = [rows[index].sampling for index in drawn]
        uniforms = [uniform(rows[index].sampling.seed, rows[index].position) for index in drawn]
        tokens = draw(logits if whole else logits[drawn], (best if whole else best[drawn])[:, None], samplings, uniforms)
        for index, token_id in zip(drawn, tokens, strict=True):
            picked[index] = token_id
    return picked


def _penalised(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A copy of `logits`: banned ids at minus infinity, then the repetition penalty (prompt and output; Keskar et al. 2019), then
    OpenAI's frequency and presence penalties (output alone)."""
    out = logits.clone()
    for index, row in enumerate(rows):
        sampling = row.sampling
        if row.banned_ids:
            out[index, torch.tensor(row.banned_ids, device=out.device)] = float("-inf")
        if sampling.repetition_penalty != 1:
            seen = torch.from_numpy(np.union1d(_ids(row.prompt_tokens), _ids(row.output_tokens))).to(out.device)
            values = out[index, seen]
            penalty = sampling.repetition_penalty
            out[index, seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and row.output_tokens:
            ids, counts = np.unique(_ids(row.output_tokens), return_counts=True)
            penalties = torch.from_numpy(sampling.frequency_penalty * counts + sampling.presence_penalty)
            out[index, torch.from_numpy(ids).to(out.device)] -= penalties.to(out)
    return out


def _ids(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter(tokens, dtype=np.int64, count=len(tokens))


def _logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Per row the given token's log-probability and rank, and the `counts[i]` best tokens."""
    scores = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    own = scores.gather(1, ids)
    ranks: list[int] = ((logits > logits.gather(1, ids)).sum(dim=-1) + 1).tolist()
    own_scores: list[float] = own[:, 0].tolist()
    most = min(max(counts), logits.shape[1])
    top = _top(scores, most) if most else [[] for _ in counts]
    return [
        TokenLogprobs(TokenLogprob(token_id, score, rank), tuple(best[:count]))
        for token_id, score, rank, best, count in zip(token_ids, own_scores, ranks, top, counts, strict=True)
    ]


def _top(scores: Tensor, count: int) -> list[list[TokenLogprob]]:
    """The `count` best tokens of each row in falling order, lower ids first among equals; equals share the better rank."""
    values, ids = scores.topk(count, dim=-1)
    rows: list[list[TokenLogprob]] = []
    for row_values, row_ids in zip(values.tolist(), ids.tolist(), strict=True):
        pairs = sorted(zip(row_values, row_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        best: list[TokenLogprob] = []
        for place, (value, token_id) in enumerate(pairs):
            rank = best[-1].rank if best and best[-1].logprob == value else place + 1
            best.append(TokenLogprob(token_id, value, rank))
        rows.append(best)
    return rows
