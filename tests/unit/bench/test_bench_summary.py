"""Records to numbers, numbers to files, two files side by side."""

from pathlib import Path

import msgspec
import pytest

from mstar.bench import results
from mstar.bench.load import LoadOutcome, RequestRecord
from mstar.bench.metrics import medians
from mstar.bench.plan import Workload
from mstar.bench.report import compare, load_differences
from mstar.bench.results import CellResult, ServeResult, SuiteResult
from mstar.bench.serve import Choice
from mstar.bench.suite import Cell, alternate, cell_workload, lora_kept, standard_cells
from mstar.bench.summary import summarize_run
from mstar.bench.targets import Spread, Target
from mstar.errors import ConfigError

BASE, RED = Target("base", is_adapter=False), Target("red", is_adapter=True)
CHOICE = Choice("base", tuple(f"a{i}" for i in range(9)), range(99), 64, 64, seed=5, is_text=False, timeout_s=60.0)


def record(index: int, target: Target, times: tuple[float, ...], failure: str | None = None) -> RequestRecord:
    return RequestRecord(index, target, times[0] - 0.5, times[-1] + 0.25, times, 8, len(times), failure)


def outcome(*records: RequestRecord, duration_s: float = 2.0) -> LoadOutcome:
    return LoadOutcome(records, duration_s, cpu_s=0.1, max_send_lag_s=0.0)


def serve_result(label: str, step_s: float, num_requests: int = 2) -> ServeResult:
    records = [record(index, BASE, tuple(step_s * position for position in range(1, 5))) for index in range(num_requests)]
    workload = Workload((BASE,), num_requests, 1, None, 8, 4, seed=1, spread=Spread.BASE)
    run = summarize_run(outcome(*records, duration_s=4 * step_s), 4, "2026-01-01T00:00:00+00:00")
    return ServeResult(label, "mstar bench serve", "http://localhost:1", "1.0", workload, run)


def test_bench_summary_pools_gaps_and_splits_classes():
    run = summarize_run(outcome(record(0, BASE, (1.0, 1.1, 1.3)), record(1, RED, (1.0, 1.4, 1.5))), 3, "now")
    assert list(run.classes) == ["base", "adapter", "total"]
    total = run.classes["total"]
    assert (total.num_ok, total.output_tokens, total.output_tokens_per_s, total.requests_per_s) == (2, 6, 3.0, 1.0)
    assert total.inter_token_s.count == 4 and total.inter_token_s.max == pytest.approx(0.4)
    assert run.classes["base"].inter_token_s.max == pytest.approx(0.2)
    assert total.ttft_s.p50 == pytest.approx(0.5)
    assert run.classes["base"].per_token_s.p50 == pytest.approx(0.15)
    assert run.classes["adapter"].e2e_s.max == pytest.approx(1.25)
    assert run.client.events_per_s == 3.0 and run.client.cpu_share == pytest.approx(0.05)


def test_bench_failed_requests_count_only_as_failures():
    run = summarize_run(
        outcome(record(0, BASE, (1.0, 1.1)), record(1, BASE, (1.0, 9.0), "broke"), record(2, BASE, (1.0,), "broke")), 2, "now"
    )
    total = run.classes["total"]
    assert (total.num_ok, total.num_failed, total.reasons, total.output_tokens) == (1, 2, {"broke": 2}, 2)
    assert total.inter_token_s.max == pytest.approx(0.1)


def test_bench_many_different_reasons_are_cut_to_the_most_frequent():
    records = [record(index, BASE, (1.0,), f"reason {min(index, 12)}") for index in range(14)]
    reasons = summarize_run(outcome(*records), 1, "now").classes["total"].reasons
    assert len(reasons) == 11 and reasons["reason 12"] == 2 and sum(reasons.values()) == 14


def test_bench_answers_shorter_than_asked_are_noted():
    assert summarize_run(outcome(record(0, BASE, (1.0, 1.1))), 64, "now").classes["total"].num_short == 1


def test_bench_load_without_one_success_has_no_times():
    total = summarize_run(outcome(record(0, BASE, (1.0,), "broke")), 1, "now").classes["total"]
    assert total.ttft_s is None and total.inter_token_s is None and total.output_tokens_per_s == 0.0


def test_bench_medians_are_taken_metric_by_metric():
    runs = [serve_result("x", step_s).run.classes["total"] for step_s in (0.1, 0.4, 0.2)]
    assert medians(runs)["inter_token_p50_s"] == pytest.approx(0.2)
    assert medians(runs)["output_tokens_per_s"] == pytest.approx(8 / 0.8)


