"""Where an adapter's folder comes from, and the front's check of it: a folder below the roots, or a hub id.

Front process, asyncio loop; everything that touches files or the network runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mstar.adapters import AdapterLimits, BaseShapes, resolve_path
from mstar.adapters.examine import Examined, TokenId, examine
from mstar.adapters.hub import HubId, Snapshot, fetch, parse_hub_id
from mstar.config import ServeConfig
from mstar.errors import AdapterError
from mstar.threads import give_way

CHECKS_AT_ONCE = 4
FETCHES_AT_ONCE = 4
REPORT_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A folder that may be served, as far as the front can tell."""

    folder: Path
    examined: Examined


class AdapterSources:
    """Finds and checks adapters. `token_id` (the served tokenizer's) is set once, before the first load."""

    def __init__(self, config: ServeConfig, base: BaseShapes) -> None:
        self._base = base
        self._roots = tuple(Path(root) for root in config.adapter_roots)
        self._max_lora_rank = config.max_lora_rank
        self._target_modules = config.lora_target_modules
        self._from_hub = config.enable_hub_adapters
        self._threads = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="check", initializer=give_way)  # hashing is work
        self._fetching = asyncio.Semaphore(FETCHES_AT_ONCE)
        self.token_id: TokenId | None = None

    async def find(self, path: str) -> Found:
        """The checked adapter that `path` names. Raises AdapterError: what `resolve_path`, `fetch` and `examine` refuse."""
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        place = await run(self._resolve, path)
        if isinstance(place, Path):
            return await run(self._examine, place, self._roots)
        snapshot = await self._fetch(place)
        return await run(self._examine, snapshot.folder, (snapshot.place,))

    def _resolve(self, path: str) -> Path | HubId:
        try:
            return resolve_path(path, self._roots)
        except AdapterError:
            hub_id = parse_hub_id(path) if self._from_hub else None
            if hub_id is None:
                raise
            return hub_id

    def _examine(self, folder: Path, roots: tuple[Path, ...]) -> Found:
        limits = AdapterLimits(self._max_lora_rank, roots, self._target_modules)
        return Found(folder, examine(folder, self._base, limits, self.token_id))

    async def _fetch(self, hub_id: HubId) -> Snapshot:
        async with self._fetching:
            started = time.monotonic()
            log.info("hub: fetching %s", hub_id)
            fetching = asyncio.wrap_future(_in_daemon_thread(hub_id))
            while not (await asyncio.wait([fetching], timeout=REPORT_S))[0]:
                log.info("hub: still fetching %s, %.0f s so far", hub_id, time.monotonic() - started)
            snapshot = await fetching
            log.info("hub: %s is in %s after %.1f s", hub_id, snapshot.folder, time.monotonic() - started)
            return snapshot


def _in_daemon_thread(hub_id: HubId) -> Future[Snapshot]:
    """Not the loop's own threads: a slow hub must not keep other work from them, nor the process from ending."""
    outcome: Future[Snapshot] = Future()

    def run() -> None:
        try:
            outcome.set_result(fetch(hub_id))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"fetch {hub_id}", daemon=True).start()
    return outcome
