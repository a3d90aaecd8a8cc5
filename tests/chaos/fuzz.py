"""`make fuzz-wire N=…`: random and mutated frames from strangers on every socket that listens, while streams run.

    the front's socket for ranks, the leader's for followers     frames: random bytes; genuine ones of other epochs, mutated; hellos
    both, below ZeroMQ                                           raw bytes on the same address
    the HTTP port                                                raw bytes

A stranger can open the sockets (the same user may) but knows neither the instance's epoch nor the supervisor's secret. Promised: no
process ends, no stream stalls or gets a wrong token, nothing grows, and what was dropped is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq

from mstar.types import Remove, Row, SamplingParams, Step
from mstar.wire import front_rank, leader_follower
from mstar.wire.channel import MAX_FRAME_BYTES, Sender, seal_hello
from tests.chaos.load import Load, Stream
from tests.chaos.processes import held, processes
from tests.e2e.prompts import MODELS
from tests.support.reference import tiny_reference
from tests.support.server import Server, ServerSpec, running_server

FAMILY = "llama2"
SPEC = ServerSpec("fuzz", FAMILY, 2, ("--num-gpu-blocks-override=512", "--max-num-seqs=32"))
NUM_STREAMS = 4
AHEAD = 5_000
FRAMES_PER_SOCKET = 200  # then a stranger comes back under another name
GROWTH_MB = 60.0
STALL_S = 60.0


@dataclass
class Report:
    """What was sent and what came of it."""

    num_frames: int = 0
    num_counted: float = 0.0
    seconds: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    longest_pause_s: float = 0.0
    growth_mb: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Frames:
    """What strangers send."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        sampling = SamplingParams(16, seed=1)
        messages = (
            *(front_rank.Ingest("r", (1, 2, 3), sampling), front_rank.Stop(), front_rank.Unload("a"), front_rank.Abort("r")),
            *(front_rank.Tokens(1, (front_rank.TokenOut("r", 0, 1),)), front_rank.LoadResult(1), front_rank.Began(1, ("r",))),
            *(Step(1, (Row("r", 0, 1),)), Remove("r", 0), leader_follower.CopyHint(1, "a"), leader_follower.Fault(1, "broken")),
        )
        hellos = (
            front_rank.RankReady(0, 2, 1, 100, 100, 1, 1, "x", "no secret"),
            front_rank.RankReady(1, 2, 1, 100, 100, 1, 1, "x"),
            front_rank.Welcome(0, "e"),
            leader_follower.FollowerHello(1),
            leader_follower.LeaderGreeting(1),
        )
        self._genuine = [Sender("0a1b2c3d").seal(message) for message in messages]
        self._genuine += [seal_hello("0a1b2c3d", hello) for hello in hellos]
        self._genuine.append(Sender("0a1b2c3d.4e5f6a7b").beat())

    def draw(self) -> list[bytes]:
        """The parts of one message."""
        draw = self._draw
        if draw.random() < 0.95:
            return [self._part()]
        return [self._part() for _ in range(draw.randint(0, 6))] or [b""]

    def _part(self) -> bytes:
        draw, kind = self._draw, self._draw.random()
        if kind < 0.25:
            return draw.randbytes(draw.choice((0, 1, 4, 30, 200, 3000)))
        if kind < 0.27:
            return draw.choice((b"\x91", b"\x81\xa1", b"\xc7\xff")) * draw.randint(1, 20_000)  # nested, or announced and not there
        data = bytearray(draw.choice(self._genuine))
        for _ in range(draw.choice((0, 1, 1, 2, 6))):
            at = draw.randrange(len(data))
            change = draw.random()
            if change < 0.6:
                data[at] = draw.randrange(256)
            elif change < 0.8:
                del data[at : at + draw.randint(1, 4)]
                data += b"\xc0"
            else:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
        return bytes(data)

    def identity(self) -> bytes:
        """A name to come under; ranks' names among them, as far as they can be known."""
        if self._draw.random() < 0.8:  # a name that comes twice takes what the first had not delivered yet
            return self._draw.randbytes(8).replace(b"\0", b"x")
        return self._draw.choice((b"rank-0", b"rank-1", b"follower-1", b"rank-0-0a1b2c3d", b"follower-1-0a1b2c3d"))


