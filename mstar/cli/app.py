"""The command tree. Sub-commands with their own dependencies (bench, simulate, replay, adapters) are imported only when asked for.

Own process. A new sub-command is one line in `_LAZY`: its module exposes `app: typer.Typer`. A module that does not exist is not listed.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from mstar import __version__
from mstar.cli.serve import make_serve

# command -> module with `app: typer.Typer`
_LAZY = {
    "adapters": "mstar.adapters.cli",
    "bench": "mstar.bench.cli",
    "replay": "mstar.sim.replay_cli",
    "simulate": "mstar.sim.cli",
}


class LazyGroup(TyperGroup):
    """A group whose further commands are imported when they are looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Those defined here, then the lazy ones that exist."""
        return [*super().list_commands(ctx), *(name for name, module in _LAZY.items() if _exists(module))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported on first use."""
        if cmd_name not in self.commands and _exists(module := _LAZY.get(cmd_name, "")):
            command = get_command(importlib.import_module(module).app)
            command.name = cmd_name
            self.add_command(command, cmd_name)
        return super().get_command(ctx, cmd_name)


def _exists(module: str) -> bool:
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


app = typer.Typer(
    cls=LazyGroup,
    name="mstar",
    help="Serve many LoRA adapters on one base model, tensor parallel, in lockstep.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(make_serve())


@app.command("keys")
def keys(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make; copy it to every host.")]) -> None:
    """Make the CURVE keys that front and ranks need off loopback."""
    from mstar.wire.security import make_keys

    make_keys(folder)
    typer.echo(f"keys written to {folder}: give --curve-dir {folder} to the front and to every rank, and keep it secret")


@app.command("version")
def version() -> None:
    """Print the version of mstar."""
    typer.echo(__version__)
