"""Hosts on one machine: each is a network namespace with one address, a veth pair to a bridge, and a cable that can be pulled.

    front  10.77.N.1 ── veth ──┐
    ranks  10.77.N.2 ── veth ──┼── bridge, 10.77.N.254: the machine itself, where clients and the test run
    ranks  10.77.N.3 ── veth ──┘

Needs root and iproute2. Everything has the test process's id in its name and is removed at the end, whatever happened; processes that
still live in a namespace are killed first. What a killed test process has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERFACE = "eth0"  # in every host
NAME = re.compile(r"mst(\d+)(?:br|[hp]\d)")


@dataclass(frozen=True)
class Host:
    """One host. `port` is the bridge's end of its cable."""

    namespace: str
    address: str
    port: str
    bridge: str

    def start(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process on this host, its output added to `log`."""
        with log.open("ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *argv],  # becomes argv: no process stands between
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self) -> None:
        """Pull the cable: nothing comes in or goes out, and nobody is told."""
        _ip("link", "set", self.port, "nomaster")

    def join(self) -> None:
        """Put it back."""
        _ip("link", "set", self.port, "master", self.bridge)

    def disturb(self, *netem: str) -> None:
        """Delay or drop what goes to this host, in netem's words. Raises CalledProcessError where the kernel has no netem."""
        _run("tc", "qdisc", "add", "dev", self.port, "root", "netem", *netem)

    def calm(self) -> None:
        """As before `disturb`."""
        _run("tc", "qdisc", "del", "dev", self.port, "root")

    def pids(self) -> list[int]:
        """Processes that live here."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]


@contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts that reach each other, in the order of their addresses."""
    for pid in _networks():
        if not Path(f"/proc/{pid}").exists():
            _remove(pid)
    pid, subnet = os.getpid(), f"10.77.{os.getpid() % 250}"
    bridge = f"mst{pid}br"
    hosts = [Host(f"mst{pid}h{at}", f"{subnet}.{at}", f"mst{pid}p{at}", bridge) for at in range(1, num_hosts + 1)]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        _forward(bridge, "-I")
        for host in hosts:
            _add(host)
        yield hosts
    finally:
        _forward(bridge, "-D")
        _remove(pid)
        signal.signal(signal.SIGTERM, before)


def has_netem() -> bool:
    """Whether the kernel can delay and drop."""
    return _can("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms") and _can("tc", "qdisc", "del", "dev", "lo", "root")


def _add(host: Host) -> None:
    _ip("netns", "add", host.namespace)
    _ip("link", "add", host.port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
    _ip("link", "set", host.port, "master", host.bridge, "up")
    inside = ("-n", host.namespace)
    _ip(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", INTERFACE, "up")


def _forward(bridge: str, action: str) -> None:
    """A docker daemon, even one that has run before, has the kernel drop what bridges forward: let this one's through."""
    if shutil.which("iptables") is not None:
        subprocess.run(["iptables", action, "FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT"], capture_output=True)


def _end(signum: int, frame: FrameType | None) -> None:
    """A test process that is told to end takes its network with it."""
    raise SystemExit(128 + signum)


def _networks() -> set[int]:
    """The ids of the test processes that made what there is."""
    return {int(found[1]) for found in NAME.finditer(_run("ip", "netns") + _run("ip", "-brief", "link"))}


def _remove(made_by: int) -> None:
    for namespace in {found[0] for found in NAME.finditer(_run("ip", "netns")) if int(found[1]) == made_by}:
        for pid in _run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", namespace)
    for device in {found[0] for found in NAME.finditer(_run("ip", "-brief", "link")) if int(found[1]) == made_by}:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", device)  # a cable may have gone with its namespace


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


def _can(*words: str) -> bool:
    return subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0
