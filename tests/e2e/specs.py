"""The servers that the end-to-end tests want. Tests of one spec share one running server and, under xdist, one process.

`@served_by(SPEC, …)` gives a test the fixtures `server` (running and idle) and `reference`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import DEMO, ServerSpec
from tests.support.tiny_models import FAMILIES

ADMIN_KEY = "the-admin-key"
PAGES = ("--num-gpu-blocks-override=1024", "--max-num-seqs=128", "--max-passes=200")
ADMIN = ("--enable-runtime-lora", f"--admin-key={ADMIN_KEY}")


def tiny(family: str, tp_size: int) -> ServerSpec:
    """A tiny model with its six adapters in two slots."""
    return ServerSpec(f"{family}-tp{tp_size}", family, tp_size, (*PAGES, *ADMIN))


LLAMA = tiny("llama2", 2)
"""The server of all tests that do not ask for another one."""

EVERY_FAMILY = tuple(tiny(family, tp_size) for family in FAMILIES for tp_size in (1, 2, 3, 4))
DEGREES = (*(tiny("llama2", tp_size) for tp_size in (1, 2, 3, 4)), *(tiny("smollm2", tp_size) for tp_size in (2, 4)))
"""All TP degrees: 4 query and 2 KV heads (shared by ranks at TP 3 and 4), 9 query and 3 KV heads (uneven at each degree)."""
OTHERS = tuple(tiny(family, tp_size) for family in FAMILIES for tp_size in (1, 2) if family not in ("llama2", "smollm2"))

TIGHT = ServerSpec(
    "llama2-tight",
    "llama2",
    2,
    ("--num-gpu-blocks-override=24", "--block-size=8", "--max-num-batched-tokens=24", "--max-num-seqs=12"),
)
"""Few pages and small steps: requests are preempted, and prompts prefill in chunks."""

FRAGILE = ServerSpec("llama2-fragile", "llama2", 2, PAGES)
"""For tests that kill its processes."""


_DEMO_FLAGS = ("--dtype=float32", "--threads-per-rank=1", "--max-loras=2", "--max-cpu-loras=4", "--kv-cache-memory-bytes=134217728")
DEMO_FLOAT32 = tuple(ServerSpec(f"demo-float32-tp{tp_size}", DEMO, tp_size, _DEMO_FLAGS) for tp_size in (1, 2))
DEMO_FLOAT32_WHOLE = tuple(ServerSpec(f"demo-float32-tp{tp_size}", DEMO, tp_size, _DEMO_FLAGS) for tp_size in (3, 4))
DEMO_SHOWN = ServerSpec("demo", DEMO, 2)
"""Exactly what `make demo` serves."""


def served_by(*specs: ServerSpec, marks: tuple[pytest.MarkDecorator, ...] = ()) -> Any:
    """Run the test once for each of `specs`."""
    params = [pytest.param(spec, id=spec.id, marks=(pytest.mark.xdist_group(spec.id), *marks)) for spec in specs]
    return pytest.mark.parametrize("running", params, indirect=True, scope="session")
