"""The entry of every rank, whoever started it: build, greet, run, end with a status that says why.

exit 0   the front asked for it       exit 2   the configuration cannot be served
exit 3   a WorkerError or ProtocolError: the instance restarts        exit 1   a bug, with its traceback
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys

from mstar import memory
from mstar.errors import ConfigError, MstarError, WorkerError
from mstar.launch import RankLaunch, read_rank_launch
from mstar.wire.front_rank import RankReady
from mstar.worker.build import Rank, build_rank
from mstar.worker.follower import Follower
from mstar.worker.io import CopyIn, RankIo
from mstar.worker.leader import Leader
from mstar.worker.shell import Stopped, exit_status

log = logging.getLogger(__name__)


def main() -> int:
    """Run the rank that the supervisor started."""
    launch, tp_rank = read_rank_launch()
    return run_rank(launch, tp_rank)


def run_rank(launch: RankLaunch, tp_rank: int) -> int:
    """Run one rank to its end; returns the exit status."""
    logging.basicConfig(
        level=launch.config.log_level.upper(), format=f"%(asctime)s rank{tp_rank} %(levelname)s %(message)s", stream=sys.stderr
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the supervisor ends the ranks in order
    try:
        _run(launch, tp_rank)
    except Stopped:
        return 0
    except ConfigError as error:
        log.error("%s", error)
        return 2
    except MstarError as error:
        log.error("%s: %s", type(error).__name__, error)
        return exit_status(error)
    return 0


def _run(launch: RankLaunch, tp_rank: int) -> None:
    waiting: list[RankIo] = []

    def on_copy(name: str) -> None:
        for io in waiting:
            io.put(CopyIn(name))

    rank = build_rank(launch, tp_rank, on_copy)
    memory.settle()
    io = RankIo(tp_rank, launch.config, launch.front_endpoint, _ready(rank))
    epoch = rank.meeting.epoch
    _connect(rank, io)
    waiting.append(io)
    io.start(epoch, launch.config.start_timeout_s)
    loop = Leader(rank, io, epoch) if tp_rank == 0 else Follower(rank, io, epoch)
    try:
        loop.run()
    except WorkerError:
        loop.lost()
        raise
    finally:
        loop.close()
        io.close()
        if rank.pool is not None:
            rank.pool.close()


def _connect(rank: Rank, io: RankIo) -> None:
    """Rank 0 binds and tells where; the others connect."""
    if rank.tp_rank > 0:
        io.connect_leader(rank.meeting.hear("leader's endpoint"), rank.meeting.epoch)
    elif rank.comm.tp_size > 1:
        rank.meeting.tell("leader's endpoint", io.bind_leader(rank.launch.leader_endpoint))


def _ready(rank: Rank) -> RankReady:
    return RankReady(
        tp_rank=rank.tp_rank,
        tp_size=rank.config.tensor_parallel_size,
        pid=os.getpid(),
        num_kv_pages=rank.kv.spec.num_pages,
        max_model_len=rank.max_model_len,
        weights_bytes=rank.weights_bytes,
        slots_bytes=rank.slots_bytes,
        backend="none" if rank.pool is None else type(rank.pool.backend).__name__,
        secret=rank.launch.secret,
    )
