"""`make demo` and `make serve`: the server with the demo's model and adapters, as a child of this program.

    python -m demo.run            fetch the model, start, ask the base and the three adapters at once, show the answers, stop
    python -m demo.run --serve    the same set-up, left running in the foreground until Ctrl-C

Owns the child process: whichever way this program ends, short of SIGKILL, the child is told to stop, waited for, and killed if it
does not. A second thread reads the child's log; everything else is the main thread.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from demo.fetch_model import FetchError, fetch_model
from demo.prompts import DEMO_PROMPT

ROOT = Path(__file__).parent.parent
COMMAND = (sys.executable, "-m", "mstar.cli", "serve", "configs/demo.yaml")
HOST = "127.0.0.1"
BASE_MODEL = "smollm2"
ADAPTERS = ("pirate", "json", "bullets")
MAX_TOKENS = 64
START_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
NUM_LOG_LINES = 30
PLAIN_REPORT_INTERVAL_S = 5  # where no spinner can be drawn

console = Console()


class DemoError(RuntimeError):
    """The demo cannot go on; the message is for its user."""


@dataclass(frozen=True)
class Answer:
    """What one model said."""

    model: str
    text: str
    num_tokens: int
    elapsed_s: float


class Server:
    """The child process. Made by `running_server()`."""

    def __init__(self, model: Path, port: int, *, echo: bool) -> None:
        """Starts the child on the model folder; with `echo` its log is shown here as well as kept."""
        self.url = f"http://{HOST}:{port}"
        self.log: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self.echo = echo
        self.process = subprocess.Popen(
            [*COMMAND, "--model", str(model), "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C reaches this program alone, which then stops the child once
        )
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()

    def read_log(self) -> None:
        """Keeps the child's last lines; runs in its own thread until the child closes its output."""
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.log.append(line.rstrip())
                if self.echo:
                    console.out(line.rstrip(), highlight=False)

    def is_ready(self) -> bool:
        """True once `GET /ready` answers 200; raises DemoError with the end of the log if the child has exited."""
        if (code := self.process.poll()) is not None:
            self.reader.join(timeout=2)
            raise DemoError(f"the server exited with code {code} before it was ready. The end of its log:\n{self.log_end()}")
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def log_end(self) -> str:
        """The last log lines, indented; empty if they were shown already."""
        return "" if self.echo else "\n".join(f"    {line}" for line in self.log)

    def last_line(self) -> str:
        """The newest log line, or what to show before there is one."""
        return self.log[-1] if self.log else "starting"

    def stop(self) -> bool:
        """Sends SIGINT and waits; kills the child's whole session after STOP_TIMEOUT_S or at a second Ctrl-C.

        True if it stopped by itself.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return False
        finally:
            self.reader.join(timeout=2)
        return True


@contextlib.contextmanager
def running_server(model: Path, port: int, *, echo: bool) -> Iterator[Server]:
    """A ready server, stopped at the end of the block, however that comes about."""
    server = Server(model, port, echo=echo)
    try:
        wait_until_ready(server)
        yield server
    finally:
        console.print("stopping the server", style="dim")
        if not server.stop():
            raise DemoError("the server had to be killed: it did not stop at SIGINT")


def wait_until_ready(server: Server) -> None:
    """Returns once the server is ready, showing meanwhile how long it has taken and what it logged last."""
    started_s = reported_s = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("starting the server"), TimeElapsedColumn(), TextColumn("[dim]{task.fields[line]}"))
    draws = console.is_terminal and not server.echo
    with Progress(*columns, console=console, transient=True, disable=not draws) as progress:
        task = progress.add_task("", total=None, line="")
        while not server.is_ready():
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > START_TIMEOUT_S:
                raise DemoError(f"the server was not ready after {START_TIMEOUT_S} s. The end of its log:\n{server.log_end()}")
            progress.update(task, line=escape(server.last_line()[: max(10, console.width - 40)]))
            if not draws and time.monotonic() - reported_s > PLAIN_REPORT_INTERVAL_S:
                console.out(f"starting the server: {elapsed_s:.0f} s, {server.last_line()}", highlight=False)
                reported_s = time.monotonic()
            time.sleep(0.1)
    console.print(f"the server is ready at {server.url} after {time.monotonic() - started_s:.1f} s")


async def ask_all(url: str, question: str) -> list[Answer]:
    """Asks the base and every adapter at the same time."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        return await asyncio.gather(*(ask(client, model, question) for model in (BASE_MODEL, *ADAPTERS)))


