"""`make test-compose`: builds the image, brings docker/compose.yaml up and does bad things to it while streams run.

Needs root, docker.io, docker-compose and debootstrap (Debian's packages). There need be no registry: the base image that the Dockerfile
names is made with debootstrap where it is missing, and wheels come from docker/wheels where an index cannot be reached from a build.
Starts dockerd where none runs. Prints one JSON line a fault; exit status 1 where a stream was lost or a token wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

from tests.chaos.load import Load, Stream
from tests.e2e.prompts import MODELS
from tests.support.adapters import ADAPTERS, tiny_adapters
from tests.support.reference import tiny_reference
from tests.support.server import ROOT
from tests.support.tiny_models import tiny_model

FAMILY = "llama2"
PROJECT = "mstartest"
PORT = 18000
URL = f"http://127.0.0.1:{PORT}"
BASE_IMAGE = "debian:bookworm-20250520-slim"
BOUND_S = 400.0
NUM_STREAMS = 8


class Compose:
    """The cluster, by docker-compose's own commands."""

    def __init__(self, folder: Path) -> None:
        self._environment = {
            **os.environ,
            "MODEL": str(folder / "model"),
            "ADAPTERS": str(folder / "adapters"),
            "CONFIG": str(folder / "serve.yaml"),
            "PORT": str(PORT),
        }

    def run(self, *words: str) -> str:
        """`docker-compose …`."""
        command = ["docker-compose", "-p", PROJECT, "-f", str(ROOT / "docker/compose.yaml"), *words]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=1800, cwd="/")
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def docker(self, *words: str) -> str:
        """`docker …`."""
        return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=120).stdout.strip()

    def container(self, service: str) -> str:
        """Its id."""
        return self.run("ps", "-q", service).strip()

    def health(self, service: str) -> str:
        """As docker sees it."""
        return self.docker("inspect", "-f", "{{.State.Health.Status}}", self.container(service))

    def status(self) -> dict[str, Any]:
        """The front's; empty where it does not answer so."""
        try:
            reply = httpx.get(f"{URL}/mstar/status", timeout=15)
            found: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
        except (httpx.TransportError, ValueError):
            return {}
        return found

    @property
    def num_starts(self) -> int:
        """How often the instance came up; 0 while it is down."""
        return int(self.status().get("instance_starts", 0))


def kill_inside(service: str) -> Callable[[Compose], None]:
    """As a crash: the process in the container dies, docker's restart policy applies."""
    return lambda compose: compose.docker("exec", compose.container(service), "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)") and None


def kill_and_start(service: str) -> Callable[[Compose], None]:
    """`docker kill` leaves it down by docker's rule; after a while an operator starts it."""

    def inject(compose: Compose) -> None:
        container = compose.container(service)
        compose.docker("kill", container)
        time.sleep(5)
        compose.docker("start", container)

    return inject


def disconnect(service: str, seconds: float) -> Callable[[Compose], None]:
    """Off the network and back."""

    def inject(compose: Compose) -> None:
        container, network = compose.container(service), f"{PROJECT}_default"
        compose.docker("network", "disconnect", "--force", network, container)
        time.sleep(seconds)
        compose.docker("network", "connect", "--alias", service, network, container)

    return inject


FAULTS: dict[str, tuple[Callable[[Compose], None], bool]] = {  # what is done; whether streams are lost with their front
    "crash of rank1": (kill_inside("rank1"), False),
    "crash of rank0": (kill_inside("rank0"), False),
    "docker kill rank1, docker start": (kill_and_start("rank1"), False),
    "docker kill rank0, docker start": (kill_and_start("rank0"), False),
    "rank1 off the network for 30 s": (disconnect("rank1", 30), False),
    "crash of the front's process": (
        lambda compose: compose.docker("exec", compose.container("front"), "sh", "-c", FRONT_KILL) and None,
        True,
    ),
    "docker restart front": (lambda compose: compose.docker("restart", "-t", "0", compose.container("front")) and None, True),
}
FRONT_KILL = "for p in /proc/[0-9]*; do grep -q mstar[.]api[.]front $p/cmdline 2>/dev/null && kill -9 ${p#/proc/} && exit 0; done; true"


async def one(compose: Compose, name: str) -> tuple[dict[str, Any], list[Stream]]:
    """Load, fault, recovery."""
    inject, loses = FAULTS[name]
    load = Load(URL, NUM_STREAMS, random.Random(name), MODELS, longest=200, is_behind_proxy=True)
    await until("tokens to flow", lambda: sum(1 for stream in load.running if stream.tokens) >= 4)
    starts, at = compose.num_starts, time.monotonic()
    await asyncio.to_thread(inject, compose)
    injected = time.monotonic()
    await until(f"{name}: another instance, or the same", lambda: compose.num_starts > starts if not loses else compose.num_starts >= 1)
    up = time.monotonic()
    await until(f"{name}: a token", lambda: load.last_token_at > up)
    served_s = round(load.last_token_at - at, 1)
    await load.stop()
    bad = [stream for stream in load.streams if not stream.is_complete and not stream.was_left]
    lost = [stream for stream in bad if loses and stream.began < injected]
    record = {
        "fault": name,
        "served_s": served_s,
        "complete": sum(stream.is_complete for stream in load.streams),
        "lost_with_front": len(lost),
        "bad": [stream.error for stream in bad if stream not in lost],
        "longest_pause_s": round(max(stream.longest_gap_s for stream in load.streams), 1),
        "refused": load.num_refused,
    }
    return record, load.streams


