"""Put on the PYTHONPATH of a server under test: makes files of one rank fail or wait. Nothing of mstar knows of it.

MSTAR_TEST_FAULTS is a folder; `fail-1` in it names a folder whose files rank 1 cannot open, `hold-1` one whose tensors rank 1 opens only
when `hold-1` is gone (it writes `held-1` while it waits). Ranks are told by RANK, which their launcher sets.
"""

import contextlib
import errno
import os
import time

_open = os.open
_rank = os.environ.get("RANK")
_faults = os.environ.get("MSTAR_TEST_FAULTS", "")


def _folder(kind):
    try:
        with open(f"{_faults}/{kind}-{_rank}", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def _open_with_faults(path, *args, **kwargs):
    text = os.fspath(path)
    if isinstance(text, str) and text.endswith(".safetensors"):
        folder = os.path.dirname(text)
        if _folder("fail") == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), text)
        if _folder("hold") == folder:
            with open(f"{_faults}/held-{_rank}", "w", encoding="utf-8"):
                pass
            while _folder("hold") == folder:
                time.sleep(0.005)
            with contextlib.suppress(OSError):
                os.unlink(f"{_faults}/held-{_rank}")
    return _open(path, *args, **kwargs)


if _rank is not None and _faults:
    os.open = _open_with_faults
