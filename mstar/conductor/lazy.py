"""`--lora-dir`: adapters that are served by their folder's name, loaded when a request first names one.

    request names `foo`, which is not served ─► DIR/foo is a folder? ─no─► 404
                                                 └─yes─► one load, however many requests wait for it ─► served, or its refusal to each

Front process, asyncio loop. The folder is never listed: a start, and a request, cost the same however many adapters lie in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

MAX_FOLDER_NAME_BYTES = 255


class LazyFolder:
    """One `lora_dir`. `load(name, path)` serves an adapter unless the name is served already."""

    def __init__(self, folder: str, load: Callable[[str, str], Awaitable[None]]) -> None:
        self._folder = Path(folder)
        self._load = load
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def serve(self, name: str) -> bool:
        """Load the adapter in the folder `name`; False where there is none. Raises what its load refuses."""
        if not may_be_folder(name):
            return False
        loading = self._loading.get(name)
        if loading is None:
            path = self._folder / name
            if not await asyncio.to_thread(path.is_dir):
                return False
            loading = self._loading.get(name)  # another request may have been first meanwhile
            if loading is None:
                loading = asyncio.ensure_future(self._run(name, str(path)))
                self._loading[name] = loading
        await asyncio.shield(loading)  # a client that goes away leaves the load to the others
        return True

    async def _run(self, name: str, path: str) -> None:
        try:
            await self._load(name, path)
        finally:
            del self._loading[name]


def may_be_folder(name: str) -> bool:
    """Whether `name` can be that of one folder here: no separator, no leading dot, nothing that a path or a log would read otherwise."""
    if not name or name.startswith(".") or not name.isprintable() or any(char in "/\\\0" for char in name):
        return False
    try:
        return len(name.encode()) <= MAX_FOLDER_NAME_BYTES
    except UnicodeEncodeError:
        return False
