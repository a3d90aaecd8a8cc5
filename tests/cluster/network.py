"""Hosts on one machine: each is a network namespace with one address, a veth pair to a bridge, and a cable that can be pulled.

    front  10.77.N.1 ── veth ──┐
    ranks  10.77.N.2 ── veth ──┼── bridge, 10.77.N.254: the machine itself, where clients and the test run
    ranks  10.77.N.3 ── veth ──┘

Needs root and iproute2. Everything has the run's number N in its name and is removed at the end, whatever happened; processes that
still live in a namespace are killed first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"  # in every host
NUM_NETWORKS = 200


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
    number = os.getpid() % NUM_NETWORKS
    bridge = f"mst{number}br"
    hosts = [Host(f"mst{number}h{at}", f"10.77.{number}.{at}", f"mst{number}p{at}", bridge) for at in range(1, num_hosts + 1)]
    _remove(bridge, hosts)
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"10.77.{number}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _add(host)
        yield hosts
    finally:
        _remove(bridge, hosts)


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


def _remove(bridge: str, hosts: Sequence[Host]) -> None:
    for host in hosts:
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", host.namespace)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", host.port)  # where the namespace has lived on
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("link", "del", bridge)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


def _can(*words: str) -> bool:
    return subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0
