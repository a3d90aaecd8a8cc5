"""The C++ product against a float64 matmul: every tail, any number of tokens, the same bits whatever a token is batched with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mstar.distributed.linear import linear_product
from mstar.distributed.linear_cpu import CpuLinear
from mstar.native.pages import HugePages

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1), (5, 3), (33, 48), (48, 64), (96, 577), (100, 31), (144, 576), (63, 62), (0, 4), (7, 128)]  # (out, in)
TOKENS = (1, 2, 3, 7, 8, 9, 12, 15, 16, 17, 33)


def case(out_size, in_size, dtype, *, has_bias):
    generator = torch.Generator().manual_seed(out_size * 1000 + in_size)
    weight = (torch.randn(out_size, in_size, generator=generator) * in_size**-0.5).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype) if has_bias else None
    linear = CpuLinear.create(weight, bias, HugePages())
    assert linear is not None, "this machine has a compiler (the tests' own requirement), so the kernel must build"
    return linear, weight, bias, torch.randn(max(TOKENS), in_size, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_kernel_is_the_matmul_and_a_tokens_bits_do_not_depend_on_the_batch(size, dtype, has_bias):
    linear, weight, bias, x = case(*size, dtype, has_bias=has_bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    alone = torch.cat([linear(row[None]) for row in x])
    torch.testing.assert_close(alone.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    for tokens in TOKENS:
        assert torch.equal(linear(x[:tokens]), alone[:tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_read_as_they_are_and_others_copied(dtype):
    linear, _, _, x = case(33, 48, dtype, has_bias=True)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(linear(wide[:, 48:]), linear(x))
    assert torch.equal(linear(x.t().contiguous().t()), linear(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_come_back_as_they_were(size, dtype):
    linear, weight, _, _ = case(*size, dtype, has_bias=False)
    every = torch.arange(size[0]).flip(0).repeat(3)
    assert torch.equal(linear.rows(every), weight[every])


def test_the_number_of_threads_changes_no_bit():
    linear, _, _, x = case(100, 31, torch.bfloat16, has_bias=False)
    before, many = torch.get_num_threads(), linear(x)
    try:
        torch.set_num_threads(1)
        assert torch.equal(linear(x), many)
    finally:
        torch.set_num_threads(before)


def test_nan_and_infinity_come_through_and_stay_in_their_row():
    linear, _, _, x = case(33, 48, torch.bfloat16, has_bias=False)
    clean = linear(x[:9])
    x[3, 5], x[4, 5] = float("nan"), float("inf")
    y = linear(x[:9])
    assert y[3].isnan().all() and not y[4].isfinite().any()
    assert torch.equal(y[[0, 1, 2, 5, 6, 7, 8]], clean[[0, 1, 2, 5, 6, 7, 8]])


def test_what_the_kernel_does_not_know_goes_another_way():
    assert CpuLinear.create(torch.randn(4, 4).half(), None, HugePages()) is None
    assert CpuLinear.create(torch.randn(4, 4, device="meta"), None, HugePages()) is None
    x = torch.randn(2, 4).half()
    assert linear_product(torch.eye(4).half())(x).tolist() == x.tolist()


def test_pages_are_zero_aligned_apart_and_outlive_their_owner():
    pages = HugePages()
    first, second, large = pages.take(100), pages.take(1), pages.take(70 << 20)
    del pages
    assert all(piece.data_ptr() % 64 == 0 and not piece[:1000].any() for piece in (first, second, large))
    first.fill_(1)
    assert second.item() == 0 and large.numel() == 70 << 20 and first.numel() == 100
