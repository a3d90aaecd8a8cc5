"""The front's socket for ranks, without CURVE: who is counted in, and what strangers can do to those who are."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import zmq

from mstar.conductor import links as links_module
from mstar.conductor.links import RankLinks
from mstar.wire import front_rank
from mstar.wire.channel import HelloReader, Receiver, Sender, seal_hello

BOUND_S = 30.0
SECRET = "the supervisor's"


class Rank:
    """A rank as the front sees one."""

    def __init__(self, front, tp_rank=0, tp_size=1, epoch="instance", secret=SECRET, identity=None):
        self.ready = front_rank.RankReady(tp_rank, tp_size, 1, 1, 100, 1, 1, "none", secret)
        self.epoch = epoch
        front.kept.append(self)  # its socket is closed with the context
        self.sock = front.context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.setsockopt(zmq.IDENTITY, identity or front_rank.rank_identity(tp_rank, epoch))
        self.sock.connect(front.endpoint)
        self.sender = self.receiver = None

    def hello(self):
        self.sock.send(seal_hello(self.epoch, self.ready))

    async def join(self):
        """Until the front counts it in."""
        reader = HelloReader(front_rank.Hello)
        while True:
            self.hello()
            await asyncio.sleep(0.05)
            while self.sock.poll(0):
                found = reader.open(self.sock.recv())
                if found is not None:
                    self.sender = Sender(found[1].epoch)
                    self.receiver = Receiver(found[1].epoch, front_rank.ToRank, "the front")
                    return self

    def send(self, message):
        self.sock.send(self.sender.seal(message))

    def heard(self):
        messages = []
        while self.sock.poll(100):
            message = self.receiver.open(self.sock.recv())
            if message is not None:
                messages.append(message)
        return messages


class Front:
    """Links that write down what they tell."""

    def __init__(self, endpoint, tp_size=1):
        self.endpoint = endpoint
        self.context = zmq.Context()
        self.kept = []
        self.events = []
        self.num_dropped = 0
        self.links = RankLinks(
            endpoint,
            "front",
            tp_size,
            secret=SECRET,
            on_up=lambda ranks: self.events.append("up"),
            on_down=lambda reason: self.events.append("down"),
            on_message=lambda tp_rank, message: self.events.append((tp_rank, message)),
            on_dropped=self._dropped,
        )

    def _dropped(self):
        self.num_dropped += 1

    async def until(self, probe):
        while not probe():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running_front(tmp_path, tp_size=1):
    front = Front(f"ipc://{tmp_path}/front.ipc", tp_size)
    front.links.start()
    try:
        async with asyncio.timeout(BOUND_S):
            yield front
    finally:
        front.context.destroy(linger=0)
        await front.links.close()


def play(scenario):
    asyncio.run(scenario)


def test_ranks_are_up_once_all_are_here_and_messages_pass_both_ways(tmp_path):
    async def run():
        async with running_front(tmp_path, 2) as front:
            first = Rank(front, 0, 2)
            first.hello()
            await front.until(lambda: front.links.num_ready == 1)
            assert not front.links.is_up
            ranks = await asyncio.gather(Rank(front, 1, 2).join(), first.join())
            assert front.events == ["up"]
            front.links.send_all(front_rank.AskStatus(3))
            assert [rank.heard() for rank in ranks] == [[front_rank.AskStatus(3)]] * 2
            ranks[0].send(front_rank.Began(1, ("r",)))
            await front.until(lambda: len(front.events) == 2)
            assert front.events[1] == (1, front_rank.Began(1, ("r",)))

    play(run())


def test_a_hello_without_the_secret_from_a_wrong_name_or_of_another_size_is_refused_and_said_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(links_module, "REPORT_S", 0.0)

    async def run():
        async with running_front(tmp_path) as front:
            rank = await Rank(front).join()
            strangers = [
                Rank(front, secret="", identity=b"a"),
                Rank(front, epoch="e1", secret="guess"),
                Rank(front, epoch="e2", identity=b"rank-0"),
                Rank(front, tp_size=2, epoch="e3"),
                Rank(front, tp_rank=5, epoch="e4"),
            ]
            for stranger in strangers:
                stranger.hello()
            await front.until(lambda: front.num_dropped == len(strangers))
            assert front.events == ["up"]
            rank.send(front_rank.Began(1, ()))
            await front.until(lambda: len(front.events) == 2)

    play(run())
    assert "does not belong to this front's supervisor" in caplog.text
    assert "one of 2 ranks, this front serves 1" in caplog.text
    assert "not what it says" in caplog.text


def test_strangers_frames_are_counted_and_a_frame_of_another_epoch_in_a_ranks_channel_too(tmp_path):
    async def run():
        async with running_front(tmp_path) as front:
            rank = await Rank(front).join()
            stranger = Rank(front, identity=b"rank-0")
            frames = [
                b"",
                b"x",
                b"\x91" * 100_000,
                b"\xc1",
                Sender("e").beat(),
                Sender("instance.front").beat(),
                random.Random(1).randbytes(500),
            ]
            for frame in frames:
                stranger.sock.send(frame)
            stranger.sock.send_multipart([b"a", b"b", b"c"])
            await front.until(lambda: front.num_dropped == len(frames) + 1)
            rank.sock.send(Sender("yesterday").seal(front_rank.Began(1, ())))
            await front.until(lambda: front.num_dropped == len(frames) + 2)
            assert front.events == ["up"]

    play(run())


def test_a_gap_in_a_ranks_channel_takes_the_instance_down_and_a_new_epoch_brings_it_up(tmp_path):
    async def run():
        async with running_front(tmp_path) as front:
            rank = await Rank(front).join()
            rank.sender.seal(front_rank.Began(1, ()))  # never sent
            rank.send(front_rank.Began(2, ()))
            await front.until(lambda: front.events == ["up", "down"])
            await Rank(front, epoch="next").join()
            assert front.events == ["up", "down", "up"]

    play(run())


def test_a_flood_of_a_strangers_frames_does_not_keep_the_loop_from_a_rank(tmp_path):
    async def run():
        async with running_front(tmp_path) as front:
            rank = await Rank(front).join()
            stranger = Rank(front, identity=b"flood")
            stopped = asyncio.Event()

            def flood():
                while not stopped.is_set():
                    stranger.sock.send(b"x" * 50)

            flooding = asyncio.create_task(asyncio.to_thread(flood))
            await front.until(lambda: front.num_dropped > 5000)
            for seq in range(20):
                rank.send(front_rank.Began(seq, ()))
            await front.until(lambda: len(front.events) == 21)
            stopped.set()
            await flooding

    play(run())


def test_a_rank_that_is_not_heard_is_named_with_how_long(tmp_path, monkeypatch):
    monkeypatch.setattr(links_module, "SILENT_S", 0.3)

    async def run():
        async with running_front(tmp_path) as front:
            rank = await Rank(front).join()
            assert front.links.silent() is None
            await front.until(lambda: front.links.silent() is not None)
            assert front.links.silent().startswith("rank 0 has been silent for")
            rank.sock.send(rank.sender.beat())
            await front.until(lambda: front.links.silent() is None)

    play(run())
