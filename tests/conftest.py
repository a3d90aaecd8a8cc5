"""What every test folder has in common."""

from __future__ import annotations

from pathlib import Path

import pytest

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/gpu is for a machine with a GPU: it is collected where `-m` asks for it, and nothing is skipped where it does not."""
    asked = config.getoption("-m")
    wants_gpu = "gpu" in asked and "not gpu" not in asked
    return True if collection_path.is_relative_to(GPU_FOLDER) and not wants_gpu else None
