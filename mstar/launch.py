"""What the supervisor tells the processes it starts. Leaf module.

`MSTAR_FRONT` and `MSTAR_LAUNCH` name JSON files written by the supervisor; RANK and WORLD_SIZE are torchrun's own names, so ranks that
torchrun starts enter the same way. `MSTAR_BEAT_FD` is the write end of a pipe to the supervisor; where there is none, `MSTAR_BEAT_FILE` may
name a file that a container's health check looks at.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mstar.config import ServeConfig


class FrontLaunch(BaseModel):
    """One start of the front. `listen_fd` is the inherited listening socket; `run` names the supervisor's run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ServeConfig
    front_endpoint: str
    listen_fd: int
    registry_path: str
    run: str
    secret: str  # ranks show it to this front
    started_at: float  # seconds since the epoch


class RankLaunch(BaseModel):
    """One start of one instance. `store` is a torch init method that every rank reaches.

    Rank 0 draws the instance's epoch and binds `leader_endpoint` (a port of 0 or * takes a free one); the others hear of both from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ServeConfig
    front_endpoint: str
    leader_endpoint: str
    store: str
    run_dir: str
    secret: str = ""  # from torchrun there is none: off loopback the keys say who may connect


class Heartbeat:
    """This process's signs of life: to its supervisor, a byte each, or as the time of a file."""

    def __init__(self) -> None:
        given = os.environ.get("MSTAR_BEAT_FD")
        self._fd = int(given) if given is not None else None
        self._file = Path(os.environ["MSTAR_BEAT_FILE"]) if self._fd is None and "MSTAR_BEAT_FILE" in os.environ else None
        if self._fd is not None:
            os.set_blocking(self._fd, False)

    def beat(self) -> None:
        """Whoever calls this must be what would not get on if the process were stuck."""
        with contextlib.suppress(OSError):  # a full pipe says enough; a supervisor that is gone ends us
            if self._fd is not None:
                os.write(self._fd, b".")
            elif self._file is not None:
                self._file.touch()


def read_front_launch() -> FrontLaunch:
    """This front's launch, from the environment."""
    return FrontLaunch.model_validate_json(Path(os.environ["MSTAR_FRONT"]).read_text(encoding="utf-8"))


def read_rank_launch() -> tuple[RankLaunch, int]:
    """This rank's launch and TP rank, from the environment."""
    launch = RankLaunch.model_validate_json(Path(os.environ["MSTAR_LAUNCH"]).read_text(encoding="utf-8"))
    return launch, int(os.environ["RANK"])
