"""All that is checked of an adapter before ranks read it: the front's part of a load, and the first half of `mstar adapters check`.

    resolve_path ─► inspect_adapter (config, headers, files beside) ─► added tokens ─► digest

Any process; reads files, so never on an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mstar.adapters.base import BaseShapes
from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.facts import AdapterFacts, AdapterLimits
from mstar.adapters.files import digest_adapter, never
from mstar.adapters.read import inspect_adapter

TokenId = Callable[[str], int | None]  # the served tokenizer's id of a token; None where it has no such token


@dataclass(frozen=True)
class Examined:
    """An adapter that may be served, as far as can be told without its values."""

    facts: AdapterFacts
    digest: str


def examine(
    folder: Path, base: BaseShapes, limits: AdapterLimits, token_id: TokenId | None = None, cancelled: Callable[[], bool] = never
) -> Examined:
    """Check the adapter in `folder` (from `resolve_path`) and hash its files. Raises AdapterError for the first thing that is refused."""
    facts = inspect_adapter(folder, base, limits)
    if token_id is not None:
        check_added_tokens(facts.added_tokens, token_id)
    return Examined(facts, digest_adapter(folder, limits.roots, cancelled))


def check_added_tokens(added: Mapping[str, int], token_id: TokenId) -> None:
    """Every token that the tokenizer beside the adapter adds must be one of the served tokenizer's, with the same id.

    Tokenizers list all their special tokens as added ones, so a list of the base's own says nothing. Raises AdapterError.
    """
    for token, number in added.items():
        known = token_id(token)
        if known != number:
            has = "does not have" if known is None else f"has with the id {known}"
            raise refuse("added_tokens", token=shown(token), number=number, has=has)
