"""Copies of base weights: equal ones pass whatever the dtypes, any other is refused by name; the base's files are read with bounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import BASE, CONFIG, sentence
from safetensors.torch import save_file

from mstar.adapters import BaseCopy, BaseFiles, BaseShapes, check_base_copies
from mstar.errors import AdapterError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q, EMBEDDING = "model.layers.1.self_attn.q_proj", "model.embed_tokens"
NEVER = lambda: False  # noqa: E731


def weight(dtype: str, seed: int = 0, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def as_copy(module: str, values: torch.Tensor) -> BaseCopy:
    dtype = next(name for name, known in DTYPES.items() if known == values.dtype)
    array = values.view(torch.uint16).numpy() if dtype == "BF16" else values.numpy()
    return BaseCopy(module, array, dtype)


def base_folder(folder: Path, **tensors: torch.Tensor) -> BaseFiles:
    save_file({name.replace("__", "."): value for name, value in tensors.items()}, folder / "model.safetensors")
    return BaseFiles(folder)


def one(folder: Path, base: torch.Tensor) -> BaseFiles:
    save_file({f"{Q}.weight": base}, folder / "model.safetensors")
    return BaseFiles(folder)


@pytest.mark.parametrize("copy", DTYPES)
@pytest.mark.parametrize("base", DTYPES)
def test_a_copy_rounded_from_the_base_or_to_it_is_equal(base: str, copy: str, tmp_path: Path) -> None:
    files = one(tmp_path, weight(base))
    check_base_copies({"k": as_copy(Q, weight(base).to(DTYPES[copy]))}, BASE, files)


@pytest.mark.parametrize(
    ("base", "copy"), [("BF16", "F32"), ("F16", "F32"), ("BF16", "BF16"), ("F32", "F32"), ("F32", "BF16"), ("F16", "F16")]
)
def test_one_changed_bit_is_refused_and_named(base: str, copy: str, tmp_path: Path) -> None:
    changed = weight(base).to(DTYPES[copy])
    number = changed.view(torch.int32 if copy == "F32" else torch.int16)
    number[37, 5] += 1
    if (base, copy) in {("BF16", "F32"), ("F16", "F32")}:
        # Beyond what rounding takes away.
        number[37, 5] += 1 << 20
    with pytest.raises(AdapterError) as refused:
        check_base_copies({"the.key": as_copy(Q, changed)}, BASE, one(tmp_path, weight(base)))
    assert refused.value.code == "adapter_base_copy_mismatch"
    assert '"the.key"' in sentence(refused.value) and "row 37" in refused.value.message


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_ranks_share_the_rows_and_exactly_one_finds_the_difference(count: int, tmp_path: Path) -> None:
    changed = weight("F32")
    changed[40, 0] += 1
    files = one(tmp_path, weight("F32"))
    finders = []
    for number in range(count):
        try:
            check_base_copies({"k": as_copy(Q, changed)}, BASE, files, (number, count))
        except AdapterError:
            finders.append(number)
    assert finders == [next(number for number in range(count) if 64 * number // count <= 40 < 64 * (number + 1) // count)]


def test_a_tied_heads_copy_is_compared_with_the_embedding(tmp_path: Path) -> None:
    tied = BaseShapes.from_config({**CONFIG, "tie_word_embeddings": True})
    values = weight("F32", rows=128)
    files = base_folder(tmp_path, model__embed_tokens__weight=values)
    check_base_copies({"head": as_copy("lm_head", values), "embedding": as_copy(EMBEDDING, values)}, tied, files)
    with pytest.raises(AdapterError) as refused:
        check_base_copies({"head": as_copy("lm_head", values)}, BASE, files)
    assert refused.value.code == "adapter_base_unreadable" and "lm_head.weight" in sentence(refused.value)


def test_shards_with_an_index_are_found(tmp_path: Path) -> None:
    save_file({f"{Q}.weight": weight("F32")}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {f"{Q}.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_base_copies({"k": as_copy(Q, weight("F32"))}, BASE, BaseFiles(tmp_path))


@pytest.mark.parametrize("damage", ["gone", "cut", "not safetensors", "index without map"])
def test_a_base_that_was_moved_or_cut_is_a_refusal_and_no_crash(damage: str, tmp_path: Path) -> None:
    files, path = one(tmp_path, weight("F32")), tmp_path / "model.safetensors"
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "not safetensors":
        path.write_bytes(b"\x08" + b"\0" * 7 + b"nonsense")
    else:
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(AdapterError) as refused:
        check_base_copies({"k": as_copy(Q, weight("F32"))}, BASE, files)
    assert (refused.value.code, refused.value.status) == ("adapter_base_unreadable", 500)
    assert f"{Q}.weight" in sentence(refused.value)


def test_rows_and_columns_come_in_chunks_as_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.adapters.base_files.CHUNK_BYTES", 5 * 64 * 4)
    values = weight("F32").numpy()
    files = one(tmp_path, weight("F32"))
    whole = [(first, rows.copy()) for first, rows, _ in files.chunks(f"{Q}.weight", (3, 64), NEVER)]
    assert [first for first, _ in whole] == list(range(3, 64, 5))
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in whole]), values[3:])
    cut = [rows.copy() for _, rows, _ in files.chunks(f"{Q}.weight", (0, 64), NEVER, (7, 30))]
    np.testing.assert_array_equal(np.concatenate(cut), values[:, 7:30])
    with pytest.raises(AdapterError, match="cancelled"):
        list(files.chunks(f"{Q}.weight", (0, 64), lambda: True))
