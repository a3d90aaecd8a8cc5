"""`mstar adapters …`: what is served (`ls`), changes to it (`load`, `unload`, `pin`, `unpin`), folders (`inspect`, `check`), the catalogue.

Only parses, calls and prints; `mstar.cli` registers `app`. The modules behind it are imported inside the commands, so that `mstar --help`
stays quick. These files alone of the package use more than numpy: typer, rich, httpx; `check` reads a tokenizer where there is one.

Exit codes: 0 done; 1 refused (by the server, or by the check); 2 wrong usage or no such model; 3 the server does not answer, or not now.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from mstar.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from mstar.adapters.admin_client import AdminClient

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3
T = TypeVar("T")

app = typer.Typer(
    name="adapters",
    help="Look at adapters and change which are served. Exit code 0: done, 1: refused, 2: wrong usage, 3: no server.",
    no_args_is_help=True,
    add_completion=False,
)

Url = Annotated[str, typer.Option("--url", envvar="MSTAR_URL", help="Where the server listens.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="MSTAR_API_KEY", help="Its API key.", show_default=False)]
AdminKey = Annotated[str | None, typer.Option("--admin-key", envvar="MSTAR_ADMIN_KEY", help="Its admin key.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")]
Name = Annotated[str, typer.Argument(help="Name that clients send.")]
Folder = Annotated[Path, typer.Argument(help="Adapter folder.", show_default=False)]
Roots = Annotated[
    list[Path] | None, typer.Option("--lora-root", help="Folder that the adapter must lie in, as the server's. Default: the one above.")
]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command("ls")
def list_served(*, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the served adapters: where each is (slot, host memory, disk), and how many requests run on it."""
    from mstar.adapters.tables import served_rows, served_table

    with _readable_errors(as_json=as_json), _client(url, api_key, None) as client:
        cards = client.adapters()
        rows = served_rows(cards, _status(client))
    _show({"adapters": rows}, as_json=as_json, table=served_table(rows))


