"""What the supervisor tells the processes it starts. Leaf module.

`MSTAR_FRONT` and `MSTAR_LAUNCH` name JSON files written by the supervisor; RANK and WORLD_SIZE are torchrun's own names, so ranks that
torchrun starts enter the same way.
"""

from __future__ import annotations

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


def read_front_launch() -> FrontLaunch:
    """This front's launch, from the environment."""
    return FrontLaunch.model_validate_json(Path(os.environ["MSTAR_FRONT"]).read_text(encoding="utf-8"))


def read_rank_launch() -> tuple[RankLaunch, int]:
    """This rank's launch and TP rank, from the environment."""
    launch = RankLaunch.model_validate_json(Path(os.environ["MSTAR_LAUNCH"]).read_text(encoding="utf-8"))
    return launch, int(os.environ["RANK"])
