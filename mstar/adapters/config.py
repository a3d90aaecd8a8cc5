"""`adapter_config.json`: what of it changes the result, and the refusal of all that would change it in a way not served.

A field is one of: read here (`r`, `lora_alpha`, `use_rslora`, the patterns, `bias` …), refused by its own row when it is set,
information (training settings, and what the tensors decide anyway), or not known: then it must be empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.strict_json import JsonProblem, load_object

MAX_ALPHA = 3.4028234663852886e38  # the largest float32
MAX_RANK = 1 << 31  # beyond it no tensor can be

# They tell how the adapter was trained, or what the tensors tell better.
INFORMATION = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "lora_dropout", "megatron_core",
    "runtime_config", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
})  # fmt: skip
READ = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_bias", "use_dora", "init_lora_weights",
    "modules_to_save", "trainable_token_indices", "layer_replication", "fan_in_fan_out", "alora_invocation_tokens", "ensure_weight_tying",
})  # fmt: skip
# Initialisations that leave the base as it is; PEFT's others subtract what they put into A and B from the base's weights.
HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """The part of the configuration that the result depends on, and `base_name` and `target_modules` for warnings."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    bias: str
    ties_ends: bool  # `ensure_weight_tying`: PEFT gives tied head and embedding one pair
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_name: str | None
    target_modules: tuple[str, ...] | None

    def scaling(self, rank: int, alpha: float) -> float:
        """What `B @ A` is multiplied by, as PEFT computes it."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_config(data: bytes) -> AdapterConfig:
    """Read the bytes of `adapter_config.json`. Raises AdapterError for the first thing that cannot be served."""
    try:
        fields = load_object(data, constants=True)
    except JsonProblem as error:
        raise refuse("config_unreadable", problem=error) from None
    if fields.get("peft_type") != "LORA":
        raise refuse("peft_type", value=_found(fields, "peft_type"))
    _refuse_features(fields)
    for field, value in fields.items():
        if field not in INFORMATION and field not in READ and not _is_empty(value):
            raise refuse("unsupported_field", field=_name(field), value=shown(value))
    targets = fields.get("target_modules")
    base_name = fields.get("base_model_name_or_path")
    return AdapterConfig(
        rank=_rank("r", fields.get("r"), _found(fields, "r")),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha"), _found(fields, "lora_alpha")),
        use_rslora=_flag(fields, "use_rslora"),
        use_dora=_flag(fields, "use_dora"),
        bias=fields.get("bias") or "none",
        ties_ends=_flag(fields, "ensure_weight_tying"),
        rank_pattern={key: _rank(_entry("rank_pattern", key), value) for key, value in _pattern(fields, "rank_pattern").items()},
        alpha_pattern={key: _alpha(_entry("alpha_pattern", key), value) for key, value in _pattern(fields, "alpha_pattern").items()},
        base_name=base_name if isinstance(base_name, str) and base_name else None,
        target_modules=_names(targets) if isinstance(targets, list) else None,
    )


def _refuse_features(fields: Mapping[str, Any]) -> None:
    """Every known feature that is not served, each by its own row."""
    if fields.get("bias") not in (None, "none", "lora_only"):
        raise refuse("bias", what=f"`bias` is {shown(fields['bias'])}")
    if _flag(fields, "lora_bias"):
        raise refuse("bias", what="`lora_bias` is true")
    if fields.get("modules_to_save"):
        raise refuse("modules_to_save", what=f"`modules_to_save` is {shown(fields['modules_to_save'])}")
    if fields.get("trainable_token_indices"):
        raise refuse("trainable_tokens", what=f"`trainable_token_indices` is {shown(fields['trainable_token_indices'])}")
    if fields.get("layer_replication"):
        raise refuse("layer_replication", value=shown(fields["layer_replication"]))
    if _flag(fields, "fan_in_fan_out"):
        raise refuse("fan_in_fan_out")
    if fields.get("alora_invocation_tokens") is not None:
        raise refuse("alora", value=shown(fields["alora_invocation_tokens"]))
    _check_init(fields.get("init_lora_weights"))


def _check_init(value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, str):
        raise refuse("field_type", field="init_lora_weights", value=shown(value), expected="true, false or a name")
    if value.lower().startswith(BASE_CHANGING_INITS):
        raise refuse("init", value=shown(value))
    if value.lower() not in HARMLESS_INITS:
        raise refuse("unsupported_field", field="init_lora_weights", value=shown(value))


def _flag(fields: Mapping[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise refuse("field_type", field=field, value=shown(value), expected="true or false")
    return bool(value)


def _rank(field: str, value: Any, found: str | None = None) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise refuse("rank_invalid", field=field, value=found or shown(value))
    return value


def _alpha(field: str, value: Any, found: str | None = None) -> float:
    # Compared as it is: float() of an integer of 400 digits would overflow. A comparison with NaN is false.
    if type(value) not in (int, float) or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise refuse("alpha_invalid", field=field, value=found or shown(value))
    return float(value)


def _pattern(fields: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = fields.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse("field_type", field=field, value=shown(value), expected="a mapping of names to numbers")
    return value


def _names(values: list[Any]) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str))


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value == 0 or value in ("", [], {})


def _found(fields: Mapping[str, Any], field: str) -> str:
    return shown(fields[field]) if field in fields else "missing"


def _name(field: str) -> str:
    return shown(field)[1:-1]


def _entry(field: str, key: str) -> str:
    return f"{field}[{shown(key)}]"
