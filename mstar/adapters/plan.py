"""Everything that config and headers can tell, checked before any tensor is read: the plan of what is to be read and how it applies.

Every tensor of the file ends in one of two places: in the plan, or named in a refusal. Pure, but for reading headers through `files`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import cast

from mstar.adapters.base import FUSED, BaseShapes
from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.config import AdapterConfig, parse_config
from mstar.adapters.facts import AdapterFacts, AdapterLimits, BaseCopyFacts, Dtype, ModuleFacts, ModuleKey
from mstar.adapters.files import AdapterFolder, read_weight_map
from mstar.adapters.keys import LORA_KINDS, Kind, ParsedKey, parse_key
from mstar.adapters.patterns import PatternTable
from mstar.adapters.safetensors_header import Head, Header, TensorEntry, parse_header, read_head
from mstar.types import EMBEDDING, HEAD

SERVED_DTYPES = ("F32", "F16", "BF16")
MAX_NAMED = 3
MAX_KEPT = 4
MAX_KEPT_BYTES = 256 << 10


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to read: the file it is in (index into the folder's weights), its header entry and what its key means."""

    file: int
    entry: TensorEntry
    parsed: ParsedKey


@dataclass(frozen=True)
class PlannedPair:
    """One projection: its tensors, and which output rows of them are its own (a part of them where the module is fused)."""

    lora_a: PlannedTensor
    lora_b: PlannedTensor
    rows: tuple[int, int]
    scaling: float
    bias: PlannedTensor | None = None
    magnitude: PlannedTensor | None = None

    def tensors(self) -> tuple[PlannedTensor, ...]:
        """All that it reads."""
        return tuple(tensor for tensor in (self.lora_a, self.lora_b, self.bias, self.magnitude) if tensor is not None)


@dataclass(frozen=True)
class Run:
    """Neighbouring bytes of one file with values of one dtype. `is_for_slots`: they are of pairs, not copies of the base's."""

    file: int
    dtype: Dtype
    is_for_slots: bool
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """What `read_adapter` does after the headers: which bytes become what. `runs` cover every tensor, and are as few as may be."""

    headers: tuple[Header, ...]
    runs: tuple[Run, ...]
    pairs: Mapping[ModuleKey, PlannedPair]
    base_copies: tuple[PlannedTensor, ...]
    facts: AdapterFacts


def make_plan(files: AdapterFolder, base: BaseShapes, limits: AdapterLimits) -> Plan:
    """Read the headers and check all that they and the config tell. Raises AdapterError for the first thing found.

    Adapters trained alike differ in their values alone, so the last few plans are kept: looking at hundreds of keys one by one holds the
    interpreter for milliseconds, in a process where steps run. What is kept depends on nothing but the bytes that are compared.
    """
    parse_config(files.config)  # what is wrong with it is said before what is wrong with a header
    heads = tuple(read_head(file) for file in files.weights)
    source = _Source(files.config, files.index, heads, files.names)
    make = _kept_plan if source.size <= MAX_KEPT_BYTES else _make_plan
    return make(source, base, dataclasses.replace(limits, roots=()))


@dataclass(frozen=True)
class _Source:
    """All bytes that a plan follows from: config, index and headers; `names` are the files that the digest covers."""

    config: bytes
    index: bytes | None
    heads: tuple[Head, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.config) + len(self.index or b"") + sum(len(head.raw) for head in self.heads)


