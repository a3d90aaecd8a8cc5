"""POST /v1/completions.

Front process, asyncio loop. One request is `len(prompts) x n` sequences; choice i*n + j is the j-th answer to prompt i.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from mstar.api.choice import Choice, Delta, OutputToken
from mstar.api.fanout import Job, run_jobs
from mstar.api.logprobs import LogprobFormat
from mstar.api.parameters import COMPLETION_MAX_TOKENS, check_fields, completion_logprobs, output_tokens, sampling_params, stop_strings
from mstar.api.prompts import Prompt, encode_prompts
from mstar.api.responses import EventStream, answer
from mstar.api.schemas import CompletionRequest
from mstar.api.seeds import derive_seed
from mstar.api.services import Services, response_head, usage
from mstar.api.unsupported import check_unsupported
from mstar.conductor.types import Generation
from mstar.errors import RequestError
from mstar.types import TokenLogprobs


def completions_router(services: Services) -> APIRouter:
    """The route over `services`."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        _check(body)
        await services.find(body.model)
        prompts = await encode_prompts(
            body.prompt,
            services.text,
            add_special_tokens=body.add_special_tokens is not False,
            max_prompts=max(1, services.max_sequences // (body.n or 1)),
            max_model_len=services.conductor.max_model_len(),
        )
        completion = _Completion(services, body, prompts)
        return EventStream(completion.events()) if body.stream else await answer(request, completion.whole())

    return router


def _check(body: CompletionRequest) -> None:
    check_unsupported(body.model_extra)
    if body.suffix:
        raise RequestError("Unsupported parameter: 'suffix' (not supported).", code="unsupported_parameter", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("Unsupported parameter: 'best_of' other than 'n'.", code="unsupported_parameter", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("Invalid 'max_tokens': 0 is only allowed with 'echo'.", code="invalid_value", param="max_tokens")


class _Completion:
    """One request on its way: its sequences and how they are shown."""

    def __init__(self, services: Services, body: CompletionRequest, prompts: list[Prompt]) -> None:
        limits = services.limits()
        check_fields(body, limits)
        self._services, self._body, self._prompts = services, body, prompts
        self._n = body.n or 1
        self._logprobs = completion_logprobs(body, limits)
        self._format = LogprobFormat(services.text, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._head = response_head("cmpl", "text_completion", body.model)
        seed = services.seed(body.seed)
        max_tokens = [output_tokens(len(p.token_ids), body.max_tokens, COMPLETION_MAX_TOKENS, limits, param="prompt") for p in prompts]
        self._jobs = [self._job(index, max_tokens[index // self._n], derive_seed(seed, index)) for index in range(len(prompts) * self._n)]
        self._choices = [job.choice for job in self._jobs]
        self._echo = [self._echo_text(prompt) if body.echo else "" for prompt in prompts]

    def _job(self, index: int, max_tokens: int, seed: int) -> Job:
        body, prompt = self._body, self._prompts[index // self._n].token_ids
        sampling = sampling_params(body, max_tokens=max_tokens, seed=seed, logprobs=self._logprobs)
        choice = Choice(
            index,
            self._services.text.detokenizer(prompt, skip_special_tokens=body.skip_special_tokens is not False),
            stops=stop_strings(body),
            include_stop=bool(body.include_stop_str_in_output),
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            discard_output=body.max_tokens == 0,
        )
        return Job(Generation(body.model, prompt, sampling, timeout_s=body.timeout_s), choice)

    def _echo_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._services.text.decode(prompt.token_ids, skip_special_tokens=self._body.skip_special_tokens is not False)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        parts = [Delta() for _ in self._jobs]
        async with aclosing(run_jobs(self._services.conductor, self._jobs)) as deltas:
            async for choice, delta in deltas:
                parts[choice.index].add(delta)
        choices = [self._show(choice, parts[choice.index], first=True) for choice in self._choices]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer as a stream of events."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        each_usage = with_usage and options is not None and bool(options.continuous_usage_stats)
        shown: set[int] = set()
        async with aclosing(run_jobs(self._services.conductor, self._jobs)) as deltas:
            async for choice, delta in deltas:
                first = choice.index not in shown
                if delta.says_nothing and not (first and self._body.echo) and not self._shows_tokens(delta):
                    continue
                shown.add(choice.index)
                event = {**self._head, "choices": [self._show(choice, delta, first=first)]}
                yield event | {"usage": self._usage() if each_usage else None} if with_usage else event
        if with_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _shows_tokens(self, delta: Delta) -> bool:
        return bool(delta.token_ids) and (self._body.logprobs is not None or bool(self._body.return_token_ids))

    def _show(self, choice: Choice, delta: Delta, *, first: bool) -> dict[str, Any]:
        """A choice object; `first` (or whole) ones begin with the echoed prompt."""
        body, at = self._body, choice.index // self._n
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": self._echo[at] + delta.text if first else delta.text,
            "logprobs": self._show_logprobs(at, delta, first=first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._logprobs.prompt is not None:
            shown["prompt_logprobs"] = self._format.prompt(delta.prompt_logprobs or (), self._logprobs.prompt)
        if body.return_token_ids:
            shown["token_ids"] = delta.token_ids
            shown["prompt_token_ids"] = list(self._prompts[at].token_ids) if first else None
        return shown

    def _show_logprobs(self, at: int, delta: Delta, *, first: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        echoed = self._echoed_tokens(at, delta.prompt_logprobs) if first and self._body.echo else ()
        return self._format.completion(delta.tokens, self._body.logprobs, echoed, len(self._echo[at]))

    def _echoed_tokens(self, at: int, known: tuple[TokenLogprobs | None, ...] | None) -> list[OutputToken]:
        """The prompt's tokens with the offsets of their text in the echo."""
        prompt = self._prompts[at].token_ids
        detokenizer = self._services.text.detokenizer((), skip_special_tokens=self._body.skip_special_tokens is not False)
        tokens = []
        for position, token_id in enumerate(prompt):
            tokens.append(OutputToken(token_id, detokenizer.num_chars, known[position] if known else None))
            detokenizer.push(token_id)
        return tokens

    def _usage(self) -> dict[str, Any]:
        return usage(sum(len(prompt.token_ids) for prompt in self._prompts), self._choices, self._n)
