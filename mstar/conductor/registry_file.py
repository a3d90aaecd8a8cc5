"""The registry on disk, so that a front that starts again serves what the one before served.

Written whole, beside, then renamed; the state before stays as `.last`. A file that is torn or edited fails its checksum, and the last
good one is used. What is restored was checked when it was loaded: nothing is read until a request names it, and its digest decides then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mstar.conductor.registry import Adapter

log = logging.getLogger(__name__)


class RegistryFile:
    """`run` names the supervisor's run: within it generations stay what they are, after it they are drawn anew."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._last = path.with_name(path.name + ".last")
        self._run = run

    def save(self, adapters: Iterable[Adapter]) -> None:
        """Write the served adapters. An OSError is logged: serving goes on, a restart would know less."""
        body = json.dumps({"run": self._run, "adapters": [asdict(adapter) for adapter in adapters]}, sort_keys=True)
        text = json.dumps({"sha256": _checksum(body), "body": body})
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            if self._path.exists():
                self._path.replace(self._last)
            beside.replace(self._path)
        except OSError as error:
            log.error("the registry could not be written to %s: %s", self._path, error)

    def load(self) -> tuple[bool, list[Adapter]]:
        """Whether this same run wrote it, and what it served; the last good state where the newest is torn, nothing where none is."""
        for path in (self._path, self._last):
            try:
                outer = json.loads(path.read_text(encoding="utf-8"))
                if outer["sha256"] != _checksum(outer["body"]):
                    raise ValueError("the checksum does not fit")
                body = json.loads(outer["body"])
                return body["run"] == self._run, [Adapter(**fields) for fields in body["adapters"]]
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("the registry in %s is not usable: %s", path, error)
        return False, []


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
