"""What a rank is told when it starts, whoever starts it: the built-in supervisor or torchrun.

`MSTAR_LAUNCH` names a JSON file written by the supervisor; RANK and WORLD_SIZE are torchrun's own names.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mstar.config import ServeConfig


class Launch(BaseModel):
    """One start of one instance. `store` is a torch init method that every rank reaches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ServeConfig
    instance_epoch: str
    front_endpoint: str
    leader_endpoint: str
    store: str
    run_dir: str


def read_launch() -> tuple[Launch, int]:
    """This process's launch and TP rank, from the environment."""
    launch = Launch.model_validate_json(Path(os.environ["MSTAR_LAUNCH"]).read_text(encoding="utf-8"))
    return launch, int(os.environ["RANK"])
