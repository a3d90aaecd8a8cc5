"""The torch backend against a reference that loops over rows and heads."""

from __future__ import annotations

import random

import pytest
import torch

from mstar.engine.resources.attention.torch_backend import TorchAttention
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.rows import KvRows

HEAD_DIM, BLOCK = 16, 4
SCALE = HEAD_DIM**-0.5


def reference(q, k, v, start, kv_of_query, window):
    """One row in float32: `q [n, hq, d]` at positions from `start`, `k`, `v [start + n, hkv, d]` its whole history."""
    out = torch.empty(q.shape)
    for token in range(len(q)):
        last = start + token
        first = 0 if window is None else max(0, last - window + 1)
        for head, kv_head in enumerate(kv_of_query):
            scores = k[first : last + 1, kv_head].float() @ q[token, head].float() * SCALE
            out[token, head] = scores.softmax(dim=0) @ v[first : last + 1, kv_head].float()
    return out.flatten(1)


class Case:
    """Rows with random histories, played in random chunks."""

    def __init__(self, kv_of_query, windows, dtype, num_pages=400, seed=0):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_of_query, self.windows, self.dtype = kv_of_query, windows, dtype
        num_kv_heads = max(kv_of_query) + 1
        self.cache = KvCache(len(windows), num_pages, BLOCK, num_kv_heads, HEAD_DIM, dtype, "cpu")
        self.attention = TorchAttention(self.cache, kv_of_query, SCALE, windows)
        self.free = list(range(num_pages))
        self.random.shuffle(self.free)
        self.tables, self.history = {}, {}

    def tensor(self, count, heads):
        return torch.randn(count, heads, HEAD_DIM, generator=self.generator).to(self.dtype)

    def step(self, rows):
        """Run `(row, number of tokens)` and compare every layer with the reference."""
        fresh = []
        starts = [len(self.history.get(row, [[()]])[0][0]) if row in self.history else 0 for row, _ in rows]
        for (row, count), start in zip(rows, starts, strict=True):
            table = self.tables.setdefault(row, [])
            while len(table) * BLOCK < start + count:
                table.append(self.free.pop())
                fresh.append(table[-1])
        counts = tuple(count for _, count in rows)
        self.attention.plan(KvRows(tuple(tuple(self.tables[row]) for row, _ in rows), tuple(starts), counts, tuple(fresh)))
        for layer_idx, window in enumerate(self.windows):
            q, k, v = (self.tensor(sum(counts), heads) for heads in (len(self.kv_of_query), *(max(self.kv_of_query) + 1,) * 2))
            got = self.attention.forward(layer_idx, q, k, v)
            assert got.shape == (sum(counts), len(self.kv_of_query) * HEAD_DIM) and got.dtype == self.dtype and got.is_contiguous()
            tolerance = 1e-5 if self.dtype == torch.float32 else 2e-2
            pieces = [tensor.split(counts) for tensor in (q, k, v, got)]
            for (row, _), start, row_q, row_k, row_v, row_got in zip(rows, starts, *pieces, strict=True):
                layers = self.history.setdefault(row, [(k[:0], v[:0]) for _ in self.windows])
                layers[layer_idx] = (torch.cat([layers[layer_idx][0], row_k]), torch.cat([layers[layer_idx][1], row_v]))
                expected = reference(row_q, *layers[layer_idx], start, self.kv_of_query, window)
                torch.testing.assert_close(row_got.float(), expected, atol=tolerance, rtol=0)

    def finish(self, row):
        self.free.extend(self.tables.pop(row))
        del self.history[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_of_query", [(0, 0, 1, 1), (0, 1, 2), (0, 0, 0), (0, 1, 1, 1, 2), (0, 0, 1)], ids=str)
def test_random_steps_match_the_reference(kv_of_query, dtype):
    case = Case(kv_of_query, windows=(None, 7), dtype=dtype)
    for _ in range(12):
        names = case.random.sample(range(6), case.random.randint(1, 6))
        case.step([(name, case.random.choice([1, 1, 1, 3, 9, 14])) for name in names])
        for name in names:
            if case.random.random() < 0.15:
                case.finish(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_far_shorter_than_the_history_sees_its_own_positions_alone(dtype):
    case = Case((0, 0), windows=(5, None), dtype=dtype)
    case.step([("long", 700)])
    case.step([("long", 40), ("short", 3)])
    case.step([("short", 1), ("long", 1)])


def test_rows_that_are_grouped_apart_come_back_in_their_packed_order():
    case = Case((0, 0, 1), windows=(None,), dtype=torch.float32)
    case.step([("a", 300), ("b", 1), ("c", 290)])
    case.step([("b", 1), ("a", 60), ("d", 2), ("c", 1), ("e", 150)])
    assert len(case.attention._groups) > 1


def test_strided_heads_of_a_fused_projection_are_read_as_they_are():
    case = Case((0, 0, 1, 1), windows=(None,), dtype=torch.float32)
    fused = torch.randn(6, 8, HEAD_DIM)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    case.attention.plan(KvRows(((3, 1),), (0,), (6,), (3, 1)))
    torch.testing.assert_close(case.attention.forward(0, q, k, v), reference(q, k, v, 0, (0, 0, 1, 1), None))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_freed_page_held_never_reaches_the_next_owner(poison):
    case = Case((0, 1, 1), windows=(None, 3), dtype=torch.float32)
    case.cache.k[:, : case.cache.num_pages] = poison
    case.cache.v[:, : case.cache.num_pages] = poison
    case.step([("a", 6), ("b", 1), ("c", 33)])
    case.step([("b", 1), ("c", 1), ("a", 1)])


def test_one_rows_nan_stays_in_its_row():
    case = Case((0, 0), windows=(None,), dtype=torch.float32)
    case.step([("bad", 5), ("good", 9)])
    case.cache.v[:, case.tables["bad"]] = float("nan")
    starts, tables = (5, 9), (tuple(case.tables["bad"]), tuple(case.tables["good"]))
    case.attention.plan(KvRows(tables, starts, (1, 1)))
    q, k, v = case.tensor(2, 2), case.tensor(2, 1), case.tensor(2, 1)
    bad, good = case.attention.forward(0, q, k, v)
    assert bad.isnan().any() and good.isfinite().all()
