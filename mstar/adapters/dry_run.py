"""The server's own validation of a folder, without a server: what the front checks of a load, then what each rank checks.

    resolve_path ─► examine (front) ─► read_adapter (ranks: every value) ─► copies of base weights

The words of a refusal are the server's because the functions are. Not covered: values that leave the range of a half-precision slot,
which depends on the server's dtype.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from mstar.adapters.base import BaseShapes
from mstar.adapters.base_copies import check_base_copies
from mstar.adapters.base_files import BaseFiles
from mstar.adapters.examine import TokenId, check_added_tokens
from mstar.adapters.facts import AdapterFacts, AdapterLimits
from mstar.adapters.outline import Outline, outline
from mstar.adapters.paths import resolve_path
from mstar.adapters.progress import ReadProgress
from mstar.adapters.read import inspect_adapter, read_adapter
from mstar.errors import AdapterError, ConfigError
from mstar.types import EMBEDDING, HEAD, PROJECTIONS

NO_CAP = 1 << 31


def dry_run(
    path: Path,
    model: Path,
    max_lora_rank: int,
    target_modules: tuple[str, ...],
    tokenizer: Path | None,
    roots: tuple[Path, ...],
    console: Console,
) -> tuple[AdapterFacts, str]:
    """Facts and digest of an adapter that would be served. Raises AdapterError where it would not be, ConfigError for the model."""
    base = read_base(model)
    folder, roots = _resolve(path, roots)
    limits = AdapterLimits(max_lora_rank, roots, target_modules or PROJECTIONS)
    facts = inspect_adapter(folder, base, limits)
    check_added_tokens(facts.added_tokens, _token_ids(tokenizer or model))
    with ReadProgress("reading", facts.size_bytes, console) as progress:
        tensors = read_adapter(folder, base, limits, cancelled=progress)
    check_base_copies(tensors.base_copies, base, BaseFiles(model))
    return facts, tensors.digest


def look(path: Path, model: Path | None, roots: tuple[Path, ...], console: Console) -> tuple[Outline, AdapterFacts | None, list[str]]:
    """An outline; with a model also the facts, or why it would be refused. Raises AdapterError where the folder cannot be read."""
    base = read_base(model) if model is not None else None
    folder, roots = _resolve(path, roots)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with ReadProgress("hashing", size, console) as progress:
        found = outline(folder, roots, progress)
    facts: AdapterFacts | None = None
    problems = list(found.problems)
    if base is not None:
        try:
            facts = inspect_adapter(folder, base, AdapterLimits(NO_CAP, roots, (*PROJECTIONS, HEAD, EMBEDDING)))
        except AdapterError as error:
            problems += [error.message] if error.message not in problems else []
    return found, facts, problems


def read_base(model: Path) -> BaseShapes:
    """The shapes of the model in the folder `model`. Raises ConfigError."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {model}: cannot read its config.json ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"--model {model}: its config.json is not JSON") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model {model}: its config.json is not a JSON object")
    return BaseShapes.from_config(config)


def _resolve(path: Path, roots: tuple[Path, ...]) -> tuple[Path, tuple[Path, ...]]:
    """The real folder and its roots; by default the folder that holds it, as for an adapter given to `mstar serve --lora-modules`."""
    roots = roots or (path.absolute().parent, path.resolve().parent)
    return resolve_path(str(path.absolute()), roots), roots


def _token_ids(folder: Path) -> TokenId:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any file that it cannot use
        raise ConfigError(f"tokenizer {file}: cannot be read ({' '.join(str(error).split())})") from None

    def token_id(token: str) -> int | None:
        found: int | None = tokenizer.token_to_id(token)
        return found

    return token_id
