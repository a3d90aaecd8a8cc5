"""Breaks the engine one line at a time; every break must turn a test red (`make mutants`).

Each `NNN-name.patch` beside this file is one break. Its first lines, `# tests: path::name`, say which tests must notice. A mutant
that survives, a patch that no longer applies and a run in which no test ran fail the whole run.

    import what tests import ─► the named tests on the code as it is: all must pass ─► per patch: a copy of the tree, the break,
    a forked child (so that nothing is imported twice) that runs the patch's tests ─► caught / total

`--refresh` rewrites patches whose surroundings changed while the lines they break did not.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("mstar", "tests", "pyproject.toml")
PRELOADED = ("torch", "numpy", "msgspec", "msgpack", "transformers", "peft", "safetensors.numpy", "hypothesis", "pytest")
CHILD_BOUND_S = 120.0
PATIENCE_S = "5"  # how long a test waits for an event that a break keeps from coming
VERDICT = 10  # plus pytest's exit status; a child that ends otherwise came to no verdict
SURVIVED, CAUGHT = VERDICT, VERDICT + 1  # all passed, some failed
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Mutant:
    """One patch: the one file that it breaks, and the tests that must notice."""

    path: Path
    file: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def load(only: Sequence[str]) -> list[Mutant]:
    mutants = []
    for path in sorted(HERE.glob("*.patch")):
        lines = path.read_text().splitlines()
        tests = tuple(line.removeprefix("# tests:").strip() for line in lines if line.startswith("# tests:"))
        file = next(line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/"))
        if not only or any(word in path.stem for word in only):
            mutants.append(Mutant(path, file, tests))
    return mutants


def copy_tree(origin: Path, place: Path) -> None:
    for part in PARTS:
        source = origin / part
        if source.is_dir():
            shutil.copytree(source, place / part, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.patch"))
        else:
            shutil.copy(source, place / part)


def apply(mutant: Mutant, tree: Path) -> str | None:
    """Break the copy; why it could not be broken, if so."""
    command = ["git", "apply", "--whitespace=nowarn", str(mutant.path)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree)})
    return None if done.returncode == 0 else " ".join(done.stderr.split())


def run_tests(tree: Path, tests: Iterable[str], log: Path) -> None:
    """The child's whole life."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    pytest = importlib.import_module("pytest")
    status = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no", *tests])
    import mstar

    if not Path(mstar.__file__).is_relative_to(tree):
        status = 3  # the tests ran against other code
    sys.stdout.flush()
    os._exit(VERDICT + int(status))


@dataclass
class Running:
    """One child under way in one copy of the tree."""

    mutant: Mutant
    tree: Path
    process: BaseProcess
    log: Path
    until: float


def start(mutant: Mutant, tree: Path) -> Running:
    log = tree / "log.txt"
    process = FORK.Process(target=run_tests, args=(tree, mutant.tests, log), daemon=True)
    process.start()
    return Running(mutant, tree, process, log, time.monotonic() + CHILD_BOUND_S)


def outcome(child: Running) -> int:
    """The child's exit status; a child past its bound hangs, which its tests count as caught."""
    if child.process.is_alive():
        child.process.kill()
        child.process.join()
        return CAUGHT
    child.process.join()
    return child.process.exitcode or 0


def run(mutants: Sequence[Mutant], jobs: int, whole: Path) -> tuple[int, list[str]]:
    """Each mutant in one of `jobs` copies of `whole`; how many were caught, and what to complain of."""
    trees = [whole.with_name(f"tree{number}") for number in range(jobs)]
    for tree in trees:
        copy_tree(whole, tree)
    caught, complaints = 0, []
    waiting, running = list(reversed(mutants)), list[Running]()
    while waiting or running:
        while waiting and trees:
            mutant, tree = waiting.pop(), trees.pop()
            refused = apply(mutant, tree)
            if refused is not None:
                complaints.append(f"{mutant.name}: the patch no longer applies: {refused}")
                trees.append(tree)
            else:
                running.append(start(mutant, tree))
        wait([child.process.sentinel for child in running], timeout=1.0)
        for child in [child for child in running if not child.process.is_alive() or time.monotonic() > child.until]:
            status = outcome(child)
            if status == CAUGHT:
                caught += 1
                sys.stdout.write(f"caught    {child.mutant.name}\n")
            elif status == SURVIVED:
                complaints.append(f"{child.mutant.name}: survived {', '.join(child.mutant.tests)}")
            else:
                complaints.append(f"{child.mutant.name}: no verdict (pytest status {status})\n{child.log.read_text()[-2000:]}")
            sys.stdout.flush()
            running.remove(child)
            shutil.copy(whole / child.mutant.file, child.tree / child.mutant.file)
            trees.append(child.tree)
    return caught, complaints


def refresh(mutant: Mutant) -> str:
    """Rewrite the patch around the lines it breaks, where those stand exactly once in the file; what was done."""
    lines = [line for line in mutant.path.read_text().splitlines(keepends=True) if not line.startswith("# tests:")]
    file = mutant.file
    body = [line for line in lines[2:] if not line.startswith("@@")]
    first = next(index for index, line in enumerate(body) if line[0] in "-+")
    last = next(index for index in range(len(body) - 1, -1, -1) if body[index][0] in "-+")
    source = (ROOT / file).read_text()
    for before, after in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 2)):  # as few lines around as name one place
        part = body[max(0, first - before) : last + 1 + after]
        old = "".join(line[1:] for line in part if line[0] in " -")
        if old and source.count(old) == 1:
            changed = source.replace(old, "".join(line[1:] for line in part if line[0] in " +"))
            diff = difflib.unified_diff(source.splitlines(keepends=True), changed.splitlines(keepends=True), f"a/{file}", f"b/{file}", n=2)
            mutant.path.write_text("".join([*(f"# tests: {test}\n" for test in mutant.tests), *diff]))
            return "refreshed"
    return "the lines it breaks are gone or stand more than once: write it anew"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="words that a patch's name must hold")
    parser.add_argument("--refresh", action="store_true", help="rewrite patches that no longer apply, then stop")
    options = parser.parse_args()
    mutants = load(options.only)
    os.environ["MSTAR_TEST_PATIENCE_S"] = PATIENCE_S
    with tempfile.TemporaryDirectory(prefix="mstar-mutants-") as folder:
        work = Path(folder)
        copy_tree(ROOT, work / "whole")
        if options.refresh:
            for mutant in mutants:
                if apply(mutant, work / "whole") is not None:
                    sys.stdout.write(f"{mutant.name}: {refresh(mutant)}\n")
                shutil.copy(ROOT / mutant.file, work / "whole" / mutant.file)
            return 0
        for name in PRELOADED:
            importlib.import_module(name)
        every = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
        base = start(Mutant(Path("the code as it is"), "", every), work / "whole")
        base.process.join(2 * CHILD_BOUND_S)
        if outcome(base) != SURVIVED:
            sys.stdout.write(f"the named tests do not pass on the code as it is:\n{base.log.read_text()[-4000:]}\n")
            return 1
        caught, complaints = run(mutants, options.jobs, work / "whole")
    for complaint in complaints:
        sys.stdout.write(f"FAILED    {complaint}\n")
    sys.stdout.write(f"{caught}/{len(mutants)} mutants caught\n")
    return 1 if complaints or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
