"""Ranks decide alike whatever is late: within a run on every rank, and across runs for ranks that are told the same.

mstar serve --record, messages and reads late (seed 1)  ─► a trace and tables per rank, a recording
the recording's broadcasts and requests, other delays (seed 2), real ranks, channels and readers  ─► the same traces and tables
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mstar.conductor.links import RankLinks
from mstar.engine.lockstep.record import Ingested, Ran, Served, Step, Unserved, read_records
from mstar.types import Remove
from mstar.wire import front_rank
from tests.e2e.prompts import MODELS, greedy, seeded, some_tokens
from tests.support.adapters import ADAPTERS, MAX_LORA_RANK, tiny_adapters
from tests.support.client import TokenStream, ask_together, fetch, first_token, new_client
from tests.support.reference import tiny_reference
from tests.support.server import BASE, ROOT, ServerSpec, running_server
from tests.support.tiny_models import tiny_model

PLANTED = ROOT / "tests/support/planted"
FAMILY = "llama2"
UNREADABLE = "unreadable"  # an adapter that the last rank cannot read, when it comes to it
SIZES = ("--max-loras=2", "--num-gpu-blocks-override=60", "--block-size=8", "--max-num-batched-tokens=64", "--max-num-seqs=12")
ADMIN = {"Authorization": "Bearer admin"}
BOUND_S = 120.0
STEPS_AHEAD = 3  # how far the front may be before the leader


def planted(folder: Path, tp_size: int, seed: int, script: Path | None = None, diverges: tuple[int, int] | None = None) -> dict[str, str]:
    """The environment of ranks with delays drawn from `seed` that write their trace into `folder`."""
    folder.mkdir()
    spec = {"seed": seed, "trace": str(folder), "unreadable": {f"/{UNREADABLE}": tp_size - 1}, "script": script and str(script)}
    spec["diverges"] = diverges
    (folder / "spec.json").write_text(json.dumps(spec))
    return {"MSTAR_TEST_RANKS": str(folder / "spec.json"), "PYTHONPATH": f"{PLANTED}{os.pathsep}{ROOT}"}


def traces(folder: Path, tp_size: int) -> list[tuple[str, str]]:
    """Per rank what each of its steps did, and its tables at the end."""
    return [((folder / f"rank-{rank}.txt").read_text(), (folder / f"tables-{rank}.txt").read_text()) for rank in range(tp_size)]


async def work(server, folder: Path) -> list[object]:
    """Base and adapters at once, greedy and seeded, in fewer slots than adapters; clients that leave; loads and unloads; bad reads."""
    async with new_client(server) as client:
        asks = [greedy(model, some_tokens(5 + 9 * (at % 4), at), 14) for at, model in enumerate(MODELS)]
        asks += [seeded(model, some_tokens(70 if at == 2 else 12, 20 + at), at, 14) for at, model in enumerate(MODELS)]
        asks += [greedy(ADAPTERS[at % 3], some_tokens(12, 40), 8) for at in range(6)]  # a shared prefix
        answers = [asyncio.ensure_future(fetch(client, ask)) for ask in asks]
        leaving = [TokenStream(client, greedy(model, some_tokens(7, 50), 400)) for model in (BASE, *ADAPTERS[:4])]
        begun = await asyncio.gather(*map(first_token, leaving))
        for rest in begun:
            await rest.aclose()
        lost = await client.post("/v1/completions", json=greedy(UNREADABLE, some_tokens(6, 51), 8).body())
        assert lost.status_code == 500, lost.text
        for turn in range(2):
            body = {"lora_name": "extra", "lora_path": str(folder)}
            assert (await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)).status_code == 200
            answers.append(asyncio.ensure_future(fetch(client, greedy("extra", some_tokens(9, 60), 6 + turn))))
            await answers[-1]
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "extra"}, headers=ADMIN)
            assert gone.status_code == 200, gone.text
        return await asyncio.gather(*answers)


def run_again(recording: Path, folder: Path, tp_size: int) -> None:
    """Tell real ranks under other delays what the recording says, as front and as leader."""
    records = list(read_records(recording))
    last = max(record.seq for record in records if isinstance(record, Step))
    with socket.socket() as front, socket.socket() as meet:
        front.bind(("127.0.0.1", 0))
        meet.bind(("127.0.0.1", 0))
        endpoint, port = f"tcp://127.0.0.1:{front.getsockname()[1]}", meet.getsockname()[1]
    config = folder.with_suffix(".yaml")
    settings = dict(flag.removeprefix("--").replace("-", "_").split("=") for flag in (*SIZES, f"--max-lora-rank={MAX_LORA_RANK}"))
    roots = [str(tiny_adapters(FAMILY)[ADAPTERS[0]].parent), str(folder.parent)]
    model = {"model": str(tiny_model(FAMILY)), "dtype": "float32", "threads_per_rank": 1, "front_endpoint": endpoint}
    config.write_text(json.dumps({**model, **settings, "max_cpu_loras": 8, "lora_root": roots, "stuck_rank_timeout_s": 120}))
    env = {**os.environ, **planted(folder, tp_size, seed=2, script=recording), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"WORLD_SIZE": str(tp_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [folder / f"log-{rank}.txt" for rank in range(tp_size)]
    ranks = [start(["launch/torchrun.py", str(config)], {**env, "RANK": str(rank)}, log) for rank, log in enumerate(logs)]
    try:
        asyncio.run(tell(endpoint, tp_size, records, last, ranks))
        assert [rank.wait(BOUND_S) for rank in ranks] == [0] * tp_size
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(log.read_text()[-3000:] for log in logs)) from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def start(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)


async def tell(endpoint: str, tp_size: int, records, last: int, ranks) -> None:
    """The front's part of the recording to all ranks, in its order and a few steps ahead; stop when every rank has run all of it."""
    up = asyncio.Event()
    heard: dict[str, object] = {}
    begun = sent = 0

    def hear(tp_rank: int, message) -> None:
        nonlocal begun
        if isinstance(message, front_rank.Stats):
            heard[f"rank {tp_rank}"] = (message.last_seq, message.num_requests)
        elif isinstance(message, front_rank.Began):
            begun = message.seq

    links = RankLinks(
        endpoint, "front", tp_size, on_up=lambda ready: up.set(), on_down=lambda reason: heard.update(down=reason), on_message=hear
    )  # fmt: skip
    links.start()
    try:
        await until(up.is_set, ranks, heard)
        for number, record in enumerate(records, start=1):
            if isinstance(record, Step):
                sent = record.seq
            elif not isinstance(record, Remove):
                await until(lambda reached=sent - STEPS_AHEAD: begun >= reached, ranks, heard)
            if isinstance(record, Served):
                links.send_all(front_rank.Load(number, record.name, record.path, record.digest, False, bool(record.nodes)))
            elif isinstance(record, Unserved):
                links.send_all(front_rank.Unload(record.name))
            elif isinstance(record, Ingested):
                links.send_all(
                    front_rank.Ingest(record.rid, record.prompt, record.sampling, record.output, record.adapter, record.cache_key)
                )
        await until(lambda: heard == {f"rank {rank}": (last, 0) for rank in range(tp_size)}, ranks, heard)
        links.send_all(front_rank.Stop())
    finally:
        await links.close()


