"""One direction of one ordered channel, without a socket: numbering, framing, and what a received frame is worth.

    frame = [epoch, kind, seq, body]      MessagePack; kind: 0 message, 1 beat (seq is the sender's last), 2 hello (seq 0)

A frame that is too long, undecodable as a frame, or of another epoch comes from a stranger or the past: it is counted and dropped.
A frame of this epoch that leaves a gap, or whose body does not decode, breaks the protocol: ProtocolError.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from mstar.errors import ProtocolError

MAX_FRAME_BYTES = 16 << 20
MAX_QUEUED_TO_SEND = 100_000  # frames for a peer that does not take them; beyond, the channel is given up
MAX_QUEUED_RECEIVED = 1_000  # frames per peer that wait to be read; beyond, the peer waits: a flood fills no memory here
MAX_READ_AT_ONCE = 256  # frames taken from a socket before other work has its turn

_MESSAGE, _BEAT, _HELLO = 0, 1, 2
_UNDECODABLE = (msgspec.DecodeError, msgspec.ValidationError, RecursionError)  # the last: nested deeper than the decoder goes

T = TypeVar("T")


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: str
    kind: int
    seq: int
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)


class Sender:
    """Numbers what goes out under one epoch."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.last_seq = 0

    def seal(self, message: msgspec.Struct) -> bytes:
        """The next message as a frame. Raises ProtocolError over the size bound; then no number is used."""
        body = _encoder.encode(message)
        if len(body) + 128 > MAX_FRAME_BYTES:
            raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is over the frame bound of {MAX_FRAME_BYTES}")
        self.last_seq += 1
        return _encoder.encode(_Frame(self.epoch, _MESSAGE, self.last_seq, msgspec.Raw(body)))

    def beat(self) -> bytes:
        """A frame that says the last number used, so that a lost last message is found."""
        return _encoder.encode(_Frame(self.epoch, _BEAT, self.last_seq))


def seal_hello(epoch: str, message: msgspec.Struct) -> bytes:
    """A message outside the numbered channel: the handshake."""
    return _encoder.encode(_Frame(epoch, _HELLO, 0, msgspec.Raw(_encoder.encode(message))))


class Receiver(Generic[T]):
    """Checks what comes in under one epoch; `union` is the type of its messages."""

    def __init__(self, epoch: str, union: Any, peer: str) -> None:
        self.epoch = epoch
        self.peer = peer
        self.last_seq = 0
        self.num_dropped = 0
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def open(self, data: bytes) -> T | None:
        """The message in a frame; None for a beat and for what is dropped. Raises ProtocolError for a gap or a bad body."""
        frame = _parse(data)
        if frame is None or frame.epoch != self.epoch or frame.kind == _HELLO:
            self.num_dropped += 1
            return None
        if frame.kind not in (_MESSAGE, _BEAT):
            raise ProtocolError(f"{self.peer} sent a frame of unknown kind {frame.kind}")
        if frame.kind == _BEAT:
            if frame.seq != self.last_seq:
                raise ProtocolError(f"{self.peer} is at message {frame.seq}, but message {self.last_seq + 1} never came")
            return None
        if frame.seq != self.last_seq + 1:
            raise ProtocolError(f"message {frame.seq} of {self.peer} came after {self.last_seq}")
        try:
            message = self._decoder.decode(frame.body)
        except _UNDECODABLE as error:
            raise ProtocolError(f"message {frame.seq} of {self.peer} does not decode: {error}") from None
        self.last_seq = frame.seq
        return message


class HelloReader(Generic[T]):
    """Reads handshakes: (epoch, message), or None for anything else; a handshake that does not decode is counted."""

    def __init__(self, union: Any) -> None:
        self.num_dropped = 0
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def open(self, data: bytes) -> tuple[str, T] | None:
        """The handshake in a frame."""
        frame = _parse(data)
        if frame is None or frame.kind != _HELLO:
            return None
        try:
            return frame.epoch, self._decoder.decode(frame.body)
        except _UNDECODABLE:
            self.num_dropped += 1
            return None


def _parse(data: bytes) -> _Frame | None:
    if len(data) > MAX_FRAME_BYTES:
        return None
    try:
        return _frames.decode(data)
    except _UNDECODABLE:
        return None
