"""A real `mstar serve` as a child process: started on a free port, waited for, stopped by its pid.

Every server that a test starts is also a test of starting and stopping: it must become ready within a bound, exit 0 on SIGTERM or
SIGINT, leave no process behind and log no traceback.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from demo.fetch_model import model_folder
from tests.support.adapters import ADAPTERS, MAX_LORA_RANK, tiny_adapters
from tests.support.processes import WAIT_S, descendants, still_alive, wait_for
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
BASE = "base"
DEMO = "demo"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
REQUEST_TIMEOUT_S = 300.0
_TAIL_CHARS = 6000
_SETPRIV = shutil.which("setpriv")
_DIES_WITH_US = (_SETPRIV, "--pdeathsig=TERM") if _SETPRIV else ()  # tests that are killed leave no server behind


@dataclass(frozen=True)
class ServerSpec:
    """What a test wants to be served: its id groups the tests that share one server."""

    id: str
    family: str  # of the tiny model, or DEMO for the real one
    tp_size: int
    flags: tuple[str, ...] = ()

    def command_line(self, scratch: Path) -> list[str]:
        """The flags of `mstar serve`. Adapters that a test makes may lie in `scratch`."""
        if self.family == DEMO:
            return ["configs/demo.yaml", f"--model={model_folder()}", f"--tensor-parallel-size={self.tp_size}", *self.flags]
        folders = tiny_adapters(self.family)
        modules = [f"--lora-modules={name}={folders[name]}" for name in ADAPTERS]
        roots = [f"--lora-root={folders[ADAPTERS[0]].parent}", f"--lora-root={scratch}"]
        sizes = ["--max-loras=2", f"--max-cpu-loras={len(ADAPTERS)}", f"--max-lora-rank={MAX_LORA_RANK}", "--threads-per-rank=1"]
        model = [f"--model={tiny_model(self.family)}", f"--served-model-name={BASE}", "--dtype=float32"]
        return [*model, f"--tensor-parallel-size={self.tp_size}", *sizes, *roots, *modules, *self.flags]


@dataclass
class Server:
    """A running server. `family` tells which reference it answers to."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    spec: ServerSpec | None = None
    scratch: Path = Path()
    at_start: dict[str, Any] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)

    def log_tail(self) -> str:
        """The end of what it logged."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:]

    def status(self) -> dict[str, Any]:
        """A fresh answer of every rank."""
        answer = httpx.get(f"{self.url}/mstar/status", timeout=30)
        assert answer.status_code == 200, f"{answer.text}\n{self.log_tail()}"
        status: dict[str, Any] = answer.json()
        return status

    def pids(self) -> list[int]:
        """The ranks' process ids, by TP rank."""
        return [rank["pid"] for rank in self.status()["ranks"]]

    def front_pid(self) -> int:
        """The front's process id."""
        (pid,) = (pid for pid in descendants(self.process.pid) if b"mstar.api.front" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return pid

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET on a fresh connection."""
        return httpx.get(self.url + path, timeout=REQUEST_TIMEOUT_S, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        """POST on a fresh connection."""
        return httpx.post(self.url + path, json=json, timeout=REQUEST_TIMEOUT_S, **options)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until `/ready` answers 200. Raises AssertionError with the end of the log where it exits or takes longer."""
        deadline = time.monotonic() + timeout_s
        while True:
            code = self.process.poll()
            assert code is None, f"the server exited with {code} before it was ready:\n{self.log_tail()}"
            try:
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"the server was not ready after {timeout_s:g} s:\n{self.log_tail()}"
            time.sleep(0.05)

    def wait_until_idle(self) -> dict[str, Any]:
        """Until no rank holds a request, a slot or a page, all ranks alike; returns that status."""
        seen: dict[str, Any] = {}

        def idle() -> bool:
            nonlocal seen
            seen = self.status()
            return not held(seen) and len({(rank["last_seq"], rank["fingerprint"]) for rank in seen["ranks"]}) == 1

        try:
            wait_for("every rank to be idle", idle)
        except AssertionError as error:
            raise AssertionError(f"{error}: {held(seen)} in {seen}\n{self.log_tail()}") from None
        return seen

    def stop(self, kind: int = signal.SIGTERM) -> None:
        """Stop it in order; asserts exit 0, that nothing is left of it and that nothing went wrong inside."""
        self.processes |= descendants(self.process.pid)
        self.process.send_signal(kind)
        code = self.process.wait(STOP_TIMEOUT_S)
        assert code == 0, f"exit status {code} after {signal.Signals(kind).name}:\n{self.log_tail()}"
        wait_for("its processes to be gone", lambda: not still_alive(self.processes), WAIT_S)
        assert "Traceback" not in self.log_path.read_text(encoding="utf-8", errors="replace"), self.log_tail()


def held(status: dict[str, Any]) -> list[str]:
    """What is held somewhere in a status: requests, slots, pages. Empty where all is as at the start."""
    found = [f"front: {key}={count}" for key, count in status["requests"].items() if count]
    for rank in status["ranks"]:
        where = f"rank {rank['tp_rank']}"
        found += [f"{where}: {key}={rank[key]}" for key in ("requests", "running", "waiting") if rank[key]]
        found += [f"{where}: slot {slot}" for slot in rank["slots"] if slot["holders"]]
        if rank["kv"]["used"]:
            found.append(f"{where}: pages {rank['kv']}")
    return found


@contextmanager
def running_server(
    flags: Sequence[str],
    folder: Path,
    *,
    spec: ServerSpec | None = None,
    stop_signal: int | None = signal.SIGTERM,
    ready_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """`mstar serve` with `flags` on a free port, ready; its log goes to `folder`.

    Stopped and checked at the end; with `stop_signal` None the test has stopped it itself.
    """
    log_path = folder / "serve.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*_DIES_WITH_US, sys.executable, "-m", "mstar.cli", "serve", *flags, "--port=0"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the tests is not one at the server
        )
    server = Server("", process, log_path, spec, folder)
    try:
        server.url = wait_for("the server to bind a port", lambda: _bound_url(server), START_TIMEOUT_S)
        server.wait_until_ready(ready_timeout_s)
        server.at_start = server.status()
        server.processes = descendants(process.pid)
        yield server
        if stop_signal is not None:
            server.stop(stop_signal)
    finally:
        if process.poll() is None:
            server.processes |= descendants(process.pid)
            process.kill()  # the kernel kills its children then
            process.wait()
        wait_for("killed processes to be gone", lambda: not still_alive(server.processes), WAIT_S)


def _bound_url(server: Server) -> str | None:
    code = server.process.poll()
    assert code is None, f"the server exited with {code}:\n{server.log_tail()}"
    found = re.search(r"starting .* on (http://\S+:\d+) ", server.log_tail())
    return found[1] if found else None