@app.command()
def load(
    name: Name,
    path: Annotated[str, typer.Argument(help="Folder as the server sees it, or a hub id where it takes those.", show_default=False)],
    *,
    inplace: Annotated[bool, typer.Option("--inplace", help="Replace what the name serves; running requests end on the old.")] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Keep it in its slot.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Serve an adapter; done when every rank has read and checked it."""
    with _readable_errors(as_json=as_json), _client(url, None, admin_key) as client:
        _patiently(f"loading {name}", lambda: client.load(name, path, load_inplace=inplace, pinned=pinned))
    _show({"name": name, "loaded": True}, as_json=as_json, text=escape(f"{name} is served from {path}"))


@app.command()
def unload(name: Name, *, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Stop serving an adapter; running requests end on it."""
    _call("unload", name, url, admin_key, as_json=as_json, done="is not served any more")


@app.command()
def pin(name: Name, *, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Keep an adapter in its slot."""
    _call("pin", name, url, admin_key, as_json=as_json, done="keeps its slot")


@app.command()
def unpin(name: Name, *, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Let an adapter's slot turn again."""
    _call("unpin", name, url, admin_key, as_json=as_json, done="may leave its slot")


@app.command()
def inspect(
    path: Folder,
    *,
    model: Annotated[Path | None, typer.Option("--model", help="Base model to compare it with.", show_default=False)] = None,
    roots: Roots = None,
    as_json: AsJson = False,
) -> None:
    """Show what lies in a folder: modules, ranks, scales, dtypes, sizes, digest, warnings. Whether it is served tells `check`."""
    from mstar.adapters.dry_run import look
    from mstar.adapters.tables import outline_data, outline_table

    with _readable_errors(as_json=as_json):
        outline, facts, problems = look(path, model, tuple(roots or ()), _stderr())
    _show(outline_data(outline, facts, problems), as_json=as_json, table=outline_table(outline))
    if not as_json:
        _print_facts(outline_data(outline, facts, problems), checked=model is not None)
    if problems:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def check(
    path: Folder,
    *,
    model: Annotated[Path, typer.Option("--model", help="Folder of the base model.", show_default=False)],
    max_lora_rank: Annotated[int, typer.Option("--max-lora-rank", min=1, help="The server's.")] = 64,
    target_modules: Annotated[list[str] | None, typer.Option("--lora-target-modules", help="The server's, if it sets them.")] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Folder of the tokenizer. Default: the model's.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="The server's: auto (the model's own), float32, bfloat16 or float16.")] = "auto",
    roots: Roots = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a server with this model would serve the folder: its own checks, its own words, nothing loaded."""
    from mstar.adapters.dry_run import dry_run
    from mstar.adapters.tables import facts_data, size_text

    with _readable_errors(as_json=as_json, refused={"path": str(path), "served": False}):
        facts, digest = dry_run(path, model, max_lora_rank, tuple(target_modules or ()), tokenizer, dtype, tuple(roots or ()), _stderr())
    data = facts_data(str(path), facts, digest)
    text = f"[green]would be served[/green]: {len(facts.modules)} modules, rank {facts.max_rank}, {size_text(facts.size_bytes)}"
    _show(data, as_json=as_json, text=text)
    if not as_json:
        for warning in facts.warnings:
            _stdout().print(f"[yellow]note[/yellow]: {escape(warning)}")


@app.command()
def catalogue(
    write: Annotated[Path | None, typer.Option("--write", help="Write it to this file.", metavar="FILE", show_default=False)] = None,
) -> None:
    """Print what is served and what is refused, as Markdown (docs/adapters.md)."""
    from mstar.adapters.catalogue import catalogue_markdown

    if write is None:
        sys.stdout.write(catalogue_markdown())
    else:
        write.write_text(catalogue_markdown(), encoding="utf-8")


def _call(verb: str, name: str, url: str, admin_key: str | None, *, as_json: bool, done: str) -> None:
    with _readable_errors(as_json=as_json), _client(url, None, admin_key) as client:
        _patiently(f"{verb} {name}", lambda: client.name_only(verb, name))
    _show({"name": name, verb: True}, as_json=as_json, text=escape(f"{name} {done}"))


def _client(url: str, api_key: str | None, admin_key: str | None) -> AdminClient:
    from mstar.adapters.admin_client import AdminClient

    return AdminClient(url, api_key, admin_key)


def _status(client: AdminClient) -> dict[str, Any] | None:
    """None where the ranks do not answer: the list is still worth showing."""
    from mstar.adapters.admin_client import Refused

    try:
        return client.status()
    except Refused:
        return None


def _patiently(what: str, call: Callable[[], T]) -> T:
    from mstar.adapters.progress import while_waiting

    return while_waiting(what, call, _stderr())


@contextmanager
def _readable_errors(*, as_json: bool, refused: dict[str, Any] | None = None) -> Iterator[None]:
    """Turn what can go wrong into one line (or one JSON object, over `refused`) and an exit code."""
    from mstar.adapters.admin_client import Refused, Unreachable

    try:
        yield
    except (Refused, RequestError) as error:
        code = EXIT_UNREACHABLE if isinstance(error, Refused) and error.status >= 500 else EXIT_REFUSED
        _fail(error.message, error.code, code, as_json=as_json, more=refused)
    except Unreachable as error:
        _fail(str(error), "server_unreachable", EXIT_UNREACHABLE, as_json=as_json)
    except (ConfigError, OSError) as error:
        _fail(str(error), "usage", EXIT_USAGE, as_json=as_json)


def _fail(message: str, code: str, exit_code: int, *, as_json: bool, more: dict[str, Any] | None = None) -> NoReturn:
    if as_json:
        _stdout().print_json(json.dumps({**(more or {}), "error": {"message": message, "code": code}}))
    else:
        _stderr().print(f"[red]refused[/red]: {escape(message)}" if exit_code == EXIT_REFUSED else f"mstar adapters: {escape(message)}")
    raise typer.Exit(exit_code)


def _show(data: dict[str, Any], *, as_json: bool, table: Any = None, text: str = "") -> None:
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        _stdout().print(text if table is None else table)


def _print_facts(data: dict[str, Any], *, checked: bool) -> None:
    from mstar.adapters.tables import size_text

    console = _stdout()
    config = data["config"]
    if config is not None:
        rule = "alpha / sqrt(r)" if config["use_rslora"] else "alpha / r"
        base = config["base_model_name_or_path"] or "not named"
        console.print(f"r {config['r']}, lora_alpha {config['lora_alpha']:g}, scale = {rule}; trained on {escape(base)}")
    for file in data["files"]:
        console.print(f"{escape(file['name'])}: {size_text(file['size_bytes'])}")
    console.print(f"digest {data['digest']}")
    if not checked:
        console.print("[dim]not compared with a base model: give --model[/dim]")
    for warning in data["warnings"]:
        console.print(f"[yellow]note[/yellow]: {escape(warning)}")
    for problem in data["problems"]:
        console.print(f"[red]refused[/red]: {escape(problem)}")


def _stdout() -> Console:
    return Console(
        highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    )


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)
