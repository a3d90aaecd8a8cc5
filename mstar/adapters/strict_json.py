"""JSON from untrusted bytes: no key twice, no surprise exceptions, and in headers no NaN.

Bounds on size are the caller's; depth is bounded by the interpreter's own limit, which is reported as any other problem.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mstar.adapters.catalogue import shown


class JsonProblem(ValueError):
    """The bytes are not what was asked for; the text completes a sentence about the file (`is not UTF-8`)."""


def load_object(data: bytes, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `data` (UTF-8). `constants` lets NaN and Infinity through, as PEFT's reader does. Raises JsonProblem."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise JsonProblem("is not UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=None if constants else _no_constant)
    except JsonProblem:
        raise
    except json.JSONDecodeError as error:
        raise JsonProblem(f"is not valid JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise JsonProblem("is nested too deeply") from None
    except ValueError:  # an integer with more digits than the interpreter converts
        raise JsonProblem("holds a number that is too long") from None
    if not isinstance(value, dict):
        raise JsonProblem("is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise JsonProblem(f"has the key {shown(key)} twice")
        found[key] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise JsonProblem(f"holds {text}, which is not JSON")
