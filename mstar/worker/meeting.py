"""Where the ranks of one instance find each other before there is a group: torch's store, which outlives them under torchrun.

    rank 0   draws the epoch; answers every call; goes on once each rank has confirmed this epoch
    rank r   call/r = a fresh mark ─► reads answer/mark = epoch ─► confirm/epoch/r

A store keeps what ranks before a restart wrote, and a rank that read a dead one's address would not come up. Only a rank 0 that lives
can answer a fresh mark, and all that follows goes under the epoch it answers with. Main thread, before any other is started.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mstar.errors import WorkerError

LOOK_S = 0.05


class Meeting:
    """One rank's place in it. `store` and what is told are this instance's alone."""

    def __init__(self, init_method: str, tp_rank: int, tp_size: int, timeout_s: float) -> None:
        """Returns when every rank has come. Raises WorkerError with those that have not after `timeout_s`."""
        self._tp_rank = tp_rank
        self._timeout_s = timeout_s
        self.epoch = uuid.uuid4().hex[:8]
        self.store: Store | None = None
        if tp_size == 1:
            return
        try:
            shared, _, _ = next(rendezvous(init_method, tp_rank, tp_size, timeout=timedelta(seconds=timeout_s)))
            if tp_rank == 0:
                self._answer(shared, range(1, tp_size))
            else:
                self._call(shared)
        except RuntimeError as error:
            raise WorkerError(f"TP rank {tp_rank} cannot reach the store {init_method}: {' '.join(str(error).split())}") from error
        self.store = PrefixStore(f"mstar/{self.epoch}", shared)

    def tell(self, key: str, text: str) -> None:
        """For every other rank to `hear`."""
        if self.store is not None:
            self.store.set(key, text)

    def hear(self, key: str) -> str:
        """What a rank told. Raises WorkerError where it told nothing within the start's bound."""
        assert self.store is not None, "there is nobody to hear"
        deadline = time.monotonic() + self._timeout_s
        while (text := _read(self.store, key)) is None:
            if time.monotonic() > deadline:
                raise WorkerError(f"TP rank {self._tp_rank} did not hear of the {key} within {self._timeout_s:g} s")
            time.sleep(LOOK_S)
        return text

    def _answer(self, shared: Store, others: range) -> None:
        answered: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout_s
        while missing := [rank for rank in others if _read(shared, f"mstar/confirm/{self.epoch}/{rank}") is None]:
            for rank in missing:
                mark = _read(shared, f"mstar/call/{rank}")
                if mark is not None and mark != answered.get(rank):
                    shared.set(f"mstar/answer/{mark}", self.epoch)
                    answered[rank] = mark
            if time.monotonic() > deadline:
                raise WorkerError(f"TP ranks {missing} did not come within {self._timeout_s:g} s")
            time.sleep(LOOK_S)

    def _call(self, shared: Store) -> None:
        mark = uuid.uuid4().hex
        shared.set(f"mstar/call/{self._tp_rank}", mark)
        deadline = time.monotonic() + self._timeout_s
        while (epoch := _read(shared, f"mstar/answer/{mark}")) is None:
            if time.monotonic() > deadline:
                raise WorkerError(f"TP rank {self._tp_rank} got no answer of rank 0 within {self._timeout_s:g} s")
            time.sleep(LOOK_S)
        self.epoch = epoch
        shared.set(f"mstar/confirm/{epoch}/{self._tp_rank}", "")


def _read(store: Store, key: str) -> str | None:
    """The value, without waiting for it."""
    return bytes(store.get(key)).decode() if store.check([key]) else None
