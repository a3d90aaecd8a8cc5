"""The `mstar` command (typer + rich): it only parses, hands over, and exits with a code.

Own process (the launcher's). Nothing here imports torch, so that `--help` and refused configurations are quick. A ConfigError is one
readable line and exit code 2, before any process starts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mstar.errors import ConfigError

EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always leaves by SystemExit."""
    from mstar.cli.app import app
    from mstar.cli.serve import spread_lora_modules

    try:
        app(args=spread_lora_modules(sys.argv[1:] if argv is None else argv), prog_name="mstar")
    except ConfigError as error:
        sys.stderr.write(f"mstar: {' '.join(str(error).split())}\n")
        sys.exit(EXIT_CONFIG)
