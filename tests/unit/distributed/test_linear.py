"""The parallel linears at one rank: what is added where, and in which order."""

from __future__ import annotations

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
