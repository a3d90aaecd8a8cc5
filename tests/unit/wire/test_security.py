"""CURVE: where it is required, and that nobody without the rank's key gets a word in or keeps others waiting."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
from contextlib import asynccontextmanager

import pytest
import zmq

from mstar.conductor.links import RankLinks
from mstar.errors import ConfigError
from mstar.wire import front_rank
from mstar.wire.channel import HelloReader, seal_hello
from mstar.wire.security import Curve, curve_for, make_keys

BOUND_S = 30.0
READY = front_rank.RankReady(0, 1, 1, 1, 100, 1, 1, "none")
EPOCH = "instance"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "curve"
    make_keys(folder)
    return folder


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x", "inproc://x", "tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://localhost:1", "tcp://[::1]:1"]
)
def test_loopback_and_ipc_need_no_keys(endpoint):
    assert curve_for(endpoint, None) is None


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "0.0.0.0",
        "*",
        "[2001:db8::1]",
        "[::]",
        "front.example",
        "127.0.0.1.example",
        "127.evil",
        "eth0",
        "localhost.example",
        "",
    ],
)
def test_every_other_address_does(host, keys):
    with pytest.raises(ConfigError, match="needs keys"):
        curve_for(f"tcp://{host}:7000", None)
    assert curve_for(f"tcp://{host}:7000", str(keys)) is not None


def test_keys_that_are_given_are_used_on_loopback_too(keys):
    assert curve_for("tcp://127.0.0.1:1", str(keys)) is not None
    assert curve_for("ipc:///tmp/x", str(keys)) is None


def test_secrets_are_readable_by_their_owner_alone_and_never_written_over(keys):
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for name in ("server", "rank"):
        assert stat.S_IMODE((keys / f"{name}.key_secret").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="holds keys already"):
        make_keys(keys)


def test_a_folder_without_usable_keys_is_named(keys, tmp_path):
    with pytest.raises(ConfigError, match="mstar keys"):
        Curve.load(str(tmp_path))
    for name in ("server", "rank"):
        shutil.copyfile(keys / f"{name}.key", tmp_path / f"{name}.key_secret")  # the public halves alone
    with pytest.raises(ConfigError, match="no secret keys"):
        Curve.load(str(tmp_path))


@asynccontextmanager
async def front(keys):
    """A front's links on a free port; yields its endpoint and the events it told its conductor."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    events = []
    links = RankLinks(
        endpoint,
        "front",
        1,
        curve_dir=str(keys),
        on_up=lambda ranks: events.append("up"),
        on_down=lambda reason: events.append("down"),
        on_message=lambda tp_rank, message: events.append(message),
        on_dropped=lambda: events.append("dropped"),
    )
    links.start()
    try:
        yield endpoint, events
    finally:
        await links.close()


def dealer(context, endpoint, secure):
    """A socket that says it is rank 0."""
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IDENTITY, front_rank.rank_identity(0, EPOCH))
    secure(sock)
    sock.connect(endpoint)
    return sock


async def is_welcomed(sock):
    """Says hello as a rank does; whether the front answered, within the bound."""
    hello = HelloReader(front_rank.Hello)
    deadline = asyncio.get_running_loop().time() + BOUND_S
    while asyncio.get_running_loop().time() < deadline:
        sock.send(seal_hello(EPOCH, READY))
        await asyncio.sleep(0.05)
        while sock.poll(0):
            found = hello.open(sock.recv())
            if found is not None and isinstance(found[1], front_rank.Welcome):
                return True
    return False


def no_keys(sock):
    """As if there were no CURVE."""


def plain_password(sock):
    sock.plain_username, sock.plain_password = b"rank", b"secret"


def only_the_servers_public_key(keys):
    """What somebody has who saw the public half: a key pair of its own."""

    def secure(sock):
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
        sock.curve_serverkey = Curve.load(str(keys)).server_public

    return secure


def another_set_of_keys(sock):
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_serverkey = zmq.curve_keypair()[0]


@pytest.mark.parametrize("kind", ["none", "password", "own pair", "other set"])
def test_a_stranger_without_the_ranks_key_gets_no_word_in_and_a_rank_is_served_meanwhile(kind, keys):
    secure = {"none": no_keys, "password": plain_password, "own pair": only_the_servers_public_key(keys), "other set": another_set_of_keys}[
        kind
    ]

    async def run():
        context = zmq.Context()
        async with front(keys) as (endpoint, events):
            strangers = [dealer(context, endpoint, secure) for _ in range(5)]
            for stranger in strangers:
                for _ in range(20):
                    stranger.send(seal_hello(EPOCH, READY), zmq.NOBLOCK)
            rank = dealer(context, endpoint, Curve.load(str(keys)).secure_client)
            assert await is_welcomed(rank)
            await asyncio.sleep(0.3)
            assert events == ["up"], "nothing of a stranger reaches the channel, not even to be counted"
            assert not any(stranger.poll(0) for stranger in strangers)
        context.destroy(linger=0)

    asyncio.run(run())


def test_connections_that_say_nothing_or_nonsense_keep_nobody_waiting(keys):
    async def run():
        context = zmq.Context()
        async with front(keys) as (endpoint, events):
            host, port = endpoint.removeprefix("tcp://").split(":")
            raw = [socket.create_connection((host, int(port))) for _ in range(50)]
            for index, connection in enumerate(raw):
                if index % 2:
                    connection.sendall(bytes(index) * 20 + b"GET / HTTP/1.1\r\n\r\n")
            rank = dealer(context, endpoint, Curve.load(str(keys)).secure_client)
            assert await is_welcomed(rank)
            assert events == ["up"]
            for connection in raw:
                connection.close()
        context.destroy(linger=0)

    asyncio.run(run())
