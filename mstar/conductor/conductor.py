"""The conductor: accepts requests, keeps them until they end, and is the one source of truth about which adapters are served.

    generate ─► resolve + register (one step) ─► gate (host tier) ─► Ingest to every rank ─► Tokens from the leader ─► stream
    load     ─► check the folder ─► Load to every rank ─► all answered ─► the name points to the new generation
    down     ─► nothing is lost: on the next `up`, names are registered and live requests ingested from where they stand

Front process, asyncio loop; every public method but the async ones returns at once. Each accepted request ends exactly once, in `_end`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mstar.adapters import AdapterFacts, AdapterLimits, BaseShapes, digest_adapter, inspect_adapter, resolve_path
from mstar.conductor.gate import HostTierGate
from mstar.conductor.links import RankLinks
from mstar.conductor.loads import PendingLoads
from mstar.conductor.metrics import Metrics
from mstar.conductor.registry import Adapter, Registry
from mstar.conductor.streams import LiveRequest, RequestStream
from mstar.conductor.types import Chunk, Generation, ServedModel
from mstar.config import ServeConfig
from mstar.errors import AdapterError, ConfigError, RequestError
from mstar.wire import front_rank

STATUS_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class Conductor:
    """One front's conductor. `start` binds nothing new: the links' endpoint is bound on construction."""

    def __init__(self, config: ServeConfig, endpoint: str, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._front_epoch = uuid.uuid4().hex[:8]
        self._created = int(time.time())
        self._registry = Registry(config.base_name, self._front_epoch, config.max_registered_loras)
        self._requests: dict[str, LiveRequest] = {}
        self._gate = HostTierGate(config.host_tier_size)
        self._loads = PendingLoads(config.tensor_parallel_size)
        self._locks: dict[str, asyncio.Lock] = {}
        self._statuses: dict[int, dict[int, front_rank.Stats]] = {}
        self._status_waiters: dict[int, asyncio.Future[None]] = {}
        self._stats: dict[int, front_rank.Stats] = {}
        self._num_asked = 0
        self._num_accepted = 0
        self._num_starts = 0
        self._max_model_len = config.max_model_len or 0
        self._ranks: tuple[front_rank.RankReady, ...] = ()
        self._draining = False
        self._roots = tuple(Path(root) for root in config.adapter_roots)
        self._limits = AdapterLimits(max_lora_rank=config.max_lora_rank, roots=self._roots)
        self._base = BaseShapes.from_config(json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8")))
        self._links = RankLinks(
            endpoint,
            self._front_epoch,
            config.tensor_parallel_size,
            on_up=self._up,
            on_down=self._down,
            on_message=self._heard,
        )
        self.ready = asyncio.Event()

    # life

    async def start(self) -> None:
        """Check the configured adapters, then listen for the ranks. Raises ConfigError for an adapter that cannot be served."""
        for module in self._config.lora_modules:
            try:
                adapter = await self._prepare(module.name, module.path, pinned=module.pinned)
            except RequestError as error:
                raise ConfigError(f"lora_modules {module.name!r}: {error.message}") from None
            self._registry.put(adapter)
        self._links.start()

    def drain(self) -> None:
        """Refuse new requests from now on (503)."""
        self._draining = True

    async def finished(self) -> None:
        """Until no request is live."""
        while self._requests:
            await asyncio.sleep(0.02)

    async def stop_ranks(self) -> None:
        """Ask the ranks to end, then close."""
        self._links.send_all(front_rank.Stop())
        await asyncio.sleep(0.05)
        await self._links.close()

    # requests

    def generate(self, generation: Generation) -> RequestStream:
        """Accept one sequence. Raises ModelNotFound, RequestError; then nothing was started.

        The name is resolved and the request counted in one step: an unload that comes later lets it run to its end.
        """
        adapter = self._registry.resolve(generation.model)
        self._refuse_unready()
        self._refuse_unfit(generation)
        self._num_accepted += 1
        rid = f"{self._front_epoch}-{self._num_accepted}"
        stream = RequestStream(rid, lambda: self._cancel(rid))
        request = LiveRequest(rid, generation, adapter, stream)
        self._requests[rid] = request
        label = request.label or self._registry.base
        self._metrics.request_started(label)
        self._metrics.tokens(label, "prompt", len(generation.prompt))
        if self._gate.enter(rid, adapter.generation if adapter is not None else None):
            self._links.send_all(request.ingest())
        return stream

    def _cancel(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is not None:
            self._links.send(0, front_rank.Abort(rid))
            self._end(request, "cancelled")

    def _end(self, request: LiveRequest, reason: str, error: RequestError | None = None) -> None:
        """The one exit of every accepted request."""
        del self._requests[request.rid]
        request.stream.end(error)
        self._metrics.request_ended(request.label or self._registry.base, reason)
        for rid in self._gate.leave(request.rid):
            self._links.send_all(self._requests[rid].ingest())

    def _refuse_unready(self) -> None:
        reason = self.not_ready_reason()
        if self._draining or (reason is not None and not self._num_starts):
            raise RequestError(reason or "the server is stopping", code="server_not_ready", status=503)
        if len(self._requests) >= self._config.max_waiting_requests + self._config.max_num_seqs:
            raise RequestError(
                f"{len(self._requests)} requests are waiting or running, the limit is reached; try again later",
                code="server_overloaded",
                status=429,
            )

    def _refuse_unfit(self, generation: Generation) -> None:
        total = len(generation.prompt) + generation.sampling.max_tokens
        if not generation.prompt:
            raise RequestError("the prompt has no tokens; give at least one", code="prompt_empty", param="prompt")
        if total > self._max_model_len:
            raise RequestError(
                f"{len(generation.prompt)} prompt tokens and max_tokens {generation.sampling.max_tokens} are {total} together; "
                f"the model's context is {self._max_model_len}",
                code="context_length_exceeded",
                param="max_tokens",
            )
        outside = next((token for token in generation.prompt if not 0 <= token < self._base.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"the prompt has the token id {outside}; ids go from 0 to {self._base.vocab_size - 1}",
                code="token_id_out_of_range",
                param="prompt",
            )

    # models

    def resolve(self, model: str) -> ServedModel:
        """See ConductorApi.resolve."""
        adapter = self._registry.resolve(model)
        return self._base_model() if adapter is None else self._card(adapter)

    def served_models(self) -> list[ServedModel]:
        """Base first, then adapters by name."""
        return [self._base_model(), *map(self._card, self._registry.adapters())]

    def max_model_len(self) -> int:
        """Longest prompt + output in tokens; 0 before the ranks said so."""
        return self._max_model_len

    def _base_model(self) -> ServedModel:
        return ServedModel(self._registry.base, self._created, self._config.model, None, self._max_model_len or None)

    def _card(self, adapter: Adapter) -> ServedModel:
        return ServedModel(adapter.name, adapter.created, adapter.root, self._registry.base, None)

    # adapters

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False, pinned: bool = False) -> None:
        """Serve `name` from `path`: on return it is usable on every rank. See ConductorApi.load_adapter."""
        if pinned:
            raise AdapterError("pinned adapters are not supported yet; load it without pinned", code="adapter_pin_unsupported")
        if not self._config.enable_lora:
            raise AdapterError("this server runs without LoRA (--no-enable-lora)", code="lora_disabled")
        self._registry.check_name(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            self._registry.check_name(name)
            adapter = await self._prepare(name, path, pinned=pinned)
            served = self._registry.get(name)
            if served is not None and served.digest == adapter.digest:
                return
            if served is not None and not load_inplace:
                raise AdapterError(
                    f"lora_name {name!r} is served already with other weights; unload it first, or set load_inplace",
                    code="adapter_already_loaded",
                    status=409,
                )
            await self._load_on_ranks(adapter)
            before = self._registry.put(adapter)
            if before is not None:
                self._links.send_all(front_rank.Unload(before.generation))

    async def unload_adapter(self, name: str) -> None:
        """Stop serving `name`: new requests on it get 404 from now on, running ones end on its weights."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            adapter = self._registry.pop(name)
            if adapter is None:
                raise RequestError(f"The lora adapter '{name}' cannot be found.", code="adapter_not_found", param="lora_name", status=404)
            self._links.send_all(front_rank.Unload(adapter.generation))
            self._metrics.forget(name)

    async def _prepare(self, name: str, path: str, *, pinned: bool) -> Adapter:
        """Check a folder as far as the front can: place, config, headers, digest. Raises AdapterError."""
        folder = resolve_path(path, self._roots)
        facts, digest = await asyncio.to_thread(self._examine, folder)
        for warning in facts.warnings:
            log.warning("adapter %s: %s", name, warning)
        generation = self._registry.draw_generation(name)
        return Adapter(name, generation, str(folder), path, digest, int(time.time()), bool(facts.modules), pinned)

    def _examine(self, folder: Path) -> tuple[AdapterFacts, str]:
        return inspect_adapter(folder, self._base, self._limits), digest_adapter(folder, self._roots)

    async def _load_on_ranks(self, adapter: Adapter) -> None:
        """All ranks read and check it, or none keeps it."""
        self._refuse_unready()
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

    # the instance

    def not_ready_reason(self) -> str | None:
        """None while requests can be served, else why not."""
        if self._draining:
            return "the server is stopping"
        if self._links.is_up:
            return None
        count = f"{self._links.num_ready} of {self._config.tensor_parallel_size} ranks are ready"
        return f"the ranks are starting again: {count}" if self._num_starts else f"the ranks are starting: {count}"

    async def status(self) -> dict[str, Any]:
        """A fresh answer of every rank, in client names. Raises RequestError 503 where a rank does not answer."""
        if not self._links.is_up:
            raise RequestError(self.not_ready_reason() or "not ready", code="server_not_ready", status=503)
        self._num_asked += 1
        token = self._num_asked
        self._statuses[token] = {}
        self._status_waiters[token] = asyncio.get_running_loop().create_future()
        self._links.send_all(front_rank.AskStatus(token))
        try:
            await asyncio.wait_for(self._status_waiters[token], STATUS_TIMEOUT_S)
            answers = self._statuses[token]
        except TimeoutError:
            raise RequestError("a rank did not answer in time", code="rank_silent", status=503) from None
        finally:
            self._statuses.pop(token, None)
            self._status_waiters.pop(token, None)
        return {
            "ranks": [self._rank_status(answers[tp_rank]) for tp_rank in sorted(answers)],
            "requests": {"live": len(self._requests), "waiting_for_host_tier": len(self._gate)},
            "instance_starts": self._num_starts,
        }

    def _rank_status(self, stats: front_rank.Stats) -> dict[str, Any]:
        name = self._registry.client_name
        ready = self._ranks[stats.tp_rank]
        return {
            "tp_rank": stats.tp_rank,
            "pid": ready.pid,
            "slots": [
                {"slot": slot.slot, "adapter": None if slot.adapter is None else name(slot.adapter), "holders": slot.holders}
                for slot in stats.slots
            ],
            "host_adapters": [name(generation) for generation in stats.host_adapters],
            "kv": {"used": stats.kv_used, "cached": stats.kv_cached, "free": stats.kv_free},
            "requests": stats.num_requests,
            "running": stats.running,
            "waiting": stats.waiting,
            "last_seq": stats.last_seq,
            "steps": stats.num_steps,
            "agreements": stats.num_agreements,
            "installs": stats.num_installs,
            "evictions": stats.num_evictions,
            "reads": stats.num_reads,
            "read_failures": stats.num_read_failures,
            "preemptions": stats.num_preemptions,
            "longest_admit_s": stats.longest_admit_s,
            "dropped_frames": stats.dropped_frames,
            "fingerprint": stats.fingerprint,
            "weights_bytes": ready.weights_bytes,
            "slots_bytes": ready.slots_bytes,
            "lora_backend": ready.backend,
        }

    def _up(self, ranks: tuple[front_rank.RankReady, ...]) -> None:
        """Every rank is here, with empty tables: tell it all names, then open every live request from where it stands."""
        self._ranks = ranks
        self._num_starts += 1
        self._max_model_len = min(rank.max_model_len for rank in ranks)
        for adapter in self._registry.adapters():
            self._links.send_all(self._load_message(adapter, 0, verify=False))
        retired = self._retired()
        for adapter in retired:
            self._links.send_all(self._load_message(adapter, 0, verify=False))
        waiting = self._gate.waiting()
        for request in list(self._requests.values()):
            if request.rid not in waiting:
                self._links.send_all(request.ingest())
        for adapter in retired:
            self._links.send_all(front_rank.Unload(adapter.generation))
        if self._num_starts > 1:
            log.info("instance up again; %d requests go on", len(self._requests))
        self.ready.set()

    def _retired(self) -> list[Adapter]:
        """Generations that live requests run on and no name points to any more."""
        used = {request.adapter.generation: request.adapter for request in self._requests.values() if request.adapter is not None}
        return [adapter for adapter in used.values() if self._registry.get(adapter.name) != adapter]

    def _down(self, reason: str) -> None:
        self.ready.clear()
        self._loads.fail_all(AdapterError(f"the ranks went down while it loaded: {reason}", code="instance_restarted", status=503))

    def _heard(self, tp_rank: int, message: front_rank.ToFront) -> None:
        if isinstance(message, front_rank.Tokens):
            for token in message.tokens:
                self._take_token(token)
        elif isinstance(message, front_rank.Failed):
            request = self._requests.get(message.rid)
            if request is not None:
                self._end(request, "failed", RequestError(message.message, code=message.code, status=message.status))
        elif isinstance(message, front_rank.LoadResult):
            self._loads.answered(tp_rank, message)
        else:
            self._take_stats(message)

    def _take_token(self, token: front_rank.TokenOut) -> None:
        request = self._requests.get(token.rid)
        if request is None or token.position < len(request.output):
            return  # it ended here meanwhile, or the token was sent before
        now = time.monotonic()
        label = request.label or self._registry.base
        if request.last_token_at is None:
            self._metrics.first_token(label, now - request.accepted_at)
        else:
            self._metrics.inter_token(label, now - request.last_token_at)
        request.last_token_at = now
        request.output.append(token.token_id)
        self._metrics.tokens(label, "output", 1)
        reason = token.finish_reason
        request.stream.put(
            Chunk(
                token_ids=() if token.is_stop_token else (token.token_id,),
                logprobs=None if token.logprobs is None or token.is_stop_token else (token.logprobs,),
                prompt_logprobs=token.prompt_logprobs,
                finish_reason=reason if reason in ("stop", "length") else None,  # type: ignore[arg-type]
                stop_token_id=token.token_id if token.is_stop_token else None,
                num_cached_tokens=token.num_cached_tokens,
            )
        )
        if reason is not None:
            self._end(request, reason)

    def _take_stats(self, stats: front_rank.Stats) -> None:
        before = self._stats.get(stats.tp_rank)
        self._stats[stats.tp_rank] = stats
        if stats.token in self._statuses:
            answers = self._statuses[stats.token]
            answers[stats.tp_rank] = stats
            waiter = self._status_waiters[stats.token]
            if len(answers) == self._config.tensor_parallel_size and not waiter.done():
                waiter.set_result(None)
        if stats.tp_rank == 0:
            self._show(stats, before)

    def _show(self, stats: front_rank.Stats, before: front_rank.Stats | None) -> None:
        """The leader's numbers as metrics; every rank's tables are the same."""
        names = self._client_names
        held = sum(1 for slot in stats.slots if slot.holders)
        idle = sum(1 for slot in stats.slots if slot.adapter is not None and not slot.holders)
        self._metrics.set_slots(held, idle, len(stats.slots) - held - idle)
        self._metrics.set_kv_pages(stats.kv_used, stats.kv_cached, stats.kv_free - stats.kv_cached)
        self._metrics.set_requests(stats.waiting + len(self._gate), stats.running)
        waiting = {*names(stats.waiting_adapters), *names(self._gate.waiting().values())}
        self._metrics.set_lora_info(self._config.max_loras, names(stats.running_adapters), waiting)
        self._metrics.set_residency(names(slot.adapter for slot in stats.slots if slot.adapter), names(stats.host_adapters))
        if before is not None and stats.num_evictions > before.num_evictions:
            self._metrics.eviction(stats.num_evictions - before.num_evictions)
        for _ in range(max(0, stats.num_read_failures - (before.num_read_failures if before is not None else 0))):
            self._metrics.read_failed()

    def _client_names(self, generations: Any) -> Collection[str]:
        return {self._registry.client_name(generation) for generation in generations}