class Pace:
    """Keeps strangers a little ahead of what the server has counted: a million frames at once would test this machine's buffers alone."""

    def __init__(self) -> None:
        self._sent = 0
        self._allowed = AHEAD
        self._counted, self._since = 0.0, time.monotonic()
        self._changed = threading.Condition()

    def counted(self, number: float) -> None:
        """So many were dropped up to now. Where the number stands still, what is missing was lost with a name that another took over."""
        now = time.monotonic()
        with self._changed:
            if number > self._counted:
                self._counted, self._since = number, now
            behind = self._sent if now - self._since > 1.0 else number
            self._allowed = max(self._allowed, int(behind) + AHEAD)
            self._changed.notify_all()

    def wait(self, num_frames: int) -> None:
        """Before so many are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent + num_frames <= self._allowed)
            self._sent += num_frames


def attack(endpoint: str, num_frames: int, seed: int, pace: Pace) -> None:
    """One stranger after another at one ZeroMQ socket."""
    draw = random.Random(seed)
    frames = Frames(draw)
    context = zmq.Context()
    sent = 0
    while sent < num_frames:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 2000)
        sock.setsockopt(zmq.SNDTIMEO, 60_000)
        sock.setsockopt(zmq.IDENTITY, frames.identity())
        sock.connect(endpoint)
        pace.wait(min(FRAMES_PER_SOCKET, num_frames - sent))
        for _ in range(min(FRAMES_PER_SOCKET, num_frames - sent)):
            sock.send_multipart(frames.draw())
            sent += 1
        if draw.random() < 0.02:
            with suppress(zmq.ZMQError):
                sock.send(bytes(MAX_FRAME_BYTES + 1))
        sock.close()
    context.term()


def attack_raw(open_socket: Callable[[], socket.socket], num_connections: int, seed: int) -> None:
    """Bytes of no protocol, or of the beginning of one."""
    draw = random.Random(seed)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + bytes(48)
    for _ in range(num_connections):
        with suppress(OSError), open_socket() as sock:
            sock.settimeout(5)
            start = draw.choice(
                (b"", greeting, b"GET /v1/models HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
            )
            sock.sendall(start[: draw.randint(0, len(start))] + draw.randbytes(draw.choice((0, 9, 500, 70_000))))


def endpoints(server: Server) -> list[str]:
    """The ZeroMQ sockets that listen, from where the supervisor keeps them."""
    pid = processes(server.process.pid)["rank 0"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (launch,) = [item.removeprefix(b"MSTAR_LAUNCH=").decode() for item in environment if item.startswith(b"MSTAR_LAUNCH=")]
    found = sorted(Path(launch).parent.glob("*.ipc"))
    assert [path.name.partition("-")[0] for path in found] == ["front.ipc", "instance"], found
    return [f"ipc://{path}" for path in found]


def run_fuzz(num_frames: int, seed: int, folder: Path) -> Report:
    """Start a server, attack it with `num_frames` in all, judge."""
    with running_server(SPEC.command_line(folder), folder, spec=SPEC) as server:
        report = asyncio.run(_fuzz(server, num_frames, seed))
        server.wait_until_idle()
    reference = tiny_reference(FAMILY)
    for stream in report.streams:
        if not (stream.is_complete or stream.was_left):
            report.problems.append(f"{stream.ask}: {stream.error or 'not complete'}")
        if stream.tokens:
            reference.check(stream.answer())
    return report


async def _fuzz(server: Server, num_frames: int, seed: int) -> Report:
    report = Report(num_frames)
    places = endpoints(server)
    pids = processes(server.process.pid)
    load = Load(server.url, NUM_STREAMS, random.Random(seed), MODELS, longest=150)
    while not load.last_token_at:
        await asyncio.sleep(0.02)
    pace = Pace()
    first = 4 * AHEAD  # buffers and caches that come with the first frames are no growth
    warming = asyncio.ensure_future(asyncio.to_thread(attack, places[0], first, seed, pace))
    while not warming.done():
        pace.counted(_dropped(server))
        await asyncio.sleep(0.05)
    pace = Pace()
    before, counted, began = held(server.process.pid), _dropped(server), time.monotonic()
    host, port = server.url.removeprefix("http://").split(":")
    openers = [lambda: socket.create_connection((host, int(port)), 5), *(lambda place=place: _unix(place) for place in places)]
    threads = [
        *(
            threading.Thread(target=attack, args=(place, num_frames // len(places), seed + index, pace))
            for index, place in enumerate(places)
        ),
        *(threading.Thread(target=attack_raw, args=(opener, max(20, num_frames // 2000), seed)) for opener in openers),
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pace.counted(await asyncio.to_thread(_dropped, server) - counted)
        await asyncio.sleep(0.05)
    now = await asyncio.to_thread(_dropped, server)
    while now != (now := await asyncio.to_thread(_dropped, server)):
        await asyncio.sleep(0.5)
    report.seconds = round(time.monotonic() - began, 1)
    await load.stop()
    report.streams = load.streams
    report.longest_pause_s = round(max(stream.longest_gap_s for stream in load.streams), 2)
    if report.longest_pause_s > STALL_S:
        report.problems.append(f"a stream stood still for {report.longest_pause_s} s")
    if processes(server.process.pid) != pids:
        report.problems.append(f"processes ended: {pids} became {processes(server.process.pid)}")
    report.num_counted = _dropped(server) - counted
    if report.num_counted < 0.9 * num_frames:
        report.problems.append(f"of {num_frames} frames only {report.num_counted:.0f} were counted as dropped")
    for then, now in zip(before, held(server.process.pid), strict=True):
        report.growth_mb[now.role] = round(now.rss_mb - then.rss_mb, 1)
        if now.rss_mb - then.rss_mb > GROWTH_MB or now.num_fds > then.num_fds + 20:
            report.problems.append(f"{now.role} grew: {then} became {now}")
    return report


def _dropped(server: Server) -> float:
    return server.metric("mstar_wire_dropped_frames_total") + sum(float(rank["dropped_frames"]) for rank in server.status()["ranks"])


def _unix(endpoint: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(endpoint.removeprefix("ipc://"))
    return sock


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzz")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mstar-fuzz-") as folder:
        report = run_fuzz(options.frames, options.seed, Path(folder))
    complete = sum(stream.is_complete for stream in report.streams)
    sys.stdout.write(
        f"{report.num_frames} frames in {report.seconds} s, {report.num_counted:.0f} counted as dropped; {complete} of {len(report.streams)} streams "
        f"complete (the others were left by their client), longest pause {report.longest_pause_s} s; growth in MB {report.growth_mb}\n"
    )
    sys.stdout.write("".join(f"{problem}\n" for problem in report.problems[:20]) or "no problems\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
