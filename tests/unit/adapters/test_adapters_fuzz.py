"""Random edits of valid files: a typed refusal, or an adapter that means what other readers of the same bytes read.

`MSTAR_FUZZ_EXAMPLES` raises the number of inputs (`make fuzz`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import struct
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from adapter_folders import CONFIG, PREFIX, WEIGHTS, config, pair, raw_file, sentence, write_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import load, save_file
from transformers.utils.chat_template_utils import _compile_jinja_template

from mstar.adapters import (
    AdapterFacts,
    AdapterLimits,
    AdapterTensors,
    BaseShapes,
    Dtype,
    LoraPair,
    as_float32,
    digest_adapter,
    inspect_adapter,
    read_adapter,
)
from mstar.errors import AdapterError
from mstar.types import EMBEDDING, HEAD, PROJECTIONS

Result = TypeVar("Result")
EXAMPLES = int(os.environ.get("MSTAR_FUZZ_EXAMPLES", "500"))
BASE = BaseShapes.from_config({**CONFIG, "attention_bias": True})
LIMITS = AdapterLimits(16, (), (*PROJECTIONS, HEAD, EMBEDDING))
SLOTS: dict[Dtype, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONFIG_FILE, INDEX_FILE = "adapter_config.json", "adapter_model.safetensors.index.json"
TEMPLATE_FILE, TOKENIZER_FILE = "chat_template.jinja", "tokenizer_config.json"
BESIDE = {
    TEMPLATE_FILE: "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% generation %}x{% endgeneration %}{% endfor %}",
    TOKENIZER_FILE: json.dumps({"chat_template": "{{ bos_token }}", "added_tokens_decoder": {"5": {"content": "<s>"}}}),
}  # read by the front alone, and not part of the digest


PATTERNS = {"rank_pattern": {"layers.1.self_attn.q_proj": 1}, "alpha_pattern": {"^model.*0.self_attn.[qk]_proj$": 3}}
COPY = {"lm_head.base_layer.weight": np.ones((128, 64))}
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
ROWS = {f"{Q}.lora_magnitude_vector": np.ones(64), f"{Q}.base_layer.bias": np.ones(64)}
ENDS = {
    **{"lm_head.lora_A.weight": np.ones((1, 64)), "lm_head.lora_B.weight": np.ones((128, 1))},
    **{"model.embed_tokens.lora_embedding_A": np.ones((1, 128)), "model.embed_tokens.lora_embedding_B": np.ones((64, 1))},
}
# tensors, their dtype, the config's fields; the last is cut into shards
SEEDS = (
    (pair(0, rank=1) | pair(1, "self_attn.k_proj", rank=1), torch.float32, {"r": 1}),
    (pair(0, rank=2) | pair(1, rank=1), torch.bfloat16, {"r": 2, "use_rslora": True, **PATTERNS}),
    (pair(0, "self_attn.qkv_proj", rank=1) | COPY, torch.float16, {"r": 1, "lora_alpha": 2.5}),
    (pair(0, rank=1) | ROWS, torch.float32, {"r": 1, "use_dora": True, "bias": "lora_only"}),
    (ENDS, torch.bfloat16, {"r": 1}),
    (pair(0, rank=1) | pair(1, rank=1), torch.float32, {"r": 1}),
)


@functools.cache
def seeds() -> tuple[dict[str, bytes], ...]:
    """The valid folders as bytes by file name."""
    folders = []
    with tempfile.TemporaryDirectory() as place:
        for number, (tensors, dtype, fields) in enumerate(SEEDS):
            folder = Path(place, str(number))
            write_config(folder, config(**fields))
            halves = {key: torch.from_numpy(values).to(dtype) for key, values in tensors.items()}
            if number < len(SEEDS) - 1:
                save_file(halves, folder / WEIGHTS)
            else:
                places = {key: f"part-{position // 2}.safetensors" for position, key in enumerate(halves)}
                for part in set(places.values()):
                    save_file({key: half for key, half in halves.items() if places[key] == part}, folder / part)
                (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
            if number == 0:
                for name, text in BESIDE.items():
                    (folder / name).write_text(text)
            inspect_adapter(folder, BASE, LIMITS)
            read_adapter(folder, BASE, LIMITS)
            folders.append({path.name: path.read_bytes() for path in folder.iterdir()})
    return tuple(folders)


TOKENS = [
    b"{", b"}", b'"', b",", b":", b"0", b"9", b"-", b"e9", b"null", b"true", b"[]", b"{}", b"\\", b"\xff", b"\0", b"\n", b".", b"[", b"F16",
    b"{%", b"%}", b"{{", b"}}", b"endif", b"endfor", b"for x in y", b"|", b"{#", b"raw", b"macro",
    b"default.", b"1e999", b"NaN", b"18446744073709551616", b"(a+)+", b"lora_A", b"lora_B", b"q_proj", b"k_proj",
]  # fmt: skip

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "put", "insert", "delete", "cut", "append", "repeat", "digit"]),
        st.floats(0, 1, exclude_max=True),  # where, within the part
        st.booleans(),  # within the first bytes (the header) or anywhere
        st.integers(0, 255),
        st.sampled_from(TOKENS),
    ),
    min_size=1,
    max_size=2,
)


def edited(data: bytes, edits: list[tuple[str, float, bool, int, bytes]]) -> bytes:
    for kind, where, early, number, token in edits:
        span = min(len(data), 700) if early else len(data)
        at = int(where * span)
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (number or 1)]) + data[at + 1 :]
        elif kind == "put":
            data = data[:at] + token + data[at + len(token) :]
        elif kind == "insert":
            data = data[:at] + token + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + number % 16 + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "append":
            data += token
        elif kind == "repeat":
            data = data[:at] + data[at : at + number] + data[at:]
        elif kind == "digit":
            digits = [match.start() for match in re.finditer(rb"[0-9]", data[:span])]
            if digits:
                at = digits[int(where * len(digits))]
                data = data[:at] + str(number % 10).encode() + data[at + 1 :]
    return data


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["", "none", "lora_only", "LORA", "q_proj", "(a+)+$", "pissa", "x" * 300]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["q_proj", ".*", "", "layers.1", "(", "0"]), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    ["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "use_dora", "target_modules", "peft_type",
     "init_lora_weights", "modules_to_save",
     "layers_to_transform", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "trainable_token_indices",
     "base_model_name_or_path", "task_type", "lora_bias", "ensure_weight_tying", "anything_else", "lora_dropout"]
)  # fmt: skip


def changed_field(config_file: bytes) -> st.SearchStrategy[bytes]:
    """The configuration with a field or two set to something, or taken away."""
    fields = json.loads(config_file)
    sets = st.dictionaries(FIELDS, VALUES, max_size=2).map(lambda more: {**fields, **more})
    drops = FIELDS.map(lambda dropped: {field: value for field, value in fields.items() if field != dropped})
    return (sets | drops).map(lambda changed: json.dumps(changed).encode())


def changed_bytes(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    """The file with edits; a weight file's header length may be put right again, so that its JSON is reached."""

    def change(edits: list[tuple[str, float, bool, int, bytes]], put_right: bool) -> bytes:
        if not put_right or not name.endswith(".safetensors"):
            return edited(content, edits)
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = edited(content[8:end], edits)
        return raw_file(header, content[end:])

    return st.builds(change, EDITS, st.booleans())


