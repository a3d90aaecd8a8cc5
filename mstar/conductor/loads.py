"""Loads under way: who answered, and what refused. All ranks or none.

Front process, asyncio loop.
"""

from __future__ import annotations

import asyncio

from mstar.errors import AdapterError, RequestError
from mstar.wire.front_rank import LoadResult


class PendingLoads:
    """Waits for every rank's LoadResult of each load."""

    def __init__(self, tp_size: int) -> None:
        self._tp_size = tp_size
        self._next_id = 0
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._answers: dict[int, dict[int, LoadResult]] = {}

    def begin(self) -> int:
        """A new load's id."""
        self._next_id += 1
        self._futures[self._next_id] = asyncio.get_running_loop().create_future()
        self._answers[self._next_id] = {}
        return self._next_id

    async def wait(self, load_id: int, timeout_s: float) -> None:
        """Until every rank answered. Raises the first rank's refusal, by rank; AdapterError 503 after `timeout_s`."""
        try:
            await asyncio.wait_for(self._futures[load_id], timeout_s)
        except TimeoutError:
            silent = sorted(set(range(self._tp_size)) - set(self._answers[load_id]))
            raise AdapterError(
                f"ranks {silent} did not answer the load within {timeout_s:g} s", code="adapter_load_timeout", status=503
            ) from None
        finally:
            self._futures.pop(load_id, None)
            self._answers.pop(load_id, None)

    def answered(self, tp_rank: int, result: LoadResult) -> None:
        """A rank's answer."""
        answers, future = self._answers.get(result.load_id), self._futures.get(result.load_id)
        if answers is None or future is None or future.done():
            return
        answers[tp_rank] = result
        if len(answers) < self._tp_size:
            return
        refused = [answers[rank] for rank in sorted(answers) if answers[rank].code]
        if refused:
            first = refused[0]
            future.set_exception(AdapterError(first.message, code=first.code, status=first.status))
        else:
            future.set_result(None)

    def fail_all(self, error: RequestError) -> None:
        """The instance went down."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
