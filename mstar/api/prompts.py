"""The `prompt` field of /v1/completions: one prompt or many, each text or token ids. Pure but for the tokenizer.

Front process. The field is checked by hand: a union of four list types would make pydantic report one error per element and type.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from mstar.api.text import THREAD_SIZE, TextProcessor
from mstar.errors import RequestError


@dataclass(frozen=True)
class Prompt:
    """One prompt, encoded. `text` is what the client sent, None where it sent token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


def split_prompts(value: Any) -> list[str | list[Any]]:
    """The prompts in the field: each a text or a list of token ids (not yet checked). Raises RequestError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _invalid("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise _invalid("must not be empty")
    if _is_token(value[0]):
        return [value]
    if not all(isinstance(item, (str, list)) for item in value):
        raise _invalid("must be a text, a list of texts, a list of token ids, or a list of such lists")
    return value


async def encode_prompts(
    value: Any, text: TextProcessor, *, add_special_tokens: bool, max_prompts: int, max_model_len: int
) -> list[Prompt]:
    """Every prompt of the field as token ids. Raises RequestError: empty, too long, not text, a token id that the model has not."""
    items = split_prompts(value)
    if len(items) > max_prompts:
        raise _invalid(f"holds {len(items)} prompts, at most {max_prompts} are allowed in one request")
    for item in items:
        if isinstance(item, list) and len(item) > max_model_len:  # before a look at each of its ids
            raise too_long(len(item), 1, max_model_len, param="prompt")

    def encode_all() -> list[Prompt]:
        return [_encode(item, text, add_special_tokens=add_special_tokens) for item in items]

    if sum(map(len, items)) <= THREAD_SIZE:
        return encode_all()
    return await asyncio.to_thread(encode_all)


def _encode(item: str | list[Any], text: TextProcessor, *, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(text.encode(item, add_special_tokens=add_special_tokens), item)
    elif all(_is_token(token) for token in item):
        check_token_ids(item, text.vocab_size, param="prompt")
        prompt = Prompt(tuple(item))
    else:
        raise _invalid("mixes token ids with something else")
    if not prompt.token_ids:
        raise _invalid("must not be empty: a prompt needs at least one token")
    return prompt


def check_token_ids(token_ids: list[int], vocab_size: int, *, param: str) -> None:
    """Raise RequestError for the first id outside the model's vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"Invalid '{param}': token id {str(token_id)[:40]} is outside the vocabulary, 0 to {vocab_size - 1}.",
                code="invalid_value",
                param=param,
            )


def too_long(num_prompt_tokens: int, num_output_tokens: int, max_model_len: int, *, param: str) -> RequestError:
    """Prompt and output do not fit the context together; in OpenAI's words."""
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_prompt_tokens + num_output_tokens} tokens ({num_prompt_tokens} in the {param}, {num_output_tokens} in the completion). "
        f"Please reduce the length of the {param} or completion.",
        code="context_length_exceeded",
        param=param,
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(problem: str) -> RequestError:
    return RequestError(f"Invalid 'prompt': it {problem}.", code="invalid_value", param="prompt")
