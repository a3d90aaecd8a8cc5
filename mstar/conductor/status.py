"""What the ranks say of themselves: kept, shown as metrics, and asked for afresh.

Front process, asyncio loop. Generations are shown under their client names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mstar.conductor.links import RankLinks
from mstar.conductor.metrics import Metrics
from mstar.conductor.registry import Registry
from mstar.errors import RequestError
from mstar.wire import front_rank

STATUS_TIMEOUT_S = 10.0


class StatusBoard:
    """The ranks' numbers."""

    def __init__(self, registry: Registry, links: RankLinks, metrics: Metrics, tp_size: int, max_loras: int) -> None:
        self._registry = registry
        self._links = links
        self._metrics = metrics
        self._tp_size = tp_size
        self._max_loras = max_loras
        self._latest: dict[int, front_rank.Stats] = {}
        self._answers: dict[int, dict[int, front_rank.Stats]] = {}
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._num_asked = 0

    async def ask(self) -> list[front_rank.Stats]:
        """A fresh answer of every rank, by rank. Raises RequestError 503 where one is silent."""
        self._num_asked += 1
        token = self._num_asked
        self._answers[token] = {}
        self._waiters[token] = asyncio.get_running_loop().create_future()
        self._links.send_all(front_rank.AskStatus(token))
        try:
            await asyncio.wait_for(self._waiters[token], STATUS_TIMEOUT_S)
            answers = self._answers[token]
        except TimeoutError:
            raise RequestError("a rank did not answer in time", code="rank_silent", status=503) from None
        finally:
            self._answers.pop(token, None)
            self._waiters.pop(token, None)
        return [answers[tp_rank] for tp_rank in sorted(answers)]

    def take(self, stats: front_rank.Stats, gated: Mapping[str, str]) -> None:
        """A rank's numbers came in; `gated` are requests that wait in front of the host tier, and the adapter each wants."""
        before = self._latest.get(stats.tp_rank)
        self._latest[stats.tp_rank] = stats
        if stats.token in self._answers:
            answers, waiter = self._answers[stats.token], self._waiters[stats.token]
            answers[stats.tp_rank] = stats
            if len(answers) == self._tp_size and not waiter.done():
                waiter.set_result(None)
        if stats.tp_rank == 0:  # every rank's tables are the same
            self._show(stats, before, gated)

    def _show(self, stats: front_rank.Stats, before: front_rank.Stats | None, gated: Mapping[str, str]) -> None:
        names = self._client_names
        held = sum(1 for slot in stats.slots if slot.holders)
        idle = sum(1 for slot in stats.slots if slot.adapter is not None and not slot.holders)
        self._metrics.set_slots(held, idle, len(stats.slots) - held - idle)
        self._metrics.set_kv_pages(stats.kv_used, stats.kv_cached, stats.kv_free - stats.kv_cached)
        self._metrics.set_requests(stats.waiting + len(gated), stats.running)
        waiting = {*names(stats.waiting_adapters), *names(gated.values())}
        self._metrics.set_lora_info(self._max_loras, names(stats.running_adapters), waiting)
        self._metrics.set_residency(names(slot.adapter for slot in stats.slots if slot.adapter), names(stats.host_adapters))
        if before is not None and stats.num_evictions > before.num_evictions:
            self._metrics.eviction(stats.num_evictions - before.num_evictions)
        for _ in range(max(0, stats.num_read_failures - (before.num_read_failures if before is not None else 0))):
            self._metrics.read_failed()

    def _client_names(self, generations: Iterable[str]) -> Collection[str]:
        return {self._registry.client_name(generation) for generation in generations}


def rank_report(stats: front_rank.Stats, ready: front_rank.RankReady, registry: Registry) -> dict[str, Any]:
    """One rank for `/mstar/status`, in client names."""
    name = registry.client_name
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
        "blocked_on_reads_s": stats.blocked_on_reads_s,
        "dropped_frames": stats.dropped_frames,
        "fingerprint": stats.fingerprint,
        "weights_bytes": ready.weights_bytes,
        "slots_bytes": ready.slots_bytes,
        "lora_backend": ready.backend,
    }
