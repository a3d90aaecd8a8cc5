"""The io thread of a rank: owns the sockets, beats, and does nothing but enqueue.

    front  ◄── DEALER ──►  this rank  ◄── ROUTER (leader) / DEALER (follower) ──►  the other ranks

What comes in is put into one inbox that the step thread drains; what goes out is handed over in a deque and numbered here. A broken
protocol is put into the inbox as `Fatal`; should the step thread not take it within a bound (it may sit in a collective), the
process ends here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from mstar.config import ServeConfig
from mstar.errors import MstarError, ProtocolError, WorkerError
from mstar.launch import Heartbeat
from mstar.wire import front_rank, leader_follower
from mstar.wire.channel import (
    MAX_FRAME_BYTES,
    MAX_QUEUED_RECEIVED,
    MAX_QUEUED_TO_SEND,
    MAX_READ_AT_ONCE,
    HelloReader,
    Receiver,
    Sender,
    seal_hello,
)
from mstar.wire.security import allow_ranks_only, curve_for

BEAT_S = 0.2
FRONT_SILENT_S = 2.0
EXIT_GRACE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FromFront:
    """A message of the front, under the present front's epoch."""

    message: front_rank.ToRank


@dataclass(frozen=True)
class FrontChanged:
    """A front counts this rank in: a new one, or the first. Requests of the one before are gone."""

    epoch: str


@dataclass(frozen=True)
class FromLeader:
    """A message of the leader, in its order."""

    message: leader_follower.ToFollower


@dataclass(frozen=True)
class FromFollower:
    """A hint or fault of a follower."""

    message: leader_follower.ToLeader


@dataclass(frozen=True)
class CopyIn:
    """This rank's reader finished a read."""

    name: str


@dataclass(frozen=True)
class LoadDone:
    """A load that the front asked for has ended on the reader thread."""

    load: front_rank.Load
    future: Future[None]


@dataclass(frozen=True)
class Fatal:
    """The process must end with this error."""

    error: Exception


class Progress:
    """What the step thread does now and since when, for whoever must explain a stuck rank. Written by the step thread alone."""

    def __init__(self) -> None:
        self._doing: tuple[str, float] | None = None

    def begin(self, what: str) -> None:
        """Something that must end within the stuck-rank bound begins."""
        self._doing = (what, time.monotonic())

    def done(self) -> None:
        """It ended."""
        self._doing = None

    def overdue(self, bound_s: float) -> str | None:
        """What has been going on for longer than `bound_s`, in words."""
        doing = self._doing
        if doing is None or time.monotonic() - doing[1] <= bound_s:
            return None
        return f"{doing[0]} for {time.monotonic() - doing[1]:.0f} s"


Event = FromFront | FrontChanged | FromLeader | FromFollower | CopyIn | LoadDone | Fatal


