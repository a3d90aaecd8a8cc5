"""Every served row equals peft: the same modules, and `scaling * B @ A` equal to merged minus base weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import (
    BASE,
    CONFIG,
    PREFIX,
    PROJECTIONS,
    ROWS,
    WEIGHTS,
    assert_same_deltas,
    hand_folder,
    limits,
    our_deltas,
    pair,
    peft_deltas,
    peft_folder,
    tiny_model,
)  # fmt: skip
from peft import PeftModel
from safetensors.numpy import load_file, save_file

from mstar.adapters import AdapterLimits, BaseShapes, digest_adapter, inspect_adapter, read_adapter
from mstar.errors import AdapterError


@pytest.mark.parametrize("row", ROWS)
def test_served_equals_peft(row: str, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, **ROWS[row])
    tensors = read_adapter(folder, BASE, limits(), digest_adapter(folder))
    assert_same_deltas(our_deltas(tensors), peft_deltas(folder))
    assert inspect_adapter(folder, BASE, limits()) == tensors.facts
    assert {key: pair.rank for key, pair in tensors.pairs.items()} == {key: facts.rank for key, facts in tensors.facts.modules.items()}


def test_c05_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, r=64, lora_alpha=16, use_rslora=True, target_modules=PROJECTIONS)
    tensors = read_adapter(folder, BASE, limits(max_lora_rank=64))
    assert {pair.scaling for pair in tensors.pairs.values()} == {2.0}
    assert_same_deltas(our_deltas(tensors), peft_deltas(folder), tolerance=1e-4)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_half_types_are_read_to_the_bit(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, dtype=dtype, target_modules=PROJECTIONS)
    tensors = read_adapter(folder, BASE, limits())
    assert {pair.dtype for pair in tensors.pairs.values()} == {name}
    assert {pair.lora_a.dtype.name for pair in tensors.pairs.values()} == {"uint16" if name == "BF16" else "float16"}
    # peft in fp32 of the same values
    assert_same_deltas(our_deltas(tensors), peft_deltas(folder))


def test_c24_mixed_dtypes_in_one_file_and_in_one_pair(tmp_path: Path) -> None:
    tensors = pair() | pair(1, "mlp.up_proj")
    tensors = {key: value.astype(np.float16) if "q_proj.lora_B" in key else value for key, value in tensors.items()}
    read = read_adapter(hand_folder(tmp_path, tensors), BASE, limits())
    mixed = read.pairs[(0, "self_attn.q_proj")]
    assert (mixed.dtype, mixed.lora_a.dtype, mixed.lora_b.dtype) == ("F32", np.float32, np.float32)
    np.testing.assert_array_equal(mixed.lora_b, tensors[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"].astype(np.float32))
    assert not mixed.lora_a.flags.writeable and not mixed.lora_b.flags.writeable
    assert_same_deltas(our_deltas(read), peft_deltas(tmp_path), tolerance=1e-4)


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.model.", "model.", "language_model.model.", "base_model.model.language_model.model.",
     "base_model.model.model.language_model.", "model.language_model.", "language_model.", "base_model.model.", ""],
)  # fmt: skip
@pytest.mark.parametrize("infix", ["", ".default"])
def test_c03_key_prefixes_are_taken_off_only_where_they_are(prefix: str, infix: str, tmp_path: Path) -> None:
    tensors = {
        key.replace(".weight", f"{infix}.weight"): value
        for layer, leaf in [(0, "self_attn.q_proj"), (1, "self_attn.q_proj"), (1, "mlp.down_proj")]
        for key, value in pair(layer, leaf, prefix=prefix).items()
    }
    plain = hand_folder(tmp_path / "plain", pair(0) | pair(1) | pair(1, "mlp.down_proj"), alpha_pattern={"layers.1.mlp.down_proj": 32})
    folder = hand_folder(tmp_path / "wild", tensors, alpha_pattern={"layers.1.mlp.down_proj": 32})
    assert_same_deltas(our_deltas(read_adapter(folder, BASE, limits())), peft_deltas(plain), tolerance=1e-4)


def test_patterns_are_matched_against_the_name_in_the_file(tmp_path: Path) -> None:
    """Trained inside a bigger model, an anchored key names the module as it was there."""
    anchored = {"^language_model.model.layers.0.self_attn.q_proj": 32, "^model.layers.0.self_attn.q_proj": 2}
    folder = hand_folder(tmp_path, pair(prefix="base_model.model.language_model.model."), alpha_pattern=anchored)
    read = read_adapter(folder, BASE, limits())
    assert read.pairs[(0, "self_attn.q_proj")].scaling == 8.0
    assert any("^model.layers" in warning for warning in read.facts.warnings)


def test_c13_fused_names_share_a_and_split_b(tmp_path: Path) -> None:
    tensors = pair(0, "self_attn.qkv_proj") | pair(1, "mlp.gate_up_proj") | pair(1, "self_attn.k_proj")
    read = read_adapter(hand_folder(tmp_path / "fused", tensors, alpha_pattern={"qkv_proj": 20}), BASE, limits())
    lora_a = tensors[f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_A.weight"]
    lora_b = tensors[f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    split = dict(zip(["q_proj", "k_proj", "v_proj"], np.split(lora_b, [64, 96]), strict=True))
    assert {leaf: rows.shape for leaf, rows in split.items()} == {"q_proj": (64, 4), "k_proj": (32, 4), "v_proj": (32, 4)}
    up_a = tensors[f"{PREFIX}model.layers.1.mlp.gate_up_proj.lora_A.weight"]
    gate, up = np.split(tensors[f"{PREFIX}model.layers.1.mlp.gate_up_proj.lora_B.weight"], 2)
    plain = pair(1, "self_attn.k_proj")
    for leaf, rows in split.items():
        plain |= {f"{PREFIX}model.layers.0.self_attn.{leaf}.lora_A.weight": lora_a.copy()}
        plain |= {f"{PREFIX}model.layers.0.self_attn.{leaf}.lora_B.weight": rows.copy()}
    for leaf, rows in (("gate_proj", gate), ("up_proj", up)):
        plain |= {f"{PREFIX}model.layers.1.mlp.{leaf}.lora_A.weight": up_a.copy()}
        plain |= {f"{PREFIX}model.layers.1.mlp.{leaf}.lora_B.weight": rows.copy()}
    modules = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    peft = hand_folder(tmp_path / "plain", plain, target_modules=modules, alpha_pattern={"layers.0.self_attn.[qkv]_proj": 20})
    assert_same_deltas(our_deltas(read), peft_deltas(peft), tolerance=1e-4)
    assert np.shares_memory(read.pairs[(0, "self_attn.q_proj")].lora_a, read.pairs[(0, "self_attn.v_proj")].lora_a)


def test_shards_with_an_index(tmp_path: Path) -> None:
    whole = peft_folder(tmp_path / "whole", target_modules=PROJECTIONS)
    tensors = load_file(whole / WEIGHTS)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((whole / "adapter_config.json").read_bytes())
    names = sorted(tensors)
    weight_map = {key: f"adapter_model-0000{1 + (number >= 5) + (number >= 9)}-of-00003.safetensors" for number, key in enumerate(names)}
    for name in set(weight_map.values()):
        save_file({key: tensors[key] for key in names if weight_map[key] == name}, folder / name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    read = read_adapter(folder, BASE, limits(), digest_adapter(folder))
    assert_same_deltas(our_deltas(read), peft_deltas(whole))
    assert read.facts.files == ("adapter_config.json", "adapter_model.safetensors.index.json", *sorted(set(weight_map.values())))
    assert read.facts.size_bytes == sum((folder / name).stat().st_size for name in set(weight_map.values()))


def test_c07_copies_of_base_weights_are_handed_over_with_a_warning(tmp_path: Path) -> None:
    head = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    embedding = head.astype(np.float16)
    q_proj = np.ones((64, 64), dtype=np.float32)
    copies = {
        PREFIX + "lm_head.base_layer.weight": head,
        PREFIX + "model.embed_tokens.weight": embedding,
        PREFIX + "model.layers.0.self_attn.q_proj.base_layer.weight": q_proj,
    }
    read = read_adapter(hand_folder(tmp_path, pair() | copies), BASE, limits())
    assert {key: (copy.module, copy.dtype) for key, copy in read.base_copies.items()} == {
        PREFIX + "lm_head.base_layer.weight": ("lm_head", "F32"),
        PREFIX + "model.embed_tokens.weight": ("model.embed_tokens", "F16"),
        PREFIX + "model.layers.0.self_attn.q_proj.base_layer.weight": ("model.layers.0.self_attn.q_proj", "F32"),
    }
    for key, values in copies.items():
        np.testing.assert_array_equal(read.base_copies[key].values, values)
        assert not read.base_copies[key].values.flags.writeable
    assert set(read.pairs) == {(0, "self_attn.q_proj")}
    assert [warning for warning in read.facts.warnings if "copies of base weights" in warning]
    assert {facts.key: facts.shape for facts in read.facts.base_copies} == {key: values.shape for key, values in copies.items()}


def test_c07_peft_itself_saves_such_copies(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PeftModel.from_pretrained(tiny_model(), folder).save_pretrained(folder, save_embedding_layers=True)
    read = read_adapter(folder, BASE, limits())
    assert {copy.module for copy in read.base_copies.values()} == {"lm_head", "model.embed_tokens"}
    assert_same_deltas(our_deltas(read), peft_deltas(folder))


def test_c18_another_base_name_is_a_warning(tmp_path: Path) -> None:
    base = BaseShapes.from_config(CONFIG, name="/models/Tiny-Llama")
    same = hand_folder(tmp_path / "a", base_model_name_or_path="someone/tiny-llama")
    other = hand_folder(tmp_path / "b", base_model_name_or_path="gone/from-the-hub")
    assert inspect_adapter(same, base, limits()).warnings == ()
    (warning,) = inspect_adapter(other, base, limits()).warnings
    assert "gone/from-the-hub" in warning and "Tiny-Llama" in warning


@pytest.mark.parametrize("targets", ["(a+)+$", "*not a regex(", "all-linear", "", None, [], ["k_proj"], [1, None], {"a": 1}])
def test_c11_the_tensors_decide_whatever_target_modules_holds(targets: Any, tmp_path: Path) -> None:
    read = read_adapter(hand_folder(tmp_path, target_modules=targets), BASE, limits())
    assert set(read.pairs) == {(0, "self_attn.q_proj")}
    assert any("target_modules" in warning for warning in read.facts.warnings) == isinstance(targets, list)


def test_fields_that_are_unknown_but_empty_change_nothing(tmp_path: Path) -> None:
    empty = {"future_a": None, "future_b": False, "future_c": {}, "future_d": [], "future_e": "", "future_f": 0}
    assert inspect_adapter(hand_folder(tmp_path, **empty), BASE, limits()).warnings == ()


def test_a_pattern_that_matches_nothing_is_a_warning_as_in_peft(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, target_modules=["q_proj"], rank_pattern={"k_proj": 2}, alpha_pattern={"x.*": 99})
    facts = inspect_adapter(folder, BASE, limits())
    assert [("rank_pattern" in warning, "alpha_pattern" in warning) for warning in facts.warnings] == [(True, False), (False, True)]
    assert_same_deltas(our_deltas(read_adapter(folder, BASE, limits())), peft_deltas(folder))


def test_alpha_zero_is_served_as_peft_does_with_a_warning(tmp_path: Path) -> None:
    read = read_adapter(hand_folder(tmp_path, lora_alpha=0), BASE, limits())
    assert our_deltas(read) == peft_deltas(tmp_path) == {}
    assert any("changes nothing" in warning for warning in read.facts.warnings)


def test_one_pattern_for_every_module_of_a_deep_model_is_quick(tmp_path: Path) -> None:
    """EVA writes one key per module; neither time nor the budget of steps may grow with their product."""
    deep = BaseShapes(BASE.leaves, 126, 128, 64, 16, tied_head=False)
    names = [f"model.layers.{layer}.{leaf}" for layer in range(126) for leaf in BASE.leaves]
    tensors = {key: value for layer in range(126) for leaf in BASE.leaves for key, value in pair(layer, leaf, rank=1).items()}
    folder = hand_folder(tmp_path, tensors, rank_pattern=dict.fromkeys(names, 1), alpha_pattern=dict.fromkeys(names, 3))
    facts = inspect_adapter(folder, deep, limits())
    assert len(facts.modules) == 882 and {module.scaling for module in facts.modules.values()} == {3.0} and not facts.warnings


BIASED = {**CONFIG, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_magnitudes_and_biases_are_read_with_their_pairs_and_split_with_fused_ones(dtype: Any, tmp_path: Path) -> None:
    """Computing with them is the engine's: see tests/unit/engine/resources/lora."""
    base = BaseShapes.from_config(BIASED)
    tensors = pair(0, "self_attn.qkv_proj") | pair(1, "mlp.down_proj")
    draw = np.random.default_rng(1)
    qkv, down = f"{PREFIX}model.layers.0.self_attn.qkv_proj", f"{PREFIX}model.layers.1.mlp.down_proj"
    rows = {
        f"{qkv}.lora_magnitude_vector": draw.random(128).astype(dtype),
        f"{qkv}.base_layer.bias": draw.random(128).astype(dtype),
        f"{down}.lora_magnitude_vector.default.weight": draw.random(64).astype(dtype),
    }
    read = read_adapter(hand_folder(tmp_path, tensors | rows, use_dora=True, bias="lora_only"), base, limits())
    for leaf, part in (("q_proj", slice(0, 64)), ("k_proj", slice(64, 96)), ("v_proj", slice(96, 128))):
        found = read.pairs[(0, f"self_attn.{leaf}")]
        assert found.magnitude is not None and found.bias is not None
        assert found.magnitude.dtype == found.bias.dtype == np.float32 and not found.bias.flags.writeable
        np.testing.assert_array_equal(found.magnitude, rows[f"{qkv}.lora_magnitude_vector"][part])
        np.testing.assert_array_equal(found.bias, rows[f"{qkv}.base_layer.bias"][part])
    found = read.pairs[(1, "mlp.down_proj")]
    assert found.bias is None and found.magnitude is not None
    assert read.facts.modules[(1, "mlp.down_proj")].kinds == ("lora_A", "lora_B", "lora_magnitude_vector")
    assert [warning for warning in read.facts.warnings if "keep the base's" in warning]


