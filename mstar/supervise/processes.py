"""Child processes of the supervisor: started in one place, ended in one place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A running child and the name under which it is reported."""

    name: str
    process: subprocess.Popen[bytes]

    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def describe_exit(self) -> str:
        """How it ended, for people."""
        status = self.process.returncode
        if status is None:
            return "is running"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


def spawn(name: str, module: str, env: Mapping[str, str], pass_fds: tuple[int, ...] = ()) -> Child:
    """Start `python -m module`. The child is killed by the kernel should the supervisor die."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, **env},
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent(),
    )
    return Child(name, process)


def end(children: Iterable[Child], timeout_s: float, kind: int = signal.SIGTERM) -> None:
    """Signal all, wait for all, kill what is left after `timeout_s`."""
    alive = [child for child in children if child.exit_status() is None]
    for child in alive:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(kind)
    deadline = time.monotonic() + timeout_s
    for child in alive:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _die_with_parent() -> Callable[[], None]:
    """Run in the child before exec: SIGKILL when the parent is gone (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arm