def _make_plan(source: _Source, base: BaseShapes, limits: AdapterLimits) -> Plan:
    config = parse_config(source.config)
    headers = tuple(map(parse_header, source.heads))
    tensors = [PlannedTensor(number, entry, parse_key(entry.key)) for number, header in enumerate(headers) for entry in header.tensors]
    _check_index(source, tensors)
    _refuse_kinds(tensors, base)
    copies = tuple(tensor for tensor in tensors if tensor.parsed.kind is Kind.BASE_COPY)
    for tensor in tensors:
        _check_values_kind(tensor)
    for tensor in copies:
        _check_copy(tensor, base)
    warnings: list[str] = []
    pairs = _pair_up([tensor for tensor in tensors if tensor.parsed.kind is not Kind.BASE_COPY], config, base, limits, warnings)
    facts = AdapterFacts(
        modules=MappingProxyType({key: _module_facts(pair) for key, pair in pairs.items()}),
        max_rank=max(_rank(pair.lora_a) for pair in pairs.values()),
        size_bytes=sum(head.size for head in source.heads),
        files=source.names,
        warnings=(*_warnings(config, base, pairs, copies), *warnings),
        base_copies=tuple(_copy_facts(tensor) for tensor in copies),
        chat_template=None,
        added_tokens=MappingProxyType({}),
    )
    return Plan(headers, _runs(tensors), MappingProxyType(pairs), copies, facts)


_kept_plan = lru_cache(maxsize=MAX_KEPT)(_make_plan)


def _runs(tensors: Iterable[PlannedTensor]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.entry.begin)):
        begin, end = tensor.entry.begin, tensor.entry.end
        kind = tensor.file, cast("Dtype", tensor.entry.dtype), tensor.parsed.kind in LORA_KINDS
        if runs and (runs[-1].file, runs[-1].dtype, runs[-1].is_for_slots, runs[-1].end) == (*kind, begin):
            begin = runs.pop().begin
        runs.append(Run(*kind, begin, end))
    return tuple(runs)


def _check_index(source: _Source, tensors: list[PlannedTensor]) -> None:
    """Each key is in one file, and where there is an index in the one it tells."""
    places: dict[str, str] = {}
    for tensor in tensors:
        key, name = tensor.entry.key, source.heads[tensor.file].name
        if key in places:
            raise refuse("index_invalid", problem=f"names {places[key]} and {name}, which both hold {shown(key)}")
        places[key] = name
    if source.index is None:
        return
    weight_map = read_weight_map(source.index)
    for key in sorted(places.keys() | weight_map.keys()):
        told, found = weight_map.get(key, "no file"), places.get(key, "no file")
        if told != found:
            raise refuse("index_invalid", problem=f"names {told} for {shown(key)}, which is in {found}")


def _refuse_kinds(tensors: list[PlannedTensor], base: BaseShapes) -> None:
    """Name the first tensor of a kind that is not served; then those whose key means nothing here."""
    for tensor in tensors:
        key, kind = shown(tensor.entry.key), tensor.parsed.kind
        if kind is Kind.TRAINABLE_TOKENS:
            raise refuse("trainable_tokens", what=f"The tensor {key} comes from `trainable_token_indices`")
        if kind is Kind.MODULES_TO_SAVE:
            raise refuse("modules_to_save", what=f"The tensor {key} comes from `modules_to_save`")
        if kind is Kind.OTHER_BIAS:
            raise refuse("bias", what=f"The tensor {key} is no `base_layer.bias`")
    unknown = [tensor.entry.key for tensor in tensors if not _is_known(tensor.parsed, base)]
    if unknown:
        expected = ", ".join(f"`model.layers.0.{leaf}.lora_A.weight`" for leaf in list(base.leaves)[:MAX_NAMED])
        keys = ", ".join(shown(key) for key in unknown[:MAX_NAMED]) + (", ..." if len(unknown) > MAX_NAMED else "")
        raise refuse("unknown_keys", count=f"{len(unknown)} of {len(tensors)}", keys=keys, expected=expected)
    for tensor in tensors:
        _check_layer_and_vocab(tensor, base)
    if not any(tensor.parsed.kind in LORA_KINDS for tensor in tensors):
        raise refuse("no_tensors")


