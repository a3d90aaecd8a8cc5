"""The tensor-parallel group of one rank: sums, gathers and the load agreement.

Owned by the rank's step thread, the sole issuer of collectives; every rank issues the same ones in the same order. Two process
groups: activations go over gloo (CPU) or NCCL (CUDA); agreements over a gloo group of their own, with their own bound, so
that a rank still waiting for an adapter's file never sits inside an activation collective and is reported for what it is.
On a CPU, ranks of one host exchange activations through memory that they share instead (`host_memory.py`).

A failed or timed-out collective raises WorkerError: the ranks no longer stand at the same place, the instance restarts.
`CommGroup.single()` is TP 1: nothing is initialised and every call returns its argument.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from mstar.distributed.host_memory import DTYPES, HostMemory
from mstar.distributed.shards import Range
from mstar.errors import WorkerError

log = logging.getLogger(__name__)


class CommGroup:
    """One rank's handle on the TP group. `tp_rank` in `[0, tp_size)`.

    `group` carries activations, `agreement_group` the small agreements; both None at TP 1.
    """

    def __init__(
        self,
        tp_rank: int,
        tp_size: int,
        group: dist.ProcessGroup | None = None,
        agreement_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.host_memory: HostMemory | None = None
        self._group = group
        self._agreement_group = agreement_group

    @classmethod
    def single(cls) -> CommGroup:
        """The group of one rank; no collective is ever issued."""
        return cls(0, 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` (any shape, contiguous) over the ranks in place and return it; the same bits on every rank.

        Process groups sum in `x`'s own dtype: float32 on the wire would double the bytes of the step's most frequent message. Shared
        memory sums in float32, in rank order, and rounds once. At two ranks both give the same bits, at more they may differ.
        """
        if self.tp_size == 1:
            return x
        if self.host_memory is not None and x.dtype in DTYPES:
            missing = self.host_memory.sum(x)
            if missing is not None:
                raise self.lost(missing)
        else:
            try:
                dist.all_reduce(x, group=self._group)
            except RuntimeError as error:
                raise self._failed("all-reduce", error) from error
        return x

    def all_gather_columns(self, x: Tensor, cuts: Sequence[Range]) -> Tensor:
        """Put the ranks' columns side by side: `x [n, local]` of this rank to `[n, total]`, the same bits on every rank.

        `cuts[tp_rank]` are the columns that each rank holds; they partition `[0, total)` in order and may differ in size.
        """
        if self.tp_size == 1:
            return x
        sizes = [stop - start for start, stop in cuts]
        if self.host_memory is not None and self.host_memory.fits(x, sizes):
            whole = self.host_memory.gather(x, sizes)
            if isinstance(whole, int):
                raise self.lost(whole)
            return whole
        width = max(sizes)
        local = x.contiguous() if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))
        gathered = x.new_empty((self.tp_size, x.shape[0], width))
        try:
            dist.all_gather(list(gathered.unbind()), local, group=self._group)
        except RuntimeError as error:
            raise self._failed("all-gather", error) from error
        if min(sizes) == width:
            return gathered.transpose(0, 1).reshape(x.shape[0], -1)
        return torch.cat([shard[:, :size] for shard, size in zip(gathered, sizes, strict=True)], dim=1)

    def agree_max(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over the ranks of `values` (same length everywhere), within the agreement's bound."""
        return self._agree(values, dist.ReduceOp.MAX)

    def agree_sum(self, values: Tensor) -> Tensor:
        """Sum `values` (on the host, same shape everywhere) over the ranks in place and return it, within the agreement's bound."""
        if self.tp_size > 1:
            try:
                dist.all_reduce(values, group=self._agreement_group)
            except RuntimeError as error:
                raise self._failed("sum in an admit", error) from error
        return values

    def all_reduce_min(self, value: int) -> int:
        """The minimum over the ranks of `value`, within the agreement's bound."""
        return self._agree([value], dist.ReduceOp.MIN)[0]

    def close(self) -> None:
        """Leave the groups. Call once, when no collective is in flight."""
        if self.tp_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def join_host_memory(self, timeout_s: float) -> None:
        """Exchange activations through shared memory from now on, where all ranks of the group can: a collective, called by all."""
        self.host_memory = HostMemory.join(self.tp_rank, self.tp_size, timeout_s, self.agree_max, self.all_reduce_min)
        if self.host_memory is None and self.tp_rank == 0:
            log.info("ranks do not all share memory (several hosts, a small /dev/shm, no compiler): activations go over gloo")

    def lost(self, missing: int) -> WorkerError:
        """What to raise where TP rank `missing` did not come to a sum in time, or is gone."""
        return WorkerError(f"TP rank {missing} did not come to a collective that TP rank {self.tp_rank} of {self.tp_size} waits in")

    def _agree(self, values: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        if self.tp_size == 1:
            return list(values)
        table = torch.tensor(values, dtype=torch.int64)
        try:
            dist.all_reduce(table, op=op, group=self._agreement_group)
        except RuntimeError as error:
            raise self._failed("agreement", error) from error
        return [int(value) for value in table.tolist()]

    def _failed(self, what: str, error: RuntimeError) -> WorkerError:
        return WorkerError(f"{what} failed on TP rank {self.tp_rank} of {self.tp_size}: {' '.join(str(error).split())}")


def init_comm(
    tp_rank: int,
    tp_size: int,
    store: Store | str,
    device: torch.device | str,
    timeout_s: float,
    agreement_timeout_s: float,
) -> CommGroup:
    """Join the TP group and return this rank's handle; blocks until all `tp_size` ranks have come, at most `timeout_s`.

    `store` is a torch store that every rank reaches, or an init method (`tcp://…`, `file://…`). Activations take NCCL on a
    CUDA `device`, else shared memory or gloo; a collective on them is bounded by `timeout_s`, an agreement by `agreement_timeout_s`.
    Raises WorkerError when the group does not come together.
    """
    if tp_size == 1:
        return CommGroup.single()
    on_cuda = torch.device(device).type == "cuda"
    where = {"init_method": store} if isinstance(store, str) else {"store": store}
    try:
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", rank=tp_rank, world_size=tp_size, timeout=timedelta(seconds=timeout_s), **where
        )
        group = dist.group.WORLD
        agreement_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=agreement_timeout_s))
    except RuntimeError as error:
        raise WorkerError(f"TP rank {tp_rank} of {tp_size} could not join its group: {' '.join(str(error).split())}") from error
    comm = CommGroup(tp_rank, tp_size, group, agreement_group)
    if not on_cuda:
        comm.join_host_memory(timeout_s)
    return comm
