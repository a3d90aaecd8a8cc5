"""What lies in an adapter folder, told without a base model: `mstar adapters inspect`.

Config and headers are read by the same functions as for a load; nothing is compared with a base, so an outline is no promise that the
adapter is served (that is `check`). What would be refused whatever the base is listed under `problems`, in the words of the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mstar.adapters.catalogue import shown
from mstar.adapters.config import AdapterConfig, parse_config
from mstar.adapters.files import digest_adapter, never, open_folder
from mstar.adapters.keys import Kind, ParsedKey, parse_key
from mstar.adapters.patterns import PatternTable
from mstar.adapters.safetensors_header import TensorEntry, read_header
from mstar.errors import AdapterError

MAX_NAMED = 5


@dataclass
class ModuleOutline:
    """One kind of module over all layers that have it."""

    module: str
    layers: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    scales: set[float] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    num_tensors: int = 0


@dataclass(frozen=True)
class Outline:
    """One folder. `config` is None where it would be refused: then the scales are not known."""

    folder: Path
    files: tuple[tuple[str, int], ...]  # name and bytes of each file that the digest covers
    size_bytes: int  # of the tensors' files
    digest: str
    config: AdapterConfig | None
    modules: tuple[ModuleOutline, ...]
    problems: tuple[str, ...]


def outline(folder: Path, roots: tuple[Path, ...], cancelled: Callable[[], bool] = never) -> Outline:
    """Read config and headers of `folder`, and hash its files. Raises AdapterError where that much cannot be read."""
    problems: list[str] = []
    with open_folder(folder, roots) as files:
        config = _config(files.config, problems)
        entries = [entry for file in files.weights for entry in read_header(file).tensors]
        sizes = {file.name: file.size for file in files.weights}
        named = tuple((name, sizes.get(name, (folder / name).stat().st_size)) for name in files.names)
    modules = _modules(entries, config, problems)
    return Outline(folder, named, sum(sizes.values()), digest_adapter(folder, roots, cancelled), config, modules, tuple(problems))


def spans(layers: Iterable[int]) -> str:
    """`0-29, 31` for layer numbers; empty for none."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _config(data: bytes, problems: list[str]) -> AdapterConfig | None:
    try:
        return parse_config(data)
    except AdapterError as error:
        problems.append(error.message)
        return None


def _modules(entries: list[TensorEntry], config: AdapterConfig | None, problems: list[str]) -> tuple[ModuleOutline, ...]:
    alphas = PatternTable("alpha_pattern", config.alpha_pattern) if config is not None else None
    found: dict[str, ModuleOutline] = {}
    unknown: list[str] = []
    for entry in entries:
        parsed = parse_key(entry.key)
        name = parsed.leaf or parsed.module
        if name is None or parsed.kind is Kind.UNKNOWN:
            unknown.append(shown(entry.key))
            continue
        module = found.setdefault(name, ModuleOutline(name))
        module.num_tensors += 1
        module.dtypes.add(entry.dtype)
        module.kinds.add(parsed.kind.value)
        module.layers.update(() if parsed.layer is None else (parsed.layer,))
        if parsed.kind in (Kind.LORA_A, Kind.EMBEDDING_A) and entry.shape and entry.shape[0]:
            module.ranks.add(entry.shape[0])
            if config is not None and alphas is not None:
                module.scales.add(_scale(config, alphas, parsed, entry.shape[0]))
    if unknown:
        more = f", … ({len(unknown)} in all)" if len(unknown) > MAX_NAMED else ""
        problems.append(f"Keys that no base of the Llama line has: {', '.join(unknown[:MAX_NAMED])}{more}")
    return tuple(found[name] for name in sorted(found))


def _scale(config: AdapterConfig, alphas: PatternTable, parsed: ParsedKey, rank: int) -> float:
    key = alphas.match(parsed.trained_name)
    return config.scaling(rank, config.alpha if key is None else config.alpha_pattern[key])
