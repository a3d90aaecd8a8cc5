"""Collectives between the ranks of one host through shared memory (`host_memory.cpp`): microseconds where TCP takes hundreds.

Step thread, as every collective. Rank 0 makes a file in /dev/shm, all ranks map it, then its name is removed: what is left lives as long as
the ranks do. Ranks that cannot all map it (several hosts, containers apart, no compiler) go on with their process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from mstar.native import load_kernel

DTYPES = (torch.bfloat16, torch.float32)
_FOLDER = Path("/dev/shm")
_SLOT_BYTES = 1 << 20  # a larger sum goes in pieces
_SPIN_NS = 200_000  # about what ranks' work differs by between two sums of a step; shorter where ranks share cores


class _Memory(ctypes.Structure):
    _fields_ = (
        ("mapping", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("can_probe", ctypes.c_int64),
        ("seq", ctypes.c_uint32),
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load_kernel(Path(__file__).with_name("host_memory.cpp"))
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.mstar_host_memory_bytes.argtypes, library.mstar_host_memory_bytes.restype = (size, size), size
        library.mstar_host_memory_join.argtypes, library.mstar_host_memory_join.restype = (pointer,), None
        library.mstar_host_memory_sum.argtypes, library.mstar_host_memory_sum.restype = (pointer, pointer, size, size), size
        library.mstar_host_memory_gather.argtypes = (pointer, pointer, size, pointer, pointer)
        library.mstar_host_memory_gather.restype = size
    return library


class HostMemory:
    """One rank's part of the mapping. Sums and gathers are issued by all ranks in the same order; made by `join`."""

    def __init__(self, library: ctypes.CDLL, mapping: mmap.mmap, tp_rank: int, tp_size: int, timeout_s: float, *, can_probe: bool) -> None:
        self.library = library
        self._mapping = mapping
        self._view = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        cores = len(os.sched_getaffinity(0))
        spin_ns = _SPIN_NS if cores >= tp_size * torch.get_num_threads() else _SPIN_NS // 40
        address = ctypes.addressof(self._view)
        self.native = _Memory(address, tp_rank, tp_size, _SLOT_BYTES, spin_ns, int(timeout_s * 1e9), int(can_probe), 0)
        self._address = ctypes.addressof(self.native)
        library.mstar_host_memory_join(self._address)

    @classmethod
    def join(
        cls,
        tp_rank: int,
        tp_size: int,
        timeout_s: float,
        most: Callable[[Sequence[int]], list[int]],
        least: Callable[[int], int],
    ) -> HostMemory | None:
        """The memory that all ranks share, or None, on every rank alike, where one cannot map it.

        `most` and `least` are the maximum (of each of several) and the minimum over the ranks; both wait for all ranks.
        """
        library = _library() if platform.system() == "Linux" else None
        mark = most(list(uuid.uuid4().bytes) if tp_rank == 0 else [0] * 16)
        path = _FOLDER / f"mstar-{bytes(mark).hex()}"
        size = 0 if library is None else library.mstar_host_memory_bytes(tp_size, _SLOT_BYTES)
        try:
            made = None if library is None or tp_rank > 0 else _map(path, size, os.O_CREAT | os.O_EXCL)
            is_made = least(int(made is not None or tp_rank > 0))
            mapping = made if library is None or tp_rank == 0 or not is_made else _map(path, size, 0)
            has_all = least(int(mapping is not None))
        finally:
            if tp_rank == 0:
                with contextlib.suppress(OSError):
                    path.unlink()
        namespace = _process_namespace()
        can_probe = least(int(least(namespace) == namespace))
        if not has_all or library is None or mapping is None:
            return None
        return cls(library, mapping, tp_rank, tp_size, timeout_s, can_probe=bool(can_probe))

    def sum(self, x: Tensor) -> int | None:
        """Add up `x` (contiguous, on the CPU, of `DTYPES`) over the ranks in place. Returns a rank that did not come, else None."""
        missing = self.library.mstar_host_memory_sum(self._address, x.data_ptr(), x.numel(), int(x.dtype == torch.bfloat16))
        return missing - 1 if missing else None

    def fits(self, x: Tensor, widths: Sequence[int]) -> bool:
        """Whether `gather` can take `x`."""
        return x.dtype in DTYPES and max(widths) * x.element_size() <= _SLOT_BYTES

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor | int:
        """`x [n, widths[tp_rank]]` of every rank side by side: `[n, sum(widths)]`, or a rank that did not come."""
        out = x.new_empty((x.shape[0], sum(widths)))
        starts = (ctypes.c_int64 * (len(widths) + 1))(0, *accumulate(width * x.element_size() for width in widths))
        x = x.contiguous()
        missing = self.library.mstar_host_memory_gather(self._address, x.data_ptr(), x.shape[0], starts, out.data_ptr())
        return int(missing) - 1 if missing else out


def _map(path: Path, size_bytes: int, flags: int) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            os.posix_fallocate(file, 0, size_bytes)  # a full file system says so here, not by a signal at the first write
            return mmap.mmap(file, size_bytes)
        finally:
            os.close(file)
    except OSError:
        return None


def _process_namespace() -> int:
    """Ranks in the same one see each other's process ids."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return -1 - os.getpid()
