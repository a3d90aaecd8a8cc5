"""What a load takes, its unload gives back, on every rank; and a slot holds nothing of the adapter before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.prompts import greedy, some_tokens
from tests.e2e.specs import ADMIN, PAGES
from tests.support.adapters import AdapterRecipe, write_adapter
from tests.support.client import ask_one
from tests.support.server import ServerSpec, running_server
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("adapter-life")
WARM_UP, CYCLES = 100, 200  # the allocator settles in the first hundred
GROWTH_BYTES_A_CYCLE = 16 << 10  # a kept copy of the rank 64 adapter alone would be ten times as much


def rss_bytes(pid):
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def cycle(life, number):
    """Load, serve, unload; two adapters in turn, so that each is read anew."""
    name, adapter = f"cycle-{number}", ("rank64", "extra")[number % 2]
    life.loaded(name, life.folders[adapter])
    answer = life.server.post("/v1/completions", greedy(name, some_tokens(6, number), 2).body())
    assert answer.status_code == 200, answer.text
    assert life.unload(name).status_code == 200


def tiers(life):
    status = life.server.wait_until_idle()
    return [(rank["host_adapters"], [slot["adapter"] for slot in rank["slots"]], rank["kv"]["used"]) for rank in status["ranks"]]


def test_unloads_leave_slots_and_host_tier_as_they_were_on_every_rank(life):
    for number in range(10):
        cycle(life, number)
        for host, slots, pages in tiers(life):
            assert not any(str(name).startswith("cycle") for name in (*host, *slots)) and not pages
    life.loaded("pinned", life.folders["extra"], pinned=True)
    cycle(life, 10)
    assert life.unload("pinned").status_code == 200
    for host, slots, _ in tiers(life):
        assert "pinned" not in (*host, *slots)


@pytest.mark.slow
def test_200_cycles_of_load_serve_unload_leave_the_memory_of_front_and_ranks_flat(life):
    pids = {"front": life.server.front_pid(), **{f"rank {number}": pid for number, pid in enumerate(life.server.pids())}}
    for number in range(WARM_UP):
        cycle(life, number)
    before = {who: rss_bytes(pid) for who, pid in pids.items()}
    for number in range(WARM_UP, WARM_UP + CYCLES):
        cycle(life, number)
    grown = {who: (rss_bytes(pid) - before[who]) // CYCLES for who, pid in pids.items()}
    assert max(grown.values()) <= GROWTH_BYTES_A_CYCLE, f"bytes a cycle: {grown}, from {before}"
    for host, slots, pages in tiers(life):
        assert not any(str(name).startswith("cycle") for name in (*host, *slots)) and not pages


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_small_adapter_in_the_slot_of_a_large_one_equals_a_fresh_process(tmp_path, tp_size):
    """Rank 4 on q_proj alone, after rank 64 on everything, in the one slot that there is: the same bits as without it."""
    model = tiny_model("llama2")
    write_adapter(tmp_path / "large", model, AdapterRecipe(64), seed=50)
    write_adapter(tmp_path / "small", model, AdapterRecipe(4, ("q_proj",)), seed=51)
    spec = ServerSpec(f"one-slot-tp{tp_size}", "llama2", tp_size, (*PAGES, *ADMIN))
    flags = [flag for flag in spec.command_line(tmp_path) if not flag.startswith(("--lora-modules", "--max-loras", "--max-cpu-loras"))]
    modules = (f"--lora-modules=large={tmp_path / 'large'}", f"--lora-modules=small={tmp_path / 'small'}")
    asks = [greedy("small", some_tokens(length, 400 + length), 32) for length in (1, 9, 40)]
    answers = []
    for first in (("large", "small", "large"), ()):
        folder = tmp_path / f"after-{len(first)}"
        folder.mkdir()
        with running_server([*flags, *modules, "--max-loras=1"], folder, spec=spec) as server:
            for model_name in first:
                ask_one(server, greedy(model_name, some_tokens(20, 401), 8))
            answers.append([ask_one(server, ask) for ask in asks])
            assert server.status()["ranks"][0]["installs"] == len(first) + 1
    for used, fresh in zip(*answers, strict=True):
        assert used.token_ids == fresh.token_ids and used.logprobs == fresh.logprobs
