"""`python -m mstar.bench` is `mstar bench`: the load generator alone, with nothing of the engine imported."""

from __future__ import annotations

from mstar.bench.cli import app

app(prog_name="mstar bench")
