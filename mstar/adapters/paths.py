"""Which folders clients may name: those below the roots, and nothing is told of any other.

A path is made absolute and its `..` are taken off by text alone, before the file system is asked anything; only a path that
then lies below a root is resolved, and what it resolves to must lie below a root too. So neither `..` nor a link reaches
outside, and the answer for an outside path is the same whether it exists or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mstar.adapters.catalogue import refuse, shown

MAX_PATH = 4096
MAX_NAME = 255


def resolve_path(path: str, roots: Sequence[Path]) -> Path:
    """The real folder that `path` names, below one of `roots`.

    A relative path is taken against each root in order, then against the working directory. Raises AdapterError
    `adapter_path_not_allowed` (400) for a path that leads outside, `adapter_not_found` (404) for one inside that is no folder.
    """
    if not _well_formed(path):
        raise refuse("path_not_allowed", path=shown(path))
    tops = [os.path.abspath(root) for root in roots]
    real_tops = [os.path.realpath(top) for top in tops]
    starts = [*tops, os.getcwd()]
    inside = []
    for candidate in dict.fromkeys(os.path.abspath(os.path.join(start, path)) for start in starts):
        if _within(candidate, (*tops, *real_tops)):
            inside.append(os.path.realpath(candidate))
    allowed = [real for real in inside if _within(real, real_tops)]
    for real in allowed:
        if os.path.isdir(real):
            return Path(real)
    if not allowed or len(allowed) < len(inside):
        raise refuse("path_not_allowed", path=shown(path))
    raise refuse("not_found", path=shown(path))


def _well_formed(path: str) -> bool:
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return len(raw) < MAX_PATH and all(len(name) <= MAX_NAME for name in raw.split(b"/"))


def _within(path: str, tops: Iterable[str]) -> bool:
    return any(path == top or path.startswith(top.rstrip("/") + "/") for top in tops)


def lies_in(path: str, folders: Iterable[Path]) -> bool:
    """Whether the real place of `path` is one of `folders` or below it."""
    return _within(os.path.realpath(path), [os.path.realpath(folder) for folder in folders])