class RankIo:
    """Sockets and channels of one rank. All public methods but `start` are for the step thread (and `put` for any)."""

    def __init__(self, tp_rank: int, config: ServeConfig, front_endpoint: str, ready: front_rank.RankReady) -> None:
        self.progress = Progress()
        self._stuck_after_s = config.stuck_rank_timeout_s
        self._curve_dir = config.curve_dir
        self._epoch = ""
        self._tp_rank = tp_rank
        self._tp_size = config.tensor_parallel_size
        self._front_endpoint = front_endpoint
        self._ready = ready
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._outbox: deque[tuple[str, msgspec.Struct]] = deque()
        self._wake_in, self._wake_out = self._wake_pair()
        self._front = self._socket(zmq.DEALER)
        curve = curve_for(front_endpoint, self._curve_dir)
        if curve is not None:
            curve.secure_client(self._front)
        self._peer: zmq.Socket[bytes] | None = None
        self._greeted = threading.Event()
        self._front_sender: Sender | None = None
        self._front_receiver: Receiver[front_rank.ToRank] | None = None
        self._front_heard = 0.0
        self._hello_front: HelloReader[front_rank.Hello] = HelloReader(front_rank.Hello)
        self._hello_peer: HelloReader[leader_follower.Hello] = HelloReader(leader_follower.Hello)
        self._peer_senders: dict[bytes, Sender] = {}
        self._peer_receivers: dict[bytes, Receiver[Any]] = {}
        self._peer_heard: dict[bytes, float] = {}
        self._num_dropped = 0
        self._ends = False  # the front said stop: a peer that is gone before us is no news
        self._heartbeat = Heartbeat()
        self._stopping = False
        self._stop_authenticator: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="mstar-io", daemon=True)

    # set-up

    def bind_leader(self, endpoint: str) -> str:
        """Rank 0: bind for the followers; returns the endpoint as bound."""
        self._peer = self._socket(zmq.ROUTER)
        self._peer.setsockopt(zmq.ROUTER_MANDATORY, 1)
        curve = curve_for(endpoint, self._curve_dir)
        if curve is not None:
            self._stop_authenticator = allow_ranks_only(self._context, curve)
            curve.secure_server(self._peer)
        self._peer.bind(endpoint)
        return self._peer.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect_leader(self, endpoint: str, epoch: str) -> None:
        """A follower: connect to rank 0, whose instance has this epoch."""
        self._epoch = epoch
        self._peer = self._socket(zmq.DEALER, f"follower-{self._tp_rank}-{epoch}".encode())
        curve = curve_for(endpoint, self._curve_dir)
        if curve is not None:
            curve.secure_client(self._peer)
        self._peer.connect(endpoint)
        self._peer_senders[b""] = Sender(self._epoch)
        self._peer_receivers[b""] = Receiver(self._epoch, leader_follower.ToFollower, "the leader")

    def start(self, epoch: str, timeout_s: float) -> None:
        """Start the thread under the instance's epoch; returns when leader and followers greeted each other.

        Raises WorkerError after `timeout_s`.
        """
        self._epoch = epoch
        if self._tp_size == 1:
            self._greeted.set()
        self._thread.start()
        if not self._greeted.wait(timeout_s):
            raise WorkerError(f"TP rank {self._tp_rank}: leader and followers did not find each other within {timeout_s:g} s")

    # step thread

    def get(self, timeout_s: float | None) -> Event | None:
        """The next event; None if none came in time (0: do not wait)."""
        try:
            if timeout_s == 0:
                return self._inbox.get_nowait()
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def put(self, event: Event) -> None:
        """Any thread: hand the step thread an event of this rank's own."""
        self._inbox.put(event)

    def to_front(self, message: front_rank.ToFront) -> None:
        """Send to the present front; dropped while there is none."""
        self._hand_over("front", message)

    def to_followers(self, message: leader_follower.ToFollower) -> None:
        """Leader: send to every follower, in order."""
        if self._tp_size > 1:
            self._hand_over("peers", message)

    def to_leader(self, message: leader_follower.ToLeader) -> None:
        """Follower: send to the leader."""
        self._hand_over("peers", message)

    def num_dropped(self) -> int:
        """Frames of strangers and other epochs so far."""
        return self._num_dropped

    def close(self) -> None:
        """Send what is handed over, then stop the thread and close the sockets."""
        self._stopping = True
        self._wake_out.send(b"")
        self._thread.join(timeout=2.0)
        self._stop_authenticator()
        self._context.destroy(linger=500)

    # io thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._inbox.put(Fatal(error if isinstance(error, MstarError) else WorkerError(f"io thread: {error!r}")))
            if not isinstance(error, MstarError):
                log.error("io thread: %s", traceback.format_exc())
            if not self._stopping:
                time.sleep(EXIT_GRACE_S)  # the step thread normally ends the process well before
                log.error("TP rank %d: ending, the step thread did not react to: %s", self._tp_rank, error)
                os._exit(4)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        poller.register(self._front, zmq.POLLIN)
        if self._peer is not None:
            poller.register(self._peer, zmq.POLLIN)
        next_beat = 0.0
        connected = False
        while True:
            if not connected and self._greeted.is_set():
                self._front.setsockopt(zmq.IDENTITY, front_rank.rank_identity(self._tp_rank, self._epoch))
                self._front.connect(self._front_endpoint)
                connected = True
            ready = dict(poller.poll(max(1, int((next_beat - time.monotonic()) * 1000)) if next_beat else 1))
            if self._wake_in in ready:
                self._drain(self._wake_in)
            if self._peer is not None and self._peer in ready:
                self._receive_peers()
            if self._front in ready:
                self._receive_front()
            self._send_all()
            if self._stopping and not self._outbox:
                return
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()

    def _beat(self) -> None:
        self._heartbeat.beat()
        overdue = self.progress.overdue(self._stuck_after_s)
        if overdue is not None:
            self._end_stuck(overdue)
        if self._greeted.is_set():
            self._check_peers()
        silent = time.monotonic() - self._front_heard > FRONT_SILENT_S
        if self._greeted.is_set() and (self._front_sender is None or silent):
            self._send(self._front, [seal_hello(self._epoch, self._ready)])
        if self._front_sender is not None:
            self._send(self._front, [self._front_sender.beat()])
        if self._peer is None:
            return
        if self._tp_rank != 0 and not self._greeted.is_set():
            self._send(self._peer, [seal_hello(self._epoch, leader_follower.FollowerHello(self._tp_rank))])
        for identity, sender in self._peer_senders.items():
            if self._greeted.is_set():
                self._send(self._peer, [identity, sender.beat()] if identity else [sender.beat()])

    def _check_peers(self) -> None:
        """A peer's io thread beats whatever else it does: one that is silent for long is stopped, or its host or link is gone."""
        now = time.monotonic()
        for identity, receiver in self._peer_receivers.items():
            silent_s = now - self._peer_heard.setdefault(identity, now)
            if silent_s > self._stuck_after_s:
                self._end_stuck(f"nothing has come from {receiver.peer} for {silent_s:.0f} s")

    def _end_stuck(self, overdue: str) -> None:
        """Something never ends: a collective whose peer is gone or stopped, most likely, or a peer's silence."""
        peers = {receiver.peer: receiver.last_seq for receiver in self._peer_receivers.values()}
        log.error("TP rank %d is stuck: %s; last messages of its peers: %s; its threads:", self._tp_rank, overdue, peers)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(5)

    def _receive_front(self) -> None:
        for parts in self._drain(self._front):
            data = parts[-1]
            hello = self._hello_front.open(data)
            if hello is not None:
                self._welcome(*hello)
            elif self._front_receiver is not None:
                before = self._front_receiver.num_dropped
                message = self._front_receiver.open(data)
                if self._front_receiver.num_dropped == before:
                    self._front_heard = time.monotonic()
                else:
                    self._num_dropped += 1
                if message is not None:
                    self._ends |= isinstance(message, front_rank.Stop)
                    self._inbox.put(FromFront(message))
            else:
                self._num_dropped += 1

    def _welcome(self, epoch: str, message: front_rank.Hello) -> None:
        if epoch != self._epoch or not isinstance(message, front_rank.Welcome) or message.tp_rank != self._tp_rank:
            self._num_dropped += 1
            return
        self._front_heard = time.monotonic()
        if self._front_sender is not None and self._front_sender.epoch == message.epoch:
            return
        self._outbox = deque(item for item in self._outbox if item[0] != "front")
        self._front_sender = Sender(message.epoch)
        self._front_receiver = Receiver(message.epoch, front_rank.ToRank, "the front")
        self._inbox.put(FrontChanged(message.epoch))

    def _receive_peers(self) -> None:
        assert self._peer is not None
        for parts in self._drain(self._peer):
            identity = parts[0] if len(parts) > 1 else b""
            data = parts[-1]
            hello = self._hello_peer.open(data)
            if hello is not None:
                self._greet(identity, *hello)
                continue
            receiver = self._peer_receivers.get(identity)
            if receiver is None:
                self._num_dropped += 1
                continue
            dropped = receiver.num_dropped
            message = receiver.open(data)
            if receiver.num_dropped == dropped:
                self._peer_heard[identity] = time.monotonic()
            self._num_dropped += receiver.num_dropped - dropped
            if message is not None:
                self._inbox.put(FromFollower(message) if self._tp_rank == 0 else FromLeader(message))

    def _greet(self, identity: bytes, epoch: str, message: leader_follower.Hello) -> None:
        if epoch != self._epoch:
            self._num_dropped += 1
        elif isinstance(message, leader_follower.FollowerHello) and self._tp_rank == 0 and 0 < message.tp_rank < self._tp_size:
            if identity not in self._peer_senders:
                self._peer_senders[identity] = Sender(self._epoch)
                self._peer_receivers[identity] = Receiver(self._epoch, leader_follower.ToLeader, f"follower {message.tp_rank}")
            assert self._peer is not None
            self._send(self._peer, [identity, seal_hello(self._epoch, leader_follower.LeaderGreeting(message.tp_rank))])
            if len(self._peer_senders) == self._tp_size - 1:
                self._greeted.set()
        elif isinstance(message, leader_follower.LeaderGreeting) and message.tp_rank == self._tp_rank:
            self._greeted.set()
        else:
            self._num_dropped += 1

    def _send_all(self) -> None:
        while self._outbox:
            way, message = self._outbox.popleft()
            if way == "front":
                if self._front_sender is not None:
                    self._send(self._front, [self._front_sender.seal(message)])
            else:
                assert self._peer is not None
                for identity, sender in self._peer_senders.items():
                    frame = sender.seal(message)
                    self._send(self._peer, [identity, frame] if identity else [frame])

    def _send(self, socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            if socket is self._front or not self._greeted.is_set():
                return  # the front is gone or drowns (its next epoch starts anew, a gap shows it), or the leader is not there yet
            raise ProtocolError(f"TP rank {self._tp_rank}: a peer rank does not take messages") from None
        except zmq.ZMQError as error:
            if not self._ends:
                raise ProtocolError(f"TP rank {self._tp_rank}: a peer rank is not reachable: {error}") from None

    def _drain(self, socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        """What has come, up to a bound: a socket that has more is ready again at the next poll."""
        frames: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(frames) < MAX_READ_AT_ONCE:
                frames.append(socket.recv_multipart(zmq.NOBLOCK))
        return frames

    def _hand_over(self, way: str, message: msgspec.Struct) -> None:
        self._outbox.append((way, message))
        self._wake_out.send(b"")

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        inner, outer = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        inner.set_hwm(0)
        outer.set_hwm(0)
        inner.bind("inproc://wake")
        outer.connect("inproc://wake")
        return inner, outer

    def _socket(self, kind: int, identity: bytes | None = None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_TO_SEND)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_RECEIVED)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        return socket
