"""Any TP degree against transformers, with real gloo processes: base and adapter, uneven heads, vocabulary and MLP."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mstar.distributed.comm import CommGroup
from mstar.distributed.shards import even_cuts, plan_heads
from mstar.errors import ConfigError
from mstar.models.arch import load_arch
from mstar.models.loader import weights_bytes
from mstar.models.lora_targets import lora_spec
from tests.unit.models.tiny import make_engine, make_model, reference_logits
from tests.unit.models.tp_worker import LORA_RANK, MODELS, lora_matrices, plain_deltas, play, schedule

SIZES = (2, 3, 4)
ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The models, what transformers says of them with and without the adapter merged, and every rank's results on disk."""
    workdir = tmp_path_factory.mktemp("tp")
    expected = {}
    for family in MODELS:
        expected.update(make_expected(family, workdir / family))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/unit/models/tp_worker.py"), str(workdir)]
    processes = [
        subprocess.Popen([*command, str(index), *map(str, SIZES)], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for index in range(max(SIZES))
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(errors)
    torch.save(expected, workdir / "expected.pt")
    return workdir


def make_expected(family, folder):
    """Make the model; transformers' logits per request, without and with the adapter."""
    model = make_model(family, folder)
    prompts, _ = schedule(model.config.vocab_size)
    base = {rid: reference_logits(model, tokens) for rid, tokens in prompts.items()}
    merge_adapter(model, folder)
    return {family: base, f"{family}/lora": {rid: reference_logits(model, tokens) for rid, tokens in prompts.items()}}


def merge_adapter(model, folder):
    """Add the test adapter's delta to the reference's weights."""
    spec = lora_spec(load_arch(folder), 1, max_loras=1, max_lora_rank=LORA_RANK, max_cpu_loras=1)
    with torch.no_grad():
        for layer_idx, layer in enumerate(model.model.layers):
            for part in (part for target in spec.targets for part in target.parts):
                lora_a, lora_b = lora_matrices(part.module, layer_idx, part.in_features, part.out_features)
                layer.get_submodule(part.module).weight += lora_b @ lora_a


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", [f"{family}{kind}" for family in MODELS for kind in ("", "/lora")])
def test_every_tp_degree_matches_transformers_and_all_ranks_have_the_same_bits(model, size, workdir):
    expected = torch.load(workdir / "expected.pt")
    per_rank = [torch.load(workdir / f"out{size}-{tp_rank}.pt")[model] for tp_rank in range(size)]
    for rid, logits in expected[model].items():
        torch.testing.assert_close(per_rank[0][rid], logits, atol=TOLERANCE, rtol=0)
        assert all(torch.equal(per_rank[0][rid], other[rid]) for other in per_rank[1:])


@pytest.mark.parametrize("family", MODELS)
def test_the_adapter_moves_the_reference_far_beyond_the_tolerance(family, workdir):
    expected = torch.load(workdir / "expected.pt")
    moved = [(expected[family][rid] - expected[f"{family}/lora"][rid]).abs().max() for rid in expected[family]]
    assert min(moved) > 100 * TOLERANCE


@pytest.mark.parametrize("family", MODELS)
def test_tp_one_with_deltas_matches_transformers(family, workdir):
    expected = torch.load(workdir / "expected.pt")[f"{family}/lora"]
    comm = CommGroup.single()
    ours = play(make_engine(workdir / family, comm, plain_deltas(workdir / family, comm)))
    for rid, logits in expected.items():
        torch.testing.assert_close(ours[rid], logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_exactly_its_share_of_the_weights(size, family, workdir):
    arch = load_arch(workdir / family)
    for tp_rank in range(size):
        held = torch.load(workdir / f"out{size}-{tp_rank}.pt")[f"{family}/bytes"]
        assert held == 4 * share(arch, size, tp_rank)


def share(arch, size, tp_rank):
    """Numbers that a rank needs: its heads, MLP and vocabulary, and the norms whole."""
    plan = plan_heads(arch.num_heads, arch.num_kv_heads, size)
    q, kv = ((stop - start) * arch.head_dim for start, stop in (plan.q_ranges[tp_rank], plan.kv_ranges[tp_rank]))
    mlp, vocab = (stop - start for start, stop in (even_cuts(total, size)[tp_rank] for total in (arch.intermediate_size, arch.vocab_size)))
    layer = arch.hidden_size * (2 * q + 2 * kv + 3 * mlp + 2)
    layer += (q + 2 * kv) * arch.qkv_bias + 2 * mlp * arch.mlp_bias + (q + kv) * arch.qk_norm
    layer += arch.hidden_size * (arch.o_bias + arch.mlp_bias) * (tp_rank == 0)
    return arch.num_layers * layer + arch.hidden_size * (1 + vocab * (1 if arch.tie_word_embeddings else 2))


def test_tp_one_holds_what_the_file_holds(workdir):
    parameters = sum(parameter.numel() for parameter in make_model("smollm2", workdir / "again").parameters())
    assert weights_bytes(make_engine(workdir / "smollm2").decoder) == 4 * parameters


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_all_reduce_sums_on_every_rank(size, workdir):
    for tp_rank in range(size):
        total = torch.load(workdir / f"out{size}-{tp_rank}.pt")["bf16_sum"]
        assert total.dtype == torch.bfloat16 and (total == size * (size + 1) / 2).all()


class ThreadComm(CommGroup):
    """Ranks as threads of this process: a sum and a gather over what all of them brought."""

    def __init__(self, tp_rank, tp_size, barrier, table):
        super().__init__(tp_rank, tp_size)
        self.barrier, self.table = barrier, table

    def all_reduce(self, x):
        return x.copy_(torch.stack(self.exchange(x.clone())).sum(dim=0))

    def all_gather_columns(self, x, cuts):
        assert x.shape[1] == cuts[self.tp_rank][1] - cuts[self.tp_rank][0]
        return torch.cat(self.exchange(x), dim=1)

    def exchange(self, x):
        self.table[self.tp_rank] = x
        self.barrier.wait(timeout=60)
        everyone = list(self.table)
        self.barrier.wait(timeout=60)
        return everyone


@pytest.mark.parametrize(
    ("family", "size"), [("smollm2", 5), ("smollm2", 7), ("smollm2", 9), ("qwen3-ten-heads", 6), ("qwen3-ten-heads", 10)]
)
def test_degrees_up_to_the_number_of_query_heads_match_transformers(family, size, tmp_path):
    expected = make_expected(family, tmp_path)

    def rank(tp_rank):
        comm = ThreadComm(tp_rank, size, barrier, table)
        return {kind: play(make_engine(tmp_path, comm, deltas and deltas(tmp_path, comm))) for kind, deltas in kinds.items()}

    kinds = {family: None, f"{family}/lora": plain_deltas}
    barrier, table = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as ranks:
        per_rank = list(ranks.map(rank, range(size)))
    for kind, logits in expected.items():
        for rid, wanted in logits.items():
            torch.testing.assert_close(per_rank[0][kind][rid], wanted, atol=TOLERANCE, rtol=0)
            assert all(torch.equal(per_rank[0][kind][rid], other[kind][rid]) for other in per_rank[1:])


def test_more_ranks_than_query_heads_are_refused(tmp_path):
    make_model("smollm2", tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 10; this model allows 1 to 9"):
        make_engine(tmp_path, CommGroup(0, 10))
