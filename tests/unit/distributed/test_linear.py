"""The parallel linears at one rank: what is added where, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mstar.distributed.comm import CommGroup
from mstar.distributed.linear import ColumnParallelLinear, RowParallelLinear, linear_product


class RecordingComm(CommGroup):
    """Rank 0 of two; the other rank's part is given."""

    def __init__(self, other):
        super().__init__(0, 2)
        self.other = other
        self.sent = None

    def all_reduce(self, x):
        self.sent = x.clone()
        return x.add_(self.other)


def add_one(y, x):
    return y.add_(x.sum(dim=-1, keepdim=True))


def test_a_column_linear_adds_bias_and_delta_to_its_own_columns():
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    y = ColumnParallelLinear(linear_product(weight, bias), add_one)(x)
    torch.testing.assert_close(y, F.linear(x, weight, bias) + x.sum(dim=-1, keepdim=True))


def test_a_row_linear_sends_base_bias_and_delta_through_one_sum():
    x, weight, bias, other = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5), torch.randn(3, 5)
    comm = RecordingComm(other)
    y = RowParallelLinear(linear_product(weight, bias), comm, add_one)(x)
    torch.testing.assert_close(comm.sent, F.linear(x, weight, bias) + x.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(y, comm.sent + other)


def test_the_base_product_is_a_seam_that_need_not_be_a_plain_matmul():
    x = torch.randn(3, 4)
    assert torch.equal(ColumnParallelLinear(lambda x: x * 2)(x), x * 2)


def test_one_rank_issues_no_collective():
    comm, x = CommGroup.single(), torch.randn(2, 3)
    assert comm.all_reduce(x) is x
    assert comm.all_gather_columns(x, ((0, 3),)) is x
    assert comm.agree_max([0, 2, 1]) == [0, 2, 1]
    assert comm.all_reduce_min(7) == 7
    comm.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 8, 130])
def test_the_plain_product_is_the_matmul_in_whatever_layout_it_keeps_the_weight(num_tokens, dtype):
    x, weight, bias = torch.randn(num_tokens, 48).to(dtype), torch.randn(33, 48).to(dtype), torch.randn(33).to(dtype)
    expected, tolerance = F.linear(x.double(), weight.double(), bias.double()), 1e-4 if dtype == torch.float32 else 0.15
    strided = torch.stack((x, x), dim=1)[:, 0]
    with torch.inference_mode():
        for given in (x, strided):
            y = linear_product(weight, bias)(given)
            assert y.dtype == dtype and y.shape == (num_tokens, 33) and y.is_contiguous()
            torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(linear_product(weight)(x).double(), expected - bias.double(), atol=tolerance, rtol=0)


def test_an_empty_shard_gives_no_columns():
    assert linear_product(torch.empty(0, 4))(torch.randn(3, 4)).shape == (3, 0)
