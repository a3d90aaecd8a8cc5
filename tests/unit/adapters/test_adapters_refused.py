"""Every row of the table of refusals is reached, by its code and its words; and many ways into each."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import (
    BASE,
    PREFIX,
    WEIGHTS,
    config,
    hand_folder,
    limits,
    pair,
    peft_folder,
    raw_file,
    sentence,
    write_config,
)
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from mstar.adapters import (
    REFUSALS,
    AdapterLimits,
    Dtype,
    as_float32,
    catalogue_markdown,
    digest_adapter,
    inspect_adapter,
    read_adapter,
    resolve_path,
)
from mstar.errors import AdapterError

Q = PREFIX + "model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
Make = Callable[[Path], object]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype=dtype)


def fields(**values: Any) -> Make:
    return lambda folder: hand_folder(folder, **values)


def without(*names: str) -> Make:
    return lambda folder: write_config(hand_folder(folder), {key: value for key, value in config().items() if key not in names})


def holding(values: dict[str, np.ndarray], **config_fields: Any) -> Make:
    return lambda folder: hand_folder(folder, values, **config_fields)


def beside(name: str, data: bytes, values: dict[str, np.ndarray] | None = None) -> Make:
    return lambda folder: (hand_folder(folder, values) / name).write_bytes(data)


def peft(**lora: Any) -> Make:
    return lambda folder: peft_folder(folder, **lora)


def only(name: str, data: bytes = b"") -> Make:
    def make(folder: Path) -> None:
        write_config(folder, config())
        (folder / name).write_bytes(data)

    return make


def linked_out(folder: Path) -> None:
    hand_folder(folder)
    outside = folder.parent / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def piped(folder: Path) -> None:
    write_config(folder, config())
    os.mkfifo(folder / WEIGHTS)


def indexed(weight_map: Any, *, drop: bool = True) -> Make:
    def make(folder: Path) -> None:
        hand_folder(folder)
        (folder / WEIGHTS).rename(folder / "shard.safetensors") if drop else None
        (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return make


def in_both_shards(folder: Path) -> None:
    indexed({A: "shard.safetensors", B: "second.safetensors"})(folder)
    (folder / "second.safetensors").write_bytes((folder / "shard.safetensors").read_bytes())


def nothing(folder: Path) -> None:
    folder.mkdir()


# (row of the table, name, how the folder is made, words that the message must hold)
CASES: list[tuple[str, str, Make, tuple[str, ...]]] = [
    ("config_missing", "no_config", nothing, ("adapter_config.json",)),
    ("config_unreadable", "empty_config", beside("adapter_config.json", b""), ("not valid JSON",)),
    ("config_unreadable", "cut_config", beside("adapter_config.json", b'{"r": 4,'), ("not valid JSON",)),
    ("config_unreadable", "list_config", beside("adapter_config.json", b"[]"), ("not a JSON object",)),
    ("config_unreadable", "latin_config", beside("adapter_config.json", b'{"r": "\xe9"}'), ("UTF-8",)),
    ("config_unreadable", "deep_config", beside("adapter_config.json", b'{"a":' + b"[" * 100_000), ("nested",)),
    ("config_unreadable", "long_number", beside("adapter_config.json", b'{"r":' + b"9" * 5000 + b"}"), ("too long",)),
    ("config_unreadable", "key_twice", beside("adapter_config.json", b'{"r": 4, "r": 8}'), ("twice",)),
    ("peft_type", "ia3", fields(peft_type="IA3"), ("peft_type", "IA3")),
    ("peft_type", "adalora", fields(peft_type="ADALORA"), ("ADALORA",)),
    ("peft_type", "list", fields(peft_type=["LORA"]), ("LORA",)),
    ("peft_type", "c19_missing", without("peft_type"), ("peft_type", "missing")),
    ("rank_invalid", "zero", fields(r=0), ("`r` is 0",)),
    ("rank_invalid", "negative", fields(r=-4), ("`r` is -4",)),
    ("rank_invalid", "float", fields(r=4.0), ("`r` is 4.0",)),
    ("rank_invalid", "true", fields(r=True), ("`r` is true",)),
    ("rank_invalid", "text", fields(r="4"), ('`r` is "4"',)),
    ("rank_invalid", "null", fields(r=None), ("`r` is null",)),
    ("rank_invalid", "missing", without("r"), ("`r` is missing",)),
    ("rank_invalid", "huge", fields(r=10**400), ("`r` is 1000",)),
    ("rank_invalid", "in_pattern", fields(rank_pattern={"q_proj": 0}), ("rank_pattern", "q_proj", "is 0")),
    ("alpha_invalid", "missing", without("lora_alpha"), ("`lora_alpha` is missing",)),
    ("alpha_invalid", "null", fields(lora_alpha=None), ("`lora_alpha` is null",)),
    ("alpha_invalid", "nan", fields(lora_alpha=float("nan")), ("NaN",)),
    ("alpha_invalid", "infinite", fields(lora_alpha=float("-inf")), ("-Infinity",)),
    ("alpha_invalid", "beyond_float32", fields(lora_alpha=1e39), ("1e+39",)),
    ("alpha_invalid", "huge", fields(lora_alpha=10**400), ("1000",)),
    ("alpha_invalid", "text", fields(lora_alpha="16"), ('"16"',)),
    ("alpha_invalid", "true", fields(lora_alpha=True), ("true",)),
    ("alpha_invalid", "in_pattern", fields(alpha_pattern={"q_proj": None}), ("alpha_pattern", "q_proj")),
    ("field_type", "flag_as_text", fields(use_rslora="false"), ("use_rslora", "true or false")),
    ("field_type", "dora_as_number", fields(use_dora=1), ("use_dora",)),
    ("field_type", "pattern_list", fields(rank_pattern=["q_proj"]), ("rank_pattern", "mapping")),
    ("field_type", "init_number", fields(init_lora_weights=3), ("init_lora_weights",)),
    ("dora", "c08_tensors_alone", holding(pair() | {f"{Q}.lora_magnitude_vector": zeros(64)}), ("magnitude", Q)),
    ("dora", "c08_one_magnitude_lost", holding(pair() | pair(1) | {f"{Q}.lora_magnitude_vector": zeros(64)}, use_dora=True),
     ("use_dora", "layers.1.self_attn.q_proj")),
    ("dora", "c08_weight_suffix", holding(pair() | {f"{Q}.lora_magnitude_vector.default.weight": zeros(64)}), ("magnitude",)),
    ("dora", "flag_alone", fields(use_dora=True), ("use_dora",)),
    ("bias", "c28_all", fields(bias="all"), ("`bias`",)),
    ("bias", "unknown", fields(bias="some_only"), ("`bias`", "some_only")),
    ("bias", "not_text", fields(bias=["lora_only"]), ("`bias`",)),
    ("bias", "c28_where_the_base_has_none", holding(pair() | {f"{Q}.base_layer.bias": zeros(64)}), (Q,)),
    ("bias", "plain_tensor", holding(pair() | {f"{Q}.bias": zeros(64)}), (Q,)),
    ("bias", "lora_bias", peft(lora_bias=True, init_lora_weights=True, target_modules=["q_proj"]), ("lora_bias",)),
    ("bias", "lora_bias_tensor", holding(pair() | {f"{Q}.lora_B.bias": zeros(64)}), ("lora_B.bias",)),
    ("modules_to_save", "peft", peft(target_modules=["q_proj"], modules_to_save=["lm_head"]), ("modules_to_save", "lm_head")),
    ("modules_to_save", "tensor", holding(pair() | {PREFIX + "lm_head.modules_to_save.default.weight": zeros(128, 64)}), ("lm_head",)),
    ("trainable_tokens", "c09_peft", peft(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]}),
     ("trainable_token_indices", "embed_tokens")),
    ("trainable_tokens", "c09_tensor", holding(pair() | {PREFIX + "model.embed_tokens.token_adapter.trainable_tokens_delta": zeros(2, 64)}),
     ("trainable_token_indices", "embed_tokens")),
    ("layer_replication", "peft", peft(target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]]), ("layer_replication", "[[0, 2]")),
    ("fan_in_fan_out", "true", fields(fan_in_fan_out=True), ("fan_in_fan_out",)),
    ("alora", "tokens", fields(alora_invocation_tokens=[5, 6]), ("alora_invocation_tokens", "[5, 6]")),
    ("alora", "no_tokens", fields(alora_invocation_tokens=[]), ("alora_invocation_tokens",)),
    *[("init", init, fields(init_lora_weights=init), ("init_lora_weights", init))
      for init in ("pissa", "pissa_niter_16", "olora", "OLoRA", "loftq", "corda", "lora_ga")],
    ("init", "pissa_by_peft", peft(target_modules=["q_proj"], init_lora_weights="pissa"), ("pissa",)),
    ("unsupported_field", "unknown_init", fields(init_lora_weights="brand_new"), ("init_lora_weights", "brand_new")),
    ("unsupported_field", "qalora", fields(use_qalora=True), ("use_qalora",)),
    ("unsupported_field", "parameters", fields(target_parameters=["w"]), ("target_parameters",)),
    ("unsupported_field", "bdlora", fields(use_bdlora={"nblocks": 2}), ("use_bdlora",)),
    ("unsupported_field", "kasa", fields(kasa_config={"beta": 1}), ("kasa_config",)),
    ("unsupported_field", "velora", fields(velora_config={}, arrow_config={"top_k": 3}), ("arrow_config",)),
    ("unsupported_field", "monteclora", fields(monteclora_config={"num_samples": 8}), ("monteclora_config",)),
    ("unsupported_field", "future", fields(future_scale=2), ("future_scale", "2")),
    ("unsupported_field", "odd_name", fields(**{"a\nb\ud800": 1}), ("a\\nb\\ud800",)),
    ("pattern_unsupported", "look_ahead", fields(alpha_pattern={"(?=q)q_proj": 1}), ("alpha_pattern", "(?=q)")),
    ("pattern_unsupported", "unclosed", fields(rank_pattern={"(q_proj": 4}), ("rank_pattern",)),
    ("pattern_unsupported", "too_large", fields(rank_pattern={"(((a{900}){900}){900}){900}": 4}), ("too large",)),
    ("pattern_unsupported", "too_long", fields(rank_pattern={"a*" * 4000: 4}), ("longer",)),
    ("pattern_unsupported", "too_slow", lambda folder: hand_folder(
        folder, pair(0) | pair(1), alpha_pattern={f"(.*.*.*){{100}}x{number}": 1 for number in range(100)}), ("too long to match",)),
    ("weights_missing", "config_alone", lambda folder: write_config(folder, config()), (WEIGHTS,)),
    ("pickle", "c14_c79_bin", only("adapter_model.bin", b"\x80\x04"), ("adapter_model.bin", "safetensors")),
    ("pickle", "c79_pt", only("adapter.pt"), ("adapter.pt",)),
    ("pickle", "c79_nemo", only("model.NEMO"), ("NEMO",)),
    ("files_ambiguous", "shards_without_index", only("adapter_model-00001-of-00002.safetensors"), ("index",)),
    ("files_ambiguous", "file_and_index", indexed({A: "shard.safetensors"}, drop=False), ("both",)),
    ("index_invalid", "no_map", indexed(None), ("weight_map",)),
    ("index_invalid", "lost_shard", indexed({A: "shard.safetensors", B: "lost.safetensors"}), ("lost.safetensors", "not there")),
    ("index_invalid", "path_in_name", indexed({A: "../shard.safetensors"}), ("../shard",)),
    ("index_invalid", "number_as_name", indexed({A: 3}), ("3",)),
    ("index_invalid", "pickle_as_shard", indexed({A: "shard.bin"}), ("shard.bin",)),
    ("index_invalid", "many_shards", indexed({f"k{number}": f"s{number}.safetensors" for number in range(65)}), ("65",)),
    ("index_invalid", "key_not_told", indexed({A: "shard.safetensors"}), ("lora_B", "no file")),
    ("index_invalid", "key_not_there", indexed({A: "shard.safetensors", B: "shard.safetensors", "x": "shard.safetensors"}), ('"x"',)),
    ("index_invalid", "key_in_both", in_both_shards, ("both hold",)),
    ("index_invalid", "not_json", beside("adapter_model.safetensors.index.json", b"{"), ("JSON",)),
    ("file_invalid", "c16_empty", beside(WEIGHTS, b""), (WEIGHTS, "empty")),
    ("file_kind", "pipe", piped, (WEIGHTS, "regular file")),
    ("file_kind", "folder", lambda folder: (write_config(folder, config()), (folder / WEIGHTS).mkdir()), (WEIGHTS,)),
    ("file_too_large", "config", beside("adapter_config.json", b" " * (1 << 20) + b"{}"), ("1048578", "1048576")),
    ("file_outside", "link", linked_out, (WEIGHTS, "link")),
    ("no_tensors", "empty_header", beside(WEIGHTS, raw_file({})), ("no LoRA tensors",)),
    ("no_tensors", "copies_alone", holding({PREFIX + "lm_head.base_layer.weight": zeros(128, 64)}), ("no LoRA tensors",)),
    ("unknown_keys", "some", holding(pair() | {f"transformer.h.{number}.c_attn.lora_A.weight": zeros(4, 64) for number in range(5)}),
     ("5 of 7", "transformer.h.0.c_attn", "...", "model.layers.0.self_attn.q_proj.lora_A.weight")),
    ("unknown_keys", "c23_module_that_the_base_lacks", holding(pair() | {A.replace("q_proj", "kv_proj"): zeros(4, 64)}), ("kv_proj",)),
    ("unknown_keys", "c104_vision_tower_beside_language_layers",
     holding(pair() | {f"{PREFIX}visual.blocks.{n}.attn.qkv.lora_{half}.weight": zeros(4, 4) for n in (0, 1) for half in "AB"}),
     ("4 of 6", "visual.blocks.0.attn.qkv")),
    ("unknown_keys", "c104_vision_tower_alone", holding({f"{PREFIX}model.visual.merger.lora_A.weight": zeros(4, 64)}), ("visual.merger",)),
    ("unknown_keys", "kohya", holding({"lora_unet_down.lora_down.weight": zeros(4, 64)}), ("lora_down",)),
    ("unknown_keys", "line_break", holding(pair() | {A + "\n": zeros(4, 64)}), ("\\n",)),
    ("unknown_keys", "layer_with_zero", holding(pair() | {A.replace("layers.0", "layers.00"): zeros(4, 64)}), ("layers.00",)),
    ("unknown_keys", "other_adapter_name", holding(pair() | {A.replace("lora_A", "lora_A.second"): zeros(4, 64)}), ("second",)),
    ("unknown_keys", "whole_weight", holding(pair() | {f"{Q}.weight": zeros(64, 64)}), (Q,)),
    ("unknown_keys", "fused_copy", holding(pair() | {Q.replace("q_proj", "qkv_proj.base_layer.weight"): zeros(128, 64)}), ("qkv",)),
    ("unknown_keys", "norm", holding(pair() | {f"{PREFIX}model.norm.lora_A.weight": zeros(4, 64)}), ("model.norm",)),
    ("unknown_keys", "long_key", holding(pair() | {"x" * 4000: zeros(1)}), ("xxx", "...")),
    ("layer_out_of_range", "third_layer", holding(pair() | pair(2)), ("layers.2.", "layer 2", "0 to 1")),
    ("layer_out_of_range", "copy", holding(pair() | {PREFIX + "model.layers.9.mlp.up_proj.base_layer.weight": zeros(1, 1)}), ("layer 9",)),
    ("duplicate_module", "two_prefixes", holding(pair() | pair(prefix="model.")), (A, '"model.layers.0.self_attn.q_proj.lora_A.weight"')),
    ("duplicate_module", "fused_and_part", holding(pair() | pair(leaf="self_attn.qkv_proj")), ("q_proj", "qkv_proj")),
    ("half_pair", "no_a", holding({B: zeros(64, 4)}), (B, "no lora_A")),
    ("half_pair", "no_b", holding(pair(1) | {A: zeros(4, 64)}), (A, "no lora_B")),
    ("shape", "a_too_wide", holding(pair() | {A: zeros(4, 65)}), (A, "[4, 65]", "[r, 64]")),
    ("shape", "a_flat", holding(pair() | {A: zeros(256)}), ("[256]",)),
    ("shape", "a_transposed", holding(pair() | {A: zeros(64, 4)}), ("[64, 4]",)),
    ("shape", "b_too_tall", holding(pair() | {B: zeros(65, 4)}), (B, "[65, 4]", "[64, 4]")),
    ("shape", "b_of_another_rank", holding(pair() | {B: zeros(64, 8)}), (B, "[64, 8]", "[64, 4]")),
    ("shape", "kv_width", holding({A.replace("q_", "k_"): zeros(4, 64), B.replace("q_", "k_"): zeros(64, 4)}), ("[32, 4]",)),
    ("zero_size", "a", holding(pair() | {A: zeros(0, 64)}), (A, "[0, 64]")),
    ("zero_size", "both", holding({A: zeros(0, 64), B: zeros(64, 0)}), (A,)),
    ("dtype", "float64", holding({key: value.astype(np.float64) for key, value in pair().items()}), (A, "F64")),
    ("dtype", "int8", holding(pair() | {B: zeros(64, 4, dtype=np.int8)}), (B, "I8")),
    ("rank_too_large", "over_the_cap", holding(pair(rank=17), r=17), (A, "17", "16")),
    ("rank_too_large", "whatever_the_config_says", holding(pair(rank=17), r=8), (A, "17", "16")),
    ("rank_mismatch", "r", fields(r=8), ("`r`", "8", A, "4")),
    ("rank_mismatch", "pattern", fields(rank_pattern={"q_proj": 2}), ("rank_pattern", "q_proj", "2", "4")),
    ("rank_mismatch", "pattern_that_fits_no_longer", holding(pair() | pair(1, rank=2), rank_pattern={"layers.0.self_attn.q_proj": 2}),
     ("rank_pattern",)),
    ("fused_pattern", "alpha_of_a_part", holding(pair(leaf="self_attn.qkv_proj"), alpha_pattern={"q_proj": 32}), ("q_proj", "qkv_proj")),
    ("fused_pattern", "rank_of_a_part", holding(pair(leaf="mlp.gate_up_proj"), rank_pattern={"up_proj": 2}), ("up_proj", "gate_up_proj")),
    ("vocab", "c26_embedding", holding(pair() | {PREFIX + "model.embed_tokens.base_layer.weight": zeros(136, 64)}), ("136", "128")),
    ("vocab", "c26_head", holding(pair() | {PREFIX + "lm_head.weight": zeros(136, 64)}), ("136", "128")),
    ("vocab", "c26_head_pair", holding({"lm_head.lora_A.weight": zeros(4, 64), "lm_head.lora_B.weight": zeros(136, 4)}), ("136",)),
    ("vocab", "c26_embedding_pair", holding({PREFIX + "model.embed_tokens.lora_embedding_A": zeros(4, 136)}), ("136",)),
    ("vocab", "added_tokens_json", beside("added_tokens.json", b'{"<new>": 128}'), ("<new>", "128")),
    ("vocab", "added_tokens_decoder", beside("tokenizer_config.json", b'{"added_tokens_decoder": {"130": {"content": "<n>"}}}'),
     ("<n>", "130")),
    ("target_modules", "lm_head", peft(target_modules=["q_proj", "lm_head"]), ("lm_head", "--lora-target-modules")),
    ("target_modules", "embedding", peft(target_modules=["q_proj", "embed_tokens"]), ("embed_tokens", "q_proj")),
    ("unknown_keys", "embedding_with_a_linears_pair", holding(pair() | {PREFIX + "model.embed_tokens.lora_A.weight": zeros(4, 64)}),
     ("embed_tokens",)),
    ("unknown_keys", "head_with_an_embeddings_pair", holding(pair() | {PREFIX + "lm_head.lora_embedding_A": zeros(4, 64)}), ("lm_head",)),
    ("half_pair", "magnitude_alone", holding(pair() | {Q.replace("q_", "k_") + ".lora_magnitude_vector": zeros(32)}), ("k_proj", "lora_A")),
    ("half_pair", "bias_alone", holding(pair() | {Q.replace("q_", "k_") + ".base_layer.bias": zeros(32)}), ("k_proj", "lora_A")),
    ("shape", "magnitude_too_long", holding(pair() | {f"{Q}.lora_magnitude_vector": zeros(65)}, use_dora=True), ("[65]", "[64]")),
    ("shape", "magnitude_of_two_axes", holding(pair() | {f"{Q}.lora_magnitude_vector": zeros(1, 64)}, use_dora=True), ("[1, 64]",)),
    ("shape", "bias_too_short", holding(pair() | {f"{Q}.base_layer.bias": zeros(63)}), ("[63]", "[64]")),
    ("field_type", "tying_as_text", fields(ensure_weight_tying="yes"), ("ensure_weight_tying",)),
    ("base_copy_shape", "head", holding(pair() | {PREFIX + "lm_head.base_layer.weight": zeros(128, 32)}), ("[128, 32]", "[128, 64]")),
    ("base_copy_shape", "q_proj", holding(pair() | {f"{Q}.base_layer.weight": zeros(64, 128)}), ("[64, 64]",)),
    ("chat_template", "cut", beside("tokenizer_config.json", b'{"chat'), ("tokenizer_config.json", "JSON")),
    ("chat_template", "number", beside("tokenizer_config.json", b'{"chat_template": 3}'), ("chat_template",)),
    ("chat_template", "no_default", beside("tokenizer_config.json", b'{"chat_template": [{"name": "x", "template": "y"}]}'), ("default",)),
    ("chat_template", "latin", beside("chat_template.jinja", b"\xe9"), ("UTF-8",)),
    ("chat_template", "if_without_its_end", beside("chat_template.jinja", b"{% for m in messages %}\n{% if m %}{% endfor %}"),
     ("chat_template.jinja", "cannot be compiled", "line 2", "endfor")),
    ("chat_template", "cut_in_a_tag", beside("chat_template.jinja", b"{{ messages[0]"), ("line 1", "end of print statement")),
    ("chat_template", "unknown_filter", beside("chat_template.jinja", b"{{ messages | shout }}"), ("shout",)),
    ("chat_template", "unknown_tag", beside("tokenizer_config.json", b'{"chat_template": "{% gen %}"}'), ("tokenizer_config.json", "gen")),
    ("chat_template", "nests_too_deep", beside("chat_template.jinja", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}"),
     ("nests too deep",)),
    ("chat_template", "too_long_in_the_config", beside("tokenizer_config.json", json.dumps({"chat_template": "x" * 131073}).encode()),
     ("131073", "131072")),
    ("file_too_large", "template", beside("chat_template.jinja", b"x" * 131073), ("chat_template.jinja", "131073", "131072")),
    ("chat_template", "default_of_several",
     beside("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": "{% endif %}"}]}'), ("endif",)),
]  # fmt: skip

# Reached elsewhere: paths, reads under way, values.
ELSEWHERE = {
    "added_tokens",
    "hub_no_adapter",
    "hub_not_found",
    "hub_too_large",
    "hub_unreachable",
    "base_copy_values",
    "base_unreadable",
    "tied_ends",
    "path_not_allowed",
    "not_found",
    "unreadable",
    "changed",
    "cancelled",
    "host_tier",
    "overflow",
    "non_finite",
}


def check(error: AdapterError, row: str, words: tuple[str, ...] = ()) -> None:
    refusal = REFUSALS[row]
    text = sentence(error)
    assert (error.code, error.status) == (refusal.code, refusal.status), text
    constant = max(refusal.allowed.replace("}", "{").split("{"), key=len)
    assert constant in text, text
    for word in words:
        assert word in text, (word, text)


@pytest.mark.parametrize(("row", "make", "words"), [case[:1] + case[2:] for case in CASES], ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_refused_with_code_and_words(row: str, make: Make, words: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    make(folder)
    with pytest.raises(AdapterError) as refused:
        inspect_adapter(folder, BASE, limits())
    check(refused.value, row, words)
    if row == "chat_template" or "chat_template.jinja" in refused.value.message or "The tokenizer beside" in refused.value.message:
        return  # ranks do not read the tokenizer's files
    with pytest.raises(AdapterError) as refused_too:
        read_adapter(folder, BASE, limits())
    assert refused_too.value.message == refused.value.message


def test_every_row_of_the_table_is_reached() -> None:
    assert {case[0] for case in CASES} | ELSEWHERE == set(REFUSALS)
    assert not {case[0] for case in CASES} & ELSEWHERE


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 63)])
def test_values_that_are_not_finite_are_refused_by_name(dtype: str, value: float, place: tuple[int, int], tmp_path: Path) -> None:
    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    halves = {key: torch.from_numpy(half).to(types[dtype]) for key, half in (pair() | pair(1, "mlp.up_proj")).items()}
    halves[A][place] = value
    write_config(tmp_path, config())
    save_torch(halves, tmp_path / WEIGHTS)
    inspect_adapter(tmp_path, BASE, limits())  # the header cannot tell
    with pytest.raises(AdapterError) as refused:
        read_adapter(tmp_path, BASE, limits())
    check(refused.value, "non_finite", (A,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_and_smallest_values_are_served(dtype: torch.dtype, tmp_path: Path) -> None:
    halves = {key: torch.from_numpy(half).to(dtype) for key, half in pair().items()}
    extremes = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).smallest_normal / 2, -0.0], dtype=dtype)
    halves[A][:, 0] = extremes
    write_config(tmp_path, config())
    save_torch(halves, tmp_path / WEIGHTS)
    found = read_adapter(tmp_path, BASE, limits()).pairs[(0, "self_attn.q_proj")]
    np.testing.assert_array_equal(as_float32(found.lora_a, found.dtype)[:, 0], extremes.float().numpy())


@pytest.mark.parametrize("file", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("slots", "name"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_c24_exactly_the_values_that_become_infinite_in_the_slots_are_refused(
    file: torch.dtype, slots: torch.dtype, name: Dtype, tmp_path: Path
) -> None:
    """The oracle is torch's own cast, at both sides of every edge."""
    edges = [65504.0, 65519.0, 65519.996, 65520.0, 65536.0, 3.3895e38, 3.3961e38, float(np.uint32(0x7F7F7FFF).view(np.float32)),
             float(np.uint32(0x7F7F8000).view(np.float32)), 3.4e38]  # fmt: skip
    several = AdapterLimits(16, (), slot_dtype=name)
    for number, value in enumerate([*edges, *(-edge for edge in edges)]):
        held = torch.tensor(value).to(file)
        if not torch.isfinite(held):
            continue
        halves = {key: torch.from_numpy(half).to(file) for key, half in pair().items()}
        halves[(A, B)[number % 2]][1, 2] = held
        folder = tmp_path / str(number)
        write_config(folder, config())
        save_torch(halves, folder / WEIGHTS)
        if torch.isfinite(held.to(slots)):
            read_adapter(folder, BASE, several)
            continue
        with pytest.raises(AdapterError) as refused:
            read_adapter(folder, BASE, several)
        check(refused.value, "overflow", ((A, B)[number % 2], str(slots).removeprefix("torch.")))


