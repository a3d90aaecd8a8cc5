"""The server's own validation of a folder, without a server: what the front checks of a load, then what each rank checks.

    resolve_path ─► examine (front) ─► read_adapter (ranks: every value) ─► copies of base weights

The words of a refusal are the server's because the functions are. Not covered: the size of a rank's copy, which its host tier bounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mstar.adapters.base import BaseShapes
from mstar.adapters.base_copies import check_base_copies
from mstar.adapters.base_files import BaseFiles
from mstar.adapters.examine import TokenId, check_added_tokens
from mstar.adapters.facts import AdapterFacts, AdapterLimits, Dtype
from mstar.adapters.outline import Outline, outline
from mstar.adapters.paths import resolve_path
from mstar.adapters.progress import ReadProgress
from mstar.adapters.read import inspect_adapter, read_adapter
from mstar.errors import AdapterError, ConfigError
from mstar.types import EMBEDDING, HEAD, PROJECTIONS

NO_CAP = 1 << 31
_DTYPES: dict[str, Dtype] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def dry_run(
    path: Path,
    model: Path,
    max_lora_rank: int,
    target_modules: tuple[str, ...],
    tokenizer: Path | None,
    dtype: str,
    roots: tuple[Path, ...],
    console: Console,
) -> tuple[AdapterFacts, str]:
    """Facts and digest of an adapter that would be served with slots of `dtype` (`auto`: the model's own).

    Raises AdapterError where it would not be, ConfigError for the model.
    """
    base = read_base(model)
    folder, roots = _resolve(path, roots)
    limits = AdapterLimits(max_lora_rank, roots, target_modules or PROJECTIONS, _slot_dtype(dtype, model))
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
    return BaseShapes.from_config(_read_config(model))


def _slot_dtype(dtype: str, model: Path) -> Dtype:
    config = _read_config(model)
    name = dtype if dtype != "auto" else config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        where = "--dtype" if dtype != "auto" else f"--model {model}: its config.json has the dtype"
        raise ConfigError(f"{where} {name}, but slots are one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _read_config(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {model}: cannot read its config.json ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"--model {model}: its config.json is not JSON") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model {model}: its config.json is not a JSON object")
    return config


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
