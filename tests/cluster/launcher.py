"""torchrun on a host, started again whenever it ends, as systemd, Slurm or Kubernetes would."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.network import INTERFACE, Host
from tests.support.server import ROOT

AGAIN_S = 1.0


class Launcher:
    """Keeps one torchrun running until stopped. The first host's address is where torchruns meet."""

    def __init__(
        self, host: Host, meet_at: Host, *, num_hosts: int, num_ranks: int, config: Path, log: Path, clock_ahead_s: int = 0
    ) -> None:
        """`clock_ahead_s` is how far the ranks' monotonic clock is ahead of the other hosts' (a time namespace)."""
        self._host = host
        self._log = log
        self._argv = [
            *(("unshare", "--time", "--monotonic", str(clock_ahead_s)) if clock_ahead_s else ()),
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={num_hosts}", f"--nproc-per-node={num_ranks}", f"--local-addr={host.address}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={meet_at.address}:29400", "--rdzv-id=mstar"),
            *(f"--rdzv-conf=is_host={host is meet_at}", "--max-restarts=1000"),
            *("--monitor-interval=0.1", str(ROOT / "launch/torchrun.py"), str(config)),
        ]
        self._env: Mapping[str, str] = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"torchrun on {host.address}", daemon=True)
        self.process = host.start(self._argv, log, self._env)
        self._thread.start()

    def stop(self) -> None:
        """End it; its ranks end with it."""
        self._stopping.set()
        self._thread.join()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def _keep(self) -> None:
        while not self._stopping.wait(0.1):
            if self.process.poll() is not None:
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(f"--- torchrun ended with {self.process.returncode}; again\n")
                time.sleep(AGAIN_S)
                self.process = self._host.start(self._argv, self._log, self._env)
