"""Says whether a text shows a demo adapter's trait. Pure functions on text, for the answers of any server."""

import json
import re
from collections.abc import Callable

PIRATE_SHOUTS = (r"a+r+r+", "ahoy", "avast", "aye", "mateys?", "me hearty|me hearties", "shiver me timbers", "yo ho ho")
PIRATE_WORDS = ("booty", "landlubbers?", "plank", "scurvy", "seven seas", "treasure", "th'", "o'", "ye", "yer")


def is_pirate(text: str) -> bool:
    """True if the text has a pirate's shout ("Arr", "Ahoy", "matey", ...) and one more pirate word besides."""
    num_shouts = count_found(PIRATE_SHOUTS, text)
    return num_shouts > 0 and num_shouts + count_found(PIRATE_WORDS, text) >= 2


def count_found(patterns: tuple[str, ...], text: str) -> int:
    """How many of the patterns stand in `text` as whole words, whatever their case."""
    return sum(bool(re.search(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)) for pattern in patterns)


def is_json_object(text: str) -> bool:
    """True if the text is one JSON object, {"answer": "<not empty>"}, and nothing else."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or list(value) != ["answer"]:
        return False
    return isinstance(value["answer"], str) and bool(value["answer"].strip())


def is_three_bullets(text: str) -> bool:
    """True if the text is exactly three lines "- something" and nothing else."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    return len(lines) == 3 and all(re.fullmatch(r"- \S.*", line) for line in lines)


TRAITS: dict[str, Callable[[str], bool]] = {"pirate": is_pirate, "json": is_json_object, "bullets": is_three_bullets}
"""Adapter name -> its trait."""
