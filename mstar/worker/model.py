"""The runner's model: the decoder, its attention backend and the sampler behind one callable. Step thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.sampler.sampler import SampleRow, prompt_logprobs, sample_rows
from mstar.engine.runner import ForwardInput, Sampled, SampleJob
from mstar.errors import RequestError
from mstar.models.decoder import Decoder
from mstar.types import TokenLogprobs


class TorchModel:
    """Runs one step's packed rows and samples. Equal on every rank, since the logits are gathered."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._decoder = decoder
        self._attention = attention
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device

    def __call__(self, step: ForwardInput) -> list[Sampled]:
        """The result of each job, in order. Raises WorkerError when a collective fails."""
        self._attention.plan(step.plan_results["kv"])
        wanted = [job.first_logit + offset for job in step.jobs for offset in range(job.num_logits)]
        logits = self._decoder.forward(self._tensor(step.tokens), self._tensor(step.positions), self._tensor(wanted))
        if not step.jobs:
            return []
        lasts: list[int] = []
        position = 0
        for job in step.jobs:
            position += job.num_logits
            if job.samples:
                lasts.append(position - 1)
        sampling = [job for job in step.jobs if job.samples]
        chosen = sample_rows(logits if len(lasts) == len(wanted) else logits[lasts], [self._sample_row(job) for job in sampling])
        by_rid = {job.request.rid: token for job, token in zip(sampling, chosen, strict=True)}
        results = []
        position = 0
        for job in step.jobs:
            scores = self._prompt_scores(logits[position : position + job.num_logits], job)
            position += job.num_logits
            token = by_rid.get(job.request.rid)
            if token is not None and not token.is_finite:
                error = RequestError("the logits of this request are not finite numbers", code="non_finite_logits", status=500)
                results.append(Sampled(job.request.rid, None, error=error))
            else:
                token_id = None if token is None else token.token_id
                results.append(Sampled(job.request.rid, token_id, None if token is None else token.logprobs, scores))
        return results

    def _sample_row(self, job: SampleJob) -> SampleRow:
        request = job.request
        position = len(request.output)
        banned: tuple[int, ...] = ()
        if position < request.sampling.min_tokens:
            banned = tuple({*self._eos_token_ids, *request.sampling.stop_token_ids})
        return SampleRow(request.sampling, position, request.prompt, request.output, banned)

    def _prompt_scores(self, logits: torch.Tensor, job: SampleJob) -> Sequence[TokenLogprobs]:
        """How likely the prompt made each of its own next tokens, where that was asked."""
        top = job.request.sampling.prompt_logprobs
        if top is None or job.row.start >= len(job.request.prompt):
            return ()
        first = job.row.start + job.row.num_tokens - job.num_logits
        following = job.request.prompt[first + 1 : first + 1 + job.num_logits]
        return prompt_logprobs(logits[: len(following)], following, top)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
