"""POST /v1/chat/completions.

Front process, asyncio loop. A chat is one prompt (the rendered template) with n choices; it differs from /v1/completions in how the
prompt is made, in its default length (the rest of the context) and in the form of the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from mstar.api.choice import Choice, Delta
from mstar.api.fanout import Job, run_jobs
from mstar.api.logprobs import LogprobFormat
from mstar.api.messages import plain_messages
from mstar.api.parameters import chat_logprobs, check_fields, output_tokens, sampling_params, stop_strings
from mstar.api.responses import EventStream, answer
from mstar.api.schemas import ChatRequest, Message
from mstar.api.seeds import derive_seed
from mstar.api.services import Services, response_head, usage
from mstar.api.text import TextProcessor
from mstar.api.unsupported import check_unsupported
from mstar.conductor.types import Generation, Rendered
from mstar.errors import RequestError


def chat_router(services: Services) -> APIRouter:
    """The route over `services`."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        check_unsupported(body.model_extra)
        served = await services.find(body.model)
        prompt = await encode_chat(
            services.text,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            chat_template=served.chat_template,
            add_special_tokens=body.add_special_tokens,
        )
        chat = _Chat(services, body, prompt, served.chat_template)
        return EventStream(chat.events()) if body.stream else await answer(request, chat.whole())

    return router


async def encode_chat(
    text: TextProcessor,
    messages: list[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
    chat_template: str | None,
    add_special_tokens: bool | None,
) -> tuple[int, ...]:
    """The messages as a prompt; `chat_template` is an adapter's own, if it has one.

    The template writes the special tokens, so none are added unless asked for. Raises RequestError.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", code="invalid_value", param="continue_final_message"
        )
    rendered = text.render_chat(
        plain_messages(messages),
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
        template_kwargs=template_kwargs,
        chat_template=chat_template,
    )
    prompt = await text.encode_async(rendered, add_special_tokens=bool(add_special_tokens), param="messages")
    if not prompt:
        raise RequestError("These messages give an empty prompt.", code="invalid_value", param="messages")
    return prompt


class _Chat:
    """One request on its way: its choices and how they are shown."""

    def __init__(self, services: Services, body: ChatRequest, prompt: tuple[int, ...], chat_template: str | None) -> None:
        limits = services.limits()
        check_fields(body, limits)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if asked == 0:
            raise RequestError("Invalid 'max_tokens': at least 1 is needed.", code="invalid_value", param="max_tokens")
        self._services, self._body, self._prompt, self._chat_template = services, body, prompt, chat_template
        self._n = body.n or 1
        self._logprobs = chat_logprobs(body, limits)
        self._format = LogprobFormat(services.text, as_token_ids=bool(body.return_tokens_as_token_ids))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = response_head("chatcmpl", kind, body.model)
        max_tokens = output_tokens(len(prompt), asked, None, limits, param="messages")
        seed = services.seed(body.seed)
        self._jobs = [self._job(index, max_tokens, derive_seed(seed, index)) for index in range(self._n)]
        self._choices = [job.choice for job in self._jobs]

    def _job(self, index: int, max_tokens: int, seed: int) -> Job:
        body = self._body
        sampling = sampling_params(body, max_tokens=max_tokens, seed=seed, logprobs=self._logprobs)
        choice = Choice(
            index,
            self._services.text.detokenizer(self._prompt, skip_special_tokens=body.skip_special_tokens is not False),
            stops=stop_strings(body),
            include_stop=bool(body.include_stop_str_in_output),
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
        )
        return Job(Generation(body.model, self._prompt, sampling, Rendered(self._chat_template), body.timeout_s), choice)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        parts = [Delta() for _ in self._jobs]
        async with aclosing(run_jobs(self._services.conductor, self._jobs)) as deltas:
            async for choice, delta in deltas:
                parts[choice.index].add(delta)
        out: dict[str, Any] = {**self._head, "choices": [self._show(choice, parts[choice.index]) for choice in self._choices]}
        out["usage"] = self._usage()
        if self._logprobs.prompt is not None:
            out["prompt_logprobs"] = self._format.prompt(parts[0].prompt_logprobs or (), self._logprobs.prompt)
        if self._body.return_token_ids:
            out["prompt_token_ids"] = list(self._prompt)
        return out

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer as a stream: per choice one event with the role, then its text, the last with the finish reason."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        each_usage = with_usage and options is not None and bool(options.continuous_usage_stats)
        begun: set[int] = set()
        async with aclosing(run_jobs(self._services.conductor, self._jobs)) as deltas:
            async for choice, delta in deltas:
                shown = [self._begin(choice, first=not begun)] if choice.index not in begun else []
                begun.add(choice.index)
                if not delta.says_nothing or self._shows_tokens(delta):
                    shown.append({**self._head, "choices": [self._show_delta(choice, delta)]})
                for event in shown:
                    yield event | {"usage": self._usage() if each_usage else None} if with_usage else event
        if with_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _shows_tokens(self, delta: Delta) -> bool:
        return bool(delta.token_ids) and (bool(self._body.logprobs) or bool(self._body.return_token_ids))

    def _begin(self, choice: Choice, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        event = {**self._head, "choices": [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        return event | {"prompt_token_ids": list(self._prompt)} if first and self._body.return_token_ids else event

    def _show(self, choice: Choice, whole: Delta) -> dict[str, Any]:
        return self._shared(choice, whole) | {"message": {"role": "assistant", "content": whole.text, "refusal": None}}

    def _show_delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._shared(choice, delta) | {"delta": {"content": delta.text} if delta.text else {}}

    def _shared(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._format.chat(delta.tokens, self._logprobs.output) if self._logprobs.output is not None else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return shown | {"token_ids": delta.token_ids} if self._body.return_token_ids else shown

    def _usage(self) -> dict[str, Any]:
        return usage(len(self._prompt), self._choices, self._n)
