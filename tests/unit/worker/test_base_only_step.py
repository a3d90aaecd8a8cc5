"""A step of base rows alone costs nothing more where adapters could be served."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from mstar.config import ServeConfig
from mstar.engine.resources.base import ResourceReqConfig
from mstar.launch import RankLaunch
from mstar.types import Row, SamplingParams, Step
from mstar.worker.build import build_rank
from tests.support.tiny_models import tiny_model

PROMPT = tuple(range(10, 17))


class Ops(TorchDispatchMode):
    """The operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of_steps(workdir, dtype, enable_lora):
    config = ServeConfig(
        model=str(tiny_model("llama2")), dtype=dtype, threads_per_rank=1, enable_lora=enable_lora, max_loras=2, max_lora_rank=8,
        max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, num_gpu_blocks_override=16, enable_prefix_caching=False,
    )  # fmt: skip
    launch = RankLaunch(config=config, front_endpoint="", leader_endpoint="", store="", run_dir=str(workdir))
    rank = build_rank(launch, 0, lambda name: None)
    try:
        for rid in ("a", "b"):
            rank.runner.ingest(rid, ResourceReqConfig(PROMPT, SamplingParams(max_tokens=9, seed=0, temperature=0), None, b""))
        prefill = Step(1, tuple(Row(rid, 0, len(PROMPT)) for rid in ("a", "b")))
        decode = Step(2, tuple(Row(rid, len(PROMPT), 1) for rid in ("a", "b")))
        found = []
        for step in (prefill, decode):
            with Ops() as ops:
                assert not rank.runner.execute(step).failed
            found.append(ops.names)
        return found
    finally:
        if rank.pool is not None:
            rank.pool.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # the kernels' own, and one that is left to torch
def test_a_base_only_step_issues_no_operation_more_with_lora_than_without(dtype, tmp_path):
    with_lora, without = (ops_of_steps(tmp_path, dtype, enable_lora) for enable_lora in (True, False))
    assert with_lora == without
    assert all(len(names) > 5 for names in without)