async def until(what: str, probe: Callable[[], bool]) -> None:
    """Wait with a bound."""
    deadline = time.monotonic() + BOUND_S
    while not await asyncio.to_thread(probe):
        if time.monotonic() > deadline:
            raise AssertionError(f"hang: waited {BOUND_S:g} s for {what}")
        await asyncio.sleep(0.1)


@contextmanager
def docker_daemon() -> Iterator[None]:
    """The one that runs, else one of our own."""
    if subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        yield
        return
    with open("/tmp/mstar-dockerd.log", "wb") as log:
        daemon = subprocess.Popen(["dockerd"], stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "info"], capture_output=True).returncode:
            if time.monotonic() > deadline or daemon.poll() is not None:
                raise RuntimeError("dockerd does not start: see /tmp/mstar-dockerd.log")
            time.sleep(0.5)
        yield
    finally:
        daemon.terminate()
        daemon.wait(60)


def build() -> None:
    """The image, and its base where no registry gives it."""
    if all(subprocess.run(["docker", *how, BASE_IMAGE], capture_output=True).returncode for how in (("image", "inspect"), ("pull",))):
        make_base()
    collect_wheels()
    options = ["--network=host", "--build-arg", "PIP_NO_INDEX=1"]  # the bridge may have no way out, the wheels are here
    command = ["docker", "build", *options, "-f", str(ROOT / "docker/Dockerfile"), "-t", "mstar", str(ROOT)]
    subprocess.run(command, check=True, stdout=sys.stderr, stderr=sys.stderr)


def make_base() -> None:
    """Debian, as debootstrap makes it, under the name in the Dockerfile's FROM."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True, stdout=sys.stderr)
        tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", BASE_IMAGE], check=True, stdin=tar.stdout)
        tar.wait()


def collect_wheels() -> None:
    """This machine's pip finds what a build may not: put it where the Dockerfile looks."""
    place = ROOT / "docker/wheels"
    if not any(place.glob("*.whl")):
        # pip reads build requirements from an index too; the container's own pip brings setuptools alone
        command = ["pip", "download", "-q", "-d", str(place), "-c", str(ROOT / "constraints.txt"), str(ROOT), "hatchling"]
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=sys.stderr)


def write_inputs(folder: Path) -> None:
    """The tiny model, its adapters and a configuration with short bounds; readable by the container's user."""
    folder.chmod(0o755)
    shutil.copytree(tiny_model(FAMILY), folder / "model")
    for name in ADAPTERS:
        shutil.copytree(tiny_adapters(FAMILY)[name], folder / "adapters" / name)
    settings = yaml.safe_load((ROOT / "docker/serve.yaml").read_text(encoding="utf-8"))
    settings |= {"dtype": "float32", "max_loras": 2, "max_cpu_loras": len(ADAPTERS), "num_gpu_blocks_override": 512, "max_num_seqs": 32}
    settings |= {"lora_read_timeout_s": 4, "agreement_timeout_s": 6, "stuck_rank_timeout_s": 10, "threads_per_rank": 1}
    (folder / "serve.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def check(streams: Sequence[Stream]) -> None:
    """Every token of every stream."""
    reference = tiny_reference(FAMILY)
    for stream in streams:
        if stream.tokens:
            reference.check(stream.answer())


def main() -> int:
    """Everything, once."""
    torch.set_num_threads(1)
    failed = False
    with docker_daemon(), tempfile.TemporaryDirectory(prefix="mstar-compose-") as name:
        write_inputs(Path(name))
        build()
        compose = Compose(Path(name))
        try:
            began = time.monotonic()
            compose.run("up", "-d")
            asyncio.run(
                until("every container to be healthy", lambda: {compose.health(s) for s in ("front", "rank0", "rank1")} == {"healthy"})
            )
            sys.stdout.write(json.dumps({"up_and_healthy_s": round(time.monotonic() - began, 1)}) + "\n")
            for fault in sys.argv[1:] or FAULTS:
                record, streams = asyncio.run(one(compose, fault))
                check(streams)
                failed |= bool(record["bad"])
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
                asyncio.run(
                    until("every container to be healthy", lambda: {compose.health(s) for s in ("front", "rank0", "rank1")} == {"healthy"})
                )
        except BaseException:
            sys.stderr.write(compose.run("logs", "--no-color", "--tail=60"))
            raise
        finally:
            compose.run("down", "-v", "-t", "20")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