def test_bench_result_survives_its_file(tmp_path: Path):
    result = msgspec.structs.replace(serve_result("x", 0.1), records=(record(0, RED, (1.0, 1.1)),))
    results.save(result, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json") == result


@pytest.mark.parametrize("content", [b"{}", b'{"kind": "other"}', b"\xff", b"[1, 2]"])
def test_bench_foreign_file_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ConfigError, match="not a result of mstar bench"):
        results.load(tmp_path / "r.json")


def test_bench_output_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a file"):
        results.check_writable(tmp_path)
    results.check_writable(tmp_path / "new" / "r.json")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("key", [["--api-key", "sekret"], ["--api-key=sekret"]])
def test_bench_saved_command_line_has_no_api_key(key):
    shown = results.command_line(["/venv/bin/mstar", "bench", "serve", *key, "--text"])
    assert shown.startswith("mstar bench serve --api-key") and shown.endswith("--text")
    assert "sekret" not in shown


def test_bench_saved_command_line_names_no_folder_of_the_machine_it_ran_on():
    shown = results.command_line(
        ["/venv/bin/mstar", "bench", "step", "/home/me/models/tiny", "--output=/tmp/r.json", "--url", "http://h:1/v1", "docs/r.json"]
    )
    assert shown == "mstar bench step tiny --output=r.json --url http://h:1/v1 docs/r.json"


def test_bench_report_divides_a_by_b():
    rows = compare(serve_result("a", 0.1), serve_result("b", 0.2))
    ratios = {row.metric.key: row.ratio for row in rows if row.cell == "total"}
    assert ratios["output_tokens_per_s"] == pytest.approx(2.0)
    assert ratios["inter_token_p99_s"] == pytest.approx(0.5)


def test_bench_report_names_what_the_loads_do_not_have_alike():
    assert load_differences(serve_result("a", 0.1), serve_result("b", 0.2)) == []
    assert load_differences(serve_result("a", 0.1), serve_result("b", 0.1, num_requests=3)) == ["load: num_requests 2 / 3"]


def test_bench_suite_is_the_standard_table_over_at_most_eight_adapters():
    assert [cell.name for cell in standard_cells(64)] == [
        "base c1",
        "base c8",
        "base c16",
        "1 adapter c8",
        "8 adapters c8",
        "8 adapters c16",
    ]
    assert [cell.name for cell in standard_cells(1)][3:] == ["1 adapter c8"]
    assert [cell.num_adapters for cell in standard_cells(0)] == [0, 0, 0]


def test_bench_suite_rounds_go_there_and_back_again():
    cells = standard_cells(0)
    names = [(round_index, cell.concurrency) for round_index, cell in alternate(cells, 3)]
    assert names == [(0, 1), (0, 8), (0, 16), (1, 16), (1, 8), (1, 1), (2, 1), (2, 8), (2, 16)]


def test_bench_suite_rounds_share_no_seed_and_warm_every_adapter():
    cells = standard_cells(9)
    loads = [cell_workload(cell, index, round_index, CHOICE, is_quick=True) for index, cell in enumerate(cells) for round_index in range(3)]
    assert len({load.seed for load in loads}) == len(loads)
    assert all(load.warmup >= len(load.targets) and load.num_requests == 2 * load.concurrency for load in loads)
    assert [target.model for target in loads[-1].targets] == [f"a{i}" for i in range(8)]


def suite_result(kept: float) -> SuiteResult:
    run = serve_result("x", 0.1).run
    cells = tuple(
        CellResult(
            cell.name, cell.num_adapters, cell.concurrency, Workload((BASE,), 2, 1, None, 8, 4, 1), (run,), {"output_tokens_per_s": rate}
        )
        for cell, rate in ((Cell("base c8", 0, 8), 100.0), (Cell("8 adapters c8", 8, 8), 100.0 * kept))
    )
    return SuiteResult("x", "mstar bench suite", "http://localhost:1", None, "now", False, 1, cells, lora_kept(cells))


def test_bench_suite_says_what_adapters_keep_of_base_throughput():
    assert suite_result(0.8).lora_kept == {"8 adapters c8": pytest.approx(0.8)}
    rows = compare(suite_result(0.8), suite_result(0.2))
    assert {row.cell: row.ratio for row in rows if row.metric.key == "lora_kept"} == {"kept 8 adapters c8": pytest.approx(4.0)}


def test_bench_results_of_different_kinds_have_nothing_to_compare():
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare(serve_result("a", 0.1), suite_result(0.5))
