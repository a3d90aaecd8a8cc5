"""A recording of one instance: all that its decisions followed from, so that they can be made again without a model.

The leader writes, in the order in which it applied them: what opened and closed (requests, served names), what it broadcast (Step,
Remove), what each load agreement gave, and what each step sampled. That fixes every slot and page on every rank (`mstar replay`).

    file = frame*            append-only; each start of the instance begins with a Header
    frame = length, crc32    big-endian u32 each, then so many bytes of MessagePack: one record
    Header ─ Served … Ingested … Step ─ Agreed … ─ Ran ─ Remove ─ Step ─ …

Step thread of the leader. A rank that dies leaves at most its last frame torn; a reader stops there, a writer cuts it off.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from mstar.errors import ConfigError
from mstar.types import Remove, SamplingParams, Step

VERSION = 2
_MAX_FRAME_BYTES = 64 << 20

log = logging.getLogger(__name__)


class NodeHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool: a model part with slots, in graph order."""

    node: str
    max_loras: int


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="header"):
    """The instance that the records after it are of. `started` is wall time, for people."""

    nodes: tuple[NodeHeader, ...]
    num_pages: int
    block_size: int
    prefix_caching: bool
    tp_size: int = 1
    started: str = ""
    version: int = VERSION


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="served"):
    """New requests may name an adapter generation; `nodes` are the pools that it has something for.

    `path` and `digest` say which bytes its weights are, for ranks that run the recording again.
    """

    name: str
    nodes: tuple[str, ...]
    path: str = ""
    digest: str = ""


class Unserved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unserved"):
    """No new requests on a generation."""

    name: str


class Ingested(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ingested", omit_defaults=True):
    """A request was opened. `prompt` and `output` (sent before a restart) make its prefix keys; without `sampling` it is a pin."""

    rid: str
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    sampling: SamplingParams | None = None
    adapter: str | None = None
    cache_key: bytes = b""


class Agreed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="agreed"):
    """The outcome of one load agreement: per miss 0 ready, 1 in flight, 2 failed somewhere."""

    node: str
    result: tuple[int, ...]


class Ran(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ran", omit_defaults=True):
    """A step ended. `waits` are requests whose reason to wait changed in the choice of this step; None: it waits no more."""

    seq: int
    fingerprint: bytes
    sampled: dict[str, int] = {}
    failed: dict[str, str] = {}
    waits: dict[str, str | None] = {}


Record = Header | Served | Unserved | Ingested | Agreed | Ran | Step | Remove

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Recorder:
    """Writes one instance's records. Three calls: `note` for what was applied or sent, `agreed`, and `ran` after each step."""

    def __init__(self, path: Path | str, header: Header) -> None:
        """Open `path` for appending, cutting off a torn last frame. Raises ConfigError where it is no recording."""
        self._path = path
        self._waits: dict[str, str] = {}
        self._is_broken = False
        try:
            whole = _whole_bytes(Path(path)) if Path(path).exists() else 0
            self._file = Path(path).open("ab")  # noqa: SIM115 - closed in `close`
            self._file.truncate(whole)
        except OSError as error:
            raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from None
        self.note(header)

    def note(self, record: Record) -> None:
        """Append a record; it reaches the file at the end of the step at the latest."""
        body = _encoder.encode(record)
        self._do(lambda: self._file.write(len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body))

    def agreed(self, node: str, result: Sequence[int]) -> None:
        """One agreement of the step under way gave `result`, without the padding."""
        self.note(Agreed(node, tuple(result)))

    def ran(self, seq: int, fingerprint: bytes, sampled: Mapping[str, int], failed: Mapping[str, str], waits: Mapping[str, str]) -> None:
        """Step `seq` ended. `failed` are rows with the code they failed with, `waits` all waiting requests with what they wait for."""
        changed: dict[str, str | None] = {rid: why for rid, why in waits.items() if self._waits.get(rid) != why}
        changed.update((rid, None) for rid in self._waits if rid not in waits)
        self._waits = dict(waits)
        self.note(Ran(seq, fingerprint, dict(sampled), dict(failed), changed))
        self._do(self._file.flush)

    def close(self) -> None:
        """Write what is left."""
        self._do(self._file.close)

    def _do(self, act: Callable[[], object]) -> None:
        """A disk that is full ends the recording, whose whole frames stay readable, and not the instance."""
        if self._is_broken:
            return
        try:
            act()
        except OSError as error:
            self._is_broken = True
            log.error("the recording %s ends here: %s", self._path, error.strerror)


def read_records(path: Path | str) -> Iterator[Record]:
    """All whole records of a file, in order; a torn tail ends it. Raises ConfigError for a file that is no recording."""
    try:
        with Path(path).open("rb") as file:
            offset = 0
            while True:
                head = file.read(8)
                size, crc = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
                if len(head) < 8 or size > _MAX_FRAME_BYTES:
                    break
                body = file.read(size)
                if len(body) < size or zlib.crc32(body) != crc:
                    break
                try:
                    yield _decoder.decode(body)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{path}, byte {offset}: not a record of version {VERSION}: {error}") from None
                offset += 8 + size
            if not offset and head:
                raise ConfigError(f"{path} is not a recording")
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from None


def _whole_bytes(path: Path) -> int:
    """Bytes up to the end of the last whole frame. Raises ConfigError where a file has other content."""
    whole = 0
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        while True:
            head = file.read(8)
            size = int.from_bytes(head[:4], "big")
            if len(head) < 8 or size > _MAX_FRAME_BYTES or whole + 8 + size > size_bytes:
                break
            body = file.read(size)
            if zlib.crc32(body) != int.from_bytes(head[4:], "big"):
                break
            whole += 8 + size
    if size_bytes and not whole:
        raise ConfigError(f"{path} exists and is not a recording; name another file")
    return whole
