"""What the commands of `mstar bench` have in common: how they refuse, and how they save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mstar.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Output = Annotated[Path | None, typer.Option(help="Save everything as JSON here.", metavar="FILE.json")]


@contextmanager
def readable_errors() -> Iterator[None]:
    """One line on stderr and exit 2 for what is refused; exit 130 for Ctrl-C."""
    try:
        yield
    except ConfigError as error:
        typer.echo(f"mstar bench: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("mstar bench: interrupted, nothing saved", err=True)
        raise typer.Exit(130) from None


@contextmanager
def measuring(output: Path | None) -> Iterator[None]:
    """The same around a measurement whose result goes to `output`: that it can be written is known before."""
    from mstar.bench.results import check_writable

    with readable_errors():
        if output is not None:
            check_writable(output)
        yield


def save_json(body: object, output: Path | None, console: Console) -> None:
    """Write `body` to `output`, if one is given, and say so."""
    import json

    if output is not None:
        output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        console.print(f"saved {output}", markup=False, highlight=False)
