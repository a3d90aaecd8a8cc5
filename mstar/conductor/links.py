"""The front's side of the channels to the ranks: one ROUTER socket, one numbered channel per rank.

    rank says RankReady ─► (all ranks of one instance epoch are here) ─► Welcome to each, channels start at 1 ─► up
    another instance epoch says RankReady, or a rank is silent too long ─► down ─► …

A hello counts only with the supervisor's secret, from the identity that its rank and epoch give: no stranger takes a rank's place.

Front process, asyncio loop. Decides nothing about requests: it tells the conductor `up`, `down` and each message.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable

import zmq

from mstar.errors import ConfigError, ProtocolError
from mstar.wire import front_rank
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
REPORT_S = 5.0  # refused hellos are logged once in so long
SILENT_S = 5.0  # a rank that has not been heard for so long is reported

log = logging.getLogger(__name__)


class RankLinks:
    """All ranks of the instance, as one thing that is up or down."""

    def __init__(
        self,
        endpoint: str,
        front_epoch: str,
        tp_size: int,
        *,
        curve_dir: str | None = None,
        secret: str = "",
        on_up: Callable[[tuple[front_rank.RankReady, ...]], None],
        on_down: Callable[[str], None],
        on_message: Callable[[int, front_rank.ToFront], None],
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._front_epoch = front_epoch
        self._secret = secret
        self._tp_size = tp_size
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._on_dropped = on_dropped
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_TO_SEND)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_RECEIVED)
        curve = curve_for(endpoint, curve_dir)
        self._stop_authenticator: Callable[[], None] = lambda: None
        if curve is not None:
            self._stop_authenticator = allow_ranks_only(self._context, curve)
            curve.secure_server(self._socket)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"front_endpoint {endpoint}: cannot listen there: {error}") from None
        self._hello: HelloReader[front_rank.Hello] = HelloReader(front_rank.Hello)
        self._ready: dict[int, front_rank.RankReady] = {}
        self._instance_epoch = ""
        self._rank_of: dict[bytes, int] = {}  # identities of the present instance's ranks
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver[front_rank.ToFront]] = {}
        self._heard: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._check_scheduled = False
        self._refused_at = -REPORT_S

    @property
    def is_up(self) -> bool:
        """Whether every rank of one instance is counted in."""
        return len(self._senders) == self._tp_size

    @property
    def num_ready(self) -> int:
        """Ranks of the present instance that said ready."""
        return len(self._ready)

    def silent(self) -> str | None:
        """Which ranks have not been heard for a while, in words; None where all were."""
        now = time.monotonic()
        gone = {tp_rank: now - self._heard[tp_rank] for tp_rank in self._senders if now - self._heard[tp_rank] > SILENT_S}
        return ", ".join(f"rank {tp_rank} has been silent for {seconds:.0f} s" for tp_rank, seconds in sorted(gone.items())) or None

    def start(self) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._readable)
        self._beating = asyncio.create_task(self._beat())

    def send(self, tp_rank: int, message: front_rank.ToRank) -> None:
        """The next message of that rank's channel. Dropped while down: the next `up` starts anew."""
        sender = self._senders.get(tp_rank)
        if sender is None:
            return
        self._put(tp_rank, sender.seal(message))

    def send_all(self, message: front_rank.ToRank) -> None:
        """To every rank."""
        for tp_rank in range(self._tp_size):
            self.send(tp_rank, message)

    async def close(self) -> None:
        """Stop listening; what was sent still goes out."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        self._socket.close()
        self._stop_authenticator()
        await asyncio.to_thread(self._context.term)

    def _put(self, tp_rank: int, frame: bytes) -> None:
        try:
            identity = front_rank.rank_identity(tp_rank, self._instance_epoch)
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._down(f"rank {tp_rank} is not reachable: {error}")
        self._look_again()  # the socket's file descriptor is edge-triggered, and a send may have taken the edge

    def _look_again(self) -> None:
        if self._loop is not None and not self._check_scheduled:
            self._check_scheduled = True
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        self._check_scheduled = False
        for _ in range(MAX_READ_AT_ONCE):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        self._look_again()

    def _take(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            self._on_dropped()
            return
        hello = self._hello.open(parts[1])
        if hello is not None:
            self._take_ready(parts[0], *hello)
            return
        tp_rank = self._rank_of.get(parts[0])
        receiver = self._receivers.get(tp_rank) if tp_rank is not None else None
        if receiver is None or tp_rank is None:
            self._on_dropped()
            return
        dropped = receiver.num_dropped
        try:
            message = receiver.open(parts[1])
        except ProtocolError as error:
            self._down(str(error))
            return
        if receiver.num_dropped > dropped:
            self._on_dropped()
            return
        self._heard[tp_rank] = time.monotonic()
        if message is not None:
            self._on_message(tp_rank, message)

    def _refusal(self, identity: bytes, epoch: str, message: front_rank.RankReady) -> str | None:
        if not hmac.compare_digest(message.secret.encode(), self._secret.encode()):
            return "it does not belong to this front's supervisor"
        if message.tp_size != self._tp_size:
            return f"it is one of {message.tp_size} ranks, this front serves {self._tp_size}"
        if not 0 <= message.tp_rank < self._tp_size or identity != front_rank.rank_identity(message.tp_rank, epoch):
            return "it is not what it says"
        return None

    def _take_ready(self, identity: bytes, epoch: str, message: front_rank.Hello) -> None:
        refusal = self._refusal(identity, epoch, message) if isinstance(message, front_rank.RankReady) else "it is no rank"
        if refusal is not None or not isinstance(message, front_rank.RankReady):
            self._on_dropped()
            if time.monotonic() - self._refused_at > REPORT_S:
                self._refused_at = time.monotonic()
                log.warning("somebody who wants to be a rank is refused: %s", refusal)
            return
        if epoch != self._instance_epoch:
            self._down("the ranks started anew")
            self._ready.clear()
            self._instance_epoch = epoch
            self._rank_of = {front_rank.rank_identity(tp_rank, epoch): tp_rank for tp_rank in range(self._tp_size)}
        self._ready[message.tp_rank] = message
        if self.is_up:
            self._welcome([message.tp_rank])
        elif len(self._ready) == self._tp_size:
            channel = f"{epoch}.{self._front_epoch}"
            for tp_rank in range(self._tp_size):
                self._senders[tp_rank] = Sender(channel)
                self._receivers[tp_rank] = Receiver(channel, front_rank.ToFront, f"rank {tp_rank}")
                self._heard[tp_rank] = time.monotonic()
            self._welcome(range(self._tp_size))
            if len(self._senders) == self._tp_size:  # a welcome that could not be sent took the channels down again
                self._on_up(tuple(self._ready[tp_rank] for tp_rank in range(self._tp_size)))

    def _welcome(self, tp_ranks: Iterable[int]) -> None:
        for tp_rank in tp_ranks:
            welcome = front_rank.Welcome(tp_rank, f"{self._instance_epoch}.{self._front_epoch}")
            self._put(tp_rank, seal_hello(self._instance_epoch, welcome))

    async def _beat(self) -> None:
        while True:
            for tp_rank, sender in list(self._senders.items()):
                if self._senders.get(tp_rank) is sender:
                    self._put(tp_rank, sender.beat())
            await asyncio.sleep(BEAT_S)

    def _down(self, reason: str) -> None:
        was_up = self.is_up
        self._senders.clear()
        self._receivers.clear()
        if was_up:
            log.warning("instance down: %s", reason)
            self._on_down(reason)
