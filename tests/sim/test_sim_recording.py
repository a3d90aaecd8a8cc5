"""A recorded run, decided again: the same tables and fingerprints, step by step, under no delays at all; and told as text."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mstar.engine.lockstep.record import Header, NodeHeader, Ran, Recorder, read_records
from mstar.sim.check import run
from mstar.sim.replay import sessions
from mstar.sim.replay_cli import app
from mstar.sim.run import simulate
from mstar.sim.scenario import draw_scenario

cli = CliRunner()


def record(path, seed, **changes):
    """Run a seed with a recorder at its leader; the outcome."""
    scenario = draw_scenario(seed).with_settings({"refusals": 0.0, "salted_hashes": False, **changes})
    settings = scenario.settings
    recorders = []

    def prepare(ranks):
        nodes = tuple(NodeHeader(node, settings.max_loras) for node in ranks[0].pools)
        header = Header(nodes, settings.num_pages, settings.block_size, settings.prefix_caching, settings.num_ranks, f"seed {seed}")
        recorders.append(Recorder(path, header))
        ranks[0].recorder = recorders[0]

    outcome = simulate(scenario, prepare)
    recorders[0].close()
    assert outcome.violation is None
    return outcome


@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in range(0, 100, 25)], ids=str)
def test_l06_a_recorded_run_decided_again_gives_the_same_tables_at_every_step(tmp_path, seeds):
    path = tmp_path / "run.rec"
    for seed in seeds:
        record(path, seed)
    views = [view for _session, steps in sessions(read_records(path)) for view in steps]
    assert len(views) > 5 * len(seeds)
    assert [view.step.seq for view in views if not view.as_recorded] == []


def test_l06_what_decides_does_not_depend_on_the_delays_of_its_own_run(tmp_path):
    """The same broadcasts, ingested early or late, give the same fingerprints: what is recorded is all that decides."""
    path = tmp_path / "run.rec"
    record(path, 9)
    records = list(read_records(path))
    served = [item for item in records if type(item).__name__ == "Served"]
    opened = [item for item in records if type(item).__name__ == "Ingested"]
    rest = [item for item in records[1:] if item not in served and item not in opened and type(item).__name__ != "Unserved"]
    (_session, steps), *_none = sessions([records[0], *served, *opened, *rest])
    assert all(view.as_recorded for view in steps)


def test_a_changed_recording_is_found_out(tmp_path):
    path, other = tmp_path / "run.rec", tmp_path / "other.rec"
    record(path, 9)
    records = list(read_records(path))
    recorder = Recorder(other, records[0])
    for item in records[1:]:
        if isinstance(item, Ran) and item.seq == 3:
            item = Ran(item.seq, b"another fingerprint", item.sampled, item.failed, item.waits)
        recorder.note(item)
    recorder.close()
    result = cli.invoke(app, [str(other)])
    assert result.exit_code == 1
    assert "step 3" in result.output


def test_replay_tells_starts_steps_and_requests(tmp_path):
    path = tmp_path / "run.rec"
    outcome = record(path, 107)
    record(path, 108)
    result = cli.invoke(app, [str(path)])
    assert result.exit_code == 0
    assert "every step was decided as recorded" in result.output
    result = cli.invoke(app, [str(path), "--step", "2", "--session", "1"])
    assert result.exit_code == 0
    for words in ("start 1", "step 2:", "slots after its admit:", "KV pages after it:", "as recorded"):
        assert words in result.output
    ended = next(what.split()[0] for _when, who, what in outcome.trace if who == "front" and what.endswith("ends: length"))
    result = cli.invoke(app, [str(path), "--request", ended, "--session", "1"])
    assert result.exit_code == 0
    for words in ("ingested before step", "prefill", "removed;", "tokens sampled"):
        assert words in result.output


def test_replay_says_why_a_request_waited(tmp_path):
    """One slot: whoever asks for another adapter waits for it, and the story names its holder."""
    path = tmp_path / "run.rec"
    waited = None
    for seed in range(60):
        path.unlink(missing_ok=True)
        record(path, seed, max_loras=1, max_cpu_loras=3, greed=0.0, two_nodes=False, gate=False)
        waits = [(rid, why) for item in read_records(path) if isinstance(item, Ran) for rid, why in item.waits.items()]
        waited = next((rid for rid, why in waits if why == "slot"), None)
        if waited is not None:
            break
    result = cli.invoke(app, [str(path), "--request", waited])
    assert "waited for a slot; held: a" in result.output


@pytest.mark.parametrize("question", [["--step", "9999"], ["--request", "nobody"], ["--step", "1", "--session", "7"]])
def test_replay_of_what_is_not_there_is_exit_code_2(tmp_path, question):
    path = tmp_path / "run.rec"
    record(path, 9)
    result = cli.invoke(app, [str(path), *question])
    assert result.exit_code == 2
    assert "has no" in result.output


def test_replay_of_another_file_is_exit_code_2(tmp_path):
    path = tmp_path / "diary.txt"
    path.write_text("dear diary, " * 20)
    assert cli.invoke(app, [str(path)]).exit_code == 2


def test_recording_changes_no_decision(tmp_path):
    outcome = record(tmp_path / "run.rec", 9)
    plain = run(draw_scenario(9).with_settings({"refusals": 0.0, "salted_hashes": False}))
    assert outcome.digest() == plain.digest()
