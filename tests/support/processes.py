"""Looking at processes by id (Linux), and waiting for a condition with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 120.0  # a bound, never a measure: a crowded machine may need most of it


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float = WAIT_S) -> T:
    """Call `probe` until it returns something true, and return that. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}; the last look gave {found!r}"
        time.sleep(0.02)


def descendants(pid: int) -> dict[int, str]:
    """Every process below `pid`: its id and what tells it from a later process with the same id."""
    children: dict[int, list[int]] = {}
    births: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            parent, birth = stat
            children.setdefault(parent, []).append(int(entry.name))
            births[int(entry.name)] = birth
    found: dict[int, str] = {}
    todo = list(children.get(pid, ()))
    while todo:
        child = todo.pop()
        found[child] = births[child]
        todo.extend(children.get(child, ()))
    return found


def still_alive(processes: dict[int, str]) -> list[int]:
    """Those of `descendants` that have not ended."""
    return [pid for pid, birth in processes.items() if (stat := _stat(pid)) is not None and stat[1] == birth]


def _stat(pid: int) -> tuple[int, str] | None:
    """The parent and the start time of a process; None where it is gone or waits only to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else (int(fields[1]), fields[19])
