"""`--max-cpu-lora-bytes` on two real ranks: too large alone is a 4xx with the arithmetic, all others turn within the bound."""

from __future__ import annotations

from tests.e2e.prompts import greedy, some_tokens
from tests.e2e.specs import ADMIN, ADMIN_KEY, PAGES, served_by
from tests.support.adapters import tiny_adapters
from tests.support.client import ask_together
from tests.support.server import ServerSpec

BOUND = 100_000
SPEC = ServerSpec("llama2-host-bytes", "llama2", 2, (*PAGES, *ADMIN, f"--max-cpu-lora-bytes={BOUND}"))


@served_by(SPEC)
def test_c60_an_adapter_over_the_bytes_is_refused_with_the_arithmetic_and_the_others_turn_within_them(server, reference):
    body = {"lora_name": "x", "lora_path": str(tiny_adapters("llama2")["rank64"])}
    loaded = server.post("/v1/load_lora_adapter", body, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    named = server.post("/v1/completions", greedy("rank64", (5, 6), 2).body())  # configured, so read when it is first named
    for answer in (loaded, named):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_exceeds_host_tier")
        assert answer.json()["error"]["message"].endswith(f" bytes, but this server's `max_cpu_lora_bytes` is {BOUND}.")
    small = ("rank1", "rank5-qkv", "rank8-rslora", "rank16-mlp")
    for seed in range(3):
        reference.check_all(ask_together(server, [greedy(name, some_tokens(9, seed), 12) for name in small]))
    for rank in server.wait_until_idle()["ranks"]:
        assert 0 < len(rank["host_adapters"]) < len(small)
