"""Request fields that mstar does not have: refused where they would change the answer, passed over where they cannot.

Front process. The promise: an adapter is applied exactly or refused, and no field that should change the output is dropped in silence.
A field that says nothing (null, empty, false) is always accepted. Fields known to nobody are passed over, as OpenAI's clients add new
bookkeeping fields with every release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar.errors import RequestError

_ADAPTER_HINT = "name the adapter in 'model'"
_STRUCTURED = "structured output is not supported"
_TOOLS = "tool calls are not supported"
_SAMPLER = "this sampler is not supported"

REFUSED: Mapping[str, str] = {
    # other engines' ways to choose an adapter
    **dict.fromkeys(
        ("lora", "loras", "lora_path", "lora_request", "lora_name", "lora_id", "lora_adapter", "adapter", "adapter_id", "adapter_name"),
        _ADAPTER_HINT,
    ),
    **dict.fromkeys(
        ("adapter_source", "adapter_parameters", "merged_adapters", "lora_scale", "lora_weights", "lora_adapters"), _ADAPTER_HINT
    ),
    # output that must have a form
    **dict.fromkeys(("response_format", "json_schema", "regex", "ebnf", "grammar", "structural_tag", "structured_outputs"), _STRUCTURED),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"), _STRUCTURED),
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call", "web_search_options"), _TOOLS),
    # other ways to choose tokens
    **dict.fromkeys(
        ("logit_bias", "bad_words", "allowed_token_ids", "banned_tokens", "logits_processors", "custom_logit_processor"), _SAMPLER
    ),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping", "typical_p", "top_a", "tfs", "mirostat_mode"), _SAMPLER),
    **dict.fromkeys(("dynatemp_range", "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "xtc_probability", "dry_multiplier"), _SAMPLER),
    **dict.fromkeys(("no_repeat_ngram_size", "no_stop_trim", "stop_regex", "thinking_token_budget", "repetition_detection"), _SAMPLER),
    **dict.fromkeys(("reasoning_effort", "reasoning", "verbosity", "prediction_mode"), "this model has no such setting"),
    # other inputs and outputs
    **dict.fromkeys(
        ("prompt_embeds", "input_embeds", "input_ids", "image_data", "mm_processor_kwargs", "truncate_prompt_tokens"), "not supported"
    ),
    **dict.fromkeys(("documents", "media_io_kwargs", "audio", "modalities", "suffix", "chat_template"), "not supported"),
    **dict.fromkeys(("cache_salt", "kv_transfer_params", "return_hidden_states", "bootstrap_host", "vllm_xargs"), "not supported"),
    "echo": "echo is for /v1/completions",
    "max_completion_tokens": "use 'max_tokens' on /v1/completions",
    "top_logprobs": "use 'logprobs' on /v1/completions",
    "best_of": "use 'n'",
    "messages": "messages are for /v1/chat/completions",
    "prompt": "prompts are for /v1/completions",
}

# Values that say no more than the field's absence.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "tfs": (1, 1.0),
    "lora_scale": (1, 1.0),
    "best_of": (1,),
}


def check_unsupported(extra: Mapping[str, Any] | None) -> None:
    """Raise RequestError for the first field among `extra` (those that the route does not have) that would change the answer."""
    for name, value in (extra or {}).items():
        if name not in REFUSED or _says_nothing(name, value):
            continue
        if name in ("tools", "functions") and (extra or {}).get("tool_choice" if name == "tools" else "function_call") == "none":
            continue
        raise RequestError(f"Unsupported parameter: '{name}' ({REFUSED[name]}).", code="unsupported_parameter", param=name)


def _says_nothing(name: str, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, (str, list, dict)) and not value):
        return True
    if isinstance(value, (int, float)) and value == 0 and name not in ("lora", "lora_id", "adapter_id", "length_penalty"):
        return True
    return any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS.get(name, ()))
