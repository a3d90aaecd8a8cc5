"""The torch backend against the plainest reference: one token, one part, one product after another."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.lora.addressing import LoraAddressing, group_by_slot
from mstar.engine.resources.lora.backends.base import LayerWeights
from mstar.engine.resources.lora.backends.torch_backend import TorchLoraBackend

IN, CAP = 10, 8
BACKEND = TorchLoraBackend()


def make_weights(ranks, out_sizes, seed=0, dtype=torch.float32):
    """Slots of the given ranks; slot 0 and everything past a slot's rank is zero."""
    draw = torch.Generator().manual_seed(seed)
    lora_a = torch.randn(len(ranks), len(out_sizes), CAP, IN, generator=draw)
    lora_b_t = torch.randn(len(ranks), CAP, sum(out_sizes), generator=draw)
    scaling = torch.rand(len(ranks), len(out_sizes), generator=draw) + 0.5
    for slot, lora_rank in enumerate(ranks):
        lora_a[slot, :, lora_rank:] = 0
        lora_b_t[slot, lora_rank:] = 0
    scaling[0] = 0
    return LayerWeights(lora_a.to(dtype), lora_b_t.to(dtype), scaling, tuple(out_sizes))


def reference(y, x, weights, row_slots, row_tokens):
    """In float32, token by token."""
    out = y.float().clone()
    token = 0
    for slot, count in zip(row_slots, row_tokens, strict=True):
        for _ in range(count):
            first = 0
            for part, size in enumerate(weights.out_sizes if slot else ()):
                shrunk = weights.lora_a[slot, part].float() @ x[token].float()
                b_t = weights.lora_b_t[slot, :, first : first + size].float()
                out[token, first : first + size] += weights.scaling[slot, part] * (shrunk @ b_t)
                first += size
            token += 1
    return out


def planned(row_slots, row_tokens, ranks):
    host = group_by_slot(row_slots, row_tokens, len(ranks))
    segments = host.segments()
    addressing = LoraAddressing(torch.tensor(host.token_order, dtype=torch.int64), torch.tensor(host.slot_indptr))
    return BACKEND.plan(addressing, segments, [ranks[segment.slot] for segment in segments])


def check(row_slots, row_tokens, ranks, out_sizes=(6, 3, 3), dtype=torch.float32, seed=0):
    weights = make_weights(ranks, out_sizes, seed, dtype)
    draw = torch.Generator().manual_seed(seed + 1)
    total = sum(row_tokens)
    x, y = (torch.randn(total, size, generator=draw).to(dtype) for size in (IN, sum(out_sizes)))
    plan = planned(row_slots, row_tokens, ranks)
    before = y.clone()
    expected = reference(y, x, weights, row_slots, row_tokens)
    assert BACKEND.add_delta(y, x, weights, plan) is y
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2 * float(expected.abs().max())
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=0)
    token = 0
    for slot, count in zip(row_slots, row_tokens, strict=True):
        if not slot:
            assert torch.equal(y[token : token + count], before[token : token + count])  # to the bit
        token += count
    return plan


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=12).filter(
    lambda rows: any(slot and count for slot, count in rows)
)


@settings(deadline=None, max_examples=80)
@given(
    rows=ROWS,
    ranks=st.tuples(*[st.sampled_from([1, 3, 5, 8])] * 4),
    out_sizes=st.sampled_from([(7,), (6, 3, 3), (4, 4)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_mixed_batch_gives_what_the_reference_gives(rows, ranks, out_sizes, dtype, seed):
    check([slot for slot, _ in rows], [count for _, count in rows], (0, *ranks), out_sizes, dtype, seed)


@pytest.mark.parametrize(
    ("lengths", "chunk_size"),
    [((1, 1, 1), 1), ((4, 3, 4), 4), ((16, 30, 15), 16), ((64, 63, 130), 64), ((300, 700, 511), 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_chunk_size_is_taken_where_it_fits_and_gives_the_same(lengths, chunk_size, dtype):
    plan = check([1, 2, 3], list(lengths), (0, 2, 8, 3), dtype=dtype)
    assert plan.chunk_size == chunk_size


def test_many_rows_of_many_slots_in_random_order():
    draw = random.Random(3)
    slots = [draw.randint(0, 4) for _ in range(200)]
    check(slots, [draw.choice([1, 1, 1, 2, 17]) for _ in slots], (0, 8, 1, 3, 5), out_sizes=(12,))


def test_a_single_slot_and_a_single_token():
    check([1], [1], (0, 8))
    check([2], [40], (0, 1, 8))
    check([0, 0, 1, 0], [5, 1, 1, 3], (0, 4))


def test_a_rank_smaller_than_the_largest_of_the_step_adds_only_its_own():
    check([1, 2], [3, 3], (0, 1, 8))


def test_an_adapter_with_nothing_in_this_target_adds_nothing():
    plan = planned([1, 2], [2, 2], (0, 4, 4))
    weights = make_weights((0, 4, 0), (6,))
    weights.scaling[2] = 0
    y = torch.zeros(4, 6)
    BACKEND.add_delta(y, torch.ones(4, IN), weights, plan)
    assert y[:2].all() and not y[2:].any()


def test_rows_past_the_step_are_not_read_or_written():
    """A capture bucket is padded: its last rows may hold anything."""
    plan = planned([1, 0, 2], [2, 1, 3], (0, 4, 8))
    weights = make_weights((0, 4, 8), (6,))
    x, y = torch.full((16, IN), float("nan")), torch.zeros(16, 6)
    x[:2] = x[3:6] = 1.0
    BACKEND.add_delta(y, x, weights, plan)
    assert torch.isfinite(y).all() and not y[2].any() and not y[6:].any() and y[:2].all() and y[3:6].all()


def test_c39_a_batch_of_base_rows_after_one_of_adapter_rows_and_any_mix_of_both():
    for slots in ([1, 1], [1, 0], [0, 1], [0, 1, 0], [1, 0, 2, 0]):
        check(slots, [1] * len(slots), (0, 4, 8))


def test_c44_the_same_step_twice_gives_the_same_bits():
    weights, plan = make_weights((0, 4, 8), (6, 3)), planned([1, 2, 1], [5, 9, 2], (0, 4, 8))
    x = torch.randn(16, IN, generator=torch.Generator().manual_seed(9))
    runs = [BACKEND.add_delta(torch.ones(16, 9), x, weights, plan) for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_c99_products_are_as_wide_as_the_largest_rank_in_the_step_not_as_the_cap():
    assert planned([1, 2, 0], [1, 1, 1], (0, 2, 3, 8)).max_rank == 3
