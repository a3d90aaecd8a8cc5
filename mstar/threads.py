"""Threads that must not take time from those that streams wait for."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 10


def give_way() -> None:
    """Run the calling thread, and threads that it starts, when others leave a core free. Only Linux has a priority per thread."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
