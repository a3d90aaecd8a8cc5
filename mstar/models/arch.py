"""What a base model is, read from its `config.json`: the Llama line, told apart by facts and not by class names.

Pure data, read by the front as well as by ranks: no torch. Whatever would change the numbers and is not known here is refused
with a ConfigError that names the field, what was found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mstar.errors import ConfigError

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_DTYPES = ("float32", "bfloat16", "float16")

# What transformers assumes where the file is silent (a null is not silence).
_DEFAULT_EOS = {"llama": 2, "mistral": 2}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_WINDOW = {"mistral": 4096}


@dataclass(frozen=True)
class ModelArch:
    """One decoder of the Llama line. Sizes are global, before any cut over ranks.

    `windows[layer_idx]` is how many positions a token sees, itself included; None is all of them. `rope` is transformers'
    `rope_parameters`: `rope_type`, `rope_theta` and the scaling's own fields.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    dtype: str


def load_arch(folder: str | Path) -> ModelArch:
    """Read `config.json` (and `generation_config.json` for further end-of-sequence ids) of a model folder.

    Raises ConfigError, in one line, for a missing folder or file and for a model that cannot be served.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"model is {str(folder)!r}, which is not a folder; give one with config.json, safetensors and a tokenizer")
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    return arch_from_config(config, generation, where=str(path / "config.json"))


def arch_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelArch:
    """The architecture that a parsed `config.json` describes; `where` names the file in messages. Raises ConfigError."""
    fields = _Fields(config, where)
    family = _family(fields)
    num_layers, hidden_size = fields.count("num_hidden_layers"), fields.count("hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(fields, family, hidden_size)
    rope = _rope(fields)
    _refuse_unknown(fields)
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    return ModelArch(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.count("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        windows=_windows(fields, family, num_layers),
        rope=rope,
        eos_token_ids=_eos_ids(fields, generation, family),
        dtype=_dtype(fields),
    )


class _Fields:
    """A parsed config with readers that name the file, the field and what is allowed."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, name: str) -> Any:
        """The field, None where it is absent or null."""
        return self.values.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, value, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def wrong(self, name: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {value!r}; allowed: {allowed}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(parsed).__name__}")
    return parsed


def _family(fields: _Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in _FAMILIES:
        raise fields.wrong("architectures", names, f"one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def _heads(fields: _Fields, family: str, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads and the size of a head."""
    num_heads = fields.count("num_attention_heads")
    silent = "num_key_value_heads" not in fields.values
    num_kv_heads = fields.count("num_key_value_heads", _DEFAULT_KV_HEADS.get(family, num_heads) if silent else num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")
    head_dim = fields.count("head_dim", _DEFAULT_HEAD_DIM.get(family, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", head_dim, "an even number: rotary positions turn pairs")
    return num_heads, num_kv_heads, head_dim


def _refuse_unknown(fields: _Fields) -> None:
    """Fields that change the numbers in a way that this decoder does not compute."""
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.wrong("hidden_act", fields.get("hidden_act"), "silu")
    if fields.get("quantization_config"):
        raise fields.wrong("quantization_config", "set", "none; give the model in float32, bfloat16 or float16")
    if fields.get("pretraining_tp") not in (None, 1):
        raise fields.wrong("pretraining_tp", fields.get("pretraining_tp"), "1")


def _windows(fields: _Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. Mistral: all layers alike; Qwen: only where switched on, from `max_window_layers` up."""
    everywhere: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama" or fields.values.get("sliding_window", _DEFAULT_WINDOW.get(family)) is None:
        return everywhere
    if family == "mistral":
        return (fields.count("sliding_window", _DEFAULT_WINDOW[family]),) * num_layers
    if not fields.flag("use_sliding_window"):
        return everywhere
    window = fields.count("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
        raise fields.wrong("layer_types", kinds, f"a list of {num_layers} entries, each of {', '.join(allowed)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: _Fields) -> Mapping[str, Any]:
    """One flat mapping from both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.wrong("rope_parameters", given, "a JSON object")
    rope = dict(given)
    rope["rope_type"] = rope.pop("type", None) if rope.get("rope_type") is None else rope["rope_type"]
    rope["rope_type"] = rope["rope_type"] or "default"
    rope.pop("type", None)
    if rope["rope_type"] not in _ROPE_TYPES:
        raise fields.wrong("rope_type", rope["rope_type"], f"one of {', '.join(_ROPE_TYPES)}")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = fields.number("rope_theta", 10_000.0)
    partial = rope.pop("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise fields.wrong("partial_rotary_factor", partial, "1")
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        length = fields.get("original_max_position_embeddings") or fields.count("max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", length)
    for name in _ROPE_NEEDS.get(rope["rope_type"], ()):
        if rope.get(name) is None:
            raise fields.wrong(f"rope_parameters.{name}", None, f"a value; rope_type {rope['rope_type']!r} needs it")
    return MappingProxyType(rope)


_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _eos_ids(fields: _Fields, generation: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """The end-of-sequence ids of both files, each once, in order."""
    found: list[int] = []
    for value in (generation.get("eos_token_id"), fields.values.get("eos_token_id", _DEFAULT_EOS.get(family))):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise fields.wrong("eos_token_id", value, "a token id or a list of token ids")
        found.extend(ids)
    return tuple(dict.fromkeys(found))


def _dtype(fields: _Fields) -> str:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if value not in _DTYPES:
        raise fields.wrong("dtype", value, f"one of {', '.join(_DTYPES)}")
    return str(value)
