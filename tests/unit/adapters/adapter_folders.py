"""Adapter folders for the tests: written by peft itself, or by hand where peft cannot write them."""

from __future__ import annotations

import functools
import json
import shutil
import struct
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mstar.adapters import AdapterLimits, AdapterTensors, BaseShapes, as_float32
from mstar.errors import AdapterError

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
BASE = BaseShapes.from_config(CONFIG)
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# What peft can write and is served: each row is compared with peft, its deltas in tests/unit/adapters, its logits at TP 1 to 4 in
# tests/unit/engine/resources/lora/test_served_rows.py.
ROWS: dict[str, dict[str, Any]] = {
    "rank_1": {"r": 1, "target_modules": PROJECTIONS},
    "rank_at_the_cap": {"r": 16, "target_modules": ["q_proj"]},
    "rank_that_is_no_power_of_two": {"r": 7, "target_modules": PROJECTIONS},
    "rank_pattern_by_name": {"target_modules": PROJECTIONS, "rank_pattern": {"q_proj": 2, "down_proj": 9}},
    "rank_pattern_by_full_name": {"target_modules": PROJECTIONS, "rank_pattern": {"model.layers.1.self_attn.k_proj": 3}},
    "rank_pattern_by_anchored_name": {"target_modules": PROJECTIONS, "rank_pattern": {"^model.layers.0.mlp.up_proj": 3}},
    "rank_pattern_by_regex": {"target_modules": PROJECTIONS, "rank_pattern": {r".*\.0\.(self_attn|mlp)\.(q|v|gate)_proj": 5}},
    "alpha_pattern_by_name": {"target_modules": PROJECTIONS, "alpha_pattern": {"v_proj": 32, "self_attn.q_proj": 2}},
    "alpha_pattern_by_regex": {"target_modules": PROJECTIONS, "alpha_pattern": {r"layers\.1\..*": 64, "[qv]_proj": 3}},
    "alpha_pattern_first_key_wins": {"target_modules": ["q_proj"], "alpha_pattern": {".*q_proj": 32, "q_proj": 2}},
    "both_patterns_with_different_keys": {"target_modules": PROJECTIONS, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*attn.q_proj": 40}},
    "both_patterns_and_rslora": {"target_modules": PROJECTIONS, "use_rslora": True, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"k_proj": 5}},
    "float_alpha": {"target_modules": PROJECTIONS, "lora_alpha": 3.75},
    "negative_alpha": {"target_modules": ["o_proj"], "lora_alpha": -8},
    "c27_layers_to_transform": {"target_modules": PROJECTIONS, "layers_to_transform": [1]},
    "c27_layers_to_transform_as_a_number": {"target_modules": ["o_proj"], "layers_to_transform": 0},
    "layers_pattern": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "exclude_modules": {"target_modules": PROJECTIONS, "exclude_modules": ["k_proj", "layers.0.mlp.up_proj"]},
    "c10_dotted_names": {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]},
    "c10_another_order": {"target_modules": list(reversed(PROJECTIONS))},
    "c11_regex": {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"},
    "c11_all_linear": {"target_modules": "all-linear"},
    "c28_bias_none": {"target_modules": ["q_proj"], "bias": "none"},
    **{f"c42_{name}_only": {"target_modules": [name]} for name in PROJECTIONS},
    "c28_lora_only_where_the_base_has_no_bias": {"target_modules": PROJECTIONS, "bias": "lora_only"},
    "init_gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "init_orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "ensure_weight_tying": {"target_modules": ["q_proj"], "ensure_weight_tying": True},
    "c18_no_base_name": {"target_modules": ["q_proj"], "base_model_name_or_path": None},
}  # fmt: skip


def limits(*roots: Path, max_lora_rank: int = 16) -> AdapterLimits:
    return AdapterLimits(max_lora_rank, roots)


def tiny_model() -> LlamaForCausalLM:
    """The tiny base of the public cases, the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"}))
    return model.eval()


@functools.cache
def base_weights() -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in tiny_model().state_dict().items()}


def peft_folder(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **lora: Any) -> Path:
    """A folder as `save_pretrained` writes it, of an adapter with random A and B."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM", **lora})
        model = get_peft_model(tiny_model(), config, autocast_adapter_dtype=False)
        model.to(dtype).save_pretrained(folder)
    return folder


def peft_deltas(folder: Path) -> dict[str, np.ndarray]:
    """What peft makes of the folder: merged minus base weights, by module path, where they differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = PeftModel.from_pretrained(tiny_model(), folder).merge_and_unload().state_dict()
    deltas = {}
    for name, weight in base_weights().items():
        delta = (merged[name].float() - weight).numpy()
        if np.any(delta):
            deltas[name.removesuffix(".weight")] = delta
    return deltas


def our_deltas(tensors: AdapterTensors) -> dict[str, np.ndarray]:
    """`scaling * B @ A` of every pair, by module path, where it is not zero."""
    deltas = {}
    for (layer, leaf), pair in tensors.pairs.items():
        delta = pair.scaling * (as_float32(pair.lora_b, pair.dtype) @ as_float32(pair.lora_a, pair.dtype))
        if np.any(delta):
            deltas[f"model.layers.{layer}.{leaf}"] = delta
    return deltas


def assert_same_deltas(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for module, delta in expected.items():
        np.testing.assert_allclose(found[module], delta, atol=tolerance, rtol=0, err_msg=module)


def pair(layer: int = 0, leaf: str = "self_attn.q_proj", rank: int = 4, prefix: str = PREFIX + "model.", seed: int = 0) -> dict[str, Any]:
    """One A and one B, float32, of the shapes that the tiny base takes."""
    parts = BASE.parts(leaf)
    draw = np.random.default_rng([seed, layer, len(leaf)])
    in_features, out_features = BASE.leaves[parts[0]][0], sum(BASE.leaves[part][1] for part in parts)
    name = f"{prefix}layers.{layer}.{leaf}"
    return {
        f"{name}.lora_A.weight": draw.standard_normal((rank, in_features), dtype=np.float32),
        f"{name}.lora_B.weight": draw.standard_normal((out_features, rank), dtype=np.float32),
    }


def config(**fields: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", **fields}


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def hand_folder(folder: Path, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """A folder by hand: one q_proj pair of rank 4 unless told otherwise."""
    write_config(folder, config(**fields))
    save_file(pair() if tensors is None else tensors, folder / WEIGHTS)
    return folder


def raw_file(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, and any length in front of it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def copy_of(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, tempfile.mkdtemp(dir=place), dirs_exist_ok=True))


def sentence(error: AdapterError) -> str:
    """The message, after checks that hold for each: one line, short, ASCII, ends in a full stop."""
    text = error.message
    assert text.isascii() and text.isprintable() and text.endswith(".") and len(text) < 800, text
    return text
