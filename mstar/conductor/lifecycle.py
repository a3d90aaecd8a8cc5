"""Loads, unloads, replaces and pins: the life of an adapter's name.

    load     check the folder ─► Load to every rank, which reads and checks it ─► all answered ─► the name points to the new generation
    refused  on any rank ─► Unload to every rank ─► the name is as it was
    replace  load the new generation ─► move the pointer ─► unload the old: running requests end on the old weights

Front process, asyncio loop. One lock per name: concurrent calls about one name have one order, whatever else goes on. Between the last
rank's answer and the moved pointer nothing is awaited, so a load that succeeded on every rank is served, and one that did not is not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from weakref import WeakValueDictionary

from mstar.adapters import BaseShapes
from mstar.adapters.examine import TokenId
from mstar.conductor.links import RankLinks
from mstar.conductor.loads import PendingLoads
from mstar.conductor.metrics import Metrics
from mstar.conductor.pins import Pins
from mstar.conductor.registry import Adapter, Registry
from mstar.conductor.sources import AdapterSources
from mstar.config import LoraModule, ServeConfig
from mstar.errors import AdapterError, ConfigError, RequestError
from mstar.wire import front_rank

log = logging.getLogger(__name__)


class AdapterLifecycle:
    """What may be done to adapters while serving."""

    def __init__(
        self,
        config: ServeConfig,
        registry: Registry,
        links: RankLinks,
        metrics: Metrics,
        front_epoch: str,
        unopened: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """`unopened` tells the generations of accepted requests that no rank has heard of yet."""
        self._config = config
        self._registry = registry
        self._links = links
        self._metrics = metrics
        self._unopened = unopened
        self._loads = PendingLoads(config.tensor_parallel_size)
        self._pins = Pins(front_epoch, config.max_loras)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one lives while somebody uses it
        self._retiring: dict[str, None] = {}  # generations whose Unload waits for requests to be opened, in order
        self._num_ups = 0
        self.base = BaseShapes.from_config(json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8")))
        self._sources = AdapterSources(config, self.base)

    def use_tokens(self, token_id: TokenId) -> None:
        """From now on, refuse adapters with tokens that the served tokenizer does not have."""
        self._sources.token_id = token_id

    # what an operator asks

    async def configure(self, module: LoraModule) -> None:
        """Serve a configured adapter from the start; ranks read it when it is first named. Raises ConfigError."""
        try:
            adapter = dataclasses.replace(await self._prepare(module.name, module.path), pinned=module.pinned)
            if module.pinned:
                self._pins.pin(adapter)  # sent when the ranks are up
        except RequestError as error:
            raise ConfigError(f"lora_modules {module.name!r}: {error.message}") from None
        self._registry.put(adapter)

    def restored(self) -> None:
        """Pin again what the registry that came back says is pinned."""
        for adapter in self._registry.adapters():
            if adapter.pinned:
                try:
                    self._pins.pin(adapter)
                except AdapterError as error:
                    log.error("%s was pinned and is not any more: %s", adapter.name, error)
                    self._registry.put(dataclasses.replace(adapter, pinned=False))

    async def load(self, name: str, path: str, *, load_inplace: bool, pinned: bool) -> None:
        """Serve `name` from `path`: on return it is usable on every rank. The same adapter again is a success that changes nothing.

        Raises AdapterError (400 refused, 404 no such folder, 409 served with other weights, 503 a rank is down); then the name and what
        it served are as they were.
        """
        self._check_enabled()
        self._registry.check_name(name)
        self._check_up()
        async with self._lock(name):
            with self._registry.claimed(name):
                await self._load(name, path, load_inplace=load_inplace, pinned=pinned)

    async def load_absent(self, name: str, path: str) -> None:
        """Serve `name` from `path` unless it is served, by whatever was faster. Raises AdapterError as `load` does."""
        self._check_enabled()
        self._registry.check_name(name)
        self._check_up()
        async with self._lock(name):
            if self._registry.get(name) is None:
                with self._registry.claimed(name):
                    await self._load(name, path, load_inplace=False, pinned=False)

    async def unload(self, name: str) -> None:
        """Stop serving `name`: new requests on it get 404 from now on, running ones end on its weights. Raises RequestError 404."""
        async with self._lock(name):
            adapter = self._served(name)
            self._registry.pop(name)
            self._end_pin(adapter)
            self.retire(adapter.generation)
            self._metrics.forget(name)

    async def pin(self, name: str) -> None:
        """Keep `name` in its slot until it is unpinned. Raises RequestError 404, AdapterError 409 where no slot would be left to turn."""
        async with self._lock(name):
            self._pin(self._served(name))

    async def unpin(self, name: str) -> None:
        """Let `name`'s slot turn again; one that is not pinned stays so. Raises RequestError 404 where it is not served."""
        async with self._lock(name):
            adapter = self._served(name)
            if self._end_pin(adapter):
                self._registry.put(dataclasses.replace(adapter, pinned=False))

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
        if generation is None:
            return False
        name = self._registry.client_name(generation)
        log.error("the pin of %s failed", name)
        adapter = self._registry.get(name)
        if adapter is not None and adapter.generation == generation:
            self._registry.put(dataclasses.replace(adapter, pinned=False))
        return True

    def went_down(self, reason: str) -> None:
        """The ranks are gone, and with them every load under way."""
        self._loads.fail_all(AdapterError(f"the ranks went down while it loaded: {reason}", code="instance_restarted", status=503))

    def register(self, adapter: Adapter) -> None:
        """Tell ranks that started anew about a generation that was checked before; nothing is read until it is named."""
        self._links.send_all(self._load_message(adapter, 0, verify=False))

    def register_all(self) -> None:
        """All served names, then the pins."""
        self._num_ups += 1
        self._retiring.clear()
        for adapter in self._registry.adapters():
            self.register(adapter)
        for generation in self._pins.generations():
            pinned = self._registry.get(self._registry.client_name(generation))
            if pinned is not None and pinned.generation == generation:
                self._links.send_all(self._pins.ingest(pinned))

    def retire(self, generation: str) -> None:
        """No name points to `generation` any more: ranks forget it once they have heard of every request that runs on it."""
        self._retiring[generation] = None
        self.opened()

    def opened(self) -> None:
        """Requests were opened on the ranks, or ended: send the Unloads that waited for them."""
        if self._retiring:
            unopened = self._unopened()
            for generation in [generation for generation in self._retiring if generation not in unopened]:
                del self._retiring[generation]
                self._links.send_all(front_rank.Unload(generation))

    # inside

    async def _load(self, name: str, path: str, *, load_inplace: bool, pinned: bool) -> None:
        adapter = await self._prepare(name, path)
        served = self._registry.get(name)
        if served is not None and self._is_served(adapter, served, load_inplace=load_inplace):
            if pinned:
                self._pin(self._served(name))
            return
        with self._pins.promised(pinned and not (served is not None and served.pinned)):
            await self._load_on_ranks(adapter)
        was_pinned = served is not None and self._end_pin(served)
        self._registry.put(adapter)
        log.info("adapter %s is served from %s, digest %s", name, path, adapter.digest[:12])
        if pinned or was_pinned:
            self._pin(adapter)
        if served is not None:
            self.retire(served.generation)

    def _is_served(self, adapter: Adapter, served: Adapter, *, load_inplace: bool) -> bool:
        """Whether `served` has the weights of `adapter` already; then only its template may change. Raises AdapterError 409."""
        same_weights, same_template = served.digest == adapter.digest, served.chat_template == adapter.chat_template
        if not (same_weights and same_template) and not load_inplace:
            raise AdapterError(
                f"lora_name {adapter.name!r} is served already with {'another chat template' if same_weights else 'other weights'}; "
                "unload it first, or set load_inplace",
                code="adapter_already_loaded",
                status=409,
            )
        if same_weights and not same_template:
            self._registry.put(dataclasses.replace(served, chat_template=adapter.chat_template))
        return same_weights

    def _check_enabled(self) -> None:
        if not self._config.enable_lora:
            raise AdapterError("this server runs without LoRA (--no-enable-lora)", code="lora_disabled")

    def _check_up(self) -> None:
        """Only ranks that are there can load: answered at once, before any file is touched."""
        if not self._links.is_up:
            raise AdapterError("the ranks are not ready; try again", code="server_not_ready", status=503)

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
        if not adapter.pinned:
            self._registry.put(dataclasses.replace(adapter, pinned=True))

    def _end_pin(self, adapter: Adapter) -> bool:
        rid = self._pins.unpin(adapter.generation)
        if rid is not None:
            self._links.send(0, front_rank.Abort(rid))
        return rid is not None

    async def _prepare(self, name: str, path: str) -> Adapter:
        """Check an adapter as far as the front can: place, config, headers, tokens, digest. Raises AdapterError."""
        found = await self._sources.find(path)
        facts = found.examined.facts
        for warning in facts.warnings:
            log.warning("adapter %s: %s", name, warning)
        return Adapter(
            name,
            self._registry.draw_generation(name),
            str(found.folder),
            path,
            found.examined.digest,
            int(time.time()),
            has_something=bool(facts.modules),
            chat_template=facts.chat_template,
        )

    async def _load_on_ranks(self, adapter: Adapter) -> None:
        """All ranks read and check it, or none keeps it."""
        self._check_up()
        load_id, num_ups = self._loads.begin(), self._num_ups
        self._links.send_all(self._load_message(adapter, load_id, verify=True))
        try:
            await self._loads.wait(load_id, 2 * self._config.lora_read_timeout_s)
            if num_ups != self._num_ups or not self._links.is_up:  # they answered, and started anew before this was read
                raise AdapterError("the ranks started anew while it loaded; try again", code="instance_restarted", status=503)
        except BaseException:
            self._links.send_all(front_rank.Unload(adapter.generation))
            raise

    def _load_message(self, adapter: Adapter, load_id: int, *, verify: bool) -> front_rank.Load:
        return front_rank.Load(
            load_id, adapter.generation, adapter.path, adapter.digest, verify=verify, has_something=adapter.has_something
        )
