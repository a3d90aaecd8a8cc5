"""What an operator can see: Prometheus series, one explicit method per event.

Front process, asyncio loop; no torch. Invariants: the number of `adapter` label values is bounded (names beyond `max_adapter_labels` share
the label "other"); after `forget` an adapter has no series, and late samples of it go to "other" instead of bringing it back.
The base model always has its own label. Names are a promise (docs, dashboards, gateways): do not rename.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
TokenKind = Literal["prompt", "output"]

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All series of one instance, in a registry of their own."""

    def __init__(self, base: str, *, max_adapter_labels: int = 200) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._base = base
        self._max_labels = max_adapter_labels
        self._known = {base}  # names that have series of their own

        self._started = Counter("mstar_requests_started", "Requests accepted.", ["adapter"], registry=registry)
        self._ended = Counter("mstar_requests_ended", "Requests ended, by reason.", ["adapter", "reason"], registry=registry)
        self._tokens = Counter("mstar_request_tokens", "Tokens read and generated.", ["adapter", "kind"], registry=registry)
        self._first_token = Histogram(
            "mstar_time_to_first_token_seconds",
            "From acceptance to the first token.",
            ["adapter"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._inter_token = Histogram(
            "mstar_inter_token_seconds", "Between two tokens of a stream.", ["adapter"], buckets=_INTER_TOKEN_BUCKETS_S, registry=registry
        )
        self._unknown_model = Counter("mstar_unknown_model_requests", "Requests that named no served model.", registry=registry)
        self._requests = Gauge("mstar_requests", "Requests now.", ["state"], registry=registry)

        self._lora_info = Gauge(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the time of the last change.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=registry,
        )
        self._resident = Gauge("mstar_lora_adapter_resident", "1 where the adapter is in the tier.", ["adapter", "tier"], registry=registry)
        self._slots = Gauge("mstar_lora_slots", "Adapter slots on the device.", ["state"], registry=registry)
        self._slot_wait = Histogram(
            "mstar_lora_slot_wait_seconds", "Waits of requests for an adapter slot.", buckets=_WAIT_BUCKETS_S, registry=registry
        )
        self._reads = Histogram("mstar_lora_read_seconds", "Reads of adapter files.", buckets=_WAIT_BUCKETS_S, registry=registry)
        self._read_failures = Counter("mstar_lora_read_failures", "Reads of adapter files that failed.", registry=registry)
        self._evictions = Counter("mstar_lora_evictions", "Idle adapters that gave up their slot.", registry=registry)
        self._kv_pages = Gauge("mstar_kv_pages", "KV pages.", ["state"], registry=registry)

        self.restarts = Counter("mstar_instance_restarts", "Starts of the instance after the first.", registry=registry)
        self.dropped_frames = Counter(
            "mstar_wire_dropped_frames", "Frames dropped: unknown sender, other epoch, too large.", registry=registry
        )

    # requests

    def request_started(self, adapter: str) -> None:
        """A request was accepted. The only event (beside residency) that gives a name its own series."""
        self._started.labels(self._own_label(adapter)).inc()

    def first_token(self, adapter: str, seconds: float) -> None:
        """Its first token came, `seconds` after acceptance."""
        self._first_token.labels(self._label(adapter)).observe(seconds)

    def inter_token(self, adapter: str, seconds: float) -> None:
        """A further token came, `seconds` after the one before."""
        self._inter_token.labels(self._label(adapter)).observe(seconds)

    def tokens(self, adapter: str, kind: TokenKind, n: int) -> None:
        """`n` tokens were read ("prompt") or generated ("output")."""
        self._tokens.labels(self._label(adapter), kind).inc(n)

    def request_ended(self, adapter: str, reason: str) -> None:
        """A request ended. `reason` is one of a small fixed set: stop, length, cancelled, error, …"""
        self._ended.labels(self._label(adapter), reason).inc()

    def unknown_model(self) -> None:
        """A request named nothing that is served. Called by the API."""
        self._unknown_model.inc()

    def set_requests(self, waiting: int, running: int) -> None:
        """Requests now."""
        self._requests.labels("waiting").set(waiting)
        self._requests.labels("running").set(running)

    # adapters

    def set_lora_info(self, max_lora: int, running: Collection[str], waiting: Collection[str]) -> None:
        """The true sets of adapters of running and of waiting requests: gateways route on them."""
        self._lora_info.clear()
        self._lora_info.labels(str(max_lora), ",".join(sorted(running)), ",".join(sorted(waiting))).set_to_current_time()

    def set_residency(self, device: Collection[str], host: Collection[str]) -> None:
        """The adapters that are in a slot and in the host tier, on every rank. Others that have a series show 0."""
        tiers = {"device": frozenset(device), "host": frozenset(host)}
        for adapter in sorted(frozenset().union(*tiers.values())):
            self._own_label(adapter)
        for adapter in self._known - {self._base}:
            for tier, names in tiers.items():
                self._resident.labels(adapter, tier).set(int(adapter in names))

    def set_slots(self, held: int, idle: int, free: int) -> None:
        """Slots whose adapter has requests, whose adapter has none, and empty ones."""
        for state, count in (("held", held), ("idle", idle), ("free", free)):
            self._slots.labels(state).set(count)

    def slot_wait(self, seconds: float) -> None:
        """A request waited so long for its slot."""
        self._slot_wait.observe(seconds)

    def read_seconds(self, seconds: float) -> None:
        """An adapter file was read."""
        self._reads.observe(seconds)

    def read_failed(self) -> None:
        """A read of an adapter file failed."""
        self._read_failures.inc()

    def eviction(self, n: int = 1) -> None:
        """`n` idle adapters gave up their slots."""
        self._evictions.inc(n)

    def forget(self, adapter: str) -> None:
        """The adapter is unloaded: its series vanish and its place among the labels is free."""
        if adapter == self._base or adapter not in self._known:
            return
        self._known.discard(adapter)
        for metric in (self._started, self._ended, self._tokens, self._first_token, self._inter_token, self._resident):
            metric.remove_by_labels({"adapter": adapter})

    # memory

    def set_kv_pages(self, used: int, cached: int, free: int) -> None:
        """KV pages held by requests, kept for their prefixes, and free."""
        for state, count in (("used", used), ("cached", cached), ("free", free)):
            self._kv_pages.labels(state).set(count)

    def render(self) -> bytes:
        """Prometheus' text format, `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _own_label(self, adapter: str) -> str:
        if adapter not in self._known and len(self._known) <= self._max_labels and adapter != OTHER:
            self._known.add(adapter)
        return self._label(adapter)

    def _label(self, adapter: str) -> str:
        return adapter if adapter in self._known else OTHER
