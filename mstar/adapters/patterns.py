"""`rank_pattern` and `alpha_pattern`: which key of a mapping holds for a module, by PEFT's rule.

PEFT takes the first key for which `re.match(rf"(.*\\.)?({key})$", name)` holds. Most keys are plain names, and there may be
one for every module (EVA writes such configs), so plain ones are looked up: in `layers.0.q_proj` a dot stands for any character,
so names are compared with the characters at the dots' places blanked out. Only the others go through `regex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.regex import Budget, PatternProblem, Regex
from mstar.errors import AdapterError

MAX_KEYS = 20_000
MAX_STEPS = 2_000_000
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)+")


class PatternTable:
    """The keys of the mapping `field`, in order, ready to be asked for many names.

    Made and asked, it raises AdapterError `adapter_pattern_unsupported` for a key that cannot be used or takes too long.
    """

    def __init__(self, field: str, keys: Iterable[str]) -> None:
        self.field = field
        self._keys = list(keys)
        self._unused = set(range(len(self._keys)))
        self._budget = Budget(MAX_STEPS)
        # (length, places of the dots) -> blanked name -> numbers of keys
        self._plain: dict[tuple[int, tuple[int, ...]], dict[str, list[int]]] = {}
        self._regexes: dict[int, Regex] = {}
        if len(self._keys) > MAX_KEYS:
            raise refuse("field_type", field=field, value=f"a mapping of {len(self._keys)} keys", expected=f"at most {MAX_KEYS} long")
        for number, key in enumerate(self._keys):
            self._add(number, key)

    def match(self, name: str) -> str | None:
        """The first key that matches the module name `name`; None if none does."""
        found = self._matches(name)
        self._unused.difference_update(found)
        return self._keys[min(found)] if found else None

    def unused(self) -> list[str]:
        """Keys that have matched no name so far, in order."""
        return [self._keys[number] for number in sorted(self._unused)]

    def _add(self, number: int, key: str) -> None:
        if _PLAIN.fullmatch(key):
            literal = key.replace("\\.", "\1")
            dots = tuple(place for place, char in enumerate(literal) if char == ".")
            blanked = literal.replace(".", "\0").replace("\1", ".")
            self._plain.setdefault((len(literal), dots), {}).setdefault(blanked, []).append(number)
            return
        try:
            self._regexes[number] = Regex(key)
        except PatternProblem as error:
            raise self._refusal(number, error) from None

    def _matches(self, name: str) -> list[int]:
        found: list[int] = []
        for (length, dots), keys in self._plain.items():
            self._spend(len(dots) + 1, next(iter(keys.values()))[0])
            start = len(name) - length
            if start < 0 or (start > 0 and name[start - 1] != "."):
                continue
            chars = list(name[start:])
            for place in dots:
                chars[place] = "\0"
            found += keys.get("".join(chars), ())
        for number, regex in self._regexes.items():
            try:
                matches = regex.matches(name, self._budget)
            except PatternProblem as error:
                raise self._refusal(number, error) from None
            if matches:
                found.append(number)
        return found

    def _spend(self, steps: int, number: int) -> None:
        try:
            self._budget.spend(steps)
        except PatternProblem as error:
            raise self._refusal(number, error) from None

    def _refusal(self, number: int, problem: PatternProblem) -> AdapterError:
        return refuse("pattern_unsupported", field=self.field, pattern=shown(self._keys[number]), problem=problem)
