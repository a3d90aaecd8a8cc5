"""`mstar simulate`: small workloads with results that can be worked out by hand, and the command around them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from mstar.conductor.gate import HostTierGate
from mstar.errors import ConfigError
from mstar.sim import plan_report
from mstar.sim.cli import app
from mstar.sim.planner import Planner, PlanSpec
from mstar.sim.tier import Gate
from mstar.sim.workload import BASE, Workload, WorkloadSpec, make_workload, read_times_s

cli = CliRunner()
EXACT = {"step_s": 1.0, "token_s": 0.0, "install_s": 0.0, "agree_s": 0.0, "read_s": 0.25, "read_p99_s": 0.25}


def workload(*requests, names=("a", "b", "c")):
    """Requests as (arrival, adapter or None, prompt, output)."""
    arrivals, adapters, prompts, outputs = zip(*requests, strict=True)
    return Workload(
        names,
        np.array(arrivals, dtype=np.float64),
        np.array([BASE if name is None else names.index(name) for name in adapters]),
        np.array(prompts),
        np.array(outputs),
    )


def plan(spec, *requests):
    tally = Planner(spec, workload(*requests)).run()
    return tally, tally.figures()


def test_a_base_request_takes_one_step_for_its_prompt_and_one_for_each_further_token():
    tally, figures = plan(PlanSpec(slots=1, host_tier=1, **EXACT), (0.0, None, 8, 5))
    assert (figures["steps"], figures["simulated_s"], figures["finished"]) == (5, 5.0, 1)
    assert list(tally.first_tokens) == [1.0]
    assert figures["slot_hit_rate"] is None


def test_a_prompt_longer_than_a_step_prefills_in_chunks():
    _tally, figures = plan(PlanSpec(slots=1, host_tier=1, max_num_seqs=4, max_num_batched_tokens=10, **EXACT), (0.0, None, 25, 1))
    assert figures["steps"] == 3


def test_l16_a_first_request_waits_for_its_read_and_a_second_finds_the_slot():
    tally, figures = plan(PlanSpec(slots=1, host_tier=1, **EXACT), (0.0, "a", 4, 2), (10.0, "a", 4, 2))
    assert list(tally.waits_miss) == [0.25]
    assert list(tally.waits_hit) == [0.0]
    assert (figures["reads"], figures["installs"], figures["evictions"], figures["slot_hit_rate"]) == (1, 1, 0, 0.5)


def test_l11_with_one_slot_another_adapter_waits_until_it_is_free_and_the_base_does_not():
    tally, _figures = plan(PlanSpec(slots=1, host_tier=2, **EXACT), (0.0, "a", 4, 4), (0.0, "b", 4, 1), (0.0, None, 4, 1))
    assert list(tally.waits_base) == [0.0]
    assert sorted(tally.waits_miss) == [1.0, 5.0]  # a is read by 0.25, in the base's step; b takes the slot after a's four steps
    assert tally.num_evictions == 1


def test_l05_the_least_recently_used_slot_goes():
    requests = [(10.0 * index, name, 1, 1) for index, name in enumerate("abcab")]
    tally, _figures = plan(PlanSpec(slots=2, host_tier=3, **EXACT), *requests)
    assert (tally.num_installs, tally.num_evictions, tally.num_reads) == (5, 3, 3)
    tally, _figures = plan(PlanSpec(slots=3, host_tier=3, **EXACT), *requests)
    assert (tally.num_installs, tally.num_evictions) == (3, 0)


def test_a_host_tier_smaller_than_the_adapters_reads_again():
    requests = [(10.0 * index, name, 1, 1) for index, name in enumerate("abab")]
    assert plan(PlanSpec(slots=1, host_tier=1, **EXACT), *requests)[0].num_reads == 4
    assert plan(PlanSpec(slots=1, host_tier=2, **EXACT), *requests)[0].num_reads == 2


def test_a_full_queue_refuses():
    requests = [(0.0, "a", 1, 50)] + [(1.0, "b", 1, 1)] * 5
    _tally, figures = plan(PlanSpec(slots=1, host_tier=2, max_waiting=2, **EXACT), *requests)
    assert (figures["refused"], figures["finished"]) == (3, 3)


def test_overtaking_is_bounded():
    requests = [(0.0, "a", 1, 10)] + [(1.0, "b", 1, 1)] + [(1.5 + 0.1 * index, "a", 1, 10) for index in range(30)]
    tally, figures = plan(PlanSpec(slots=1, host_tier=2, max_passes=3, **EXACT), *requests)
    assert figures["longest_pass_over"] == 3
    assert tally.num_ended == 32


@pytest.mark.parametrize("ranks", [2, 3])
def test_l06_check_runs_every_rank_with_reads_of_its_own_and_all_decide_alike(ranks):
    drawn = make_workload(WorkloadSpec(1500, 30, "zipf:0.8", 20.0, 0.1, 16, 8, seed=3))
    spec = PlanSpec(slots=3, host_tier=5, ranks=ranks, check=True, hint_wait_s=0.05, step_s=0.01, read_s=0.05, read_p99_s=0.4)
    figures = Planner(spec, drawn).run().figures()
    assert figures["finished"] + figures["refused"] == 1500
    assert figures["stalls"] > 0  # a short hint bound lets steps wait for followers: the second agreement
    assert figures["collectives"] > figures["steps_with_collective"]


def test_one_ranks_plan_is_near_the_plan_of_all_ranks_where_reads_do_not_queue():
    drawn = make_workload(WorkloadSpec(3000, 40, "zipf:1.0", 5.0, 0.0, 32, 16, seed=5))
    spec = {"slots": 6, "host_tier": 20, "ranks": 3, "read_s": 0.05, "read_p99_s": 0.1}
    one = Planner(PlanSpec(**spec), drawn).run().figures()
    every = Planner(PlanSpec(**spec, check=True), drawn).run().figures()
    assert one["slot_hit_rate"] == pytest.approx(every["slot_hit_rate"], abs=0.03)
    assert one["wait_p99_s"] == pytest.approx(every["wait_p99_s"], rel=0.3)


def test_a_plan_is_the_same_every_time():
    drawn = make_workload(WorkloadSpec(2000, 50, "zipf:1.0", 10.0, 0.1, 32, 16, seed=1))
    spec = PlanSpec(slots=4, host_tier=8)
    assert Planner(spec, drawn).run().figures() == Planner(spec, drawn).run().figures()


@pytest.mark.parametrize("seed", range(30))
def test_the_planners_gate_lets_in_whom_the_conductors_gate_lets_in(seed):
    draws = random.Random(seed)
    capacity = draws.randint(1, 4)
    mine, theirs = Gate(capacity), HostTierGate(capacity)
    adapters, inside = {}, []
    for request in range(120):
        if inside and draws.random() < 0.5:
            leaving = inside.pop(draws.randrange(len(inside)))
            entered = mine.leave(adapters[leaving])
            assert [str(one) for one in entered] == theirs.leave(str(leaving))
            inside += entered
        adapters[request] = f"a{draws.randint(0, 6)}"
        enters = mine.enter(request, adapters[request])
        assert enters == theirs.enter(str(request), adapters[request])
        assert mine.num_waiting == len(theirs)
        if enters:
            inside.append(request)


def test_popularity_follows_its_law():
    drawn = make_workload(WorkloadSpec(40_000, 10, "zipf:1.0", 1.0, 0.25, 10, 10, seed=0))
    counts = np.bincount(drawn.adapters[drawn.adapters != BASE], minlength=10)
    assert (drawn.adapters == BASE).mean() == pytest.approx(0.25, abs=0.02)
    assert counts[0] / counts[4] == pytest.approx(5, rel=0.15)
    assert drawn.arrivals_s[-1] == pytest.approx(40_000, rel=0.05)
    assert drawn.prompts.mean() == pytest.approx(10, rel=0.05)
    flat = np.bincount(make_workload(WorkloadSpec(40_000, 10, "uniform", 1.0, 0.0, 10, 10, seed=0)).adapters)
    assert flat.min() / flat.max() > 0.9


def test_read_times_have_their_median_and_tail_and_the_slowest_of_ranks_is_slower():
    times = read_times_s(0.1, 0.4, 4, seed=0)
    own, slowest = zip(*(next(times) for _ in range(20_000)), strict=True)
    assert np.median(own) == pytest.approx(0.1, rel=0.05)
    assert np.percentile(own, 99) == pytest.approx(0.4, rel=0.1)
    assert all(one <= other for one, other in zip(own, slowest, strict=True))
    assert np.median(slowest) > 0.13


def test_a_trace_file_gives_requests_as_it_says(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("# seconds,adapter,prompt,output\n1.5,sql,10,3\n0.5,law,4,2\n2,base,7,1\n3,,7,1\n")
    drawn = make_workload(WorkloadSpec(100, 5, str(trace), 1.0, 0.0, 10, 10, seed=0))
    assert drawn.arrivals_s.tolist() == [0.5, 1.5, 2, 3]
    assert [drawn.names[index] if index != BASE else None for index in drawn.adapters] == ["law", "sql", None, None]
    assert (drawn.prompts.tolist(), drawn.outputs.tolist()) == ([4, 10, 7, 7], [2, 3, 1, 1])


@pytest.mark.parametrize(("text", "words"), [("1,a,2\n", "3 fields"), ("soon,a\n", "soon"), ("1,a,two,3\n", "two"), ("\n", "no requests")])
def test_a_trace_that_cannot_be_read_is_refused_by_line(tmp_path, text, words):
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(ConfigError, match=words):
        make_workload(WorkloadSpec(100, 5, str(trace), 1.0, 0.0, 10, 10, seed=0))


SMALL = ["--requests", "400", "--adapters", "20", "--slots", "2", "--slots", "4", "--output-tokens", "8"]


def test_the_command_prints_a_column_a_run_and_writes_json(tmp_path):
    file = tmp_path / "plan.json"
    result = cli.invoke(app, [*SMALL, "--json", str(file)])
    assert result.exit_code == 0, result.output
    for words in ("2 slots", "4 slots", "slot hit rate", "wait p99", "evictions", "longest pass-over", "steps with a load agreement"):
        assert words in result.output
    document = json.loads(file.read_text())
    assert [one["instance"]["slots"] for one in document["runs"]] == [2, 4]
    assert document["runs"][0]["figures"]["slot_hit_rate"] < document["runs"][1]["figures"]["slot_hit_rate"]
    assert document["workload"]["num_adapters"] == 20


def test_the_command_checks_all_ranks(tmp_path):
    result = cli.invoke(app, [*SMALL, "--ranks", "3", "--check"])
    assert result.exit_code == 0, result.output
    assert "all 3 ranks decided alike" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--popularity", "no/such/file"], "popularity"),
        (["--popularity", "zipf:much"], "exponent"),
        (["--host-tier", "1"], "--host-tier is 1"),
        (["--read-ms", "10", "--read-p99-ms", "5"], "less than the median"),
        (["--max-num-batched-tokens", "8"], "each of 64 rows"),
    ],
)
def test_an_option_that_makes_no_sense_is_exit_code_2(options, words):
    result = cli.invoke(app, [*SMALL, *options])
    assert result.exit_code == 2
    assert words in result.output


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_report.importlib.util, "find_spec", lambda name: None)
    result = cli.invoke(app, [*SMALL, "--plot", str(tmp_path / "plan.png")])
    assert result.exit_code == 2
    assert "pip install 'mstar[plot]'" in result.output


def test_a_plot_has_a_line_a_run_and_is_a_picture(monkeypatch, tmp_path):
    drawn = make_workload(WorkloadSpec(200, 10, "uniform", 5.0, 0.0, 16, 8, seed=0))
    runs = [plan_report.Planned(spec, Planner(spec, drawn).run()) for spec in (PlanSpec(1, 2), PlanSpec(2, 4))]
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: (figures.append(figure), save(figure, *args, **options)))
    plan_report.write_plot(tmp_path / "plan.png", runs)
    (figure,) = figures
    lines = [[line.get_label() for line in axes.get_lines()] for axes in figure.axes]
    assert [label for labels in lines[:2] for label in labels] == ["1 slots", "2 slots", "wait p99, s", "wait p50, s"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "plan.png").stat().st_size > 5000
