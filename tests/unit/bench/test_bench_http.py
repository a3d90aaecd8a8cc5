"""The commands and the HTTP client against a tiny server over real sockets."""

import json
import socket

import pytest
from typer.testing import CliRunner

from mstar.bench.cli import app
from mstar.bench.http1 import parse_base_url, render_post
from mstar.errors import ConfigError

ARGUMENTS = ["--num-requests", "12", "--concurrency", "3", "--max-tokens", "5", "--prompt-tokens", "7"]


def bench(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def saved_total(path) -> dict:
    return json.loads(path.read_text())["run"]["classes"]["total"]


def test_bench_serve_measures_base_and_adapters_and_saves_it_all(fake_server, tmp_path):
    output = tmp_path / "r.json"
    load = ["--adapters", "auto", "--include-base", "--warmup", "4", "--seed", "1", "--api-key", "sekret", "--save-events"]
    done = bench("serve", "--base-url", fake_server.base_url + "/v1", *ARGUMENTS, *load, "--output", output)
    assert done.exit_code == 0, done.output
    assert "TTFT p99" in done.output
    saved = json.loads(output.read_text())
    counts = {name: (summary["num_ok"], summary["output_tokens"]) for name, summary in saved["run"]["classes"].items()}
    assert counts == {"base": (3, 15), "adapter": (9, 45), "total": (12, 60)}
    assert saved["server_version"] == "fake 1.0" and saved["workload"]["seed"] == 1 and len(saved["records"]) == 12
    assert "sekret" not in output.read_text() and fake_server.authorization == {"bearer sekret"}
    assert [body["model"] for body in fake_server.completions[4:8]] == ["base", "red", "green", "blue"]
    prompts = [tuple(body["prompt"]) for body in fake_server.completions]
    assert len(prompts) == len(set(prompts)) == 16 and {len(prompt) for prompt in prompts} == {7}


def test_bench_serve_keeps_connections(fake_server):
    assert bench("serve", "--base-url", fake_server.base_url, *ARGUMENTS).exit_code == 0
    num_questions = 3  # /version, /v1/models, /tokenize
    assert fake_server.num_connections == num_questions + 3  # one per request in flight


def test_bench_serve_sends_poisson_arrivals(fake_server, tmp_path):
    output = tmp_path / "r.json"
    done = bench("serve", "--base-url", fake_server.base_url, "--request-rate", "500", "--num-requests", "10", "--output", output)
    assert done.exit_code == 0, done.output
    assert saved_total(output)["num_ok"] == 10


def test_bench_serve_sends_text_where_asked(fake_server):
    assert bench("serve", "--base-url", fake_server.base_url, *ARGUMENTS, "--text").exit_code == 0
    assert all(len(body["prompt"].split()) == 7 for body in fake_server.completions)


@pytest.mark.parametrize("model", ["goes", "closes"])
def test_bench_serve_bears_a_server_that_closes_connections(fake_server, tmp_path, model):
    output = tmp_path / "r.json"
    done = bench("serve", "--base-url", fake_server.base_url, *ARGUMENTS, "--model", model, "--output", output)
    assert done.exit_code == 0, done.output
    assert saved_total(output)["num_ok"] == 12


def test_bench_serve_counts_failures_by_reason_and_goes_on(fake_server, tmp_path):
    output = tmp_path / "r.json"
    adapters = ["--adapter", "red", "--adapter", "unknown", "--adapter", "breaks"]
    done = bench("serve", "--base-url", fake_server.base_url, *ARGUMENTS, *adapters, "--output", output)
    assert done.exit_code == 0, done.output
    total = saved_total(output)
    assert (total["num_ok"], total["num_failed"]) == (4, 8)
    assert total["reasons"] == {
        "HTTP 404 model_not_found The model `unknown` does not exist.": 4,
        "connection closed before the reply ended": 4,
    }


def test_bench_serve_exits_1_when_nothing_succeeded(fake_server):
    done = bench("serve", "--base-url", fake_server.base_url, *ARGUMENTS, "--model", "unknown")
    assert done.exit_code == 1
    assert "12 × failed: HTTP 404 model_not_found" in done.output


def test_bench_server_that_is_not_there_is_one_line_and_exit_2():
    with socket.socket() as unused:  # bound and never listening: nobody else can take the port meanwhile
        unused.bind(("127.0.0.1", 0))
        done = bench("serve", "--base-url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert done.exit_code == 2
    assert done.output.startswith("mstar bench: cannot reach http://127.0.0.1:") and done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "2", "--request-rate", "3"], "give one of them"),
        (["--distribution", "zipf"], "needs adapters"),
        (["--adapters", "some"], "takes only `auto`"),
        (["--adapters", "auto", "--adapter", "red"], "not beside --adapter"),
        (["--vocab-size", "4"], "too small"),
        (["--output", "/"], "not a file"),
    ],
)
def test_bench_options_that_contradict_are_one_line_and_exit_2(fake_server, arguments, said):
    done = bench("serve", "--base-url", fake_server.base_url, *arguments)
    assert done.exit_code == 2
    assert said in done.output and done.output.count("\n") == 1
    assert fake_server.completions == []


def test_bench_suite_and_report_make_the_standard_table(fake_server, tmp_path):
    output = tmp_path / "s.json"
    load = ["--quick", "--repeat", "2", "--max-tokens", "3", "--prompt-tokens", "4"]
    done = bench("suite", "--base-url", fake_server.base_url, *load, "--output", output)
    assert done.exit_code == 0, done.output
    cells = json.loads(output.read_text())["cells"]
    assert [cell["name"] for cell in cells] == ["base c1", "base c8", "base c16", "1 adapter c8", "3 adapters c8", "3 adapters c16"]
    assert all(len(cell["rounds"]) == 2 and cell["median"]["output_tokens_per_s"] > 0 for cell in cells)
    assert "throughput kept, 3 adapters c16" in done.output
    report = bench("report", output, output)
    assert report.exit_code == 0, report.output
    assert "base c16" in report.output and "1.00" in report.output and "!" not in report.output


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://host/team/v1", "https://host:443/team"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_bench_base_url_is_taken_with_and_without_v1(url, shown):
    assert parse_base_url(url).url == shown


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://user:pass@host", "http://host:99999", "http://h?x=1"])
def test_bench_base_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="--base-url"):
        parse_base_url(url)


def test_bench_request_is_whole_http():
    wire = render_post(parse_base_url("http://h:1/p/v1"), "/v1/completions", b"{}", "key")
    assert wire.startswith(b"POST /p/v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert wire.endswith(b"Content-Length: 2\r\nAuthorization: Bearer key\r\n\r\n{}")
