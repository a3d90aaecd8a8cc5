"""What every test folder has in common."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: test processes run side by side, one to a core

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/gpu is for a machine with a GPU: it is collected where `-m` asks for it, and nothing is skipped where it does not."""
    asked = config.getoption("-m")
    wants_gpu = "gpu" in asked and "not gpu" not in asked
    return True if collection_path.is_relative_to(GPU_FOLDER) and not wants_gpu else None
