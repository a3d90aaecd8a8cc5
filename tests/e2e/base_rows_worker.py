"""One rank of test_base_rows_bits.py: drives a rank's runner by hand, without sockets, and writes what each request got.

    python base_rows_worker.py WORKDIR TP_RANK TP_SIZE

Runs the same steps in float32 and bfloat16, with LoRA enabled (two rows of each step on adapters) and with LoRA disabled (all rows on the
base). Every token comes with the log-probabilities of the whole vocabulary, and so does every prompt position.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from mstar.config import ServeConfig
from mstar.engine.resources.base import ResourceReqConfig
from mstar.launch import RankLaunch
from mstar.types import Row, SamplingParams, Step
from mstar.worker.build import Rank, build_rank
from tests.e2e.prompts import some_tokens
from tests.support.adapters import MAX_LORA_RANK, tiny_adapters
from tests.support.tiny_models import tiny_model

DTYPES = ("float32", "bfloat16")
VOCAB_SIZE = 128
PROMPT_LENGTHS = {"base-0": 10, "adapter-0": 20, "base-1": 12, "adapter-1": 9, "base-2": 30}
ADAPTER_OF = {"adapter-0": "rank64", "adapter-1": "rank8-rslora"}
STEPS = (
    {"base-0": 10, "adapter-0": 7, "base-1": 5},
    {"base-0": 1, "adapter-0": 13, "base-1": 7, "adapter-1": 9},
    {"base-2": 30, "base-0": 1, "adapter-0": 1, "base-1": 1, "adapter-1": 1},
    *({"base-0": 1, "adapter-0": 1, "base-1": 1, "adapter-1": 1, "base-2": 1},) * 6,
    {"base-1": 1, "base-2": 1},
    {"adapter-1": 1, "base-1": 1},
)


def rank_of(workdir: Path, tp_rank: int, tp_size: int, dtype: str, *, enable_lora: bool) -> Rank:
    """This process's rank, built as `mstar serve` builds it."""
    folders = tiny_adapters("llama2")
    modules = {name: str(folders[name]) for name in ADAPTER_OF.values()} if enable_lora else {}
    config = ServeConfig(
        model=str(tiny_model("llama2")),
        dtype=dtype,
        tensor_parallel_size=tp_size,
        threads_per_rank=1,
        num_gpu_blocks_override=64,
        enable_lora=enable_lora,
        lora_modules=modules,
        max_loras=2,
        max_lora_rank=MAX_LORA_RANK,
    )
    store = f"file://{workdir}/store-{tp_size}-{dtype}-{enable_lora}"
    launch = RankLaunch(config=config, front_endpoint="", leader_endpoint="", store=store, run_dir=str(workdir))
    return build_rank(launch, tp_rank, lambda name: None)


def play(rank: Rank) -> dict[str, list[Any]]:
    """Run `STEPS`; per request what each step gave it."""
    sampling = SamplingParams(max_tokens=64, seed=0, temperature=0, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE, ignore_eos=True)
    if rank.pool is not None:
        for module in rank.config.lora_modules:
            rank.pool.register_adapter(module.name, module.path)
    for seed, (rid, length) in enumerate(PROMPT_LENGTHS.items()):
        adapter = ADAPTER_OF.get(rid) if rank.pool is not None else None
        rank.runner.ingest(rid, ResourceReqConfig(some_tokens(length, seed), sampling, adapter, (adapter or "").encode()))
    got: dict[str, list[Any]] = {rid: [] for rid in PROMPT_LENGTHS}
    done = dict.fromkeys(PROMPT_LENGTHS, 0)
    for seq, counts in enumerate(STEPS, start=1):
        outcome = rank.runner.execute(Step(seq, tuple(Row(rid, done[rid], count) for rid, count in counts.items())))
        assert not outcome.failed, outcome.failed
        for rid, count in counts.items():
            done[rid] += count
        for token in outcome.tokens:
            got[token.rid].append((token.position, token.token_id, token.logprobs, token.prompt_logprobs))
    return got


def main() -> None:
    """Write `out-TP_SIZE-TP_RANK.json`: by dtype and LoRA, by request."""
    workdir, tp_rank, tp_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    results = {}
    for dtype in DTYPES:
        for enable_lora in (True, False):
            rank = rank_of(workdir, tp_rank, tp_size, dtype, enable_lora=enable_lora)
            results[f"{dtype} {'enabled' if enable_lora else 'disabled'}"] = play(rank)
            rank.comm.close()
            if rank.pool is not None:
                rank.pool.close()
    (workdir / f"out-{tp_size}-{tp_rank}.json").write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    main()
