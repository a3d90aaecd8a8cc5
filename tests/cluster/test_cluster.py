"""Three hosts, ranks by torchrun, 20 streams over 6 adapters in 2 slots; then a cable, a host's process or a rank fails.

Every stream ends complete but those whose own front was killed; every token is what transformers + peft give. How long it took is
recorded (`make test-cluster` keeps cluster.json), not judged: docs/reliability.md shows it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.chaos.load import Load
from tests.cluster.cluster import Cluster, running_cluster, write_record
from tests.cluster.network import has_netem
from tests.e2e.prompts import MODELS
from tests.support.reference import tiny_reference

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]

NUM_STREAMS = 20
BOUND_S = 300.0  # of each wait; a hang, never a measure
LOST = r"is stuck:|failed \(exitcode|instance down:|torchrun ended"
UP = "instance up again"
FRONT_DIED, FRONT_UP = "the front was killed", "ready after"


@dataclass(frozen=True)
class Fault:
    """`inject` does it and returns what undoes it, after `lasts_s`."""

    inject: Callable[[Cluster], Callable[[], None] | None]
    lasts_s: float = 0.0
    found: str | None = None
    served: str | None = None
    kills_front: bool = False


def cut(host: str) -> Callable[[Cluster], Callable[[], None]]:
    def inject(cluster: Cluster) -> Callable[[], None]:
        getattr(cluster, host).cut()
        return getattr(cluster, host).join

    return inject


def disturb(*netem: str) -> Callable[[Cluster], Callable[[], None]]:
    def inject(cluster: Cluster) -> Callable[[], None]:
        cluster.follower_host.disturb(*netem)
        return cluster.follower_host.calm

    return inject


def kill_rank(tp_rank: int, kind: int = signal.SIGKILL) -> Callable[[Cluster], None]:
    return lambda cluster: os.kill(cluster.rank_pid(tp_rank % cluster.tp_size), kind)


FAULTS = {
    "cut the follower's cable for 1 s": Fault(cut("follower_host"), 1.0),
    "cut the front's cable for 1 s": Fault(cut("front_host"), 1.0),
    "cut the follower's cable for 30 s": Fault(cut("follower_host"), 30.0, LOST, UP),
    "cut the front's cable for 30 s": Fault(cut("front_host"), 30.0),
    "kill -9 follower": Fault(kill_rank(-1), 0, LOST, UP),
    "kill -9 leader": Fault(kill_rank(0), 0, LOST, UP),
    "SIGSTOP follower": Fault(kill_rank(-1, signal.SIGSTOP), 0, LOST, UP),
    "SIGSTOP leader": Fault(kill_rank(0, signal.SIGSTOP), 0, LOST, UP),
    "kill -9 front": Fault(lambda cluster: os.kill(cluster.front_pid(), signal.SIGKILL), 0, FRONT_DIED, FRONT_UP, kills_front=True),
    "kill -9 the follower's torchrun": Fault(lambda cluster: cluster.launchers[1].process.kill(), 0, LOST, UP),
    "kill -9 the leader's torchrun": Fault(lambda cluster: cluster.launchers[0].process.kill(), 0, LOST, UP),
}
NETEM = {
    "50 ms to the follower": Fault(disturb("delay", "50ms"), 15.0),
    "5 % loss to the follower": Fault(disturb("loss", "5%"), 15.0),
}


@pytest.fixture(scope="module", params=[2, 3], ids=["tp2", "tp3"])
def cluster(request, tmp_path_factory):
    with running_cluster(request.param, tmp_path_factory.mktemp(f"cluster-tp{request.param}")) as running:
        yield running


@contextmanager
def tails_on_failure(cluster):
    try:
        yield
    except BaseException as error:
        error.add_note(cluster.tails())
        raise


@pytest.mark.parametrize("name", FAULTS)
def test_no_stream_is_lost_and_no_token_is_wrong(cluster, name):
    with tails_on_failure(cluster):
        check(cluster, name, FAULTS[name])


@pytest.mark.parametrize("name", NETEM if has_netem() else ())
def test_a_bad_link_makes_streams_slow_and_nothing_else(cluster, name):
    with tails_on_failure(cluster):
        check(cluster, name, NETEM[name])


def check(cluster, name, fault):
    starts = cluster.server.status()["instance_starts"]
    record, streams = asyncio.run(run(cluster, name, fault))
    write_record(record)
    bad = [stream for stream in streams if not stream.is_complete and not stream.was_left]
    lost = [stream for stream in bad if fault.kills_front and stream.began < record["at"] + 5]
    assert [stream.error for stream in bad if stream not in lost] == []
    assert record["complete"] >= NUM_STREAMS / 2
    reference = tiny_reference("llama2")
    for stream in streams:
        if stream.tokens:
            reference.check(stream.answer())
    status = cluster.server.wait_until_idle()
    if fault.found is None:
        assert status["instance_starts"] == starts, "such a short trouble is no reason to start anew"


async def run(cluster, name, fault):
    load = Load(cluster.server.url, NUM_STREAMS, random.Random(name), MODELS, longest=120)
    await until("tokens to flow", lambda: sum(1 for stream in load.running if stream.tokens) >= 5)
    mark, at = cluster.mark(), time.monotonic()
    record = {"fault": name, "tp": cluster.tp_size, "at": at, "running": len(load.running)}
    undo = fault.inject(cluster)
    try:
        if fault.found is not None:
            await until(f"{name} to be found", lambda: cluster.says(fault.found, mark))
            record["found_s"] = round(time.monotonic() - at, 2)
        await asyncio.sleep(max(0.0, at + fault.lasts_s - time.monotonic()))
    finally:
        if undo is not None:
            undo()
    if fault.served is not None:
        await until(f"{name}: serving again", lambda: cluster.says(fault.served, mark))
    up = time.monotonic()
    await until(f"{name}: a token", lambda: load.last_token_at > up)
    record["served_s"] = round(load.last_token_at - at, 2)
    await load.stop()
    record["complete"] = sum(stream.is_complete for stream in load.streams)
    record["lost"] = sum(not stream.is_complete and not stream.was_left for stream in load.streams)
    record["longest_pause_s"] = round(max(stream.longest_gap_s for stream in load.streams), 2)
    record["refused"] = sum(load.num_refused.values())
    return record, load.streams


async def until(what, probe):
    deadline = time.monotonic() + BOUND_S
    while not probe():
        assert time.monotonic() < deadline, f"hang: waited {BOUND_S:g} s for {what}"
        await asyncio.sleep(0.02)
