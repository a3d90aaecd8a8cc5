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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one `xdist_group` go to one process. xdist 3.8 notes a test's group where pytest 9.2 no longer looks.

    Without it every group's server would be started by every process, again and again; see pytest-xdist#1386.
    """
    if getattr(config.option, "loadgroup", False):
        for item in items:
            groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
            if groups and hasattr(item, "_id"):
                item._id = type(item._id).parse(f"{item.nodeid}@{'_'.join(groups)}")
