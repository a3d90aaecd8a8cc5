"""The TP group with real gloo processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mstar.distributed.comm import init_comm
from mstar.errors import WorkerError

ROOT = Path(__file__).resolve().parents[3]
TP_SIZE = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the ranks got."""
    store = tmp_path_factory.mktemp("comm") / "store"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/unit/distributed/comm_worker.py"), str(store)]
    processes = [
        subprocess.Popen([*command, str(tp_rank), str(TP_SIZE)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for tp_rank in range(TP_SIZE)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * TP_SIZE, "\n".join(error for _, error in outputs)
    return [json.loads(output) for output, _ in outputs]


def test_sums_are_whole_on_every_rank_in_both_dtypes(results):
    for result in results:
        assert result["float32"] == result["bfloat16"] == [[7.5] * 3] * 2


def test_columns_come_together_in_order_for_even_and_uneven_cuts(results):
    for result in results:
        assert result["uneven"]
        assert result["even"] == [[0, 0, 1, 1, 2, 2]] * 2


def test_agreements_take_the_worst_state_and_the_least_number(results):
    for result in results:
        assert result["agreed"] == [2, 2, 0]
        assert result["least"] == 8


def test_shares_of_an_install_add_up_in_float64_to_the_same_bits(results):
    for result in results:
        assert result["sum"] == results[0]["sum"]
        assert result["sum"] == [[1.5, 3.0], [pytest.approx(3e-9, rel=1e-15), 6.0]]


def test_an_agreement_that_a_rank_does_not_join_fails_within_its_own_bound(results):
    for tp_rank, result in enumerate(results[:-1]):
        assert result["late"].startswith(f"agreement failed on TP rank {tp_rank} of {TP_SIZE}:")


def test_a_group_that_does_not_come_together_is_a_worker_error(tmp_path):
    with pytest.raises(WorkerError, match="TP rank 1 of 2 could not join its group"):
        init_comm(1, 2, f"file://{tmp_path}/store", "cpu", timeout_s=0.5, agreement_timeout_s=0.5)