def test_c24_rows_that_are_not_cast_may_be_large(tmp_path: Path) -> None:
    """A magnitude stays float32 in a slot."""
    folder = hand_folder(tmp_path / "large", pair() | {f"{Q}.lora_magnitude_vector": zeros(64) + 1e30}, use_dora=True)
    adapter = read_adapter(folder, BASE, AdapterLimits(16, (), slot_dtype="F16"))
    (found,) = adapter.pairs.values()
    assert found.magnitude is not None and found.magnitude.max() == found.magnitude.min() == np.float32(1e30)


def test_c79_a_pickle_is_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (marker.touch, ())

    folder = tmp_path / "adapter"
    only("adapter_model.bin", pickle.dumps(Payload()))(folder)
    for refused_by in (
        lambda: inspect_adapter(folder, BASE, limits()),
        lambda: read_adapter(folder, BASE, limits()),
        lambda: digest_adapter(folder),
    ):
        with pytest.raises(AdapterError) as refused:
            refused_by()
        check(refused.value, "pickle")
    (folder / WEIGHTS).write_bytes((folder / "adapter_model.bin").read_bytes())
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, BASE, limits())
    check(refused.value, "file_invalid", (WEIGHTS,))
    assert not marker.exists()


def test_c16_the_same_folder_loads_after_its_file_is_replaced(tmp_path: Path) -> None:
    folder = hand_folder(tmp_path)
    whole = (folder / WEIGHTS).read_bytes()
    for size in (0, 7, 8, 9, 40, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        for refused_by in (inspect_adapter, read_adapter):
            with pytest.raises(AdapterError) as refused:
                refused_by(folder, BASE, limits())
            check(refused.value, "file_invalid", (WEIGHTS,))
    (folder / WEIGHTS).write_bytes(whole)
    assert read_adapter(folder, BASE, limits()).facts.max_rank == 4


def test_a_folder_that_cannot_be_read_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as refused:
        inspect_adapter(hand_folder(tmp_path / "a") / WEIGHTS, BASE, limits())
    check(refused.value, "unreadable", ("Not a directory",))


def test_a_link_into_a_root_is_served(tmp_path: Path) -> None:
    """The hub's cache keeps its files as links from `snapshots` to `blobs`."""
    folder, blobs = hand_folder(tmp_path / "snapshot"), tmp_path / "blobs"
    blobs.mkdir()
    (folder / WEIGHTS).rename(blobs / "f00")
    (folder / WEIGHTS).symlink_to("../blobs/f00")
    assert read_adapter(folder, BASE, limits(tmp_path)).digest == digest_adapter(folder, (tmp_path,))
    for refused_by in (lambda: read_adapter(folder, BASE, limits(folder)), lambda: digest_adapter(folder)):
        with pytest.raises(AdapterError) as refused:
            refused_by()
        check(refused.value, "file_outside")


def test_a_message_shows_nothing_that_a_file_could_shape(tmp_path: Path) -> None:
    key = "evil\x1b[31m\r\nSet-Cookie: x" + "\u202e" * 300
    folder = hand_folder(tmp_path)
    save_file(pair() | {key: zeros(1)}, folder / WEIGHTS)
    with pytest.raises(AdapterError) as refused:
        inspect_adapter(folder, BASE, limits())
    check(refused.value, "unknown_keys", ("evil\\u001b[31m\\r\\nSet-Cookie",))


def test_paths_are_the_only_place_that_says_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as refused:
        resolve_path("nowhere", (tmp_path,))
    check(refused.value, "not_found", ("nowhere",))
    others = [row for row, refusal in REFUSALS.items() if refusal.status != 400 and not row.startswith("hub_")]
    assert others == ["not_found", "cancelled", "base_unreadable"]


def test_the_catalogue_has_every_row_and_keeps_its_tables_whole() -> None:
    text = catalogue_markdown()
    for refusal in REFUSALS.values():
        assert f"`{refusal.code}`" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {4, 5}
    assert "{" not in "".join(line.split("|")[3] for line in rows)
