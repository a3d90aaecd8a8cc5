"""The registry on disk, so that a front that starts again serves what the one before served.

A log: a line a change, each with its own checksum, so that a change costs one line however many adapters are registered. At a start, and
when most of it is history, it is written anew: whole, beside, then renamed; the file before stays as `.last`.

    <checksum> {"run": "3f…"}
    <checksum> {"name": "a", "adapter": {…}}
    <checksum> {"name": "a", "adapter": null}

A line that is torn or edited fails its checksum: what stands before it is used, and `.last` where that is nothing. What is restored was
checked when it was loaded: nothing is read until a request names it, and its digest decides then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from mstar.conductor.registry import Adapter

MAX_HISTORY = 4  # lines per served adapter …
SLACK = 1000  # … and so many more, before the log is written anew

log = logging.getLogger(__name__)


class RegistryFile:
    """`run` names the supervisor's run: within it generations stay what they are, after it they are drawn anew."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._last = path.with_name(path.name + ".last")
        self._run = run
        self._num_lines = 0
        self._is_whole = False  # nothing torn is in it that would hide what comes after

    def load(self) -> tuple[bool, list[Adapter]]:
        """Whether this same run wrote it, and what it served."""
        for path in (self._path, self._last):
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    lines = _sound(path, file)
                    run = next(lines, {}).get("run")
                    if run is not None:
                        return run == self._run, list(_replay(lines))
            except FileNotFoundError:
                continue
            except (OSError, KeyError, TypeError) as error:
                log.error("the registry in %s is not usable: %s", path, error)
        return False, []

    def begin(self, adapters: Iterable[Adapter]) -> None:
        """Write the file anew with what is served. An OSError is logged: serving goes on, a restart would know less."""
        lines = [_line({"run": self._run}), *(_line({"name": adapter.name, "adapter": adapter}) for adapter in adapters)]
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            beside.write_bytes(b"".join(lines))
            if self._path.exists():
                self._path.replace(self._last)
            beside.replace(self._path)
            self._num_lines, self._is_whole = len(lines), True
        except OSError as error:
            log.error("the registry could not be written to %s: %s", self._path, error)
            self._is_whole = False

    def changed(self, name: str, adapter: Adapter | None, num_served: int, served: Callable[[], Iterable[Adapter]]) -> None:
        """`name` is served by `adapter` from now on, or (None) by nothing. `served` is asked where the log has to be written anew."""
        self._num_lines += 1
        if not self._is_whole or self._num_lines > MAX_HISTORY * num_served + SLACK:
            self.begin(served())
            return
        try:
            with self._path.open("ab") as file:
                file.write(_line({"name": name, "adapter": adapter}))
        except OSError as error:
            log.error("the registry could not be written to %s: %s", self._path, error)
            self._is_whole = False


def _line(record: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(record)
    return _checksum(body) + b" " + body + b"\n"


def _sound(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The records up to the first line that is not as it was written."""
    for number, line in enumerate(lines, start=1):
        checksum, _, body = line.rstrip("\n").partition(" ")
        if checksum.encode() != _checksum(body.encode()) or not line.endswith("\n"):
            log.error("the registry in %s is torn at line %d: going on with what stands before", path, number)
            return
        yield json.loads(body)


def _replay(records: Iterable[dict[str, Any]]) -> list[Adapter]:
    served: dict[str, Adapter] = {}
    for record in records:
        served.pop(record["name"], None)
        if record["adapter"] is not None:
            served[record["name"]] = Adapter(**record["adapter"])
    return list(served.values())


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).hexdigest().encode()
