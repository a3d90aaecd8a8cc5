"""One rank of test_host_memory: `python host_memory_worker.py STORE TP_RANK TP_SIZE WHAT`; writes what it got as JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from mstar.distributed import comm as comm_module
from mstar.distributed import host_memory
from mstar.distributed.comm import CommGroup, init_comm
from mstar.distributed.shards import even_cuts
from mstar.errors import WorkerError


def main() -> None:
    path, tp_rank, tp_size, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if what == "apart" and tp_rank == 1:
        host_memory._FOLDER = host_memory.Path("/nowhere")
    store = dist.FileStore(path, tp_size)
    comm = init_comm(tp_rank, tp_size, store, "cpu", timeout_s=120, agreement_timeout_s=120)
    results = {"shares": comm.host_memory is not None, "files": [name for name in os.listdir("/dev/shm") if name.startswith("mstar-")]}
    results |= {"sums": sums, "apart": sums, "gone": gone, "late": late}[what](comm)
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


def drawn(tp_rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(tp_rank)).to(dtype)


def sums(comm: CommGroup) -> dict[str, object]:
    """Sums of many sizes, larger than a slot too, and a gather: whether they are what one process computes, in those bits."""
    right = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 17, 4096, 700_001):
            total = comm.all_reduce(drawn(comm.tp_rank, (count,), dtype))
            parts = [drawn(tp_rank, (count,), dtype).float() for tp_rank in range(comm.tp_size)]
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            right.append(torch.equal(total, expected.to(dtype)) or comm.host_memory is None)
        cuts = even_cuts(1000, comm.tp_size)
        whole = drawn(99, (1500, 1000), dtype)
        right.append(torch.equal(comm.all_gather_columns(whole[:, slice(*cuts[comm.tp_rank])], cuts), whole))
    before = comm_module.dist.all_reduce
    comm_module.dist.all_reduce = lambda *args, **kwargs: right.append("gloo")
    comm.all_reduce(torch.ones(3))
    comm_module.dist.all_reduce = before
    for index in range(2000):  # ranks overtake each other by one at most: no sum sees another's numbers
        right.append(comm.all_reduce(torch.full((64,), float(index))).eq(index * comm.tp_size).all().item())
    return {"right": [item for item in right if item is not True]}


def gone(comm: CommGroup) -> dict[str, object]:
    """The last rank ends without a word."""
    comm.all_reduce(torch.ones(4))
    if comm.tp_rank == comm.tp_size - 1:
        os._exit(0)
    return missed(comm)


def late(comm: CommGroup) -> dict[str, object]:
    """The last rank is there, but does not come."""
    assert comm.host_memory is not None
    comm.host_memory.native.timeout_ns = 2_000_000_000
    if comm.tp_rank == comm.tp_size - 1:
        comm_module.dist.distributed_c10d._get_default_store().wait([f"missed {tp_rank}" for tp_rank in range(comm.tp_size - 1)])
        return {"error": "", "seconds": 0.0}
    return missed(comm)


def missed(comm: CommGroup) -> dict[str, object]:
    began, error = time.monotonic(), ""
    try:
        comm.all_reduce(torch.ones(4))
    except WorkerError as raised:
        error = str(raised)
    comm_module.dist.distributed_c10d._get_default_store().set(f"missed {comm.tp_rank}", "1")
    return {"error": error, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()
