"""From a request's fields to the `SamplingParams` of each of its sequences: defaults, and rules over several fields. Pure.

Front process. Raises RequestError; a `SamplingParams` that leaves here is valid, ranks trust it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar.api.prompts import check_token_ids, too_long
from mstar.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from mstar.errors import RequestError
from mstar.types import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default on /v1/completions; a chat fills the context
_GREEDY_BELOW = 1e-5  # as vLLM: logits divided by less leave fp32


@dataclass(frozen=True)
class Limits:
    """What bounds a request beside its own fields."""

    max_model_len: int  # tokens of prompt + output
    max_logprobs: int
    vocab_size: int


@dataclass(frozen=True)
class LogprobPlan:
    """Which log-probabilities go into the response; None is none of them."""

    output: int | None = None  # alternatives per output token
    echoed: int | None = None  # alternatives per echoed prompt token, in the choice's `logprobs`
    prompt: int | None = None  # alternatives per prompt token, in the choice's `prompt_logprobs` (vLLM's field)

    @property
    def of_prompt(self) -> int | None:
        """What the ranks must compute for prompt tokens."""
        wanted = [count for count in (self.echoed, self.prompt) if count is not None]
        return max(wanted) if wanted else None


def stop_strings(body: GenerationRequest) -> tuple[str, ...]:
    """`stop` as a tuple."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def completion_logprobs(body: CompletionRequest, limits: Limits) -> LogprobPlan:
    """What /v1/completions was asked for."""
    _bound(body.logprobs, limits.max_logprobs, "logprobs")
    plan = LogprobPlan(body.logprobs, body.logprobs if body.echo else None, body.prompt_logprobs)
    return _checked(plan, body, limits)


def chat_logprobs(body: ChatRequest, limits: Limits) -> LogprobPlan:
    """What /v1/chat/completions was asked for."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true.", code="invalid_value", param="top_logprobs")
    _bound(body.top_logprobs, limits.max_logprobs, "top_logprobs")
    plan = LogprobPlan((body.top_logprobs or 0) if body.logprobs else None, None, body.prompt_logprobs)
    return _checked(plan, body, limits)


def _checked(plan: LogprobPlan, body: GenerationRequest, limits: Limits) -> LogprobPlan:
    _bound(body.prompt_logprobs, limits.max_logprobs, "prompt_logprobs")
    if plan.prompt is not None and body.stream:
        raise RequestError("'prompt_logprobs' is not available with 'stream'.", code="invalid_value", param="prompt_logprobs")
    return plan


def _bound(count: int | None, most: int, param: str) -> None:
    if count is not None and count > most:
        raise RequestError(
            f"Invalid '{param}': {count} is more than this server's max_logprobs of {most}.", code="invalid_value", param=param
        )


def check_fields(body: GenerationRequest, limits: Limits) -> None:
    """Rules that need no prompt."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", code="invalid_value", param="stream_options")
    check_token_ids(body.stop_token_ids or [], limits.vocab_size, param="stop_token_ids")


def output_tokens(num_prompt_tokens: int, asked: int | None, default: int | None, limits: Limits, *, param: str) -> int:
    """How many tokens a sequence may have: what was asked, else the default, else what the context leaves.

    `asked` 0 (scoring with echo) still takes one token's room: it is generated and not shown.
    """
    room = limits.max_model_len - num_prompt_tokens
    wanted = max(asked, 1) if asked is not None else None
    if room < (wanted or 1):
        raise too_long(num_prompt_tokens, wanted or 1, limits.max_model_len, param=param)
    if wanted is not None:
        return wanted
    return min(room, default) if default is not None else room


def sampling_params(body: GenerationRequest, *, max_tokens: int, seed: int, logprobs: LogprobPlan) -> SamplingParams:
    """The sampling of one sequence, whose seed the caller derived. Raises RequestError where min_tokens is above max_tokens."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"Invalid 'min_tokens': {min_tokens} is more than the {max_tokens} tokens that may be generated.",
            code="invalid_value",
            param="min_tokens",
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.of_prompt,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
    )
