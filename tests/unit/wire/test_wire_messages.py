"""Every message of every edge: frozen, tagged, closed, and read back by another library as it is."""

from __future__ import annotations

import inspect
import typing

import msgpack
import msgspec
import pytest

from mstar import types
from mstar.wire import front_rank, leader_follower

EDGES = {
    "ToRank": front_rank.ToRank, "ToFront": front_rank.ToFront, "front hello": front_rank.Hello,
    "ToFollower": leader_follower.ToFollower, "ToLeader": leader_follower.ToLeader, "leader hello": leader_follower.Hello,
}  # fmt: skip
MESSAGES = sorted({message for union in EDGES.values() for message in typing.get_args(union)}, key=lambda message: message.__name__)


@pytest.mark.parametrize("edge", EDGES)
def test_every_edge_is_a_closed_union_of_tagged_messages(edge):
    members = typing.get_args(EDGES[edge])
    tags = [member.__struct_config__.tag for member in members]
    assert len(set(tags)) == len(members) and all(isinstance(tag, str) for tag in tags)
    msgspec.msgpack.Decoder(EDGES[edge])


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_frozen_refuse_unknown_fields_and_say_what_they_are_for(message):
    config = message.__struct_config__
    assert config.frozen and config.forbid_unknown_fields and len(inspect.getdoc(message)) > 10


def example(kind):
    """Any value of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return (example(args[0]),)
    if args:  # a union with None: the value
        return example(next(arg for arg in args if arg is not type(None)))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: example(field.type) for field in msgspec.structs.fields(kind)})
    return {str: "text", int: 7, float: 0.5, bool: True, bytes: b"\x00\xff"}[kind]


def plain(value):
    """As another library reads it."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        if config.array_like:
            return [plain(getattr(value, name)) for name in value.__struct_fields__]
        tagged = {config.tag_field: config.tag} if config.tag else {}
        return {**tagged, **{name: plain(getattr(value, name)) for name in value.__struct_fields__}}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_plain_messagepack_and_come_back_equal(message):
    made = example(message)
    packed = msgspec.msgpack.encode(made)
    read = msgpack.unpackb(packed)
    expected = plain(made)
    assert {key: value for key, value in expected.items() if key in read} == read  # defaults may be left out
    assert msgspec.msgpack.decode(msgpack.packb(read), type=message) == made
    with pytest.raises(AttributeError):
        setattr(made, message.__struct_fields__[0] if message.__struct_fields__ else "more", None)


def test_steps_and_removes_are_the_engines_own_types():
    assert set(typing.get_args(leader_follower.ToFollower)) == {types.Step, types.Remove}
