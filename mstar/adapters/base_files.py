"""The base model's own safetensors files, read a few rows at a time while it serves: copies of its weights are compared with them,
DoRA's norms are computed from them.

What ranks hold cannot be read back (packed for the CPU), so the file is the source. Read by `pread` as adapters are: a file that was
moved or cut is a refusal of the adapter, never a crash. Reader thread; the CLI's `check`. numpy only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mstar.adapters.catalogue import refuse
from mstar.adapters.facts import Dtype
from mstar.errors import AdapterError

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
CHUNK_BYTES = 512 << 10  # what is made of a chunk stays in the cache and in memory that is there: 1.5 times as quick as 8 MiB
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

Range = tuple[int, int]  # [start, stop)


class BaseFiles:
    """Rows of the tensors in `folder`. Headers are read once, at the first use of their file."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}  # file -> where its data starts, entries
        self._file_of: dict[str, str] | None = None

    def chunks(
        self, name: str, rows: Range, cancelled: Callable[[], bool], columns: Range | None = None
    ) -> Iterator[tuple[int, NDArray[Any], Dtype]]:
        """(first row, values, dtype) over the rows `[start, stop)` of `name`, some MiB at a time; BF16 as uint16.

        A vector's rows are its elements; of a matrix only `columns` are read where they are given. Raises AdapterError:
        `adapter_base_unreadable`, or `adapter_read_cancelled` between chunks.
        """
        try:
            yield from self._chunks(name, rows, columns, cancelled)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(name, f"cannot be read ({type(error).__name__})") from None

    def _chunks(
        self, name: str, rows: Range, columns: Range | None, cancelled: Callable[[], bool]
    ) -> Iterator[tuple[int, NDArray[Any], Dtype]]:
        file = self._file(name)
        start, entries = self._header(file)
        if name not in entries:
            raise unreadable(name, "is not in the base's files")
        dtype, shape, begin = entries[name]["dtype"], entries[name]["shape"], entries[name]["data_offsets"][0]
        if dtype not in _NUMPY or not 0 <= rows[0] <= rows[1] <= shape[0]:
            raise unreadable(name, f"is {dtype} {list(shape)}")
        item_bytes = _NUMPY[dtype].itemsize
        row_bytes = item_bytes * int(np.prod(shape[1:], dtype=np.int64))
        cut = (0, row_bytes) if columns is None else (columns[0] * item_bytes, columns[1] * item_bytes)
        if not 0 <= cut[0] <= cut[1] <= row_bytes:
            raise unreadable(name, f"is {dtype} {list(shape)}")
        at_once = max(1, CHUNK_BYTES // max(1, cut[1] - cut[0]))
        descriptor = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for first in range(rows[0], rows[1], at_once):
                if cancelled():
                    raise refuse("cancelled")
                last = min(first + at_once, rows[1])
                data = _pread_rows(descriptor, start + begin + first * row_bytes, last - first, row_bytes, cut)
                width = shape[1:] if columns is None else [columns[1] - columns[0]]
                yield first, data.view(_NUMPY[dtype]).reshape(last - first, *width), cast("Dtype", dtype)
        finally:
            os.close(descriptor)

    def _file(self, name: str) -> str:
        if self._file_of is None:
            index = self._folder / INDEX_NAME
            self._file_of = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
        return self._file_of.get(name, WEIGHTS_NAME)

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        known = self._headers.get(file)
        if known is None:
            with (self._folder / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                known = self._headers[file] = (8 + length, json.loads(opened.read(length)))
        return known


def _pread_rows(descriptor: int, offset: int, rows: int, row_bytes: int, cut: Range) -> NDArray[np.uint8]:
    """The bytes `cut` of each of `rows` rows that begin at `offset`."""
    width = cut[1] - cut[0]
    buffer = np.empty(rows * width, dtype=np.uint8)
    if width == row_bytes:
        _pread(descriptor, buffer.data, offset)
        return buffer
    for row in range(rows):
        _pread(descriptor, buffer.data[row * width : (row + 1) * width], offset + row * row_bytes + cut[0])
    return buffer


def _pread(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError("the file was cut")
        done += count


def unreadable(name: str, problem: str) -> AdapterError:
    """The refusal of an adapter that needs what the base's files do not give."""
    return refuse("base_unreadable", tensor=name, problem=problem)
