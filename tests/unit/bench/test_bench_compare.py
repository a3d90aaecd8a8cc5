"""What `mstar bench compare` makes of measurements: medians, ratios and their bars, the part of the docs, pictures."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mstar.bench import compare
from mstar.bench.bars import Bar, bars, bars_markdown, medians_markdown, throughput_series
from mstar.bench.cli import app
from mstar.bench.compare import OURS, OURS_TP2, PEER, PEER_OFF, PREFILL_BASE, Measurement, Medians, save
from mstar.bench.document import check_part, replace_part
from mstar.bench.plots import plot_gaps, plot_throughput
from mstar.bench.suite import Cell, cell_workload, standard_cells
from mstar.errors import ConfigError

LABELS = [value for name, value in vars(compare).items() if name.startswith(("OURS", "PEER"))]
CELLS = [
    *(cell.name for cell in standard_cells(8)),
    compare.PREFILL_BASE,
    compare.PREFILL_MIXED,
    compare.FEW,
    "base c64",
    "64 adapters c64",
]


def measured(label, index, tokens_per_s=100.0, start_s=5.0, memory_mb=2000.0):
    cell = {"output_tokens_per_s": tokens_per_s, "requests_per_s": 2.0, "ttft_p50_s": 0.25}
    return Measurement(label, index, "2026-12-01T00:00:00", start_s, memory_mb, dict.fromkeys(CELLS, cell))


def medians_of(**changes):
    results = [measured(label, index, **changes.get(label, {})) for index in range(3) for label in LABELS]
    return Medians(results, weights_mb=200.0)


def ratio(found, start):
    (bar,) = [bar for bar in found if bar.name.startswith(start)]
    return bar


def test_a_bar_is_a_floor_or_a_ceiling():
    assert Bar("", 1.2, 1.2).is_met and not Bar("", 1.19, 1.2).is_met
    assert Bar("", 0.2, 0.2, is_most=True).is_met and not Bar("", 0.21, 0.2, is_most=True).is_met


def test_ratios_are_ours_over_theirs_of_medians():
    found = list(bars(medians_of(**{OURS: {"tokens_per_s": 300.0}, PEER_OFF: {"tokens_per_s": 200.0}, OURS_TP2: {"tokens_per_s": 270.0}})))
    assert ratio(found, "base c8: ours").ratio == 1.5
    assert ratio(found, "8 adapters c16: ours").ratio == 3.0 and not ratio(found, "8 adapters c16: ours").is_met
    assert ratio(found, "base c8: TP 2").ratio == pytest.approx(0.9)
    assert len(found) == len({bar.name for bar in found})


def test_the_middle_round_counts_and_the_first_start_does_not():
    results = [measured(OURS, index, tokens, start) for index, (tokens, start) in enumerate([(10.0, 60.0), (900.0, 4.0), (30.0, 6.0)])]
    medians = Medians(results, weights_mb=200.0)
    assert medians.of(OURS, "base c8") == 30.0
    assert medians.start_s(OURS) == 5.0
    assert medians.beyond_mb(OURS) == pytest.approx(2000 - 200 - (1 << 30) / 1e6)
    assert Medians(results[:1], 200.0).start_s(OURS) == 60.0


def test_the_tables_show_every_server_and_every_bar():
    medians = medians_of()
    table = medians_markdown(medians)
    assert all(label in table.splitlines()[0] for label in LABELS)
    assert f"| {PREFILL_BASE} | 2.00 prompts/s" in table and "| base c1 | 100 (250 ms)" in table
    found = list(bars(medians))
    shown = bars_markdown(found)
    assert (
        shown.count("| yes |") == sum(bar.is_met for bar in found) > 0 and shown.count("**no**") == sum(not bar.is_met for bar in found) > 0
    )


def test_a_cell_may_have_lengths_of_its_own():
    from mstar.bench.serve import Choice

    choice = Choice("base", ("a", "b"), range(1000), 64, 32, 1, is_text=False, timeout_s=1.0)
    own = cell_workload(Cell("own", 2, 8, 512, 1), 0, 0, choice, is_quick=True)
    plain = cell_workload(Cell("plain", 2, 8), 0, 0, choice, is_quick=True)
    assert (own.prompt_tokens, own.max_tokens, plain.prompt_tokens, plain.max_tokens) == (512, 1, 64, 32)


def test_everything_is_saved(tmp_path):
    found = list(bars(medians_of()))
    save([measured(PEER, 0)], tmp_path / "r.json", "mstar bench compare", found)
    body = json.loads((tmp_path / "r.json").read_text())
    assert (body["command"], len(body["bars"])) == ("mstar bench compare", len(found))
    assert body["runs"][0]["cells"]["base c8"]["output_tokens_per_s"] == 100.0


def test_only_the_marked_part_of_a_document_is_written_anew(tmp_path):
    page = tmp_path / "b.md"
    page.write_text("before\n<!-- compare: written by mstar bench -->\nold\n<!-- end of compare -->\nafter\n")
    for text in ("first", "second"):
        replace_part(page, "compare", text)
        shown = page.read_text()
        assert text in shown and shown.startswith("before\n<!--") and shown.endswith("-->\nafter\n")
    assert "old" not in shown and "first" not in shown
    for name, path in (("other", page), ("compare", tmp_path / "none.md")):
        with pytest.raises(ConfigError, match="has no part between"):
            check_part(path, name)


def test_pictures_are_drawn(tmp_path):
    plot_throughput(throughput_series(medians_of()), tmp_path / "t.png")
    plot_gaps({"mstar": [(0.1, 0.02), (0.2, 0.03)], "peer": [(0.1, 0.5)]}, tmp_path / "g.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("t.png", "g.png"))


@pytest.mark.parametrize(("arguments", "words"), [
    (("openvino", "model", "--gguf", "none.gguf"), "none.gguf: no such file"),
    (("compare", "model", "--docs", "nowhere"), "has no part between"),
    (("cold", "model", "--output", "."), "not a file that can be written"),
])  # fmt: skip
def test_what_cannot_be_measured_or_written_is_refused_before_anything_starts(arguments, words):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output
