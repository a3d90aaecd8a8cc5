"""Everything about a configuration that can be found wrong before any process starts. Imports no torch."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from mstar.adapters import AdapterLimits, BaseShapes, inspect_adapter, resolve_path
from mstar.adapters.hub import parse_hub_id
from mstar.config import ServeConfig
from mstar.distributed.shards import plan_heads
from mstar.errors import ConfigError, RequestError
from mstar.models.arch import ModelArch, load_arch
from mstar.wire.security import curve_for

DEFAULT_MAX_MODEL_LEN = 8192
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

log = logging.getLogger(__name__)


def preflight(config: ServeConfig) -> ServeConfig:
    """Check `config` against the model and the adapters; returns it with `max_model_len` filled in. Raises ConfigError."""
    arch = load_arch(config.model)
    folder = Path(config.model)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model {config.model}: the folder has no .safetensors file")
    tokenizer = Path(config.tokenizer or config.model)
    if not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer {tokenizer}: the folder has no tokenizer.json")
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise ConfigError(f"chat_template {config.chat_template}: there is no such file")
    plan_heads(arch.num_heads, arch.num_kv_heads, config.tensor_parallel_size)
    for root in config.lora_root:
        if not Path(root).is_dir():
            raise ConfigError(f"lora_root {root}: there is no such folder")
    if config.lora_dir is not None and not Path(config.lora_dir).is_dir():
        raise ConfigError(f"lora_dir {config.lora_dir}: there is no such folder")
    if config.front_endpoint is not None:
        curve_for(config.front_endpoint, config.curve_dir)
    _check_adapters(config)
    return config.model_copy(update={"max_model_len": _max_model_len(config, arch)})


def _max_model_len(config: ServeConfig, arch: ModelArch) -> int:
    longest = config.max_model_len or min(arch.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if longest > arch.max_position_embeddings:
        raise ConfigError(f"max_model_len is {longest}, the model has {arch.max_position_embeddings} positions")
    pages, source = _num_pages(config, arch)
    room = pages * config.block_size
    if room >= longest:
        return longest
    if config.max_model_len is not None or room < config.block_size:
        raise ConfigError(
            f"max_model_len is {longest}, but {source} gives {pages} KV pages of {config.block_size} tokens, {room} in all: one request of "
            "that length could never run"
        )
    log.warning("max_model_len is lowered from %d to %d tokens: what %s holds", longest, room, source)
    return room


def _num_pages(config: ServeConfig, arch: ModelArch) -> tuple[int, str]:
    """KV pages of the rank that has the fewest, as the ranks will count them, and the setting that they come from."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, f"num_gpu_blocks_override {config.num_gpu_blocks_override}"
    heads = plan_heads(arch.num_heads, arch.num_kv_heads, config.tensor_parallel_size)
    most = max(stop - start for start, stop in heads.kv_ranges)
    item = _ITEM_BYTES[arch.dtype if config.dtype == "auto" else config.dtype]
    page_bytes = 2 * arch.num_layers * config.block_size * most * arch.head_dim * item
    pages = config.kv_cache_memory_bytes // config.tensor_parallel_size // page_bytes
    return pages, f"kv_cache_memory_bytes {config.kv_cache_memory_bytes}"


def _check_adapters(config: ServeConfig) -> None:
    if not config.lora_modules:
        return
    base = BaseShapes.from_config(json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8")))
    roots = tuple(Path(root) for root in config.adapter_roots)
    limits = AdapterLimits(config.max_lora_rank, roots, config.lora_target_modules)
    for module in config.lora_modules:
        if config.enable_hub_adapters and not Path(module.path).exists() and parse_hub_id(module.path) is not None:
            continue  # the front fetches it, and refuses it
        try:
            inspect_adapter(resolve_path(module.path, roots), base, limits)
        except RequestError as error:
            raise ConfigError(f"lora_modules {module.name!r} ({module.path}): {error.message}") from None
