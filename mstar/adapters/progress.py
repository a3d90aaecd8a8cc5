"""Progress for people, on stderr, and only where something takes longer than `PATIENCE_S`.

`WhileWaiting` is for one blocking call, `ReadProgress` for reads that ask between chunks whether they should go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mstar.adapters.files import CHUNK_BYTES

PATIENCE_S = 2.0
T = TypeVar("T")


def while_waiting(what: str, call: Callable[[], T], console: Console) -> T:
    """Run `call`; once it takes long, a spinner with the seconds so far. Its result or its exception is passed on."""
    done = threading.Event()

    def show() -> None:
        if done.wait(PATIENCE_S):
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what, total=None)
            done.wait()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        return call()
    finally:
        done.set()
        thread.join()


class ReadProgress:
    """The `cancelled` of a read: never cancels, and shows a bar of `size_bytes` once the read takes long."""

    def __init__(self, what: str, size_bytes: int, console: Console) -> None:
        self._what = what
        self._size_bytes = size_bytes
        self._started = time.monotonic()
        self._num_asked = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(what, total=size_bytes)
        self._is_shown = False

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_shown:
            self._progress.stop()

    def __call__(self) -> bool:
        """A chunk begins: see `read_adapter`."""
        if not self._is_shown and time.monotonic() - self._started > PATIENCE_S:
            self._is_shown = True
            self._progress.start()
        self._progress.update(self._task, completed=min(self._num_asked * CHUNK_BYTES, self._size_bytes))
        self._num_asked += 1
        return False