def _is_known(parsed: ParsedKey, base: BaseShapes) -> bool:
    if parsed.kind is Kind.UNKNOWN or parsed.module is None:
        return False
    if parsed.leaf is None:
        is_embedding = parsed.module == f"model.{EMBEDDING}"
        return parsed.kind not in LORA_KINDS or is_embedding == (parsed.kind in (Kind.EMBEDDING_A, Kind.EMBEDDING_B))
    if parsed.kind is Kind.BASE_COPY:
        return parsed.leaf in base.leaves
    return parsed.kind not in (Kind.EMBEDDING_A, Kind.EMBEDDING_B) and bool(base.parts(parsed.leaf))


def _check_layer_and_vocab(tensor: PlannedTensor, base: BaseShapes) -> None:
    """The base has the layer, and head and embedding have as many rows as its vocabulary."""
    parsed, key, shape = tensor.parsed, shown(tensor.entry.key), tensor.entry.shape
    if parsed.layer is not None:
        if parsed.layer >= base.num_layers:
            raise refuse("layer_out_of_range", key=key, layer=parsed.layer, last=base.num_layers - 1)
        return
    axis = _vocab_axis(parsed)
    if axis is not None and len(shape) > axis and shape[axis] not in (base.vocab_size, 0):
        raise refuse("vocab", what=f"{key} has the shape {list(shape)}", vocab=base.vocab_size)


def _vocab_axis(parsed: ParsedKey) -> int | None:
    """The axis of the tensor that counts the vocabulary."""
    if parsed.kind is Kind.BASE_COPY or (parsed.module == HEAD and parsed.kind in (Kind.LORA_B, Kind.MAGNITUDE)):
        return 0
    return 1 if parsed.kind is Kind.EMBEDDING_A else None


def _check_values_kind(tensor: PlannedTensor) -> None:
    if tensor.entry.dtype not in SERVED_DTYPES:
        raise refuse("dtype", key=shown(tensor.entry.key), dtype=tensor.entry.dtype)
    if 0 in tensor.entry.shape:
        raise refuse("zero_size", key=shown(tensor.entry.key), shape=list(tensor.entry.shape))


def _check_copy(tensor: PlannedTensor, base: BaseShapes) -> None:
    module = str(tensor.parsed.module)
    shape = base.module(module)
    assert shape is not None, f"{module} was checked before"
    expected = shape if module == "model.embed_tokens" else shape[::-1]
    if tensor.entry.shape != expected:
        raise refuse("base_copy_shape", key=shown(tensor.entry.key), shape=list(tensor.entry.shape), expected=list(expected))


def _pair_up(
    tensors: list[PlannedTensor], config: AdapterConfig, base: BaseShapes, limits: AdapterLimits, warnings: list[str]
) -> dict[ModuleKey, PlannedPair]:
    """Bring the tensors of every module together, check them against base and config, and split fused modules."""
    halves: dict[ModuleKey, dict[Kind, PlannedTensor]] = {}
    for tensor in tensors:
        half = halves.setdefault(_module_key(tensor.parsed), {})
        _refuse_second(half.setdefault(_ROLE.get(tensor.parsed.kind, tensor.parsed.kind), tensor), tensor)
    _check_ties(halves, config, base)
    ranks, alphas = PatternTable("rank_pattern", config.rank_pattern), PatternTable("alpha_pattern", config.alpha_pattern)
    pairs: dict[ModuleKey, PlannedPair] = {}
    for (layer, leaf), half in sorted(halves.items()):
        lora_a, lora_b = _both(half)
        parts = base.parts(leaf)
        _check_enabled(lora_a, parts, limits)
        bias, magnitude = half.get(Kind.BIAS), half.get(Kind.MAGNITUDE)
        _check_rows(lora_a, bias, magnitude, parts, base, config)
        rank = _check_shapes(lora_a, lora_b, parts, base, limits)
        _check_rank(lora_a, rank, config, ranks)
        alpha = _pattern_value(config.alpha_pattern, alphas, lora_a, config.alpha)
        scaling = config.scaling(rank, alpha)
        start = 0
        for part in parts:
            rows = (start, start + base.features(part)[1])
            pair = PlannedPair(lora_a, lora_b, rows, scaling, bias, magnitude)
            _refuse_second(pairs.setdefault((layer, part), pair).lora_a, lora_a)
            start = rows[1]
    for table in (ranks, alphas):
        warnings += [f"`{table.field}` has the key {shown(key)}, which matches no tensor: it has no effect" for key in table.unused()]
    return pairs


