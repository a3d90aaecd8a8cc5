"""The conductor: accepts requests, keeps them until they end, and is the one source of truth about which adapters are served.

    generate ─► resolve + register (one step) ─► gate (host tier) ─► Ingest to every rank ─► Tokens from the leader ─► stream
    down     ─► nothing is lost: on the next `up`, names are registered and live requests ingested from where they stand

Front process, asyncio loop; every public method but the async ones returns at once. Each accepted request ends exactly once, in `_end`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import replace
from typing import Any

from mstar.adapters.examine import TokenId
from mstar.conductor.gate import HostTierGate
from mstar.conductor.lazy import LazyFolder
from mstar.conductor.lifecycle import AdapterLifecycle
from mstar.conductor.links import RankLinks
from mstar.conductor.metrics import Metrics
from mstar.conductor.registry import Adapter, Registry
from mstar.conductor.registry_file import RegistryFile
from mstar.conductor.status import StatusBoard, rank_report
from mstar.conductor.streams import LiveRequest, RequestStream
from mstar.conductor.suspects import Suspects
from mstar.conductor.types import Chunk, Generation, ServedModel
from mstar.config import ServeConfig
from mstar.errors import ModelNotFound, RequestError
from mstar.wire import front_rank

MAX_PROMPT_LOGPROBS = 500_000  # about 17 bytes each between the ranks and here, in one frame of 16 MiB

log = logging.getLogger(__name__)


class Conductor:
    """One front's conductor. `start` binds nothing new: the links' endpoint is bound on construction."""

    def __init__(
        self, config: ServeConfig, endpoint: str, metrics: Metrics, registry_file: RegistryFile | None = None, secret: str = ""
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._front_epoch = uuid.uuid4().hex[:8]
        self._created = int(time.time())
        self._registry = Registry(config.base_name, self._front_epoch, config.max_registered_loras)
        self._registry_file = registry_file
        self._requests: dict[str, LiveRequest] = {}
        self._gate = HostTierGate(config.host_tier_size)
        self._suspects = Suspects()
        self._num_accepted = 0
        self._num_starts = 0
        self._max_model_len = config.max_model_len or 0
        self._ranks: tuple[front_rank.RankReady, ...] = ()
        self._draining = False
        self._links = RankLinks(
            endpoint,
            self._front_epoch,
            config.tensor_parallel_size,
            curve_dir=config.curve_dir,
            secret=secret,
            on_up=self._up,
            on_down=self._down,
            on_message=self._heard,
            on_dropped=metrics.dropped_frames.inc,
        )
        self._lifecycle = AdapterLifecycle(config, self._registry, self._links, metrics, self._front_epoch, self._unopened)
        self._lazy = LazyFolder(config.lora_dir, self._lifecycle.load_absent) if config.lora_dir is not None else None
        self._board = StatusBoard(self._registry, self._links, metrics, config.tensor_parallel_size, config.max_loras)
        self.ready = asyncio.Event()

    # life

    def use_tokens(self, token_id: TokenId) -> None:
        """Before `start`: the served tokenizer's id of a token, which adapters' tokenizers must agree with."""
        self._lifecycle.use_tokens(token_id)

    async def start(self) -> None:
        """Check the configured adapters, then listen for the ranks. Raises ConfigError for an adapter that cannot be served."""
        same_run = self._restore()
        self._lifecycle.restored()
        for module in self._config.lora_modules:
            if not (same_run and self._registry.get(module.name) is not None):
                await self._lifecycle.configure(module)
        self._links.start()

    def _restore(self) -> bool:
        """Serve what the front before this one served; whether it was of the same run, so that generations stay what they are.

        Of another run only what was loaded at runtime comes back, as new generations: configured adapters are checked anew.
        """
        if self._registry_file is None:
            return False
        same_run, adapters = self._registry_file.load()
        configured = {module.name for module in self._config.lora_modules}
        for adapter in adapters:
            if same_run:
                self._registry.put(adapter)
            elif adapter.name not in configured:
                self._registry.put(replace(adapter, generation=self._registry.draw_generation(adapter.name)))
        if adapters:
            log.info("%d adapters come back from the registry file", len(self._registry))
        file, registry = self._registry_file, self._registry
        file.begin(registry.adapters())
        registry.on_change = lambda name: file.changed(name, registry.get(name), len(registry), registry.adapters)
        return same_run

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
        if generation.rendered is not None and generation.rendered.chat_template != (adapter.chat_template if adapter else None):
            raise RequestError(
                f"{generation.model!r} was replaced while this chat was read; send it again", code="adapter_replaced", status=409
            )
        self._refuse_unready()
        self._refuse_unfit(generation)
        self._num_accepted += 1
        rid = f"{self._front_epoch}-{self._num_accepted}"
        stream = RequestStream(rid, lambda: self._cancel(rid))
        request = LiveRequest(rid, generation, adapter, stream)
        self._requests[rid] = request
        bounds_s = [bound_s for bound_s in (generation.timeout_s, self._config.request_timeout_s) if bound_s is not None]
        if bounds_s:
            request.deadline = asyncio.get_running_loop().call_later(min(bounds_s), self._expire, rid, min(bounds_s))
        label = request.label or self._registry.base
        self._metrics.request_started(label)
        self._metrics.tokens(label, "prompt", len(generation.prompt))
        if self._gate.enter(rid, adapter.generation if adapter is not None else None):
            self._open(request)
        return stream

    def _cancel(self, rid: str) -> None:
        if rid in self._requests:
            self._links.send(0, front_rank.Abort(rid))
        request = self._requests.get(rid)  # a rank that cannot be reached counts as a crash, which may have ended this very one
        if request is not None:
            self._end(request, "cancelled")

    def _expire(self, rid: str, after_s: float) -> None:
        """Its time is over, wherever it stands: the leader alone hears of it and turns it into a Remove."""
        self._links.send(0, front_rank.Abort(rid))
        request = self._requests.get(rid)
        if request is not None:
            error = RequestError(f"the request did not end within {after_s:g} s", code="deadline_exceeded", status=504)
            self._end(request, "deadline", error)

    def _end(self, request: LiveRequest, reason: str, error: RequestError | None = None) -> None:
        """The one exit of every accepted request."""
        del self._requests[request.rid]
        if request.deadline is not None:
            request.deadline.cancel()
        request.stream.end(error)
        self._metrics.request_ended(request.label or self._registry.base, reason)
        for rid in self._gate.leave(request.rid):
            self._open(self._requests[rid])
        self._clear(request.rid)
        self._lifecycle.opened()

    def _open(self, request: LiveRequest) -> None:
        """Ingest a request on every rank, unless it waits to be tested alone."""
        if self._suspects.let_in(request.rid, is_new=not request.was_open):
            request.is_open = request.was_open = True
            self._links.send_all(request.ingest())
            if self._links.is_up:
                self._suspects.opened(request.rid)
            self._lifecycle.opened()

    def _unopened(self) -> set[str]:
        """Generations that requests run on of which no rank has heard yet."""
        return {request.adapter.generation for request in self._requests.values() if request.adapter is not None and not request.is_open}

    def _clear(self, rid: str) -> None:
        """`rid` got on, so it crashes nothing: the next suspect's turn."""
        following = self._suspects.cleared(rid)
        if following is not None and following in self._requests:
            log.warning("request %s crashes nothing; testing %s", rid, following)
            self._open(self._requests[following])

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
        scores = generation.sampling.prompt_logprobs
        if scores is not None and len(generation.prompt) * (scores + 1) > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"{len(generation.prompt)} prompt tokens with {scores} alternatives each are more than the {MAX_PROMPT_LOGPROBS} "
                "log-probabilities that one answer may hold; ask for fewer",
                code="too_many_prompt_logprobs",
                param="prompt_logprobs",
            )
        outside = next((token for token in generation.prompt if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"the prompt has the token id {outside}; ids go from 0 to {self.vocab_size - 1}",
                code="token_id_out_of_range",
                param="prompt",
            )

    # models

    def resolve(self, model: str) -> ServedModel:
        """See ConductorApi.resolve."""
        adapter = self._registry.resolve(model)
        return self._base_model() if adapter is None else self._card(adapter)

    async def find(self, model: str) -> ServedModel:
        """See ConductorApi.find."""
        try:
            return self.resolve(model)
        except ModelNotFound:
            if self._lazy is None or not (
                await self._lazy.serve(model) or await self._lazy.serve(model.removeprefix(f"{self._registry.base}:"))
            ):
                raise
            return self.resolve(model)

    def served_models(self, after: str | None = None, limit: int | None = None) -> tuple[list[ServedModel], bool]:
        """See ConductorApi.served_models."""
        base = [self._base_model()] if after is None else []
        behind = None if after == self._registry.base else after
        adapters, more = self._registry.page(behind, None if limit is None else limit - len(base))
        return [*base, *map(self._card, adapters)], more

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self._lifecycle.base.vocab_size

    def max_model_len(self) -> int:
        """Longest prompt + output in tokens; 0 before the ranks said so."""
        return self._max_model_len

    def _base_model(self) -> ServedModel:
        return ServedModel(self._registry.base, self._created, self._config.model, None, self._max_model_len or None)

    def _card(self, adapter: Adapter) -> ServedModel:
        return ServedModel(adapter.name, adapter.created, adapter.root, self._registry.base, None, adapter.chat_template)

    # adapters

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False, pinned: bool = False) -> None:
        """See AdapterLifecycle.load."""
        await self._lifecycle.load(name, path, load_inplace=load_inplace, pinned=pinned)

    async def unload_adapter(self, name: str) -> None:
        """See AdapterLifecycle.unload."""
        await self._lifecycle.unload(name)

    async def pin_adapter(self, name: str) -> None:
        """See AdapterLifecycle.pin."""
        await self._lifecycle.pin(name)

    async def unpin_adapter(self, name: str) -> None:
        """See AdapterLifecycle.unpin."""
        await self._lifecycle.unpin(name)

    # the instance

    def not_ready_reason(self) -> str | None:
        """None while requests can be served, else why not."""
        if self._draining:
            return "the server is stopping"
        if self._links.is_up:
            return self._links.silent()
        count = f"{self._links.num_ready} of {self._config.tensor_parallel_size} ranks are ready"
        return f"the ranks are starting again: {count}" if self._num_starts else f"the ranks are starting: {count}"

    async def status(self) -> dict[str, Any]:
        """A fresh answer of every rank, in client names. Raises RequestError 503 where a rank does not answer."""
        if not self._links.is_up:
            raise RequestError(self.not_ready_reason() or "not ready", code="server_not_ready", status=503)
        answers = await self._board.ask()
        return {
            "ranks": [rank_report(stats, self._ranks[stats.tp_rank], self._registry) for stats in answers],
            "pinned": self._lifecycle.pinned(),
            "requests": {"live": len(self._requests), "waiting_for_host_tier": len(self._gate)},
            "instance_starts": self._num_starts,
        }

    def _up(self, ranks: tuple[front_rank.RankReady, ...]) -> None:
        """Every rank is here, with empty tables: tell it all names, then open every live request from where it stands."""
        self._ranks = ranks
        self._num_starts += 1
        self._max_model_len = min(rank.max_model_len for rank in ranks)
        self._lifecycle.register_all()
        retired = self._retired()
        for adapter in retired:
            self._lifecycle.register(adapter)
        waiting = self._gate.waiting()
        for request in list(self._requests.values()):
            if request.rid not in waiting:
                self._open(request)
        for adapter in retired:
            self._lifecycle.retire(adapter.generation)
        if self._num_starts > 1:
            self._metrics.restarts.inc()
            log.info("instance up again; %d requests go on", len(self._requests))
        self.ready.set()

    def _retired(self) -> list[Adapter]:
        """Generations that live requests run on and no name points to any more."""
        used = {request.adapter.generation: request.adapter for request in self._requests.values() if request.adapter is not None}
        served = {adapter.generation for adapter in map(self._registry.get, {adapter.name for adapter in used.values()}) if adapter}
        return [adapter for adapter in used.values() if adapter.generation not in served]

    def _down(self, reason: str) -> None:
        self.ready.clear()
        proven = [request.rid for request in self._requests.values() if request.is_proven]
        for request in self._requests.values():
            request.is_open = request.is_proven = False
        self._lifecycle.went_down(reason)
        waiting = self._gate.waiting()
        culprit = self._suspects.crashed([rid for rid in self._requests if rid not in waiting], proven)
        if culprit is not None:
            log.error("request %s crashed the ranks again and ends; the others go on", culprit)
            error = RequestError("this request crashed a worker more than once", code="request_crashed_worker", status=500)
            self._end(self._requests[culprit], "crashed", error)

    def _heard(self, tp_rank: int, message: front_rank.ToFront) -> None:
        if isinstance(message, front_rank.Tokens):
            for token in message.tokens:
                self._take_token(token)
        elif isinstance(message, front_rank.Failed):
            request = self._requests.get(message.rid)
            if request is not None:
                self._end(request, "failed", RequestError(message.message, code=message.code, status=message.status))
            else:
                self._lifecycle.pin_failed(message.rid)
        elif isinstance(message, front_rank.Began):
            self._suspects.began(message.rids)
        elif isinstance(message, front_rank.LoadResult):
            self._lifecycle.answered(tp_rank, message)
        else:
            self._board.take(message, self._gate.waiting())

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
        request.is_proven = True
        self._clear(token.rid)
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
