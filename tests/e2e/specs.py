"""The servers that the end-to-end tests want. Tests of one spec share one running server and, under xdist, one process.

`@served_by(SPEC, …)` gives a test the fixtures `server` (running and idle) and `reference`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import ServerSpec
from tests.support.tiny_models import FAMILIES, NUM_HEADS

ADMIN_KEY = "the-admin-key"
PAGES = ("--num-gpu-blocks-override=512", "--max-num-seqs=32")
ADMIN = ("--enable-runtime-lora", f"--admin-key={ADMIN_KEY}")


def tiny(family: str, tp_size: int, *, num_prompts: int = 20) -> ServerSpec:
    """A tiny model with its six adapters in two slots."""
    return ServerSpec(f"{family}-tp{tp_size}", family, tp_size, (*PAGES, *ADMIN), num_prompts)


LLAMA = tiny("llama2", 2)
"""The server of all tests that do not ask for another one."""

QUICK = (
    *(tiny("llama2", tp_size) for tp_size in (1, 2, 3, 4)),
    *(tiny("smollm2", tp_size) for tp_size in (2, 4)),
    *(tiny(family, tp_size, num_prompts=6) for family in FAMILIES for tp_size in (1, 2) if family not in ("llama2", "smollm2")),
)
_QUICK_IDS = {spec.id for spec in QUICK if spec.num_prompts == 20}
WHOLE = tuple(
    spec for family in FAMILIES for tp_size in (1, 2, 3, 4) if (spec := tiny(family, tp_size)).id not in _QUICK_IDS
)  # fmt: skip
assert all(spec.tp_size <= NUM_HEADS[spec.family] for spec in WHOLE)

TIGHT = ServerSpec(
    "llama2-tight",
    "llama2",
    2,
    ("--num-gpu-blocks-override=24", "--block-size=8", "--max-num-batched-tokens=24", "--max-num-seqs=12"),
)
"""Few pages and small steps: requests are preempted, and prompts prefill in chunks."""

FRAGILE = ServerSpec("llama2-fragile", "llama2", 2, PAGES)
"""For tests that kill its processes."""


def served_by(*specs: ServerSpec, marks: tuple[pytest.MarkDecorator, ...] = ()) -> Any:
    """Run the test once for each of `specs`."""
    params = [pytest.param(spec, id=spec.id, marks=(pytest.mark.xdist_group(spec.id), *marks)) for spec in specs]
    return pytest.mark.parametrize("running", params, indirect=True, scope="session")
