"""What ends when: a supervisor that is killed, requests over their time, a start that cannot be."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.e2e.prompts import greedy, some_tokens
from tests.support.adapters import ADAPTERS, tiny_adapters
from tests.support.client import TokenStream, ask_one, new_client
from tests.support.processes import descendants, still_alive, wait_for
from tests.support.reference import tiny_reference
from tests.support.server import BASE, ROOT, ServerSpec, running_server

SPEC = ServerSpec("ends", "llama2", 2, ("--num-gpu-blocks-override=512", "--max-num-seqs=32", "--enable-runtime-lora", "--admin-key=k"))
HEADERS = {"Authorization": "Bearer k"}

pytestmark = pytest.mark.xdist_group("chaos")


def test_a_killed_supervisor_takes_front_and_ranks_with_it_and_the_next_one_serves_the_adapters_that_were_loaded(tmp_path):
    flags = [*SPEC.command_line(tmp_path), f"--registry-file={tmp_path}/registry.json"]
    with running_server(flags, tmp_path, spec=SPEC, stop_signal=None) as server:
        folder = str(tiny_adapters("llama2")["extra"])
        assert server.post("/v1/load_lora_adapter", {"lora_name": "extra", "lora_path": folder}, headers=HEADERS).status_code == 200
        children = descendants(server.process.pid)
        assert len(children) == 3

        async def run():
            async with new_client(server) as client:
                stream = TokenStream(client, greedy("extra", some_tokens(20, 50), 900))
                reading = asyncio.ensure_future(stream.read())
                await asyncio.to_thread(wait_for, "the stream to run", lambda: len(stream.tokens) >= 2)
                os.kill(server.process.pid, signal.SIGKILL)
                (lost,) = await asyncio.gather(reading, return_exceptions=True)
                return lost

        assert isinstance(asyncio.run(run()), httpx.TransportError), "its client is told by a closed connection"
        wait_for("front and ranks to end", lambda: not still_alive(children), 20)
        server.process.wait()
    with running_server(flags, tmp_path, spec=SPEC) as server:
        tiny_reference("llama2").check(ask_one(server, greedy("extra", some_tokens(20, 50), 12)))


def test_a_request_over_its_time_ends_alone_with_504_wherever_it_stands(tmp_path):
    """One that runs, one that waits for a slot, one that waits for the host tier; a fourth without a bound goes on."""
    spec = ServerSpec("times", "llama2", 2, ("--num-gpu-blocks-override=512", "--max-cpu-loras=2"))
    with running_server(spec.command_line(tmp_path), tmp_path, spec=spec) as server:

        async def run():
            async with new_client(server) as client:
                holders = [TokenStream(client, greedy(model, some_tokens(20, 51), 900)) for model in ADAPTERS[:2]]
                reading = [asyncio.ensure_future(stream.read()) for stream in holders]
                await asyncio.to_thread(wait_for, "both slots to be held", lambda: all(stream.tokens for stream in holders))
                timed = [greedy(BASE, some_tokens(20, 52), 900), greedy(ADAPTERS[2], some_tokens(20, 53), 10)]
                bodies = [ask.body(timeout_s=0.2) for ask in timed]
                replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                assert not any(task.done() for task in reading)
                return replies, await asyncio.gather(*reading)

        replies, answers = asyncio.run(run())
        assert [reply.status_code for reply in replies] == [504, 504]
        assert {reply.json()["error"]["code"] for reply in replies} == {"deadline_exceeded"}
        tiny_reference("llama2").check_all(answers)
        stream = server.post("/v1/completions", greedy(BASE, some_tokens(20, 54), 900).body(stream=True, timeout_s=0.3)).text
        assert '"deadline_exceeded"' in stream and stream.rstrip().endswith("[DONE]")
        server.wait_until_idle()
        assert server.metric("mstar_requests_ended_total", reason="deadline") == 3


@pytest.mark.parametrize("entry", ["serve", "torchrun"])
def test_off_loopback_without_keys_is_refused_with_exit_2_and_one_line(entry, tmp_path):
    config = tmp_path / "config.yaml"
    lines = [*SPEC.command_line(tmp_path), "--front-endpoint=tcp://10.1.2.3:7000"]
    settings = {line.removeprefix("--").partition("=")[0].replace("-", "_"): line.partition("=")[2] for line in lines if "=" in line}
    kept = ("model", "served_model_name", "front_endpoint", "max_loras", "max_lora_rank")
    config.write_text("".join(f"{name}: {settings[name]}\n" for name in kept))
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    command = {"serve": ["-m", "mstar.cli", "serve", str(config), "--attach"], "torchrun": ["launch/torchrun.py", str(config)]}[entry]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "needs keys" in done.stderr and "mstar keys" in done.stderr and "Traceback" not in done.stderr
