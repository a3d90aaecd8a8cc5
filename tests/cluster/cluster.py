"""A front on one host, ranks by torchrun on two others, off loopback and so with CURVE; and what may happen to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.chaos.processes import processes
from tests.cluster.launcher import Launcher
from tests.cluster.network import Host, network
from tests.support.adapters import ADAPTERS, MAX_LORA_RANK, tiny_adapters
from tests.support.processes import wait_for
from tests.support.server import BASE, ROOT, Server
from tests.support.tiny_models import tiny_model

FAMILY = "llama2"
STUCK_S = 10.0  # a cut of 1 s is none, one of 30 s is a rank lost
READY_BOUND_S = 300.0
FOLLOWERS_CLOCK_AHEAD_S = 5  # always: no message carries a time
RANKS_OF_HOSTS = {2: (1, 1), 3: (2, 1)}  # by TP size


@dataclass
class Cluster:
    """A running one. `leader_host` has rank 0."""

    server: Server  # its process is the front's supervisor
    front_host: Host
    leader_host: Host
    follower_host: Host
    launchers: list[Launcher]
    logs: list[Path]
    tp_size: int

    def rank_pid(self, tp_rank: int) -> int:
        """The process of a rank."""
        for host in (self.leader_host, self.follower_host):
            for pid in host.pids():
                with suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if b"torch.distributed.run" not in command and f"RANK={tp_rank}".encode() in environment:
                        return pid
        raise AssertionError(f"rank {tp_rank} does not run")

    def front_pid(self) -> int:
        """The front's process."""
        return processes(self.server.process.pid)["front"]

    def mark(self) -> dict[Path, int]:
        """Where the logs end now."""
        return {path: path.stat().st_size for path in self.logs}

    def says(self, pattern: str, since: dict[Path, int]) -> bool:
        """Whether any log has said so since a mark."""
        for path, start in since.items():
            with path.open("rb") as log:
                log.seek(start)
                if re.search(pattern, log.read().decode(errors="replace")):
                    return True
        return False

    def tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"=== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.logs)


@contextmanager
def running_cluster(tp_size: int, folder: Path) -> Iterator[Cluster]:
    """Start everything, wait until it serves, and stop it in order at the end: the front first, which tells the ranks."""
    with network(3) as (front_host, leader_host, follower_host):
        subprocess.run([sys.executable, "-m", "mstar.cli", "keys", str(folder / "keys")], cwd=ROOT, check=True, capture_output=True)
        config = folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(_config(tp_size, front_host, folder)), encoding="utf-8")
        logs = [folder / name for name in ("front.log", "leader_host.log", "follower_host.log")]
        for log in logs:
            log.touch()
        command = [sys.executable, "-m", "mstar.cli", "serve", str(config), "--attach"]
        front = front_host.start(command, logs[0], {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)})
        launchers = [
            Launcher(host, leader_host, num_hosts=2, num_ranks=num_ranks, config=config, log=log, clock_ahead_s=ahead_s)
            for host, num_ranks, log, ahead_s in zip(
                (leader_host, follower_host), RANKS_OF_HOSTS[tp_size], logs[1:], (0, FOLLOWERS_CLOCK_AHEAD_S), strict=True
            )
        ]
        server = Server(f"http://{front_host.address}:8000", front, logs[0])
        cluster = Cluster(server, front_host, leader_host, follower_host, launchers, logs, tp_size)
        try:
            server.wait_until_ready(READY_BOUND_S)
            yield cluster
            front.send_signal(signal.SIGTERM)
            assert front.wait(60) == 0, cluster.tails()
            wait_for("every torchrun to end with its ranks", lambda: cluster.says("torchrun ended with 0", dict.fromkeys(logs[1:], 0)))
        finally:
            for launcher in launchers:
                launcher.stop()
            if front.poll() is None:
                front.kill()
                front.wait()


def _config(tp_size: int, front_host: Host, folder: Path) -> dict[str, object]:
    adapters = tiny_adapters(FAMILY)
    return {
        "model": str(tiny_model(FAMILY)),
        "served_model_name": BASE,
        "dtype": "float32",
        "tensor_parallel_size": tp_size,
        "threads_per_rank": 1,
        "max_loras": 2,
        "max_cpu_loras": len(ADAPTERS),
        "max_lora_rank": MAX_LORA_RANK,
        "lora_modules": [{"name": name, "path": str(adapters[name])} for name in ADAPTERS],
        "num_gpu_blocks_override": 512,
        "max_num_seqs": 32,
        "host": front_host.address,
        "port": 8000,
        "front_endpoint": f"tcp://{front_host.address}:7000",
        "curve_dir": str(folder / "keys"),
        "max_restarts": 1000,
        "lora_read_timeout_s": 4,
        "agreement_timeout_s": 6,
        "stuck_rank_timeout_s": STUCK_S,
    }


def write_record(record: dict[str, object]) -> None:
    """Add a line to the report that `make test-cluster` keeps."""
    sys.stderr.write(f"\n{json.dumps(record)}\n")
    if out := os.environ.get("MSTAR_CLUSTER_OUT"):
        with Path(out).open("a", encoding="utf-8") as report:
            report.write(json.dumps(record) + "\n")
