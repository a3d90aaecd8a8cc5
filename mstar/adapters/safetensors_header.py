"""The header of a safetensors file, read with bounds and checked whole before anything is allocated for the data.

The format (github.com/huggingface/safetensors): 8 bytes little-endian length n, n bytes of JSON that start with `{`, then the data:

    0        8                 8 + n                              size
    | n u64  | JSON, padded    | tensor | tensor | … | tensor       |
                               '-- data_offsets count from here ----'

Every tensor's bytes must be what its dtype and shape need, and all of them together must cover the data exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.files import AdapterFile
from mstar.adapters.strict_json import JsonProblem, load_object
from mstar.errors import AdapterError

MAX_HEADER_BYTES = 4 << 20
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 48  # of one dimension, and of a product of them: far above any tensor, far below what overflows

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `begin` and `end` are bytes from the start of the data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """One file's header: `raw` are its bytes including the length, so the data starts at `len(raw)`."""

    raw: bytes
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class Head:
    """What a header is parsed from: the file's name and size, and its first bytes, the length and the JSON."""

    name: str
    size: int
    raw: bytes


def read_header(file: AdapterFile) -> Header:
    """Read and check the header of `file`. Raises AdapterError `adapter_file_invalid` with the reason."""
    return parse_header(read_head(file))


def read_head(file: AdapterFile) -> Head:
    """The bytes of the header, bounded. Raises AdapterError `adapter_file_invalid` where they cannot be one."""
    if file.size == 0:
        raise _invalid(file, "is empty")
    if file.size < 10:
        raise _invalid(file, f"is truncated: it has {file.size} bytes")
    start = file.read(0, 9)
    length = int.from_bytes(start[:8], "little")
    if start.startswith(b"version "):
        raise _invalid(file, "is a git-lfs pointer and not the file itself")
    if length > file.size - 8:
        raise _invalid(file, f"is truncated or not safetensors: its header would have {length} bytes, the file has {file.size}")
    if length > MAX_HEADER_BYTES:
        raise _invalid(file, f"has a header of {length} bytes (at most {MAX_HEADER_BYTES} are read)")
    if start[8:] != b"{" or length < 2:
        raise _invalid(file, "is not safetensors: its header does not start with `{`")
    return Head(file.name, file.size, start + file.read(9, length - 1))


def parse_header(head: Head) -> Header:
    """Check a header whole. Raises AdapterError `adapter_file_invalid` with the reason."""
    try:
        entries = load_object(head.raw[8:])
    except JsonProblem as error:
        raise _invalid(head, f"has a header that {error}") from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(head, "has a `__metadata__` that is not a mapping of strings")
    tensors = [_entry(head, key, entry) for key, entry in entries.items()]
    _check_cover(head, tensors, head.size - len(head.raw))
    return Header(head.raw, tuple(tensors))


def _entry(head: Head, key: str, entry: Any) -> TensorEntry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _invalid(head, f"has a header entry {shown(key)} without exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refuse("dtype", key=shown(key), dtype=shown(dtype))
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(head, f"gives {shown(key)} the shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(head, f"gives {shown(key)} the data_offsets {shown(offsets)}")
    needed = ITEM_BYTES[dtype]
    for size in shape:
        needed *= size
    if needed > MAX_SIZE or needed != offsets[1] - offsets[0]:
        raise _invalid(head, f"gives {shown(key)} {offsets[1] - offsets[0]} bytes, where {dtype} {list(shape)} needs {needed}")
    return TensorEntry(key, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)


def _check_cover(head: Head, tensors: list[TensorEntry], data_bytes: int) -> None:
    """Together the tensors cover the data exactly once."""
    covered = 0
    for tensor in sorted(tensors, key=lambda item: (item.begin, item.end)):
        if tensor.begin != covered:
            problem = "overlaps the one before it" if tensor.begin < covered else "leaves a hole before it"
            raise _invalid(head, f"has the tensor {shown(tensor.key)}, which {problem}")
        covered = tensor.end
    if covered > data_bytes:
        raise _invalid(head, f"is truncated: its tensors need {covered} bytes, it has {data_bytes}")
    if covered < data_bytes:
        raise _invalid(head, f"has {data_bytes - covered} bytes after its last tensor")


def _invalid(file: AdapterFile | Head, problem: str) -> AdapterError:
    return refuse("file_invalid", file=file.name, problem=problem)
