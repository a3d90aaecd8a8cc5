"""One rank of the TP tests, as a process: joins a gloo group for each TP size in turn and writes what it computed.

Run as `python tp_worker.py WORKDIR PROCESS_INDEX SIZES...`; a process beyond a size sits that one out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mstar.distributed.comm import CommGroup, init_comm
from mstar.models.arch import load_arch
from mstar.models.decoder import LayerDeltas
from mstar.models.loader import weights_bytes
from mstar.models.lora_targets import lora_spec
from tests.unit.models.tiny import Engine, make_engine, some_tokens

MODELS = ("smollm2", "qwen2-window", "llama-biases", "qwen3-ten-heads")
LORA_RANK = 3


def lora_matrices(module: str, layer_idx: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random adapter's `lora_a [r, in]`, `lora_b [out, r]` for one projection: a function of its name, alike everywhere."""
    generator = torch.Generator().manual_seed(sum(map(ord, module)) * 100 + layer_idx)
    lora_a = torch.randn(LORA_RANK, in_features, generator=generator)
    return lora_a, 0.05 * torch.randn(out_features, LORA_RANK, generator=generator)


def plain_deltas(folder: Path, comm: CommGroup) -> LayerDeltas:
    """The delta of one adapter over all rows, cut as `lora_spec` says: what a LoRA pool does, without its slots."""
    spec = lora_spec(load_arch(folder), comm.tp_size, max_loras=1, max_lora_rank=LORA_RANK, max_cpu_loras=1)

    def layer_delta(target_name: str, layer_idx: int):
        if not spec.has_target(target_name):
            return None
        target = spec.target(target_name)

        def delta(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            columns = y.split(target.out_sizes(comm.tp_rank), dim=-1)
            for part, column in zip(target.parts, columns, strict=True):
                lora_a, lora_b = lora_matrices(part.module, layer_idx, part.in_features, part.out_features)
                a_cut, b_cut = slice(*part.in_ranges[comm.tp_rank]), slice(*part.out_ranges[comm.tp_rank])
                column += x @ lora_a[:, a_cut].T @ lora_b[b_cut].T
            return y

        return delta

    return layer_delta


def schedule(vocab_size: int) -> tuple[dict[str, list[int]], list[list[tuple[str, int]]]]:
    """Prompts, and steps of (request, number of tokens): chunks and decodes mixed."""
    prompts = {f"r{index}": some_tokens(length, seed=index, vocab_size=vocab_size) for index, length in enumerate([24, 9, 17])}
    steps = [[("r0", 10), ("r1", 7)], [("r1", 1), ("r2", 16), ("r0", 1)], [("r0", 13), ("r1", 1), ("r2", 1)]]
    return prompts, steps


def play(engine: Engine) -> dict[str, torch.Tensor]:
    """Run the schedule; per request the logits at every position."""
    prompts, steps = schedule(engine.arch.vocab_size)
    done = dict.fromkeys(prompts, 0)
    seen: dict[str, list[torch.Tensor]] = {rid: [] for rid in prompts}
    for step in steps:
        rows = [(rid, prompts[rid][done[rid] : done[rid] + count]) for rid, count in step]
        for (rid, count), logits in zip(step, engine.step(rows), strict=True):
            seen[rid].append(logits.clone())
            done[rid] += count
    return {rid: torch.cat(pieces) for rid, pieces in seen.items()}


def main() -> None:
    workdir, process_index, sizes = Path(sys.argv[1]), int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
    torch.set_num_threads(1)
    for size in sizes:
        if process_index >= size:
            continue
        store = dist.FileStore(str(workdir / f"store{size}"), size)
        comm = init_comm(process_index, size, store, "cpu", timeout_s=60, agreement_timeout_s=60)
        results = {}
        for model in MODELS:
            engine = make_engine(workdir / model, comm)
            results[model] = play(engine)
            results[f"{model}/bytes"] = weights_bytes(engine.decoder)
            results[f"{model}/lora"] = play(make_engine(workdir / model, comm, plain_deltas(workdir / model, comm)))
        bf16 = torch.full((5, 7), 1.0 + comm.tp_rank, dtype=torch.bfloat16)
        results["bf16_sum"] = comm.all_reduce(bf16)
        torch.save(results, workdir / f"out{size}-{process_index}.pt")
        comm.close()


if __name__ == "__main__":
    main()
