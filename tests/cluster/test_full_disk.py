"""The disk with the adapters and the registry file is full: nothing that runs is touched, what needs room fails with a reason or a log line."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest

from tests.e2e.prompts import greedy, seeded, some_tokens
from tests.support.adapters import ADAPTERS, tiny_adapters
from tests.support.client import TokenStream, ask_one, new_client
from tests.support.reference import tiny_reference
from tests.support.server import BASE, ServerSpec, running_server

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]

FAMILY = "llama2"
HEADERS = {"Authorization": "Bearer k"}


@pytest.fixture
def disk(tmp_path):
    """A file system of 16 MB with the adapters on it."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=True)
    try:
        for name in ("extra", ADAPTERS[0]):
            shutil.copytree(tiny_adapters(FAMILY)[name], place / f"copied-{name}")
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place) -> int:
    """Until not one byte more fits."""
    written = 0
    with (place / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    written += file.write(b"\0" * size)
            except OSError:
                continue  # a smaller piece may still fit
    return written


def test_a_full_disk_stops_no_stream_and_what_was_loaded_before_comes_back(disk, tmp_path):
    spec = ServerSpec("full-disk", FAMILY, 2, ("--enable-runtime-lora", "--admin-key=k", f"--registry-file={disk}/registry.jsonl"))
    flags = spec.command_line(disk)

    def load(server, name, folder):
        return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(disk / folder)}, headers=HEADERS)

    def change(server):
        """Reading needs no room: only the registry file cannot be written, and the log says so."""
        server.post("/v1/unload_lora_adapter", {"lora_name": "late"}, headers=HEADERS)
        assert load(server, "late", f"copied-{ADAPTERS[0]}").status_code == 200

    with running_server(flags, tmp_path, spec=spec) as server:
        assert load(server, "extra", "copied-extra").status_code == 200

        async def run():
            async with new_client(server) as client:
                asks = [
                    greedy(BASE, some_tokens(9, 1), 300),
                    seeded(ADAPTERS[1], some_tokens(9, 2), 3, 300),
                    greedy("extra", some_tokens(9, 3), 300),
                ]
                streams = [TokenStream(client, ask) for ask in asks]
                reading = [asyncio.ensure_future(stream.read()) for stream in streams]
                while not all(stream.tokens for stream in streams[:2]):
                    await asyncio.sleep(0.01)
                assert fill(disk) > 1 << 20
                for _ in range(20):  # the file's last block has room for some lines
                    await asyncio.to_thread(change, server)
                return await asyncio.gather(*reading)

        answers = asyncio.run(run())
        assert "late" in {model["id"] for model in server.get("/v1/models").json()["data"]}
        assert "No space left" in server.log_path.read_text()
        tiny_reference(FAMILY).check_all(answers)
        answer = ask_one(server, greedy("late", some_tokens(9, 4), 12))
        assert len(answer.token_ids) == 12
    with running_server(flags, tmp_path, spec=spec) as server:
        names = {model["id"] for model in server.get("/v1/models").json()["data"]}
        assert "extra" in names, "the torn or missing last line hides nothing that was written before"
        tiny_reference(FAMILY).check(ask_one(server, greedy("extra", some_tokens(9, 3), 20)))
