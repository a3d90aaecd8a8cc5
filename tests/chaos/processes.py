"""The processes of a running server, found by what they are; what they hold."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import descendants

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Held:
    """What one process holds now."""

    role: str
    pid: int
    num_fds: int
    num_threads: int
    rss_mb: float


def processes(supervisor: int) -> dict[str, int]:
    """Role ("supervisor", "front", "rank 0", …) to process id, of those that are there now."""
    found = {"supervisor": supervisor}
    for pid in descendants(supervisor):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"mstar.api.front" in command:
                found["front"] = pid
            elif b"mstar.worker" in command:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for rank in [item.removeprefix(b"RANK=") for item in environment if item.startswith(b"RANK=")]:
                    found[f"rank {rank.decode()}"] = pid  # one that is just about to end has no environment any more
    return found


def held(supervisor: int) -> list[Held]:
    """What every process of the server holds."""
    return [_held(role, pid) for role, pid in sorted(processes(supervisor).items())]


def _held(role: str, pid: int) -> Held:
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    rss = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    return Held(role, pid, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads, round(rss / 1e6, 1))
