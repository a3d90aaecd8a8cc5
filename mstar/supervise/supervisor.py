"""`mstar serve`: owns the front and the ranks, restarts what dies, stops in order.

    supervisor ─┬─ front (keeps its port: the listening socket is the supervisor's)
                └─ rank 0 … N-1, one instance: one of them ends, all are ended and start anew under a new epoch

A rank that ends with status 2 says that the configuration cannot be served: everything stops with 2. A front that dies is started
again beside the running ranks. Both give up after `max_restarts` within `RESTART_WINDOW_S`. Whoever gives no sign of life for
`stuck_rank_timeout_s` (before the first one: `start_timeout_s`) is killed, and so found dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from mstar.api.server import bind
from mstar.config import ServeConfig
from mstar.launch import FrontLaunch, RankLaunch
from mstar.supervise.preflight import preflight
from mstar.supervise.processes import Child, end, spawn

RESTART_WINDOW_S = 300.0
BACK_OFF_WINDOW_S = 30.0  # restarts that follow each other closely wait longer and longer; a rare one does not
LONGEST_BACK_OFF_S = 5.0
RANK_END_S = 5.0
TABLES_WAIT_S = 3.0

log = logging.getLogger(__name__)


def serve(config: ServeConfig) -> int:
    """Serve until stopped; returns the exit status. Raises ConfigError before any process was started."""
    resolved = preflight(config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s mstar %(levelname)s %(message)s", stream=sys.stderr)
    listener = bind(config.host, config.port)
    run_dir = Path(tempfile.mkdtemp(prefix="mstar-"))
    try:
        return Supervisor(resolved, listener, run_dir).run()
    finally:
        listener.close()
        shutil.rmtree(run_dir, ignore_errors=True)


class Supervisor:
    """One instance with its front."""

    def __init__(self, config: ServeConfig, listener: socket.socket, run_dir: Path) -> None:
        self._config = config
        self._listener = listener
        self._run_dir = run_dir
        self._started_at = time.time()
        self._secret = "" if config.attach else uuid.uuid4().hex  # ranks of torchrun know none
        self._front_endpoint = config.front_endpoint or f"ipc://{run_dir}/front.ipc"
        self._restarts: deque[float] = deque()
        self._signals = 0
        self._front: Child | None = None
        self._ranks: list[Child] = []

    def run(self) -> int:
        """Start everything, watch it, end it."""
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, self._on_signal)
        host, port = self._listener.getsockname()[:2]
        log.info(
            "starting %s on http://%s:%d with %d rank(s), %d adapter(s)",
            self._config.base_name, host, port, self._config.tensor_parallel_size, len(self._config.lora_modules),
        )  # fmt: skip
        try:
            self._start_front()
            if not self._config.attach:
                self._start_ranks()
            return self._watch()
        finally:
            self._end_all()

    def _watch(self) -> int:
        while not self._signals:
            time.sleep(0.05)
            assert self._front is not None
            if self._front.exit_status() is not None:
                status = self._front_died(self._front)
                if status is not None:
                    return status
            dead = [rank for rank in self._ranks if rank.exit_status() is not None]
            if dead:
                status = self._rank_died(dead)
                if status is not None:
                    return status
            self._kill_silent()
        return self._stop()

    def _kill_silent(self) -> None:
        """A child that is stopped, or whose loop is stuck, ends here; the next look finds it dead."""
        assert self._front is not None
        for child in (self._front, *self._ranks):
            bound_s = self._config.stuck_rank_timeout_s if child.is_heard else self._config.start_timeout_s
            if child.silent_s() > bound_s:
                what = "gave no sign of life" if child.is_heard else "did not start"
                log.error("%s %s for %.0f s, the limit is %g s: killing it", child.name, what, child.silent_s(), bound_s)
                child.process.kill()
                child.process.wait()

    def _front_died(self, front: Child) -> int | None:
        front.forget()
        if front.exit_status() == 2:
            return 2
        log.error("the front %s; its connections are lost, the ranks go on", front.describe_exit())
        if not self._may_restart():
            return 1
        self._start_front()
        return None

    def _rank_died(self, dead: list[Child]) -> int | None:
        for rank in dead:
            log.error("%s %s", rank.name, rank.describe_exit())
        if any(self._tables()):
            for rank in self._ranks:  # ranks differ: the others learn of it and write their tables before they end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(TABLES_WAIT_S)
        end(self._ranks, 0.5)  # the others sit in a collective with a dead peer
        if any(rank.exit_status() == 2 for rank in dead):
            return 2
        self._print_tables()
        if not self._may_restart():
            return 1
        log.warning("starting the ranks again; streams resume")
        self._start_ranks()
        return None

    def _may_restart(self) -> bool:
        """Count a restart, after a wait that doubles with each other one just before. False after too many."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._config.max_restarts:
            log.error("%d restarts within %g s: giving up", len(self._restarts), RESTART_WINDOW_S)
            return False
        recent = sum(1 for at in self._restarts if now - at < BACK_OFF_WINDOW_S)
        time.sleep(min(LONGEST_BACK_OFF_S, 0.1 * 2**recent))
        self._restarts.append(now)
        return True

    def _start_front(self) -> None:
        launch = FrontLaunch(
            config=self._config,
            front_endpoint=self._front_endpoint,
            listen_fd=self._listener.fileno(),
            registry_path=self._config.registry_file or str(self._run_dir / "registry.json"),
            run=self._run_dir.name,
            secret=self._secret,
            started_at=self._started_at,
        )
        path = self._write("front.json", launch.model_dump_json())
        self._front = spawn("front", "mstar.api.front", {"MSTAR_FRONT": str(path)}, (self._listener.fileno(),))

    def _start_ranks(self) -> None:
        for path in self._run_dir.glob("instance-*"):
            path.unlink()  # of the instance before
        epoch = uuid.uuid4().hex[:8]
        size = self._config.tensor_parallel_size
        launch = RankLaunch(
            config=self._config,
            front_endpoint=self._front_endpoint,
            leader_endpoint=f"ipc://{self._run_dir}/instance-{epoch}.ipc",
            store=f"file://{self._run_dir}/instance-{epoch}.store",
            run_dir=str(self._run_dir),
            secret=self._secret,
        )
        path = self._write(f"instance-{epoch}.json", launch.model_dump_json())
        threads = str(self._config.threads_per_rank or max(1, (os.cpu_count() or 1) // size))
        env = {"MSTAR_LAUNCH": str(path), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": threads}
        if self._config.device == "cpu":
            env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self._ranks = [spawn(f"rank {rank}", "mstar.worker", {**env, "RANK": str(rank)}) for rank in range(size)]

    def _write(self, name: str, text: str) -> Path:
        path = self._run_dir / name
        path.touch(mode=0o600)  # it holds the keys of the API
        path.write_text(text, encoding="utf-8")
        return path

    def _stop(self) -> int:
        """In order: the front drains and tells the ranks; a second signal ends everything now."""
        assert self._front is not None
        log.info("stopping (again to stop now)")
        self._front.process.terminate()
        deadline = time.monotonic() + self._config.shutdown_timeout_s + 10.0
        while self._front.exit_status() is None and time.monotonic() < deadline and self._signals < 2:
            time.sleep(0.02)
        clean = self._front.exit_status() == 0
        deadline = time.monotonic() + RANK_END_S
        while self._signals < 2 and time.monotonic() < deadline and any(rank.exit_status() is None for rank in self._ranks):
            time.sleep(0.02)
        return 0 if clean or self._signals >= 2 else 1

    def _end_all(self) -> None:
        children = [*self._ranks, *([self._front] if self._front is not None else [])]
        end(children, 1.0)

    def _tables(self) -> Iterator[Path]:
        return self._run_dir.glob("tables-*.txt")

    def _print_tables(self) -> None:
        """Where ranks differed, show both tables."""
        for path in sorted(self._tables()):
            sys.stderr.write(f"--- {path.name}\n{path.read_text(encoding='utf-8')}")
            path.unlink()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signals += 1