def _refuse_second(first: PlannedTensor, second: PlannedTensor) -> None:
    if first is not second:
        raise refuse("duplicate_module", first=shown(first.entry.key), second=shown(second.entry.key))


def _both(half: Mapping[Kind, PlannedTensor]) -> tuple[PlannedTensor, PlannedTensor]:
    lora_a, lora_b = half.get(Kind.LORA_A), half.get(Kind.LORA_B)
    if lora_a is not None and lora_b is not None:
        return lora_a, lora_b
    alone = next(iter(half.values()))
    raise refuse("half_pair", key=shown(alone.entry.key), missing="A" if lora_a is None else "B")


_ROLE = {Kind.EMBEDDING_A: Kind.LORA_A, Kind.EMBEDDING_B: Kind.LORA_B}  # an embedding's pair is one over the vocabulary


def _module_key(parsed: ParsedKey) -> ModuleKey:
    if parsed.layer is not None and parsed.leaf is not None:
        return parsed.layer, parsed.leaf
    return 0, str(parsed.module).removeprefix("model.")


def _check_ties(halves: Mapping[ModuleKey, object], config: AdapterConfig, base: BaseShapes) -> None:
    """`ensure_weight_tying`: PEFT saves the one pair of tied head and embedding under both names and would fill in a lost one."""
    found = [leaf for leaf in (HEAD, EMBEDDING) if (0, leaf) in halves]
    if config.ties_ends and base.tied_head and len(found) == 1:
        raise refuse("tied_ends", found=found[0], missing=EMBEDDING if found[0] == HEAD else HEAD)


def _check_enabled(lora_a: PlannedTensor, parts: tuple[str, ...], limits: AdapterLimits) -> None:
    """This server applies adapters to every part of the module."""
    for part in parts:
        leaf = part.rpartition(".")[2]
        if leaf not in limits.target_modules:
            raise refuse("target_modules", key=shown(lora_a.entry.key), module=leaf, served=", ".join(limits.target_modules))


def _check_rows(
    lora_a: PlannedTensor,
    bias: PlannedTensor | None,
    magnitude: PlannedTensor | None,
    parts: tuple[str, ...],
    base: BaseShapes,
    config: AdapterConfig,
) -> None:
    """Bias and magnitude: one number for each output row, a bias only where the base has one, a magnitude exactly where DoRA is on."""
    expected = [sum(base.features(part)[1] for part in parts)]
    for tensor in (bias, magnitude):
        if tensor is not None and list(tensor.entry.shape) != expected:
            raise refuse("shape", key=shown(tensor.entry.key), shape=list(tensor.entry.shape), expected=expected)
    if bias is not None and not base.biases.issuperset(parts):
        raise refuse("bias", what=f"The tensor {shown(bias.entry.key)} is the bias of a module that has none in this base")
    if magnitude is not None and not config.use_dora:
        raise refuse("dora", what=f"The tensor {shown(magnitude.entry.key)} is a DoRA magnitude and `use_dora` is not true")
    if magnitude is None and config.use_dora:
        raise refuse("dora", what=f"`use_dora` is true and {shown(lora_a.entry.key)} has no lora_magnitude_vector beside it")


