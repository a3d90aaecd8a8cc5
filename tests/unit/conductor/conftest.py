"""Fixtures of the conductor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.adapters.adapter_folders import hand_folder, pair
from tests.unit.conductor.pool_ranks import save_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder; adapters may lie beside it."""
    return save_config(tmp_path / "model")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Four adapters with different weights, beside the model."""
    return {name: hand_folder(tmp_path / name, pair(seed=seed)) for seed, name in enumerate("ABCD")}
