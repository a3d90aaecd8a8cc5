"""Reads under way: one pass over the bytes, files that change, a read that is given up; what is imported."""

from __future__ import annotations

import ast
import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_folders import BASE, PREFIX, WEIGHTS, copy_of, hand_folder, limits, pair, sentence
from safetensors.numpy import load_file

import mstar.adapters
from mstar.adapters import AdapterTensors, digest_adapter, inspect_adapter, read_adapter, read_adapter_into
from mstar.adapters.catalogue import refuse
from mstar.errors import AdapterError

PACKAGE = Path(mstar.adapters.__file__).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hand_folder(tmp_path / "adapter", pair(0) | pair(1) | pair(1, "mlp.down_proj"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("read", "files"):
        monkeypatch.setattr(f"mstar.adapters.{module}.CHUNK_BYTES", 1000)


def at_call(number: int, act: Callable[[], object]) -> Callable[[], bool]:
    """A `cancelled` that never cancels, and acts when it is asked for the `number`th time."""
    calls = iter(range(1, 10**6))

    def cancelled() -> bool:
        if next(calls) == number:
            act()
        return False

    return cancelled


def code(read: Callable[[], object]) -> str:
    with pytest.raises(AdapterError) as refused:
        read()
    sentence(refused.value)
    return refused.value.code


@pytest.mark.usefixtures("small_chunks")
def test_every_byte_is_read_once_and_never_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[tuple[str, int]] = Counter()
    real = os.preadv

    def counted(descriptor: int, buffers: list[Any], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        read.update((name, byte) for byte in range(offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    read_adapter(folder, BASE, limits())
    sizes = {name: (folder / name).stat().st_size for name in ("adapter_config.json", WEIGHTS)}
    assert read == Counter({(name, byte): 1 for name, size in sizes.items() for byte in range(size)})
    assert str(folder) not in Path("/proc/self/maps").read_text()
    read.clear()
    inspect_adapter(folder, BASE, limits())
    assert (
        sum(read.values())
        < sizes["adapter_config.json"] + sizes[WEIGHTS] - sum(half.nbytes for half in load_file(folder / WEIGHTS).values()) + 1
    )


def test_the_digest_is_of_names_sizes_and_bytes(folder: Path, tmp_path: Path) -> None:
    expected = hashlib.sha256()
    for name in ("adapter_config.json", WEIGHTS):
        data = (folder / name).read_bytes()
        expected.update(len(name).to_bytes(8, "little") + name.encode() + len(data).to_bytes(8, "little") + data)
    assert digest_adapter(folder) == read_adapter(folder, BASE, limits()).digest == expected.hexdigest()
    assert digest_adapter(copy_of(folder, tmp_path)) == expected.hexdigest()
    (folder / "README.md").write_text("not part of it")
    assert digest_adapter(folder) == expected.hexdigest()


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_any_other_byte_is_another_digest(name: str, folder: Path) -> None:
    digest = digest_adapter(folder)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= ord(" ") ^ ord("\n") if name.endswith("json") else 1
    if name.endswith("json"):
        data = bytearray((folder / name).read_bytes() + b" ")
    (folder / name).write_bytes(data)
    assert digest_adapter(folder) != digest
    assert code(lambda: read_adapter(folder, BASE, limits(), digest)) == "adapter_changed"
    assert read_adapter(folder, BASE, limits(), digest_adapter(folder)).facts.max_rank == 4


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("reader", ["read", "digest"])
@pytest.mark.parametrize("change", ["cut", "cut_to_nothing", "grown", "rewritten"])
def test_a_file_that_changes_while_it_is_read_is_refused(reader: str, change: str, folder: Path) -> None:
    file = folder / WEIGHTS
    size = file.stat().st_size
    os.utime(file, ns=(0, 0))

    def act() -> None:
        if change == "rewritten":
            with file.open("r+b") as opened:
                opened.seek(size - 4)
                opened.write(b"\0\0\x80\x3f")
        else:
            os.truncate(file, {"cut": size - 8, "cut_to_nothing": 0, "grown": size + 8}[change])

    digest = digest_adapter(folder)
    reads = {
        "read": lambda: read_adapter(folder, BASE, limits(), digest, at_call(3, act)),
        "digest": lambda: digest_adapter(folder, cancelled=at_call(3, act)),
    }
    assert code(reads[reader]) == "adapter_changed"


def test_other_bytes_are_what_is_said_whatever_was_made_of_them(folder: Path) -> None:
    made: list[AdapterTensors] = []

    def make(tensors: AdapterTensors) -> None:
        made.append(tensors)
        raise refuse("host_tier", size=2, limit=1)

    assert code(lambda: read_adapter_into(make, folder, BASE, limits(), "0" * 64)) == "adapter_changed"
    assert len(made) == 1
    assert code(lambda: read_adapter_into(make, folder, BASE, limits(), digest_adapter(folder))) == "adapter_exceeds_host_tier"


@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_is_replaced_while_it_is_read_is_still_the_old_one(folder: Path, tmp_path: Path) -> None:
    """A rename puts another file at the path; the open one is whole, and its digest says that it is the old one."""
    digest = digest_adapter(folder)
    new = hand_folder(tmp_path / "new", pair(seed=9))
    read = read_adapter(folder, BASE, limits(), digest, at_call(2, lambda: os.replace(new / WEIGHTS, folder / WEIGHTS)))
    assert read.digest == digest != digest_adapter(folder)


@pytest.mark.usefixtures("small_chunks")
def test_a_read_is_given_up_at_the_next_chunk(folder: Path) -> None:
    chunks = -(-(folder / WEIGHTS).stat().st_size // 1000)
    asked = []
    read_adapter(folder, BASE, limits(), cancelled=lambda: bool(asked.append(1)))
    assert len(asked) >= chunks - 1
    for number in range(len(asked)):
        for digest in (None, digest_adapter(folder)):
            calls = iter([False] * number + [True])
            assert (
                code(lambda digest=digest, calls=calls: read_adapter(folder, BASE, limits(), digest, lambda: next(calls)))
                == "adapter_read_cancelled"
            )
    assert code(lambda: digest_adapter(folder, cancelled=lambda: True)) == "adapter_read_cancelled"


def test_an_error_of_the_disk_is_a_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    for read in (
        lambda: read_adapter(folder, BASE, limits()),
        lambda: inspect_adapter(folder, BASE, limits()),
        lambda: digest_adapter(folder),
    ):
        assert code(read) == "adapter_unreadable"


@pytest.mark.parametrize(
    ("read", "preads"),
    [
        (lambda folder: inspect_adapter(folder, BASE, limits()), 3),  # config, start of the header, its rest
        (lambda folder: read_adapter(folder, BASE, limits()), 4),
        (digest_adapter, 2),
    ],
)
def test_a_file_that_ends_early_is_a_refusal_at_every_read(
    read: Callable[[Path], object], preads: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the header is read: what is not there is never taken for zeros."""
    real = os.preadv
    for number in range(preads):
        calls = iter(range(10**6))
        monkeypatch.setattr(os, "preadv", lambda *args, number=number, calls=calls: 0 if next(calls) == number else real(*args))
        with pytest.raises(AdapterError, match="was cut while it was read") as refused:
            read(folder)
        assert refused.value.code == "adapter_changed"
    calls = iter(range(10**6))
    monkeypatch.setattr(os, "preadv", lambda *args: (next(calls), real(*args))[1])
    read(folder)
    assert next(calls) == preads


def test_short_preads_are_put_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_adapter(folder, BASE, limits())
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: real(descriptor, [buffers[0][:7]], offset))
    read = read_adapter(folder, BASE, limits(), digest_adapter(folder))
    assert read.digest == whole.digest
    np.testing.assert_array_equal(read.pairs[(1, "mlp.down_proj")].lora_b, whole.pairs[(1, "mlp.down_proj")].lora_b)


def test_no_descriptor_is_left_open(folder: Path, tmp_path: Path) -> None:
    bad = hand_folder(tmp_path / "bad", pair(5))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        read_adapter(folder, BASE, limits())
        digest_adapter(folder)
        assert code(lambda: read_adapter(bad, BASE, limits())) == "adapter_layer_out_of_range"
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_read_is_what_safetensors_reads_and_cannot_be_written(folder: Path) -> None:
    read, expected = read_adapter(folder, BASE, limits()), load_file(folder / WEIGHTS)
    for (layer, leaf), found in read.pairs.items():
        for half, values in (("A", found.lora_a), ("B", found.lora_b)):
            np.testing.assert_array_equal(values, expected[f"{PREFIX}model.layers.{layer}.{leaf}.lora_{half}.weight"])
            with pytest.raises(ValueError, match="read-only"):
                values[0, 0] = 1
    with pytest.raises(TypeError):
        read.pairs[(0, "x")] = found  # type: ignore[index]


def test_c79_neither_torch_nor_a_pickle_reader_is_in_the_package() -> None:
    """Imported in a fresh process, and read from the sources."""
    script = "import sys, mstar.adapters; print([name for name in ('torch', 'transformers', 'safetensors', 'peft', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parents[1])
    assert done.stdout.strip() == "[]"
    imported = set()
    # for people, the hub and the front
    shells = {"cli.py", "admin_client.py", "dry_run.py", "hub.py", "progress.py", "tables.py", "template.py"}
    for source in PACKAGE.glob("*.py"):
        if source.name in shells:
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Attribute):
                assert node.attr not in {"load", "memmap", "fromfile", "mmap"}, (source.name, node.attr)
    assert imported - set(sys.stdlib_module_names) == {"numpy", "mstar"}
    assert not imported & {"pickle", "mmap", "shelve", "marshal", "zipfile"}


def test_plans_that_are_kept_are_those_of_the_same_config_header_base_and_cap_alone(tmp_path: Path) -> None:
    first, other = (hand_folder(tmp_path / name, pair(0) | pair(1), lora_alpha=alpha) for name, alpha in (("first", 8), ("other", 16)))
    moved = hand_folder(tmp_path / "moved", pair(0) | pair(1, "self_attn.k_proj"))
    for _ in range(2):  # the second time from what is kept
        scalings = [{pair.scaling for pair in read_adapter(folder, BASE, limits()).pairs.values()} for folder in (first, other)]
        assert scalings == [{2.0}, {4.0}]
        assert (1, "self_attn.k_proj") in read_adapter(moved, BASE, limits()).pairs
        assert code(lambda: read_adapter(first, BASE, limits(max_lora_rank=3))) == "adapter_rank_too_large"
        assert code(lambda: read_adapter(first, dataclasses.replace(BASE, num_layers=1), limits())) == "adapter_layer_out_of_range"


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_one_bad_value_among_many_tensors_is_found_and_named_wherever_it_is(bad: int, tmp_path: Path) -> None:
    tensors = (
        pair(0) | pair(1) | pair(0, "self_attn.v_proj") | pair(1, "self_attn.v_proj") | pair(0, "mlp.up_proj") | pair(1, "mlp.up_proj")
    )
    name = sorted(tensors)[bad]
    tensors[name].flat[-1] = np.nan
    with pytest.raises(AdapterError) as refused:
        read_adapter(hand_folder(tmp_path / "adapter", tensors), BASE, limits())
    assert refused.value.code == "adapter_non_finite" and name in refused.value.message
