"""The C++ backend against a loop over tokens, and against the torch backend."""

import os
import subprocess
import sys

import pytest
import torch

from mstar.engine.resources.lora.addressing import LoraAddressing, group_by_slot
from mstar.engine.resources.lora.backends.base import LayerWeights
from mstar.engine.resources.lora.backends.cpu_backend import CpuLoraBackend
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend
from mstar.native import load_kernel

CAP = 24
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}


def weights_of(in_size, out_sizes, slot_ranks, dtype, generator):
    """Random slots; rows past a slot's rank are NaN, so that a kernel that reads them shows it."""
    slots, parts = len(slot_ranks), len(out_sizes)
    a = torch.randn(slots, parts, CAP, in_size, generator=generator) / in_size**0.5
    b = torch.randn(slots, CAP, sum(out_sizes), generator=generator) / CAP**0.5
    for slot, rank in enumerate(slot_ranks):
        a[slot, :, rank:] = float("nan")
        b[slot, rank:] = float("nan")
    scaling = torch.rand(slots, parts, generator=generator) + 0.5
    return LayerWeights(a.to(dtype), b.to(dtype), scaling, tuple(out_sizes))


def reference(y, x, weights, row_slots, slot_ranks):
    """Token by token, in float64."""
    out = y.double()
    for token, slot in enumerate(row_slots):
        start = 0
        for part, size in enumerate(weights.out_sizes):
            rank = slot_ranks[slot]
            a = weights.lora_a[slot, part, :rank].double()
            b = weights.lora_b_t[slot, :rank, start : start + size].double()
            out[token, start : start + size] += weights.scaling[slot, part].double() * (a @ x[token].double()) @ b
            start += size
    return out


def planned(backend, row_slots, row_tokens, slot_ranks):
    host = group_by_slot(row_slots, row_tokens, len(slot_ranks))
    addressing = LoraAddressing(torch.tensor(host.token_order), torch.tensor(host.slot_indptr))
    segments = host.segments()
    return backend.plan(addressing, segments, [slot_ranks[segment.slot] for segment in segments])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernel(request):
    backend = CpuLoraBackend.create(request.param)
    assert backend is not None, "this machine has a compiler (the tests' own requirement), so the kernel must build"
    return backend, request.param


@pytest.mark.parametrize("sizes", [(32, (64,)), (48, (64, 32, 32)), (33, (70, 70)), (7, (5,)), (576, (384, 128, 128))])
@pytest.mark.parametrize("rows", [[(1, 1)], [(0, 3), (2, 1), (1, 5), (0, 1), (3, 9), (2, 4)], [(0, 2), (3, 70), (1, 1)]])
def test_l01_the_kernel_adds_each_tokens_own_adapter_and_touches_no_base_row(kernel, sizes, rows):
    backend, dtype = kernel
    in_size, out_sizes = sizes
    slot_ranks = [0, 1, 8, 19]
    generator = torch.Generator().manual_seed(len(rows) * 1000 + in_size)
    weights = weights_of(in_size, out_sizes, slot_ranks, dtype, generator)
    row_slots, row_tokens = [slot for slot, _ in rows], [count for _, count in rows]
    token_slots = [slot for slot, count in rows for _ in range(count)]
    x = torch.randn(len(token_slots), in_size, generator=generator).to(dtype)
    y = torch.randn(len(token_slots), sum(out_sizes), generator=generator).to(dtype)
    expected = reference(y, x, weights, token_slots, slot_ranks)
    before = y.clone()
    result = backend.add_delta(y, x, weights, planned(backend, row_slots, row_tokens, slot_ranks))
    assert result is y
    assert torch.allclose(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    base = [token for token, slot in enumerate(token_slots) if slot == 0]
    assert torch.equal(result[base], before[base]), "a base row was touched"
    moved = [token for token, slot in enumerate(token_slots) if slot]
    assert not torch.allclose(result[moved], before[moved])


def test_a_tokens_delta_is_the_same_bits_whatever_it_is_batched_with(kernel):
    backend, dtype = kernel
    generator = torch.Generator().manual_seed(3)
    slot_ranks = [0, 8, 16]
    weights = weights_of(96, (64, 64), slot_ranks, dtype, generator)
    x = torch.randn(9, 96, generator=generator).to(dtype)
    y = torch.randn(9, 128, generator=generator).to(dtype)
    together = backend.add_delta(y.clone(), x, weights, planned(backend, [1, 2, 1], [4, 3, 2], slot_ranks))
    for token, slot in enumerate([1, 1, 1, 1, 2, 2, 2, 1, 1]):
        one = slice(token, token + 1)
        alone = backend.add_delta(y[one].clone(), x[one], weights, planned(backend, [slot], [1], slot_ranks))
        assert torch.equal(alone, together[one])


def test_kernel_and_torch_backend_agree(kernel):
    backend, dtype = kernel
    generator = torch.Generator().manual_seed(5)
    slot_ranks = [0, 4, 4, 4]
    weights = weights_of(64, (64, 32, 32), slot_ranks, dtype, generator)
    rows = ([3, 0, 1], [2, 1, 30])
    x = torch.randn(33, 64, generator=generator).to(dtype)
    y = torch.randn(33, 128, generator=generator).to(dtype)
    plain = TorchLoraBackend()
    ours = backend.add_delta(y.clone(), x, weights, planned(backend, *rows, slot_ranks))
    theirs = plain.add_delta(y.clone(), x, weights, planned(plain, *rows, slot_ranks))
    assert torch.allclose(ours.float(), theirs.float(), atol=TOLERANCE[dtype] * 2, rtol=TOLERANCE[dtype])


def test_without_a_compiler_the_torch_backend_is_used_and_a_line_says_so(tmp_path):
    code = (
        "import logging, torch; logging.basicConfig(level='INFO')\n"
        "from mstar.engine.resources.lora.backends.select import default_backend\n"
        "print(type(default_backend(torch.device('cpu'), torch.float32)).__name__)\n"
    )
    env = {**os.environ, "PATH": str(tmp_path), "MSTAR_CACHE": str(tmp_path)}
    env.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "TorchLoraBackend"
    assert "no C++ compiler" in done.stderr


def test_a_source_that_does_not_compile_is_a_fallback_and_not_a_crash(tmp_path, monkeypatch):
    monkeypatch.setenv("MSTAR_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    assert load_kernel(broken) is None
    assert not list((tmp_path / "cache" / "kernels").glob("*"))
