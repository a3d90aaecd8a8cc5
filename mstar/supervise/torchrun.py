"""Ranks that torchrun started, on one host or several: the same rank, told by torchrun's environment what it is.

    torchrun --nproc-per-node=2 launch/torchrun.py CONFIG.yaml        beside it: mstar serve CONFIG.yaml --attach

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torchrun's; whoever sets them (a container per rank, say) needs no torchrun. The leader
listens at MASTER_ADDR, which is rank 0's host.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile

from mstar.config import load_config
from mstar.errors import ConfigError
from mstar.launch import RankLaunch
from mstar.supervise.preflight import preflight
from mstar.worker.main import run_rank


def main(argv: list[str]) -> int:
    """Run one rank; returns its exit status, 2 with one line for what cannot be served."""
    try:
        if len(argv) != 1:
            raise ConfigError("usage: torchrun … launch/torchrun.py CONFIG.yaml")
        tp_rank, tp_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        config = preflight(load_config(argv[0], {"tensor_parallel_size": tp_size}))
        if config.front_endpoint is None:
            raise ConfigError("front_endpoint is missing: where `mstar serve --attach` listens for ranks, tcp://ADDRESS:PORT")
        launch = RankLaunch(
            config=config,
            front_endpoint=config.front_endpoint,
            leader_endpoint=f"tcp://{_address(os.environ['MASTER_ADDR'])}:*" if tp_rank == 0 else "",
            store="env://",
            run_dir=os.environ.get("MSTAR_RUN_DIR") or tempfile.mkdtemp(prefix="mstar-rank-"),
        )
    except ConfigError as error:
        sys.stderr.write(f"mstar: {error}\n")
        return 2
    except KeyError as error:
        sys.stderr.write(f"mstar: {error.args[0]} is not set; start this with torchrun\n")
        return 2
    return run_rank(launch, tp_rank)


def _address(host: str) -> str:
    """The address behind a name: a socket can be bound to nothing else. Raises ConfigError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR {host}: {error.strerror or error}") from None