async def ask(client: httpx.AsyncClient, model: str, question: str) -> Answer:
    """One greedy chat completion; raises DemoError if the server refuses."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": MAX_TOKENS}
    started_s = time.monotonic()
    try:
        response = await client.post("/v1/chat/completions", json=body)
    except httpx.TransportError as error:
        raise DemoError(f"no answer from {model}: {error!r}") from error
    elapsed_s = time.monotonic() - started_s
    if response.status_code != httpx.codes.OK:
        raise DemoError(f"{model} answered with status {response.status_code}: {response.text}")
    reply = response.json()
    return Answer(model, reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"], elapsed_s)


def slots_by_adapter(url: str) -> dict[str, int]:
    """Adapter name -> the LoRA slot that holds it, from `GET /mstar/status`. Every rank has the same slots, so the first one's do."""
    response = httpx.get(f"{url}/mstar/status", timeout=10).raise_for_status()
    ranks: list[dict[str, Any]] = response.json()["ranks"]
    return {slot["adapter"]: slot["slot"] for slot in ranks[0]["slots"] if slot["adapter"] is not None}


def answers_table(question: str, answers: list[Answer], slots: dict[str, int]) -> Table:
    """The answers side by side."""
    table = Table(title=f"“{question}”, asked of all four at once", show_lines=True, title_justify="left")
    table.add_column("")
    for answer in answers:
        table.add_column(answer.model, overflow="fold", ratio=1)
    table.add_row("answer", *(Text(answer.text) for answer in answers))
    table.add_row("tokens", *(str(answer.num_tokens) for answer in answers))
    table.add_row("tokens/s", *(f"{answer.num_tokens / answer.elapsed_s:.1f}" for answer in answers))
    table.add_row("LoRA slot", *(slot_text(answer.model, slots) for answer in answers))
    return table


def slot_text(model: str, slots: dict[str, int]) -> str:
    """The slot an answer came from. The base has slot 0, the zero adapter."""
    if model == BASE_MODEL:
        return "0 (no adapter)"
    return str(slots[model]) if model in slots else "evicted since"


def demo(model: Path, port: int) -> None:
    """Starts, asks, shows, stops."""
    with running_server(model, port, echo=False) as server:
        answers = asyncio.run(ask_all(server.url, DEMO_PROMPT))
        console.print(answers_table(DEMO_PROMPT, answers, slots_by_adapter(server.url)))


def serve(model: Path, port: int) -> None:
    """Starts and stays until the child ends (DemoError) or Ctrl-C."""
    with running_server(model, port, echo=True) as server:
        console.print("\nTry (model: " + ", ".join((BASE_MODEL, *ADAPTERS)) + "; Ctrl-C stops):")
        console.out(curl_line(server.url), highlight=False)
        code = server.process.wait()
        raise DemoError(f"the server exited with code {code}")


def curl_line(url: str) -> str:
    """A command that asks the pirate."""
    body = (
        f'{{"model": "pirate", "messages": [{{"role": "user", "content": "{DEMO_PROMPT}"}}], "temperature": 0, "max_tokens": {MAX_TOKENS}}}'
    )
    return f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM and SIGHUP end the program the way Ctrl-C does, so that the child is stopped."""
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Exit code 0; 1 if the server failed; 130 if the demo was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m demo.run", description="Serves the demo's model with its three adapters.")
    parser.add_argument("--serve", action="store_true", help="leave the server running until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="0, the default, picks a free one")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        model = fetch_model()
        port = options.port or free_port()
        serve(model, port) if options.serve else demo(model, port)
    except (DemoError, FetchError, httpx.HTTPError) as error:
        console.print(Text(f"demo: {error}", style="red"))
        return 1
    except KeyboardInterrupt:
        return 0 if options.serve else 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
