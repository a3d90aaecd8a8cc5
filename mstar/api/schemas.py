"""The bodies that clients send, as pydantic models: types and bounds of single fields.

Front process. What one field cannot say (prompt and context length, fields that exclude each other) is in `parameters.py` and
`prompts.py`; fields that are not listed here go through `unsupported.py`. None stands for "not given", as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, Strict, field_validator

Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), AllowInfNan(allow_inf_nan=False)]
Text = Annotated[str, Strict()]

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
_INT64 = 1 << 63
_PRINTABLE = r"^[^\x00-\x1f\x7f]+$"  # no control characters: names go into logs, metrics and paths


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None


class GenerationRequest(BaseModel):
    """What both generation routes take."""

    model_config = ConfigDict(extra="allow")

    model: Text
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = Field(None, ge=1, le=128)
    max_tokens: Int | None = Field(None, ge=0)
    seed: Int | None = Field(None, ge=-_INT64, lt=_INT64)

    temperature: Float | None = Field(None, ge=0, le=1e6)
    top_p: Float | None = Field(None, gt=0, le=1)
    top_k: Int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: Float | None = Field(None, ge=0, le=1)
    presence_penalty: Float | None = Field(None, ge=-2, le=2)
    frequency_penalty: Float | None = Field(None, ge=-2, le=2)
    repetition_penalty: Float | None = Field(None, ge=0.01, le=100)  # beyond these, logits leave fp32

    stop: Text | list[Text] | None = None
    stop_token_ids: list[Int] | None = Field(None, max_length=128)
    min_tokens: Int | None = Field(None, ge=0)
    timeout_s: Float | None = Field(None, gt=0, le=86400)  # mstar's own: the request ends with 504 then
    ignore_eos: Bool | None = None
    include_stop_str_in_output: Bool | None = None
    skip_special_tokens: Bool | None = None

    add_special_tokens: Bool | None = None
    prompt_logprobs: Int | None = Field(None, ge=0)
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(not text or len(text) > MAX_STOP_CHARS for text in stops):
            raise ValueError(f"stop strings must have 1 to {MAX_STOP_CHARS} characters")
        return stop


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any  # read by prompts.py: text, token ids, or a list of either
    best_of: Int | None = Field(None, ge=1)
    echo: Bool | None = None
    logprobs: Int | None = Field(None, ge=0)
    suffix: Text | None = None


class Message(BaseModel):
    """One message of a chat. Further keys (`name`, `tool_calls`, …) reach the template."""

    model_config = ConfigDict(extra="allow")

    role: Text = Field(min_length=1)
    content: Text | list[Text | dict[str, Any]] | None = None


class TemplateFields(BaseModel):
    """How messages become a prompt."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, TemplateFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: Int | None = Field(None, ge=1)
    logprobs: Bool | None = None
    top_logprobs: Int | None = Field(None, ge=0)


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt` or `messages`, as vLLM takes them."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[Int]


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter. An unknown field is refused: it could change what is served."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Text = Field(min_length=1, max_length=256, pattern=_PRINTABLE)
    lora_path: Text = Field(min_length=1, max_length=4096, pattern=_PRINTABLE)
    load_inplace: Bool = False
    pinned: Bool = False


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter. vLLM's clients may add `lora_int_id`; names decide here."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Text = Field(min_length=1, max_length=256, pattern=_PRINTABLE)
    lora_int_id: Int | None = None
