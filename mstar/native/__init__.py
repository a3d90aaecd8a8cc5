"""Builds the package's C++ kernels with the machine's own compiler and keeps them in the cache folder.

A g++ call of a few seconds at the first start after a change; later starts load the cached library. Linked against the OpenMP
runtime that torch has loaded already, so that there is one set of threads. Where there is no compiler the caller falls back to torch.
Leaf package: `vector.h` is what kernels share, `pages.py` the memory that weights lie in.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_BUILD_TIMEOUT_S = 120


def cache_folder() -> Path:
    """`$MSTAR_CACHE`, or mstar's folder in the user's cache."""
    configured = os.environ.get("MSTAR_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "mstar"


def load_kernel(source: Path) -> ctypes.CDLL | None:
    """The library built from `source`; None where it cannot be built here (the reason is logged)."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.info("no C++ compiler: %s is not built, torch's operations are used", source.name)
        return None
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    runtime = str(openmp[0]) if openmp else "-fopenmp"
    key = hashlib.sha256("\n".join([_text(source), compiler, *_FLAGS, runtime, _cpu()]).encode()).hexdigest()[:20]
    library = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            _build(compiler, source, library, runtime)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        log.warning("%s could not be built, torch's operations are used: %s %s", source.name, error, detail.decode(errors="replace")[-500:])
        return None


def address_of(function: Any) -> int:
    """Where a function of a loaded library lies, for a kernel that calls it."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _text(source: Path) -> str:
    """`source` and the headers that it includes by a relative path."""
    text = source.read_text()
    return "\n".join([text, *(_text(source.parent / name) for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE))])


def _build(compiler: str, source: Path, library: Path, runtime: str) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        for command in (
            [compiler, *_FLAGS, "-c", str(source), "-o", str(built)],
            [compiler, "-shared", str(built), runtime, "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_S)
        linked.replace(library)  # atomic: two ranks may build at once


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
