"""Chat messages as templates want them: plain dicts with text contents. Pure.

Front process. Parts of a content are texts (joined by a line end, as vLLM joins them); anything else (images, audio) is refused.
Tool calls of earlier turns keep their place; their arguments become objects, which is what templates read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mstar.api.schemas import Message
from mstar.errors import RequestError

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises RequestError naming the part that is not text."""
    return [_plain(message, f"messages.{at}") for at, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content, f"{where}.content")}
    plain |= {key: value for key, value in (message.model_extra or {}).items() if value is not None}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls.{at}") for at, call in enumerate(plain["tool_calls"])]
    return plain


def _text(content: str | list[str | dict[str, Any]] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(_part(part, f"{where}.{at}") for at, part in enumerate(content))


def _part(part: str | dict[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text = part.get(_TEXT_KEYS[kind]) if isinstance(kind, str) and kind in _TEXT_KEYS else None
    if isinstance(text, str):
        return text
    shown = str(kind)[:40] if kind is not None else "none"
    raise RequestError(f"Unsupported content part of type '{shown}': only text is supported.", code="unsupported_content", param=where)


def _tool_call(call: Any, where: str) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        raise RequestError(f"Invalid '{where}.function.arguments': not valid JSON.", code="invalid_value", param=where) from None
    return {**call, "function": {**function, "arguments": parsed}}
