"""Sums and gathers through shared memory, between real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def ranks(tmp_path, tp_size, what):
    """What each rank wrote; None for one that ended without."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/unit/distributed/host_memory_worker.py"), str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(tp_rank), str(tp_size), what], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for tp_rank in range(tp_size)
    ]
    outputs = []
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * tp_size, "\n".join(error for _, error in outputs)
    return [json.loads(output) if output else None for output, _ in outputs]


def test_sums_and_gathers_are_right_and_the_same_bits_on_every_rank(tmp_path):
    for result in ranks(tmp_path, 3, "sums"):
        assert result["shares"] and result["right"] == []
        assert result["files"] == [], "the mapping has no name any more: nothing stays behind a killed rank"


def test_ranks_that_cannot_all_map_it_take_gloo_all_of_them(tmp_path):
    for result in ranks(tmp_path, 2, "apart"):
        assert not result["shares"] and result["right"][0] == "gloo"


def test_a_rank_that_is_gone_is_noticed_long_before_the_bound(tmp_path):
    *others, last = ranks(tmp_path, 3, "gone")
    assert last is None
    for tp_rank, result in enumerate(others):
        assert result["error"] == f"TP rank 2 did not come to a collective that TP rank {tp_rank} of 3 waits in"
        assert result["seconds"] < 60


def test_a_rank_that_does_not_come_is_an_error_within_the_bound(tmp_path):
    *others, _ = ranks(tmp_path, 3, "late")
    for result in others:
        assert result["error"].startswith("TP rank 2 did not come")
        assert 2 <= result["seconds"] < 60
