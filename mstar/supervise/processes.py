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
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A running child and the name under which it is reported. `beats` is the read end of its pipe of signs of life."""

    name: str
    process: subprocess.Popen[bytes]
    beats: int
    is_heard: bool = False
    last_sign: float = field(default_factory=time.monotonic)

    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def forget(self) -> None:
        """It has ended: close its pipe. Idempotent."""
        if self.beats >= 0:
            os.close(self.beats)
            self.beats = -1

    def silent_s(self) -> float:
        """Seconds since its last sign of life; since its start, where it gave none (`is_heard`)."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.beats, 4096):
                self.is_heard, self.last_sign = True, time.monotonic()
        return time.monotonic() - self.last_sign

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
    beats, beats_in = os.pipe()
    os.set_blocking(beats, False)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, **env, "MSTAR_BEAT_FD": str(beats_in)},
            pass_fds=(*pass_fds, beats_in),
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent(),
        )
    finally:
        os.close(beats_in)
    return Child(name, process, beats)


def end(children: Iterable[Child], timeout_s: float, kind: int = signal.SIGTERM) -> None:
    """Signal all that run, wait for them, kill what is left after `timeout_s`. Nothing is left of any child then."""
    children = list(children)
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
    for child in children:
        child.forget()


def _die_with_parent() -> Callable[[], None]:
    """Run in the child before exec: SIGKILL when the parent is gone (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arm
