"""Messages between the leader and its followers. One ordered channel per follower: what fixes the order of admits and teardowns."""

from __future__ import annotations

import msgspec

from mstar.types import Remove, Step

ToFollower = Step | Remove


class CopyHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="copy_hint"):
    """This follower's copy of `name` is in or failed: lets the leader's admission wait less. Nothing correct depends on it."""

    tp_rank: int
    name: str


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fault"):
    """This follower is about to exit, and why."""

    tp_rank: int
    message: str


ToLeader = CopyHint | Fault


class FollowerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="follower_hello"):
    """A follower is connected; repeated until the leader's greeting."""

    tp_rank: int


class LeaderGreeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leader_greeting"):
    """The leader knows this follower; both directions start at seq 1."""

    tp_rank: int


Hello = FollowerHello | LeaderGreeting
