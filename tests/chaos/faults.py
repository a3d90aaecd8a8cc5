"""What may go wrong while streams run, and how to tell from the outside that it was found and that the server serves again.

A fault is injected with a signal or a changed file, as an operator's bad day would; the server has no seam for it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.load import MUTABLE, Load
from tests.chaos.processes import processes
from tests.e2e.prompts import greedy, some_tokens
from tests.support.server import Server

RANK_DIED = r"rank \d (?:was killed|ended with|gave no sign)|is stuck:|instance down:"
FRONT_DIED = r"the front was killed|front gave no sign"
RANKS_UP = r"instance up again"
FRONT_UP = r"ready after"


@dataclass(frozen=True)
class Scene:
    """What a fault works on."""

    server: Server
    load: Load
    draw: random.Random
    mutable: Path  # the folder of the adapter that may be changed

    def pid(self, role: str) -> int:
        """A process that runs now."""
        return processes(self.server.process.pid)[role]

    def send(self, role: str, kind: int) -> float:
        """Signal a process; returns when."""
        pid, now = self.pid(role), time.monotonic()
        os.kill(pid, kind)
        return now

    def some_rank(self) -> str:
        """Any rank."""
        assert self.server.spec is not None
        return f"rank {self.draw.randrange(self.server.spec.tp_size)}"


Inject = Callable[[Scene], Awaitable[float]]


@dataclass(frozen=True)
class Fault:
    """`inject` does it and returns when it began; `found` and `served` are what the log says then (None: nothing is found, serving never ends)."""

    inject: Inject
    found: str | None
    served: tuple[str, ...]
    kills_front: bool = False
    changes_adapter: bool = False


def _signal(role: str | None, kind: int) -> Inject:
    async def inject(scene: Scene) -> float:
        return scene.send(role or scene.some_rank(), kind)

    return inject


async def _kill_all_ranks(scene: Scene) -> float:
    now = time.monotonic()
    for role, pid in processes(scene.server.process.pid).items():
        if role.startswith("rank"):
            with suppress(ProcessLookupError):  # the supervisor was quicker
                os.kill(pid, signal.SIGKILL)
    return now


async def _kill_front_and_rank(scene: Scene) -> float:
    pids = [scene.pid("front"), scene.pid(scene.some_rank())]
    now = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return now


async def _kill_rank_while_it_starts(scene: Scene) -> float:
    """A rank, and one of the next instance a moment after it was started."""
    before, began = processes(scene.server.process.pid), time.monotonic()
    os.kill(before[scene.some_rank()], signal.SIGKILL)
    while True:
        now = processes(scene.server.process.pid)
        fresh = [pid for role, pid in now.items() if role.startswith("rank") and before[role] != pid]
        if fresh:
            await asyncio.sleep(scene.draw.uniform(0, 4))
            with suppress(ProcessLookupError):
                os.kill(scene.draw.choice(fresh), signal.SIGKILL)
            return began
        await asyncio.sleep(0.02)


async def _pause(scene: Scene) -> float:
    """Stop a process for a moment that is within all bounds."""
    began = time.monotonic()
    pid = scene.pid(scene.draw.choice((scene.some_rank(), "front")))
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(scene.draw.uniform(0.5, 2))
    os.kill(pid, signal.SIGCONT)
    return began


def _changed_adapter(change: Callable[[Path], None]) -> Inject:
    """Change the file while a stream runs on it, and kill a rank, so that the resumed stream has to read it anew."""

    async def inject(scene: Scene) -> float:
        stream = asyncio.ensure_future(scene.load.begin(greedy(MUTABLE, some_tokens(20, 1), 900)))
        while not any(other.ask.model == MUTABLE and other.tokens for other in scene.load.running):
            if stream.done():
                break
            await asyncio.sleep(0.02)
        change(scene.mutable / "adapter_model.safetensors")
        return scene.send(scene.some_rank(), signal.SIGKILL)

    return inject


def _replace(path: Path) -> None:
    """Other weights of the same shapes: every value's sign is turned."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + 3 :: 4] = bytes(byte ^ 0x80 for byte in data[start + 3 :: 4])
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.replace(path)


def _cut(path: Path) -> None:
    """As a copy that stopped half-way leaves it."""
    os.truncate(path, path.stat().st_size // 2)


FAULTS: dict[str, Fault] = {
    "kill -9 leader": Fault(_signal("rank 0", signal.SIGKILL), RANK_DIED, (RANKS_UP,)),
    "kill -9 follower": Fault(_signal("rank 1", signal.SIGKILL), RANK_DIED, (RANKS_UP,)),
    "kill -9 all ranks": Fault(_kill_all_ranks, RANK_DIED, (RANKS_UP,)),
    "kill -9 while it starts": Fault(_kill_rank_while_it_starts, RANK_DIED, (RANKS_UP,)),
    "SIGTERM a rank": Fault(_signal(None, signal.SIGTERM), RANK_DIED, (RANKS_UP,)),
    "SIGSTOP leader": Fault(_signal("rank 0", signal.SIGSTOP), RANK_DIED, (RANKS_UP,)),
    "SIGSTOP follower": Fault(_signal("rank 1", signal.SIGSTOP), RANK_DIED, (RANKS_UP,)),
    "pause a process": Fault(_pause, None, ()),
    "kill -9 front": Fault(_signal("front", signal.SIGKILL), FRONT_DIED, (FRONT_UP,), kills_front=True),
    "SIGSTOP front": Fault(_signal("front", signal.SIGSTOP), FRONT_DIED, (FRONT_UP,), kills_front=True),
    "kill -9 front and rank": Fault(_kill_front_and_rank, f"{FRONT_DIED}|{RANK_DIED}", (FRONT_UP,), kills_front=True),
    "replace adapter": Fault(_changed_adapter(_replace), RANK_DIED, (RANKS_UP,), changes_adapter=True),
    "delete adapter": Fault(_changed_adapter(Path.unlink), RANK_DIED, (RANKS_UP,), changes_adapter=True),
    "cut adapter": Fault(_changed_adapter(_cut), RANK_DIED, (RANKS_UP,), changes_adapter=True),
}
