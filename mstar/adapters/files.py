"""The files of one adapter folder: which they are, opened once each, read by `pread` into our own memory, and their digest.

Nothing is mapped: a mapped file that is cut would kill the process, a short `pread` is only a refusal. A file is checked on
the descriptor that is then read (a plain file; what a link leads to lies in the folder or a root), so nobody can swap it between.

The digest is SHA-256 over, for each file in order (config, index if any, weight files by name): the length of its name, its name,
its size, its bytes; lengths as 8 bytes little endian.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.paths import lies_in
from mstar.adapters.strict_json import JsonProblem, load_object
from mstar.errors import AdapterError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"

MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 4 << 20
MAX_SHARDS = 64
MAX_LISTED = 10_000
CHUNK_BYTES = 8 << 20

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".nemo")


class Hasher(Protocol):
    """The part of hashlib's objects that is used."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class AdapterFile:
    """One open file. `size` is what it had when it was opened; a read never goes beyond it."""

    def __init__(self, name: str, descriptor: int, found: os.stat_result) -> None:
        self.name = name
        self.size = found.st_size
        self._descriptor = descriptor
        self._found = found

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (bytes) from `offset`. Raises AdapterError `adapter_changed` when the file ends before that."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done : done + CHUNK_BYTES]], offset + done)
            except OSError as error:
                raise refuse("unreadable", file=self.name, problem=error.strerror) from None
            if count == 0:
                raise refuse("changed", what=f"{self.name} was cut while it was read")
            done += count

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, as `read_into`."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """Raise AdapterError `adapter_changed` if size or time of change differ from those at the opening."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._found.st_size, self._found.st_mtime_ns):
            raise refuse("changed", what=f"{self.name} changed while it was read")


@dataclass(frozen=True)
class AdapterFolder:
    """The open files of one adapter. `config` and `index` hold their files' bytes."""

    config: bytes
    index: bytes | None
    weights: tuple[AdapterFile, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files that the digest covers, in its order."""
        index = () if self.index is None else (INDEX_NAME,)
        return (CONFIG_NAME, *index, *(file.name for file in self.weights))

    def start_digest(self) -> hashlib._Hash:
        """The digest's state after config and index."""
        hasher = hashlib.sha256()
        frame(hasher, CONFIG_NAME, len(self.config))
        hasher.update(self.config)
        if self.index is not None:
            frame(hasher, INDEX_NAME, len(self.index))
            hasher.update(self.index)
        return hasher


def frame(hasher: Hasher, name: str, size: int) -> None:
    """Feed what stands before a file's bytes in the digest."""
    raw = name.encode()
    hasher.update(len(raw).to_bytes(8, "little") + raw + size.to_bytes(8, "little"))


@contextmanager
def open_file(folder: Path, name: str, roots: Sequence[Path]) -> Iterator[AdapterFile | None]:
    """The file `name` of `folder`, open; None if there is none. Raises AdapterError if it may not or cannot be read."""
    path = os.path.join(folder, name)
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except (OSError, ValueError) as error:
        raise refuse("unreadable", file=name, problem=getattr(error, "strerror", None) or "bad name") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise refuse("file_kind", file=name)
        if not _is_allowed(path, found, (folder, *roots)):
            raise refuse("file_outside", file=name)
        yield AdapterFile(name, descriptor, found)
    finally:
        os.close(descriptor)


def _is_allowed(path: str, found: os.stat_result, folders: Sequence[Path]) -> bool:
    real = os.path.realpath(path)
    try:
        there = os.stat(real, follow_symlinks=False)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino) and lies_in(real, folders)


def read_small(folder: Path, name: str, roots: Sequence[Path], limit: int) -> bytes | None:
    """All bytes of a file of at most `limit` bytes; None if there is none."""
    with open_file(folder, name, roots) as file:
        if file is None:
            return None
        if file.size > limit:
            raise refuse("file_too_large", file=name, size=file.size, limit=limit)
        return file.read(0, file.size)


@contextmanager
def open_folder(folder: Path, roots: Sequence[Path]) -> Iterator[AdapterFolder]:
    """The adapter's files, open, with config and index read. Raises AdapterError when they are not there or not clear."""
    config = read_small(folder, CONFIG_NAME, roots, MAX_CONFIG_BYTES)
    if config is None:
        raise refuse("config_missing")
    index = read_small(folder, INDEX_NAME, roots, MAX_INDEX_BYTES)
    with ExitStack() as stack:
        single = stack.enter_context(open_file(folder, WEIGHTS_NAME, roots))
        if index is None:
            if single is None:
                raise _no_weights(folder)
            yield AdapterFolder(config, None, (single,))
            return
        names = sorted(set(read_weight_map(index).values()))
        if single is not None and names != [WEIGHTS_NAME]:
            raise refuse("files_ambiguous", what=f"both {WEIGHTS_NAME} and an index of other files")
        if len(names) > MAX_SHARDS:
            raise refuse("index_invalid", problem=f"names {len(names)} files (at most {MAX_SHARDS} are read)")
        shards = []
        for name in names:
            shard = stack.enter_context(open_file(folder, name, roots))
            if shard is None:
                raise refuse("index_invalid", problem=f"names {name}, which is not there")
            shards.append(shard)
        yield AdapterFolder(config, index, tuple(shards))


def read_weight_map(index: bytes) -> dict[str, str]:
    """The index's `weight_map`, key to file name. Raises AdapterError `adapter_index_invalid`."""
    try:
        weight_map = load_object(index).get("weight_map")
    except JsonProblem as error:
        raise refuse("index_invalid", problem=error) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse("index_invalid", problem="has no `weight_map`")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise refuse("index_invalid", problem=f"names {shown(name)} for {shown(key)}, which is not a safetensors file of the folder")
    return weight_map


def _is_plain_name(name: str) -> bool:
    return (
        name.isascii() and name.isprintable() and "/" not in name and "\\" not in name
        and not name.startswith(".") and name.endswith(".safetensors") and len(name) <= 255
    )  # fmt: skip


def _no_weights(folder: Path) -> AdapterError:
    """Why there are no tensors to read, from a bounded look at the folder."""
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(MAX_LISTED), strict=False))
    except OSError:
        pass
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return refuse("files_ambiguous", what=f"{shown(shards[0])} but neither {WEIGHTS_NAME} nor {INDEX_NAME}")
    if pickles := [name for name in names if name.lower().endswith(_PICKLE_SUFFIXES)]:
        return refuse("pickle", names=", ".join(shown(name) for name in pickles[:3]))
    return refuse("weights_missing")


def never() -> bool:
    """The `cancelled` of a read that nobody cancels."""
    return False


def digest_adapter(folder: Path, roots: Sequence[Path] = (), cancelled: Callable[[], bool] = never) -> str:
    """SHA-256 (hex) over config, index and weight files, streamed in chunks: what `read_adapter` computes of the same bytes.

    Links may lead into `folder` and `roots`. Raises AdapterError when the files are not there or change while they are read.
    """
    with open_folder(folder, roots) as files:
        hasher = files.start_digest()
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(file.size for file in files.weights))))
        for file in files.weights:
            frame(hasher, file.name, file.size)
            for offset in range(0, file.size, CHUNK_BYTES):
                if cancelled():
                    raise refuse("cancelled")
                part = buffer[: min(CHUNK_BYTES, file.size - offset)]
                file.read_into(part, offset)
                hasher.update(part)
            file.check_unchanged()
        return hasher.hexdigest()
