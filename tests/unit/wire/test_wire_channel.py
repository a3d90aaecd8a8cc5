"""One direction of one channel: what a frame is worth, whoever sent it. The `msgpack` package is the independent reader."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.errors import ProtocolError
from mstar.types import Remove, Row, SamplingParams, Step
from mstar.wire import front_rank, leader_follower
from mstar.wire.channel import MAX_FRAME_BYTES, HelloReader, Receiver, Sender, seal_hello

EPOCH = "e1"
UNION = leader_follower.ToFollower


def channel():
    return Sender(EPOCH), Receiver(EPOCH, UNION, "the leader")


def frame(epoch=EPOCH, kind=0, seq=1, body=None):
    """A frame made by another library."""
    return msgpack.packb([epoch, kind, seq, {"type": "remove", "rid": "r", "after_tp_seq": 0} if body is None else body])


def test_messages_come_out_in_order_and_equal():
    sender, receiver = channel()
    step = Step(1, (Row("a", 0, 3), Row("b", 7, 1)), ("c",), 8, 3, b"\x00\xff")
    for message in (step, Remove("a", 1), Remove("b", 1)):
        assert receiver.open(sender.seal(message)) == message
    assert receiver.last_seq == sender.last_seq == 3 and receiver.num_dropped == 0


def test_another_librarys_reader_sees_plain_messagepack():
    sender, _ = channel()
    sampling = SamplingParams(16, seed=2**63 - 1, temperature=0.5, stop_token_ids=(1, 2))
    ingest = front_rank.Ingest("r", (1, 2, 3), sampling, adapter="sql@1", cache_key=b"\x01\x02")
    epoch, kind, seq, body = msgpack.unpackb(sender.seal(ingest))
    assert (epoch, kind, seq) == (EPOCH, 0, 1)
    assert body == {
        "type": "ingest", "rid": "r", "prompt": [1, 2, 3], "output": [], "adapter": "sql@1", "cache_key": b"\x01\x02",
        "sampling": {"max_tokens": 16, "seed": 2**63 - 1, "temperature": 0.5, "stop_token_ids": [1, 2]},
    }  # fmt: skip
    assert msgpack.unpackb(sender.beat()) == [EPOCH, 1, 1, None]
    assert msgpack.unpackb(seal_hello("instance", leader_follower.FollowerHello(2))) == [
        "instance", 2, 0, {"type": "follower_hello", "tp_rank": 2},
    ]  # fmt: skip


def test_what_another_library_wrote_is_read():
    _, receiver = channel()
    assert receiver.open(frame()) == Remove("r", 0)


@pytest.mark.parametrize("seq", [0, 2, 9, -1, 2**63 - 1])
def test_a_gap_is_a_broken_protocol_and_takes_no_number(seq):
    _, receiver = channel()
    with pytest.raises(ProtocolError, match="the leader"):
        receiver.open(frame(seq=seq))
    assert receiver.open(frame(seq=1)) is not None


def test_a_repeated_message_is_a_broken_protocol():
    sender, receiver = channel()
    sealed = sender.seal(Remove("a", 0))
    receiver.open(sealed)
    with pytest.raises(ProtocolError):
        receiver.open(sealed)


def test_a_beat_finds_the_last_message_lost():
    sender, receiver = channel()
    assert receiver.open(sender.beat()) is None
    receiver.open(sender.seal(Remove("a", 0)))
    assert receiver.open(sender.beat()) is None
    sender.seal(Remove("b", 0))  # never arrives
    with pytest.raises(ProtocolError, match="message 2 never came"):
        receiver.open(sender.beat())
    assert receiver.num_dropped == 0


@pytest.mark.parametrize(
    "data",
    [
        frame(epoch="e0"),
        frame(epoch="e0", seq=7),
        frame(kind=2, seq=0),
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgpack.packb([EPOCH, 0]),
        msgpack.packb([EPOCH, 0, 1, {}, "more"]),
        msgpack.packb({"epoch": EPOCH, "kind": 0, "seq": 1}),
        msgpack.packb([EPOCH, 0, 1.5, {}]),
        msgpack.packb([EPOCH, 0, 2**64 - 1, {}]) + b"trailing",
        b"\x94\xa2e1\x00\x01" + b"\x91" * 100_000 + b"\x01",
        b"\x00" * (MAX_FRAME_BYTES + 1),
    ],
    ids=range(13),
)
def test_strangers_the_past_and_oversize_are_counted_and_dropped(data):
    _, receiver = channel()
    assert receiver.open(data) is None and receiver.num_dropped == 1
    assert receiver.open(frame()) == Remove("r", 0)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"type": "unknown"},
        {"type": "remove", "rid": "r"},
        {"type": "remove", "rid": 7, "after_tp_seq": 0},
        {"type": "remove", "rid": "r", "after_tp_seq": 0, "more": 1},
        {"type": "step", "seq": 1, "rows": [["a", 0]]},
        [1, 2],
        "text",
    ],
)
def test_a_body_of_this_epochs_own_peer_that_does_not_decode_is_a_broken_protocol(body):
    _, receiver = channel()
    with pytest.raises(ProtocolError, match="does not decode"):
        receiver.open(frame(body=body))


def test_a_message_for_another_edge_does_not_decode_here():
    _, receiver = channel()
    with pytest.raises(ProtocolError):
        receiver.open(Sender(EPOCH).seal(front_rank.Abort("r")))


def test_a_frame_of_an_unknown_kind_is_no_message():
    _, receiver = channel()
    with pytest.raises(ProtocolError):
        receiver.open(frame(kind=3))


def test_a_message_over_the_bound_is_refused_before_it_takes_a_number():
    sender, receiver = channel()
    with pytest.raises(ProtocolError, match="over the frame bound"):
        sender.seal(Remove("x" * MAX_FRAME_BYTES, 0))
    assert sender.last_seq == 0
    largest = Remove("x" * (MAX_FRAME_BYTES - 256), 0)
    assert receiver.open(sender.seal(largest)) == largest


def test_hellos_are_read_by_their_own_reader_and_nothing_else_is():
    reader = HelloReader(front_rank.Hello)
    welcome = front_rank.Welcome(1, "channel")
    assert reader.open(seal_hello("instance", welcome)) == ("instance", welcome)
    for data in (frame(), Sender(EPOCH).beat(), b"", seal_hello("instance", Remove("a", 0)), frame(kind=2, seq=0, body=[])):
        assert reader.open(data) is None


MESSAGES = st.one_of(
    st.builds(Remove, st.text(max_size=8), st.integers(0, 2**62)),
    st.builds(
        Step,
        st.integers(0, 2**62),
        st.lists(st.builds(Row, st.text(max_size=8), st.integers(0, 2**31), st.integers(0, 2**31)), max_size=5).map(tuple),
        st.lists(st.text(max_size=8), max_size=3).map(tuple),
        st.integers(0, 4096),
        st.integers(0, 2**62),
        st.binary(max_size=16),
    ),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(MESSAGES, max_size=6))
def test_any_messages_survive_the_way(messages):
    sender, receiver = channel()
    assert [receiver.open(sender.seal(message)) for message in messages] == messages


RECEIVERS = {"to follower": UNION, "to rank": front_rank.ToRank, "to front": front_rank.ToFront, "to leader": leader_follower.ToLeader}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=6) | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def only_protocol_errors(data):
    for union in RECEIVERS.values():
        receiver = Receiver(EPOCH, union, "a peer")
        try:
            assert receiver.open(data) is None or receiver.last_seq == 1
        except ProtocolError:
            assert receiver.last_seq == 0
    for union in (front_rank.Hello, leader_follower.Hello):
        HelloReader(union).open(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_raise_nothing_but_protocol_errors(data):
    only_protocol_errors(data)


@settings(deadline=None, max_examples=200)
@given(st.integers(-1, 3), st.integers(-1, 3), VALUES)
def test_any_frame_of_this_epoch_raises_nothing_but_protocol_errors(kind, seq, body):
    only_protocol_errors(msgpack.packb([EPOCH, kind, seq, body]))


@settings(deadline=None, max_examples=200)
@given(MESSAGES, st.data())
def test_any_damage_to_a_frame_raises_nothing_but_protocol_errors(message, data):
    sealed = bytearray(Sender(EPOCH).seal(message))
    for _ in range(data.draw(st.integers(1, 3))):
        sealed[data.draw(st.integers(0, len(sealed) - 1))] = data.draw(st.integers(0, 255))
    only_protocol_errors(bytes(sealed[: data.draw(st.integers(0, len(sealed)))]))


@pytest.mark.parametrize("depth", [600, 5000, 100_000])
def test_bodies_nested_without_end_raise_nothing_but_protocol_errors(depth):
    for kind in (0, 2):
        only_protocol_errors(b"\x94\xa2e1" + bytes([kind]) + b"\x01" + b"\x91" * depth + b"\x01")
