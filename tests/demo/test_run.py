"""`make demo` and `make serve` against a fake server: what they show, how they end, and that no child is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import demo.run

FAKE = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def run_demo(monkeypatch, capfd):
    """Runs main() against a fake in a given mode; returns (exit code, output)."""
    children = []
    real_popen = subprocess.Popen

    def popen(*arguments, **options):
        children.append(real_popen(*arguments, **options))
        return children[-1]

    def run(mode, *arguments):
        monkeypatch.setattr(demo.run, "COMMAND", (sys.executable, str(FAKE), mode))
        code = demo.run.main(list(arguments))
        assert [child.poll() is not None for child in children] == [True]
        return code, capfd.readouterr().out

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # main() would take signals over for good
    monkeypatch.setattr(demo.run, "fetch_model", lambda: Path("unused"))
    monkeypatch.setattr(demo.run, "console", demo.run.Console(width=140))
    monkeypatch.setattr(subprocess, "Popen", popen)
    yield run
    monkeypatch.undo()
    signal.signal(signal.SIGINT, before)


def test_demo_shows_four_answers_with_tokens_and_slots(run_demo):
    code, output = run_demo("good")
    assert code == 0
    for model in ("smollm2", "pirate", "json", "bullets"):
        assert f"[hello] from {model}" in output
    slots = next(line for line in output.splitlines() if "LoRA slot" in line)
    assert [cell.strip() for cell in slots.strip("│ ").split("│")] == ["LoRA slot", "0 (no adapter)", "1", "evicted since", "2"]


def test_demo_reports_the_log_of_a_server_that_dies(run_demo):
    code, output = run_demo("dies")
    assert code == 1
    assert "exited with code 3" in output
    assert "out of luck" in output


def test_demo_reports_a_refusal_in_the_servers_words(run_demo):
    code, output = run_demo("refuses")
    assert code == 1
    assert "does not exist" in output


def test_demo_kills_a_server_that_ignores_sigint(run_demo, monkeypatch):
    monkeypatch.setattr(demo.run, "STOP_TIMEOUT_S", 0.2)
    code, output = run_demo("deaf")
    assert code == 1
    assert "had to be killed" in output


def test_serve_stops_cleanly_at_ctrl_c(run_demo, monkeypatch):
    real_curl_line = demo.run.curl_line

    def curl_line_then_ctrl_c(url):
        os.kill(os.getpid(), signal.SIGINT)
        return real_curl_line(url)

    monkeypatch.setattr(demo.run, "curl_line", curl_line_then_ctrl_c)
    code, output = run_demo("good", "--serve")
    assert code == 0
    assert "Ctrl-C stops" in output
    assert "fake server stopped" in output
