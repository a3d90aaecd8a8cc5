"""Loads, unloads, replaces and pins: the life of an adapter's name.

    load     check the folder ─► Load to every rank, which reads and checks it ─► all answered ─► the name points to the new generation
    refused  on any rank ─► Unload to every rank ─► the name is as it was
    replace  load the new generation ─► move the pointer ─► unload the old: running requests end on the old weights

Front process, asyncio loop. One lock per name: concurrent calls about one name have one order, whatever else goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from weakref import WeakValueDictionary

from mstar.adapters import AdapterFacts, AdapterLimits, BaseShapes, digest_adapter, inspect_adapter, resolve_path
from mstar.conductor.links import RankLinks
from mstar.conductor.loads import PendingLoads
from mstar.conductor.metrics import Metrics
from mstar.conductor.pins import Pins
from mstar.conductor.registry import Adapter, Registry
from mstar.config import LoraModule, ServeConfig
from mstar.errors import AdapterError, ConfigError, RequestError
from mstar.wire import front_rank

log = logging.getLogger(__name__)


class AdapterLifecycle:
    """What may be done to adapters while serving."""

    def __init__(self, config: ServeConfig, registry: Registry, links: RankLinks, metrics: Metrics, front_epoch: str) -> None:
        self._config = config
        self._registry = registry
        self._links = links
        self._metrics = metrics
        self._loads = PendingLoads(config.tensor_parallel_size)
        self._pins = Pins(front_epoch, config.max_loras)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one lives while somebody uses it
        self._roots = tuple(Path(root) for root in config.adapter_roots)
        self._limits = AdapterLimits(max_lora_rank=config.max_lora_rank, roots=self._roots)
        self.base = BaseShapes.from_config(json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8")))

    # what an operator asks

    async def configure(self, module: LoraModule) -> None:
        """Serve a configured adapter from the start; ranks read it when it is first named. Raises ConfigError."""
        try:
            adapter = await self._prepare(module.name, module.path, pinned=module.pinned)
            if module.pinned:
                self._pins.pin(adapter)  # sent when the ranks are up
        except RequestError as error:
            raise ConfigError(f"lora_modules {module.name!r}: {error.message}") from None
        self._registry.put(adapter)

    async def load(self, name: str, path: str, *, load_inplace: bool, pinned: bool) -> None:
        """Serve `name` from `path`: on return it is usable on every rank. The same weights again are a success that changes nothing.

        Raises AdapterError (400 refused, 404 no such folder, 409 served with other weights, 503 a rank is down); then the name and what
        it served are as they were.
        """
        if not self._config.enable_lora:
            raise AdapterError("this server runs without LoRA (--no-enable-lora)", code="lora_disabled")
        self._registry.check_name(name)
        async with self._lock(name):
            self._registry.check_name(name)
            adapter = await self._prepare(name, path, pinned=pinned)
            served = self._registry.get(name)
            if served is not None and served.digest == adapter.digest:
                if pinned:
                    self._pin(served)
                return
            if served is not None and not load_inplace:
                raise AdapterError(
                    f"lora_name {name!r} is served already with other weights; unload it first, or set load_inplace",
                    code="adapter_already_loaded",
                    status=409,
                )
            if pinned:
                self._pins.check_room()
            await self._load_on_ranks(adapter)
            before = self._registry.put(adapter)
            was_pinned = before is not None and self._unpin(before)
            if pinned or was_pinned:
                self._pin(adapter)
            if before is not None:
                self._links.send_all(front_rank.Unload(before.generation))

    async def unload(self, name: str) -> None:
        """Stop serving `name`: new requests on it get 404 from now on, running ones end on its weights. Raises RequestError 404."""
        async with self._lock(name):
            adapter = self._served(name)
            self._registry.pop(name)
            self._unpin(adapter)
            self._links.send_all(front_rank.Unload(adapter.generation))
            self._metrics.forget(name)

    async def pin(self, name: str) -> None:
        """Keep `name` in its slot until it is unpinned. Raises RequestError 404, AdapterError 409 where no slot would be left to turn."""
        async with self._lock(name):
            self._pin(self._served(name))

    async def unpin(self, name: str) -> None:
        """Let `name`'s slot turn again; one that is not pinned stays so. Raises RequestError 404 where it is not served."""
        async with self._lock(name):
            self._unpin(self._served(name))

    def pinned(self) -> list[str]:
        """Names of pinned adapters."""
        return sorted(self._registry.client_name(generation) for generation in self._pins.generations())

    # what ranks say

    def answered(self, tp_rank: int, result: front_rank.LoadResult) -> None:
        """A rank's answer to a Load."""
        self._loads.answered(tp_rank, result)

    def pin_failed(self, rid: str) -> bool:
        """A request failed: whether it was a pin, which then is none any more."""
        generation = self._pins.failed(rid)
        if generation is not None:
            log.error("the pin of %s failed", self._registry.client_name(generation))
        return generation is not None

    def went_down(self, reason: str) -> None:
        """The ranks are gone, and with them every load under way."""
        self._loads.fail_all(AdapterError(f"the ranks went down while it loaded: {reason}", code="instance_restarted", status=503))

    def register(self, adapter: Adapter) -> None:
        """Tell ranks that started anew about a generation that was checked before; nothing is read until it is named."""
        self._links.send_all(self._load_message(adapter, 0, verify=False))

    def register_all(self) -> None:
        """All served names, then the pins."""
        for adapter in self._registry.adapters():
            self.register(adapter)
        for generation in self._pins.generations():
            pinned = self._registry.get(self._registry.client_name(generation))
            if pinned is not None and pinned.generation == generation:
                self._links.send_all(self._pins.ingest(pinned))

    # inside

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _served(self, name: str) -> Adapter:
        adapter = self._registry.get(name)
        if adapter is None:
            raise RequestError(f"The lora adapter '{name}' cannot be found.", code="adapter_not_found", param="lora_name", status=404)
        return adapter

    def _pin(self, adapter: Adapter) -> None:
        ingest = self._pins.pin(adapter)
        if ingest is not None:
            self._links.send_all(ingest)

    def _unpin(self, adapter: Adapter) -> bool:
        rid = self._pins.unpin(adapter.generation)
        if rid is not None:
            self._links.send(0, front_rank.Abort(rid))
        return rid is not None

    async def _prepare(self, name: str, path: str, *, pinned: bool) -> Adapter:
        """Check a folder as far as the front can: place, config, headers, digest. Raises AdapterError."""
        folder = resolve_path(path, self._roots)
        facts, digest = await asyncio.to_thread(self._examine, folder)
        for warning in facts.warnings:
            log.warning("adapter %s: %s", name, warning)
        generation = self._registry.draw_generation(name)
        return Adapter(name, generation, str(folder), path, digest, int(time.time()), bool(facts.modules), pinned)

    def _examine(self, folder: Path) -> tuple[AdapterFacts, str]:
        return inspect_adapter(folder, self.base, self._limits), digest_adapter(folder, self._roots)

    async def _load_on_ranks(self, adapter: Adapter) -> None:
        """All ranks read and check it, or none keeps it."""
        if not self._links.is_up:
            raise AdapterError("the ranks are not ready; try again", code="server_not_ready", status=503)
        load_id = self._loads.begin()
        self._links.send_all(self._load_message(adapter, load_id, verify=True))
        try:
            await self._loads.wait(load_id, 2 * self._config.lora_read_timeout_s)
        except BaseException:
            self._links.send_all(front_rank.Unload(adapter.generation))
            raise

    def _load_message(self, adapter: Adapter, load_id: int, *, verify: bool) -> front_rank.Load:
        return front_rank.Load(
            load_id, adapter.generation, adapter.path, adapter.digest, verify=verify, has_something=adapter.has_something
        )
