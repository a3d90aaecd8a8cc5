"""CURVE on the channels: who may connect at all. Loopback and ipc need none; every other address does.

A folder holds two certificates, made by `mstar keys DIR`: `server` (front and leader bind with it) and `rank` (whoever connects). A
listening socket takes that one client key and no other; frames of strangers never reach the channel.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from mstar.errors import ConfigError

SERVER, RANK = "server", "rank"


@dataclass(frozen=True)
class Curve:
    """Both pairs of keys."""

    server_public: bytes
    server_secret: bytes
    rank_public: bytes
    rank_secret: bytes

    @classmethod
    def load(cls, folder: str) -> Curve:
        """Read the certificates. Raises ConfigError where they are not there."""
        try:
            server_public, server_secret = zmq.auth.load_certificate(Path(folder) / f"{SERVER}.key_secret")
            rank_public, rank_secret = zmq.auth.load_certificate(Path(folder) / f"{RANK}.key_secret")
        except (OSError, ValueError) as error:
            raise ConfigError(f"curve_dir {folder}: {error}; make the keys with `mstar keys {folder}`") from None
        if server_secret is None or rank_secret is None:
            raise ConfigError(f"curve_dir {folder}: the certificates hold no secret keys; make them with `mstar keys {folder}`")
        return cls(server_public, server_secret, rank_public, rank_secret)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind: only holders of the rank key may connect (with `allow_ranks_only` on its context)."""
        socket.curve_secretkey = self.server_secret
        socket.curve_publickey = self.server_public
        socket.curve_server = True

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Before connect."""
        socket.curve_secretkey = self.rank_secret
        socket.curve_publickey = self.rank_public
        socket.curve_serverkey = self.server_public


def make_keys(folder: Path) -> None:
    """Write both certificates; the folder and its secrets are readable by the owner alone. Raises ConfigError where they exist."""
    if any((folder / f"{name}.key_secret").exists() for name in (SERVER, RANK)):
        raise ConfigError(f"{folder} holds keys already; remove them first to make new ones")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (SERVER, RANK):
        _, secret = zmq.auth.create_certificates(folder, name)
        Path(secret).chmod(0o600)


def allow_ranks_only(context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> Callable[[], None]:
    """Start the context's authenticator with the rank key as the only allowed client; returns what stops it."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_OneKey(curve.rank_public))
    return authenticator.stop


class _OneKey:
    """Accepts one client key (z85)."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key` (z85) may connect."""
        return hmac.compare_digest(key, self._public)


def curve_for(endpoint: str, folder: str | None) -> Curve | None:
    """The keys for an endpoint; None where it needs none and none are configured. Raises ConfigError off loopback without keys."""
    if folder is not None and endpoint.startswith("tcp://"):
        return Curve.load(folder)
    if endpoint.startswith(("ipc://", "inproc://")) or _is_loopback(endpoint):
        return None
    raise ConfigError(f"{endpoint} is off loopback and needs keys: make them with `mstar keys DIR` and give --curve-dir DIR on every host")


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or an interface