async def until(holds, ranks, heard) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert "down" not in heard and time.monotonic() < deadline, f"it never came; last heard: {heard}"
        assert all(rank.poll() is None for rank in ranks), f"ranks ended with {[rank.poll() for rank in ranks]}"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_l06_ranks_decide_alike_under_any_delays_and_again_when_told_the_same(tp_size, tmp_path, monkeypatch):
    folders = tiny_adapters(FAMILY)
    shutil.copytree(folders["extra"], tmp_path / UNREADABLE)
    recording = tmp_path / "run.rec"
    flags = (
        *SIZES,
        "--max-cpu-loras=8",
        f"--record={recording}",
        "--enable-runtime-lora",
        "--admin-key=admin",
        f"--lora-modules={UNREADABLE}={tmp_path / UNREADABLE}",
    )
    spec = ServerSpec("determinism", FAMILY, tp_size, flags)
    for name, value in planted(tmp_path / "first", tp_size, seed=1).items():
        monkeypatch.setenv(name, value)
    with running_server(spec.command_line(tmp_path), tmp_path, spec=spec) as server:
        answers = asyncio.run(work(server, folders["extra"]))
        server.wait_until_idle()
    for name in ("MSTAR_TEST_RANKS", "PYTHONPATH"):
        monkeypatch.delenv(name)
    tiny_reference(FAMILY).check_all(answers[:20])

    first = traces(tmp_path / "first", tp_size)
    records = list(read_records(recording))
    ran = [record for record in records if isinstance(record, Ran)]
    assert first == [first[0]] * tp_size, "ranks of one run differ"
    assert first[0][0].count("\n") == len(ran) > 60
    assert sum(len(record.failed) for record in ran) == 1, "the read that failed on one rank failed its request on all"

    run_again(recording, tmp_path / "second", tp_size)
    assert traces(tmp_path / "second", tp_size) == first, "told the same, under other delays, ranks did something else"


def test_l06_a_rank_that_differs_ends_the_instance_with_both_tables_shown_and_its_streams_go_on(tmp_path, monkeypatch):
    for name, value in planted(tmp_path / "trace", 2, seed=3, diverges=(1, 12)).items():
        monkeypatch.setenv(name, value)
    spec = ServerSpec("divergence", FAMILY, 2, SIZES)
    with running_server(spec.command_line(tmp_path), tmp_path, spec=spec, stop_signal=None) as server:
        answers = ask_together(server, [greedy(model, some_tokens(9, at), 40) for at, model in enumerate(MODELS)])
        assert server.wait_until_idle()["instance_starts"] == 2
        server.process.terminate()
        server.process.wait(BOUND_S)
    tiny_reference(FAMILY).check_all(answers)
    log = server.log_path.read_text()
    assert sorted(re.findall(r"^--- tables-\w+-(rank\d)\.txt$", log, re.MULTILINE)) == ["rank0", "rank1"]
    assert "after the admit of step 13 the leader's fingerprint is" in log
