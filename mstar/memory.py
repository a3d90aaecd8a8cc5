"""What a process of ours does with its memory once it is built."""

from __future__ import annotations

import ctypes
import gc


def settle() -> None:
    """What was built stays: the collector, which stops all threads, need not look at it again. What the build freed goes back."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