def _check_shapes(lora_a: PlannedTensor, lora_b: PlannedTensor, parts: tuple[str, ...], base: BaseShapes, limits: AdapterLimits) -> int:
    """The rank of the pair, after A and B fit each other, the base and the cap."""
    in_features = base.features(parts[0])[0]
    out_features = sum(base.features(part)[1] for part in parts)
    shape_a, shape_b = lora_a.entry.shape, lora_b.entry.shape
    if len(shape_a) != 2 or shape_a[1] != in_features:
        raise refuse("shape", key=shown(lora_a.entry.key), shape=list(shape_a), expected=f"[r, {in_features}]")
    rank = shape_a[0]
    if rank > limits.max_lora_rank:
        raise refuse("rank_too_large", key=shown(lora_a.entry.key), rank=rank, limit=limits.max_lora_rank)
    if shape_b != (out_features, rank):
        raise refuse("shape", key=shown(lora_b.entry.key), shape=list(shape_b), expected=f"[{out_features}, {rank}]")
    return rank


def _check_rank(lora_a: PlannedTensor, rank: int, config: AdapterConfig, ranks: PatternTable) -> None:
    value = int(_pattern_value(config.rank_pattern, ranks, lora_a, config.rank))
    if value != rank:
        key = ranks.match(lora_a.parsed.trained_name)
        field = "r" if key is None else f"rank_pattern[{shown(key)}]"
        raise refuse("rank_mismatch", field=field, value=value, key=shown(lora_a.entry.key), rank=rank)


def _pattern_value(
    values: Mapping[str, int] | Mapping[str, float],
    table: PatternTable,
    lora_a: PlannedTensor,
    default: float,
) -> float:
    """What the pattern gives for the module; a fused module's parts must not be given something else."""
    name, leaf = lora_a.parsed.trained_name, str(lora_a.parsed.leaf)
    key = table.match(name)
    value = default if key is None else values[key]
    for part in FUSED.get(leaf, ()):
        part_key = table.match(name.removesuffix(leaf) + part)
        if part_key is not None and values[part_key] != value:
            raise refuse("fused_pattern", field=table.field, pattern=shown(part_key), key=shown(lora_a.entry.key))
    return value


def _rank(tensor: PlannedTensor) -> int:
    return tensor.entry.shape[0]


def _module_facts(pair: PlannedPair) -> ModuleFacts:
    return ModuleFacts(_rank(pair.lora_a), pair.scaling, tuple(tensor.parsed.kind.value for tensor in pair.tensors()))


def _copy_facts(tensor: PlannedTensor) -> BaseCopyFacts:
    shape = cast("tuple[int, int]", tensor.entry.shape)
    return BaseCopyFacts(tensor.entry.key, str(tensor.parsed.module), shape, cast("Dtype", tensor.entry.dtype))


def _warnings(
    config: AdapterConfig, base: BaseShapes, pairs: Mapping[ModuleKey, PlannedPair], copies: tuple[PlannedTensor, ...]
) -> list[str]:
    """What is served and yet worth a line in the log."""
    warnings = []
    if config.base_name and base.name and _last(config.base_name) != _last(base.name):
        warnings.append(f"`base_model_name_or_path` is {shown(config.base_name)}, the served base is {shown(base.name)}: the shapes fit")
    if copies:
        keys = ", ".join(shown(tensor.entry.key) for tensor in copies[:MAX_NAMED])
        warnings.append(f"{len(copies)} copies of base weights ({keys}) are ignored if they equal the served base's")
    plain = all(pair.bias is None and pair.magnitude is None for pair in pairs.values())
    if plain and all(pair.scaling == 0 for pair in pairs.values()):
        warnings.append("`lora_alpha` is 0: the adapter changes nothing")
    lost = [leaf for (_, leaf), pair in pairs.items() if leaf in base.biases and pair.bias is None]
    if config.bias != "none" and lost:
        warnings.append(f"`bias` is {shown(config.bias)} and {len(lost)} adapted modules with a bias have none here: they keep the base's")
    if config.target_modules is not None:
        names = {pair.lora_a.parsed.trained_name for pair in pairs.values()}
        extra = sorted(name for name in names if not any(f".{name}".endswith(f".{target}") for target in config.target_modules))
        if extra:
            warnings.append(f"`target_modules` does not name {shown(extra[0])} ({len(extra)} in all): its tensors are applied, they decide")
    return warnings


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
