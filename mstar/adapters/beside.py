"""The tokenizer's files that may lie beside an adapter: its chat template, and tokens it adds.

Read by the front alone, at validation; ranks never open them. The digest does not cover them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.files import read_small
from mstar.adapters.strict_json import JsonProblem, load_object
from mstar.adapters.template import template_problem

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAME = "tokenizer_config.json"
ADDED_NAME = "added_tokens.json"
MAX_TEMPLATE_BYTES = 128 << 10  # those in use have up to 25 KiB, and the front compiles it while others' answers wait
MAX_TOKENIZER_BYTES = 8 << 20


def read_beside(folder: Path, roots: Sequence[Path], vocab_size: int) -> tuple[str | None, dict[str, int]]:
    """The adapter's own chat template, if any, and the added tokens with their ids.

    Raises AdapterError `adapter_vocab_mismatch` for a token that the base's vocabulary has no row for, and
    `adapter_chat_template_invalid` for files that cannot be understood and templates that cannot be compiled.
    """
    tokenizer = _object(folder, TOKENIZER_NAME, roots)
    added = {**_added_by_id(tokenizer.get("added_tokens_decoder")), **_added_by_name(_object(folder, ADDED_NAME, roots))}
    for token, number in added.items():
        if number >= vocab_size:
            raise refuse("vocab", what=f"The tokenizer beside the adapter adds {shown(token)} with the id {number}", vocab=vocab_size)
    own = _text(read_small(folder, TEMPLATE_NAME, roots, MAX_TEMPLATE_BYTES))
    file, template = (TOKENIZER_NAME, _template_of(tokenizer)) if own is None else (TEMPLATE_NAME, own)
    if template is not None:
        _check_template(file, template)
    return template, added


def _check_template(file: str, template: str) -> None:
    if len(template) > MAX_TEMPLATE_BYTES:  # of a tokenizer_config.json, which may be larger
        raise refuse(
            "chat_template", file=file, problem=f"has a chat template of {len(template)} characters (at most {MAX_TEMPLATE_BYTES})"
        )
    problem = template_problem(template)
    if problem is not None:
        raise refuse("chat_template", file=file, problem=f"has a chat template that cannot be compiled ({shown(problem)})")


def _text(template: bytes | None) -> str | None:
    try:
        return None if template is None else template.decode("utf-8")
    except UnicodeDecodeError:
        raise refuse("chat_template", file=TEMPLATE_NAME, problem="is not UTF-8") from None


def _object(folder: Path, name: str, roots: Sequence[Path]) -> dict[str, Any]:
    data = read_small(folder, name, roots, MAX_TOKENIZER_BYTES)
    if data is None:
        return {}
    try:
        return load_object(data)
    except JsonProblem as error:
        raise refuse("chat_template", file=name, problem=error) from None


def _added_by_id(decoder: Any) -> dict[str, int]:
    if not isinstance(decoder, Mapping):
        return {}
    return {
        str(entry.get("content", number)): int(number)
        for number, entry in decoder.items()
        if isinstance(entry, dict) and number.isascii() and number.isdigit() and len(number) < 10
    }


def _added_by_name(tokens: Mapping[str, Any]) -> dict[str, int]:
    return {token: number for token, number in tokens.items() if type(number) is int}


def _template_of(tokenizer: Mapping[str, Any]) -> str | None:
    """The template in `tokenizer_config.json`: one text, or a list of named ones of which `default` is meant."""
    template = tokenizer.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
                return str(entry["template"])
    raise refuse("chat_template", file=TOKENIZER_NAME, problem="has a `chat_template` that is neither a text nor a list with `default`")