@pytest.mark.parametrize("kind", ["lora_magnitude_vector", "base_layer.bias"])
def test_magnitudes_and_biases_that_are_not_finite_are_refused(kind: str, tmp_path: Path) -> None:
    key = f"{PREFIX}model.layers.0.self_attn.q_proj.{kind}"
    values = np.ones(64, dtype=np.float32)
    values[7] = np.nan
    folder = hand_folder(tmp_path, pair() | {key: values}, use_dora="magnitude" in kind, bias="lora_only")
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, BaseShapes.from_config(BIASED), limits())
    assert refused.value.code == "adapter_non_finite" and key in refused.value.message


def test_head_and_embedding_pairs_are_read_where_the_server_takes_them(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, target_modules=["q_proj", "lm_head", "embed_tokens"], rank_pattern={"lm_head": 2})
    takes = AdapterLimits(16, (), ("q_proj", "lm_head", "embed_tokens"))
    read = read_adapter(folder, BASE, takes)
    assert {key: (pair.lora_a.shape, pair.lora_b.shape) for key, pair in read.pairs.items() if not key[1].startswith("self")} == {
        (0, "lm_head"): ((2, 64), (128, 2)),
        (0, "embed_tokens"): ((4, 128), (64, 4)),
    }
    assert {copy.module for copy in read.base_copies.values()} == {"lm_head", "model.embed_tokens"}
    assert inspect_adapter(folder, BASE, takes) == read.facts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"attention_bias": True}, {"q", "k", "v", "o"}),
        ({"model_type": "qwen2"}, {"q", "k", "v"}),
        ({"model_type": "qwen3", "attention_bias": True, "mlp_bias": True}, {"q", "k", "v", "o"}),
        ({"model_type": "mistral", "attention_bias": True}, set()),
        ({"mlp_bias": True}, {"gate", "up", "down"}),
    ],
)
def test_which_leaves_have_a_bias_follows_the_family(fields: dict[str, Any], expected: set[str]) -> None:
    biases = BaseShapes.from_config({**CONFIG, **fields}).biases
    assert {leaf.rpartition(".")[2].removesuffix("_proj") for leaf in biases} == expected
