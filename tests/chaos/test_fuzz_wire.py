"""The short version of `make fuzz-wire`."""

from __future__ import annotations

import pytest

from tests.chaos.fuzz import run_fuzz


@pytest.mark.xdist_group("chaos")
def test_frames_of_strangers_end_nothing_stall_nothing_and_are_counted(tmp_path):
    report = run_fuzz(20_000, 5, tmp_path)
    assert not report.problems
    assert len(report.streams) >= 4
