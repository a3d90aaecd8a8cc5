"""One rank of test_comm: joins through a file store, runs every collective, writes what it got as JSON to its standard output."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from mstar.distributed.comm import CommGroup, init_comm
from mstar.distributed.shards import even_cuts
from mstar.errors import WorkerError


def main() -> None:
    path, tp_rank, tp_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(path, tp_size)
    comm = init_comm(tp_rank, tp_size, store, "cpu", timeout_s=60, agreement_timeout_s=1.5)
    results = {**collectives(comm), "late": lateness(comm, store)}
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # the timed-out collective is still in gloo's hands; a rank that met one ends without ceremony


def collectives(comm: CommGroup) -> dict[str, object]:
    total = 8
    cuts = even_cuts(total, comm.tp_size)
    whole = torch.arange(3 * total, dtype=torch.float32).view(3, total)
    start, stop = cuts[comm.tp_rank]
    even = torch.full((2, 2), float(comm.tp_rank))
    return {
        "float32": comm.all_reduce(torch.full((2, 3), 1.5 + comm.tp_rank)).tolist(),
        "bfloat16": comm.all_reduce(torch.full((2, 3), 1.5 + comm.tp_rank, dtype=torch.bfloat16)).tolist(),
        "uneven": comm.all_gather_columns(whole[:, start:stop], cuts).tolist() == whole.tolist(),
        "even": comm.all_gather_columns(even, [(2 * i, 2 * i + 2) for i in range(comm.tp_size)]).tolist(),
        "agreed": comm.agree_max([comm.tp_rank, 2 - comm.tp_rank, 0]),
        "least": comm.all_reduce_min(10 - comm.tp_rank),
        "sum": comm.agree_sum(torch.tensor([[0.5, comm.tp_rank], [1e-9, 2.0]], dtype=torch.float64)).tolist(),
    }


def lateness(comm: CommGroup, store: dist.Store) -> str:
    """The last rank does not come to an agreement; the others must say so within its bound. Returns their error."""
    if comm.tp_rank == comm.tp_size - 1:
        store.wait([f"gave up {tp_rank}" for tp_rank in range(comm.tp_size - 1)])
        return ""
    try:
        comm.agree_max([0])
    except WorkerError as error:
        return str(error)
    finally:
        store.set(f"gave up {comm.tp_rank}", "1")
    return "agreed without the last rank"


if __name__ == "__main__":
    main()
