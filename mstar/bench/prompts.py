"""Random prompts of a given length. Pure and seeded: prompt i is a function of (seed, stream, i) alone.

Random, so that no two prompts share a prefix and a server's prefix cache cannot help. The same seed against the same running server
does meet its cache; that is why the commands draw a fresh seed unless one is given, and why warm-up uses a stream of its own.

Token ids are drawn from a pool that is safe to send: ids of ordinary words where the server can tokenize, else the middle of the
vocabulary, because special tokens and padding lie at its two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mstar.errors import ConfigError

Prompt = tuple[int, ...] | str

WORDS: tuple[str, ...] = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family", "student",
    "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question", "work",
    "government", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot",
    "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend",
    "father", "power", "hour", "game", "line", "end",
)  # fmt: skip
_MIN_POOL = 16


def middle_ids(vocab_size: int) -> range:
    """The ids of a vocabulary without its first and last eighth. Raises ConfigError if too few remain to make distinct prompts."""
    pool = range(vocab_size // 8, vocab_size - vocab_size // 8)
    if len(pool) < _MIN_POOL:
        raise ConfigError(f"--vocab-size {vocab_size}: too small; at least {_MIN_POOL * 4 // 3 + 2} is needed")
    return pool


def seen_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The distinct ids in a tokenized text, ascending. Raises ConfigError if they are too few to make distinct prompts."""
    pool = tuple(sorted(set(token_ids)))
    if len(pool) < _MIN_POOL:
        raise ConfigError(f"/tokenize gave {len(pool)} distinct ids, fewer than {_MIN_POOL}: give --vocab-size N, or --text")
    return pool


def token_prompt(pool: Sequence[int], num_tokens: int, seed: int, stream: str, index: int) -> Prompt:
    """`num_tokens` ids out of `pool`."""
    return tuple(Random(f"{seed}/{stream}/{index}").choices(pool, k=num_tokens))


def text_prompt(num_words: int, seed: int, stream: str, index: int) -> Prompt:
    """`num_words` common English words: about one token each with an English vocabulary."""
    return " ".join(Random(f"{seed}/{stream}/{index}").choices(WORDS, k=num_words))
