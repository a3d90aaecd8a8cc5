"""The part of `docs/benchmarks.md` that a command writes, between its two marks; the rest is written by people."""

from __future__ import annotations

from pathlib import Path

from mstar.errors import ConfigError


def replace_part(path: Path, name: str, text: str) -> None:
    """Put `text` between the marks of `name`. Raises ConfigError where the file has no such marks."""
    before, after = _around(path, name)
    path.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def check_part(path: Path, name: str) -> None:
    """Raises ConfigError where `replace_part` would: better known before the measurement than after."""
    _around(path, name)


def _around(path: Path, name: str) -> tuple[str, str]:
    begin, end = f"<!-- {name}: written by mstar bench -->", f"<!-- end of {name} -->"
    try:
        before, rest = path.read_text(encoding="utf-8").split(begin, 1)
        _, after = rest.split(end, 1)
    except (OSError, ValueError):
        raise ConfigError(f"{path} has no part between {begin!r} and {end!r}") from None
    return before + begin, end + after
