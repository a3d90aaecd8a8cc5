"""Python runs this at the start of every process of a server that a test started with this folder in PYTHONPATH.

MSTAR_TEST_AUDIT=FILE     every `pickle.find_class` of the process goes into FILE, with its stack
MSTAR_TEST_POISON=1,2,3   a rank dies by SIGKILL in the forward of any step whose tokens hold this sequence, as a kernel's bug would have it
MSTAR_TEST_SLOW_READS=R:S every read of an adapter on rank R takes S seconds longer
MSTAR_TEST_RANKS=FILE     ranks with delays, a trace and perhaps a script: see `planted_ranks.py`
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import traceback
from pathlib import Path


def audit(path: str) -> None:
    """Write down who asks pickle for a class."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode()
    os.write(out, f"armed {command}\n".encode())

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            os.write(out, f"{event} {args} in {command}\n{''.join(traceback.format_stack())}\n".encode())

    sys.addaudithook(hook)


class Planter(importlib.abc.MetaPathFinder):
    """Loads one module as it is, then changes it."""

    def __init__(self, name, plant) -> None:
        self._name, self._plant = name, plant

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._plant(module)

        spec.loader.exec_module = exec_module
        return spec


def poison(module) -> None:
    """Make the model of `mstar.worker.model` deadly."""
    sequence = [int(token) for token in os.environ["MSTAR_TEST_POISON"].split(",")]
    run = module.TorchModel.__call__

    def deadly(model, step):
        tokens = list(step.tokens)
        if any(tokens[at : at + len(sequence)] == sequence for at in range(len(tokens))):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(model, step)

    module.TorchModel.__call__ = deadly


if "MSTAR_TEST_AUDIT" in os.environ:
    audit(os.environ["MSTAR_TEST_AUDIT"])
if "MSTAR_TEST_POISON" in os.environ:
    sys.meta_path.insert(0, Planter("mstar.worker.model", poison))
if "MSTAR_TEST_SLOW_READS" in os.environ:
    slow = os.environ["MSTAR_TEST_SLOW_READS"]
    sys.meta_path.insert(
        0, Planter("mstar.worker.main", lambda module: importlib.import_module("planted_ranks").plant_slow_reads(module, slow))
    )
if "MSTAR_TEST_RANKS" in os.environ:
    sys.meta_path.insert(0, Planter("mstar.worker.main", lambda module: importlib.import_module("planted_ranks").plant(module)))
