"""Base rows with LoRA enabled, beside rows on adapters, against LoRA disabled, in batches of the same shape: the same bits.

The worker drives real ranks (gloo processes at TP 2) through fixed steps, so that both runs have the very same rows in the very same steps;
over HTTP nobody could promise that. Compared are the float32 log-probabilities of the whole vocabulary, at every position.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.base_rows_worker import ADAPTER_OF, DTYPES, PROMPT_LENGTHS, STEPS
from tests.support.adapters import tiny_adapters
from tests.support.server import ROOT

WORKER = Path(__file__).with_name("base_rows_worker.py")


@pytest.mark.xdist_group("base-rows")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_c87_base_rows_with_lora_enabled_equal_lora_disabled_bit_for_bit(tp_size, tmp_path):
    tiny_adapters("llama2")  # built here once, not by all ranks at once
    results = run_ranks(tmp_path, tp_size)
    assert all(result == results[0] for result in results), "all ranks sample alike"
    for dtype in DTYPES:
        enabled, disabled = results[0][f"{dtype} enabled"], results[0][f"{dtype} disabled"]
        for rid in PROMPT_LENGTHS:
            assert len(enabled[rid]) > 5 and len(enabled[rid][0][2][1]) == 128, "a token of each step, with the whole vocabulary"
            assert (enabled[rid] == disabled[rid]) == (rid not in ADAPTER_OF), f"{dtype}, {rid}"
    assert sum(len(step) for step in STEPS) > 40


def run_ranks(workdir, tp_size):
    """What every rank wrote, by TP rank."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER), str(workdir)]
    processes = [
        subprocess.Popen([*command, str(tp_rank), str(tp_size)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for tp_rank in range(tp_size)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0] * tp_size, "\n".join(errors)
    return [json.loads((workdir / f"out-{tp_size}-{tp_rank}.json").read_bytes()) for tp_rank in range(tp_size)]
