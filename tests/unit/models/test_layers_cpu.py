"""The kernels of the small operations against plain torch, and all layers in one call against layer by layer."""

from __future__ import annotations

import pytest
import torch

from mstar.distributed.comm import CommGroup
from mstar.engine.resources.attention.torch_backend import TorchAttention
from mstar.models import decoder as decoder_module
from mstar.models.layers_cpu import CpuOps, layer_ops
from mstar.models.ops import LayerOps
from tests.unit.models.tiny import make_engine, make_model, reference_logits, some_tokens

DTYPES = [torch.float32, torch.bfloat16]
TOKENS = [1, 8, 70]


@pytest.fixture(params=DTYPES, ids=str)
def ops(request):
    torch.manual_seed(0)
    kernels = layer_ops(torch.empty(0, dtype=request.param))
    assert isinstance(kernels, CpuOps)
    return kernels, request.param


def close(ours, theirs, dtype):
    """Equal but for the order of float32 sums: at most one rounding of bfloat16 apart, and that seldom."""
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=2**-7)
        assert (ours != theirs).float().mean() < 0.02


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", [576, 33, 16, 1])
def test_the_norm_is_torchs(ops, tokens, size):
    kernels, dtype = ops
    x, weight = torch.randn(tokens, size).mul(3).to(dtype), torch.randn(size).to(dtype)
    close(kernels.norm(x, weight, 1e-5), LayerOps().norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dim", [64, 24])
def test_head_norms_and_rotations_of_a_fused_projection_are_torchs(ops, tokens, dim):
    kernels, dtype = ops
    fused = torch.randn(tokens, 7, dim).to(dtype)
    heads, weight = fused[:, :5], torch.randn(5, dim).to(dtype)
    cos, sin = torch.randn(2, tokens, 1, dim).to(dtype)
    normed = kernels.norm(heads, weight, 1e-6)
    close(normed, LayerOps().norm(heads, weight, 1e-6), dtype)
    expected, rest = LayerOps().rotate(heads, cos, sin), fused[:, 5:].clone()
    turned = kernels.rotate(heads, cos, sin)
    if dtype == torch.bfloat16:
        assert torch.equal(turned, expected)
    else:
        torch.testing.assert_close(turned, expected)
    assert torch.equal(fused[:, 5:], rest), "the other heads of the projection are left alone"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1536, 300, 5])
def test_the_gate_is_torchs_out_to_infinity(ops, tokens, width):
    kernels, dtype = ops
    gate_up = torch.randn(tokens, 2 * width).mul(20).to(dtype)
    gate_up[0, :4] = torch.tensor([float("inf"), -100.0, -90.0, 88.0])
    close(kernels.gate(gate_up), LayerOps().gate(gate_up), dtype)
    gate_up[0, 1], gate_up[0, 2] = float("nan"), float("-inf")
    assert kernels.gate(gate_up)[0, 1:3].isnan().all(), "as in torch, where minus infinity over infinity is not a number"


STEPS = ([("a", 9), ("b", 40)], [("a", 1), ("c", 5), ("b", 1)], [("a", 1), ("b", 1), ("c", 1)])


def play(engine):
    done = dict.fromkeys("abc", 0)
    logits = []
    for step in STEPS:
        rows = [(rid, some_tokens(60, seed=ord(rid))[done[rid] : done[rid] + count]) for rid, count in step]
        logits.extend(engine.step(rows))
        for rid, count in step:
            done[rid] += count
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["smollm2", "qwen3", "mistral", "llama-biases"])
def test_one_call_gives_the_bits_of_layer_by_layer_and_other_threads(family, dtype, tmp_path, monkeypatch):
    make_model(family, tmp_path, dtype=dtype)
    engine = make_engine(tmp_path, dtype=dtype)
    assert engine.decoder._at_once is not None
    at_once = play(engine)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(play(make_engine(tmp_path, dtype=dtype)), at_once)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(decoder_module.CpuLayers, "create", lambda *args: None)
    by_layer = make_engine(tmp_path, dtype=dtype)
    assert by_layer.decoder._at_once is None
    assert torch.equal(play(by_layer), at_once)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "qwen2-window"])
def test_plain_torch_still_matches_transformers(family, tmp_path, monkeypatch):
    model = make_model(family, tmp_path)
    monkeypatch.setattr(decoder_module, "layer_ops", lambda like: LayerOps())
    tokens = some_tokens(30, seed=3)
    engine = make_engine(tmp_path, make_attention=TorchAttention)
    assert engine.decoder._at_once is None
    first, second = engine.step([("a", tokens[:17])])[0], engine.step([("a", tokens[17:])])[0]
    torch.testing.assert_close(torch.cat((first, second)), reference_logits(model, tokens), atol=1e-3, rtol=0)


class CallsOnly:
    """A delta that no kernel can add."""

    def __call__(self, y, x):
        return y.add_(x.sum())


class Native(CallsOnly):
    """A delta that a kernel could add, but in this step must not."""

    def native_target(self):
        return 1

    def native_step(self):
        return None


@pytest.mark.parametrize("delta", [CallsOnly(), Native()], ids=["never", "not in this step"])
def test_a_step_that_needs_python_between_two_kernels_goes_layer_by_layer(delta, tmp_path):
    make_model("llama2", tmp_path)
    plain = play(make_engine(tmp_path))
    engine = make_engine(tmp_path, deltas=lambda target, layer: delta if target == "o_proj" else None)
    assert (engine.decoder._at_once is None) == (type(delta) is CallsOnly)
    assert not torch.allclose(play(engine), plain)


def test_ranks_that_share_no_memory_go_layer_by_layer(tmp_path):
    make_model("llama2", tmp_path)
    assert make_engine(tmp_path, CommGroup(0, 2)).decoder._at_once is None