def outcome(call: Callable[[], Result]) -> Result | AdapterError:
    """What `call` gives, or the refusal it raises, which must be a proper one."""
    try:
        return call()
    except AdapterError as error:
        sentence(error)
        return error


def check_template(inspected: AdapterFacts | AdapterError) -> None:
    """A template that is taken is one that transformers compiles."""
    if isinstance(inspected, AdapterFacts) and inspected.chat_template is not None:
        _compile_jinja_template(inspected.chat_template)


def check_against_other_readers(read: AdapterTensors, files: dict[str, bytes], slots: torch.dtype) -> None:
    """Every tensor that safetensors finds is in one pair or copy, to the bit, with PEFT's scale, and stays finite in the slots."""
    fields = json.loads(files[CONFIG_FILE])
    tensors: dict[str, torch.Tensor] = {}
    for name in read.facts.files:
        if name.endswith(".safetensors"):
            tensors |= load(files[name])
    seen = {key for key in tensors if key in read.base_copies}
    for (layer, leaf), found in read.pairs.items():
        widths = {"self_attn.q_proj": slice(0, 64), "self_attn.k_proj": slice(64, 96), "self_attn.v_proj": slice(96, 128)}
        fused = [key for key in tensors if f"layers.{layer}.self_attn.qkv_proj.lora_" in key]
        module = leaf if leaf in (HEAD, EMBEDDING) else f"layers.{layer}.{leaf}"
        keys = fused if fused and leaf in widths else [key for key in tensors if f"{module}.lora_" in key and "magnitude" not in key]
        key_a, key_b = sorted(keys, key=lambda key: key.rpartition("_B")[1])
        assert "_A" in key_a and "_B" in key_b and ("embedding" in key_a) == ("embedding" in key_b) == (leaf == EMBEDDING)
        seen |= {key_a, key_b} | check_rows(found, module, tensors, is_dora=bool(fields.get("use_dora")))
        expected_b = tensors[key_b][widths[leaf]] if fused and leaf in widths else tensors[key_b]
        np.testing.assert_array_equal(as_float32(found.lora_a, found.dtype), tensors[key_a].float().numpy())
        np.testing.assert_array_equal(as_float32(found.lora_b, found.dtype), expected_b.float().numpy())
        name = key_a.removeprefix("base_model.model.").rpartition(".lora_")[0]
        rank = (fields.get("rank_pattern") or {}).get(get_pattern_key((fields.get("rank_pattern") or {}), name), fields["r"])
        alpha = (fields.get("alpha_pattern") or {}).get(get_pattern_key((fields.get("alpha_pattern") or {}), name), fields["lora_alpha"])
        assert rank == found.rank == tensors[key_a].shape[0]
        assert found.scaling == (alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank)
        assert all(torch.isfinite(tensors[key].to(slots)).all() for key in keys) and math.isfinite(found.scaling)
    assert seen == set(tensors)
    assert fields["peft_type"] == "LORA" and fields.get("bias") in (None, "none", "lora_only")


