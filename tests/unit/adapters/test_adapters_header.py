"""Safetensors headers that lie: every one is a refusal with its reason, before anything is allocated for the data."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_folders import BASE, PREFIX, WEIGHTS, config, limits, raw_file, sentence, write_config

from mstar.adapters import BaseShapes, inspect_adapter, read_adapter
from mstar.errors import AdapterError

A = PREFIX + "model.layers.0.self_attn.q_proj.lora_A.weight"
B = PREFIX + "model.layers.0.self_attn.q_proj.lora_B.weight"
SIZE = 4 * 64 * 4
DATA = bytes(2 * SIZE)


def entry(begin: Any, end: Any, shape: Any = (4, 64), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def both(a: Any = None, b: Any = None, **more: Any) -> dict[str, Any]:
    return {A: a or entry(0, SIZE), B: b or entry(SIZE, 2 * SIZE, (64, 4)), **more}


def refusal(folder: Path, data: bytes, code: str = "adapter_file_invalid") -> str:
    write_config(folder, config())
    (folder / WEIGHTS).write_bytes(data)
    messages = set()
    for refused_by in (inspect_adapter, read_adapter):
        with pytest.raises(AdapterError) as refused:
            refused_by(folder, BASE, limits())
        assert refused.value.code == code
        messages.add(sentence(refused.value))
    (message,) = messages
    assert WEIGHTS in message or code != "adapter_file_invalid"
    return message


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"\x02\0\0\0", "truncated"),
    "no_header": (raw_file(b""), "truncated"),
    "length_over_the_file": (raw_file(both(), DATA, length=1 << 40), "truncated or not safetensors"),
    "length_overflows": (raw_file(both(), DATA, length=(1 << 64) - 1), "truncated or not safetensors"),
    "length_negative": (raw_file(both(), DATA, length=1 << 63), "truncated or not safetensors"),
    "header_too_large": (raw_file(b"{" + b" " * (4 << 20) + b"}"), "at most"),
    "git_lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
    "html_page": (b"<!DOCTYPE html><html></html>", "truncated or not safetensors"),
    "zip": (b"PK\x03\x04" + bytes(100), "truncated or not safetensors"),
    "space_first": (raw_file(b" {}"), "does not start"),
    "list": (raw_file(b"[]"), "does not start"),
    "cut_json": (raw_file(b'{"a": '), "not valid JSON"),
    "not_utf8": (raw_file(b'{"\xff": 1}'), "UTF-8"),
    "two_objects": (raw_file(b"{}{}"), "not valid JSON"),
    "deep": (raw_file(b'{"a":' + b"[" * 50_000), "nested"),
    "nan": (raw_file(b'{"a": NaN}'), "NaN"),
    "key_twice": (raw_file(f'{{"{A}": {json.dumps(entry(0, SIZE))}, "{A}": {json.dumps(entry(0, SIZE))}}}'.encode(), DATA), "twice"),
    "field_twice": (raw_file(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "twice"),
    "entry_is_number": (raw_file({"a": 3}), '"a"'),
    "entry_without_shape": (raw_file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "exactly"),
    "entry_with_more": (raw_file(both({**entry(0, SIZE), "stride": [1]}), DATA), "exactly"),
    "metadata_is_list": (raw_file({"__metadata__": [], **both()}, DATA), "__metadata__"),
    "metadata_holds_number": (raw_file({"__metadata__": {"a": 1}, **both()}, DATA), "__metadata__"),
    "shape_negative": (raw_file(both(entry(0, SIZE, (-4, -64))), DATA), "shape"),
    "shape_float": (raw_file(both(entry(0, SIZE, (4.0, 64))), DATA), "shape"),
    "shape_true": (raw_file(both(entry(0, SIZE, (True, 256))), DATA), "shape"),
    "shape_text": (raw_file(both(entry(0, SIZE, "4,64")), DATA), "shape"),
    "shape_long": (raw_file(both(entry(0, SIZE, (1,) * 9)), DATA), "shape"),
    "shape_overflows": (raw_file(both(entry(0, SIZE, (1 << 62, 1 << 62))), DATA), "shape"),
    "product_overflows": (raw_file(both(entry(0, SIZE, (1 << 32, 1 << 32))), DATA), "needs"),
    "product_wraps_to_zero": (raw_file(both(entry(0, 0, (1 << 32, 1 << 32))), DATA), "needs"),
    "offsets_reversed": (raw_file(both(entry(SIZE, 0)), DATA), "data_offsets"),
    "offsets_negative": (raw_file(both(entry(-SIZE, 0)), DATA), "data_offsets"),
    "offsets_three": (raw_file(both({**entry(0, 0), "data_offsets": [0, 1, 2]}), DATA), "data_offsets"),
    "offsets_huge": (raw_file(both(entry(0, 1 << 63)), DATA), "data_offsets"),
    "offsets_float": (raw_file(both(entry(0.0, float(SIZE))), DATA), "data_offsets"),
    "too_few_bytes": (raw_file(both(entry(0, SIZE - 4)), DATA), "needs"),
    "overlap": (raw_file(both(b=entry(SIZE // 2, SIZE // 2 + SIZE, (64, 4))), DATA), "overlaps"),
    "same_place": (raw_file(both(b=entry(0, SIZE, (64, 4))), DATA), "overlaps"),
    "hole": (raw_file(both(b=entry(SIZE + 8, 2 * SIZE + 8, (64, 4))), DATA + bytes(8)), "hole"),
    "hole_at_the_start": (raw_file(both(entry(8, SIZE + 8), entry(SIZE + 8, 2 * SIZE + 8, (64, 4))), DATA + bytes(8)), "hole"),
    "padded": (raw_file(both(), DATA + b"\0"), "1 bytes after"),
    "cut": (raw_file(both(), DATA[:-1]), "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_c16_a_header_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    data, word = CASES[case]
    assert word in refusal(tmp_path, data)


@pytest.mark.parametrize("dtype", ["F128", "f32", None, 4, ["F32"], {}])
def test_a_dtype_that_nobody_knows_is_refused(dtype: Any, tmp_path: Path) -> None:
    assert A in refusal(tmp_path, raw_file(both({**entry(0, SIZE), "dtype": dtype}), DATA), "adapter_dtype_unsupported")


def test_an_honest_header_is_served_in_any_order_and_padding(tmp_path: Path) -> None:
    raw = json.dumps({"__metadata__": {"format": "pt"}, B: entry(SIZE, 2 * SIZE, (64, 4)), A: entry(0, SIZE)}).encode()
    for padding in range(9):
        write_config(tmp_path, config())
        (tmp_path / WEIGHTS).write_bytes(raw_file(raw + b" " * padding, DATA))
        assert read_adapter(tmp_path, BASE, limits()).facts.max_rank == 4


def test_values_at_odd_places_are_read_right(tmp_path: Path) -> None:
    """The format lets a float32 start after an odd number of float16."""
    odd = BaseShapes({"self_attn.q_proj": (3, 5), "self_attn.k_proj": (3, 5)}, 1, 7, 3, 1, tied_head=False)
    lora_a, lora_b = np.arange(3, dtype=np.float32), -np.arange(5, dtype=np.float32)
    header = {
        "layers.0.self_attn.k_proj.lora_A.weight": entry(0, 6, (1, 3), "F16"),
        A: entry(6, 18, (1, 3)),
        B: entry(18, 38, (5, 1)),
        "layers.0.self_attn.k_proj.lora_B.weight": entry(38, 48, (5, 1), "F16"),
    }
    write_config(tmp_path, config(r=1))
    (tmp_path / WEIGHTS).write_bytes(raw_file(header, bytes(6) + lora_a.tobytes() + lora_b.tobytes() + bytes(10)))
    found = read_adapter(tmp_path, odd, limits()).pairs[(0, "self_attn.q_proj")]
    np.testing.assert_array_equal(found.lora_a, lora_a.reshape(1, 3))
    np.testing.assert_array_equal(found.lora_b, lora_b.reshape(5, 1))
    for half in (found.lora_a, found.lora_b):
        assert half.flags.aligned and half.ctypes.data % 4 == 0 and not half.flags.writeable


def test_nothing_is_allocated_for_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """4 GiB in a sparse file, refused by its header at the cost of some kilobytes."""
    size = (1 << 26) * 64
    write_config(tmp_path, config())
    head = raw_file({A: entry(0, size, (1 << 24, 64)), B: entry(size, size + SIZE, (64, 4))})
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size + SIZE)
    for refused_by in (inspect_adapter, read_adapter):
        tracemalloc.start()
        with pytest.raises(AdapterError) as refused:
            refused_by(tmp_path, BASE, limits())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert refused.value.code == "adapter_rank_too_large" and peak < 1 << 18