def check_rows(found: LoraPair, module: str, tensors: dict[str, torch.Tensor], *, is_dora: bool) -> set[str]:
    """Magnitude and bias are the file's, and nothing where it has none; returns their keys."""
    seen = set()
    for kind, values in (("lora_magnitude_vector", found.magnitude), ("base_layer.bias", found.bias)):
        keys = [key for key in tensors if f"{module}.{kind}" in key]
        assert len(keys) == (values is not None)
        for key in keys:
            np.testing.assert_array_equal(values, tensors[key].float().numpy())
            seen.add(key)
    assert (found.magnitude is not None) == is_dora
    return seen


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_edited_files_are_refused_or_mean_what_other_readers_read(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, len(seeds()) - 1))
    files = dict(seeds()[seed])
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = data.draw(
        changed_field(files[name]) if name == CONFIG_FILE and data.draw(st.booleans()) else changed_bytes(name, files[name])
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        folder = Path(place)
        for file, content in seeds()[seed].items():
            (folder / file).write_bytes(content)
        digest = digest_adapter(folder)
        (folder / name).write_bytes(files[name])
        slots = data.draw(st.sampled_from(sorted(SLOTS)))
        limits = dataclasses.replace(LIMITS, slot_dtype=slots)
        tracemalloc.start()
        try:
            inspected = outcome(lambda: inspect_adapter(folder, BASE, LIMITS))
            read = outcome(lambda: read_adapter(folder, BASE, limits))
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()
        if name in BESIDE:
            assert isinstance(read, AdapterTensors)
            check_template(inspected)
        elif isinstance(inspected, AdapterError):
            assert isinstance(read, AdapterError) and read.message == inspected.message
        elif isinstance(read, AdapterError) and read.code == "adapter_dtype_overflow":
            assert slots != "F32" and isinstance(outcome(lambda: read_adapter(folder, BASE, LIMITS)), AdapterTensors)
        if name not in BESIDE and files[name] != seeds()[seed][name]:
            with pytest.raises(AdapterError):
                read_adapter(folder, BASE, LIMITS, digest)
    if isinstance(read, AdapterTensors):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_against_other_readers(read, files, SLOTS[slots])
