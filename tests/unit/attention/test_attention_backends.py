"""Both backends against a reference that loops over rows and heads."""

from __future__ import annotations

import random

import pytest
import torch

from mstar.engine.resources.attention.cpu_backend import CpuAttention
from mstar.engine.resources.attention.select import default_attention
from mstar.engine.resources.attention.torch_backend import TorchAttention
from mstar.engine.resources.kv.cache import KvCache
from mstar.engine.resources.kv.rows import KvRows

HEAD_DIM, BLOCK = 16, 4
BLOCKS = (4, 16)  # the kernel keeps keys and values as they come, or turned for its products
BACKENDS = {"torch": TorchAttention, "cpu": CpuAttention.create}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


@pytest.fixture(params=BLOCKS)
def block(request):
    return request.param


def reference(q, k, v, start, kv_of_query, window):
    """One row in float32: `q [n, hq, d]` at positions from `start`, `k`, `v [start + n, hkv, d]` its whole history."""
    out = torch.empty(q.shape)
    for token in range(len(q)):
        last = start + token
        first = 0 if window is None else max(0, last - window + 1)
        for head, kv_head in enumerate(kv_of_query):
            scores = k[first : last + 1, kv_head].float() @ q[token, head].float() * q.shape[-1] ** -0.5
            out[token, head] = scores.softmax(dim=0) @ v[first : last + 1, kv_head].float()
    return out.flatten(1)


class Case:
    """Rows with random histories, played in random chunks."""

    def __init__(self, backend, kv_of_query, windows, dtype, num_pages=400, seed=0, head_dim=HEAD_DIM, block=BLOCK):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_of_query, self.windows, self.dtype = kv_of_query, windows, dtype
        self.head_dim, self.block = head_dim, block
        self.cache = KvCache(len(windows), num_pages, block, max(kv_of_query) + 1, head_dim, dtype, "cpu")
        self.attention = backend(self.cache, kv_of_query, head_dim**-0.5, windows)
        self.free = list(range(num_pages))
        self.random.shuffle(self.free)
        self.tables, self.history = {}, {}

    def tensor(self, count, heads):
        return torch.randn(count, heads, self.head_dim, generator=self.generator).to(self.dtype)

    def step(self, rows):
        """Run `(row, number of tokens)` and compare every layer with the reference; returns what the layers gave."""
        outs = []
        fresh = []
        starts = [len(self.history.get(row, [[()]])[0][0]) if row in self.history else 0 for row, _ in rows]
        for (row, count), start in zip(rows, starts, strict=True):
            table = self.tables.setdefault(row, [])
            while len(table) * self.block < start + count:
                table.append(self.free.pop())
                fresh.append(table[-1])
        counts = tuple(count for _, count in rows)
        self.attention.plan(KvRows(tuple(tuple(self.tables[row]) for row, _ in rows), tuple(starts), counts, tuple(fresh)))
        for layer_idx, window in enumerate(self.windows):
            q, k, v = (self.tensor(sum(counts), heads) for heads in (len(self.kv_of_query), *(max(self.kv_of_query) + 1,) * 2))
            got = self.attention.forward(layer_idx, q, k, v)
            outs.append(got)
            assert got.shape == (sum(counts), len(self.kv_of_query) * self.head_dim) and got.dtype == self.dtype and got.is_contiguous()
            tolerance = 1e-5 if self.dtype == torch.float32 else 2e-2
            pieces = [tensor.split(counts) for tensor in (q, k, v, got)]
            for (row, _), start, row_q, row_k, row_v, row_got in zip(rows, starts, *pieces, strict=True):
                layers = self.history.setdefault(row, [(k[:0], v[:0]) for _ in self.windows])
                layers[layer_idx] = (torch.cat([layers[layer_idx][0], row_k]), torch.cat([layers[layer_idx][1], row_v]))
                expected = reference(row_q, *layers[layer_idx], start, self.kv_of_query, window)
                torch.testing.assert_close(row_got.float(), expected, atol=tolerance, rtol=0)
        return outs

    def finish(self, row):
        self.free.extend(self.tables.pop(row))
        del self.history[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_of_query", [(0, 0, 1, 1), (0, 1, 2), (0, 0, 0), (0, 1, 1, 1, 2), (0, 0, 1)], ids=str)
def test_random_steps_match_the_reference(backend, kv_of_query, block, dtype):
    case = Case(backend, kv_of_query, windows=(None, 7), dtype=dtype, block=block)
    for _ in range(12):
        names = case.random.sample(range(6), case.random.randint(1, 6))
        case.step([(name, case.random.choice([1, 1, 1, 3, 9, 14])) for name in names])
        for name in names:
            if case.random.random() < 0.15:
                case.finish(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_far_shorter_than_the_history_sees_its_own_positions_alone(backend, block, dtype):
    case = Case(backend, (0, 0), windows=(5, None), dtype=dtype, block=block)
    case.step([("long", 700)])
    case.step([("long", 40), ("short", 3)])
    case.step([("short", 1), ("long", 1)])


@pytest.mark.parametrize(("head_dim", "block"), [(24, 16), (64, 16), (80, 3), (80, 48), (128, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_head_and_page_sizes_match_the_reference(backend, head_dim, block, dtype):
    case = Case(backend, (0, 0, 0, 1, 1), windows=(None, 40), dtype=dtype, head_dim=head_dim, block=block)
    case.step([("a", 150), ("b", 1), ("c", 33)])
    case.step([("b", 1), ("a", 1), ("c", 100)])
    case.step([("c", 1), ("b", 1), ("a", 1)])


def test_rows_that_are_grouped_apart_come_back_in_their_packed_order():
    case = Case(TorchAttention, (0, 0, 1), windows=(None,), dtype=torch.float32)
    case.step([("a", 300), ("b", 1), ("c", 290)])
    case.step([("b", 1), ("a", 60), ("d", 2), ("c", 1), ("e", 150)])
    assert len(case.attention._groups) > 1


def test_strided_heads_of_a_fused_projection_are_read_as_they_are(backend):
    case = Case(backend, (0, 0, 1, 1), windows=(None,), dtype=torch.float32)
    fused = torch.randn(6, 8, HEAD_DIM)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    case.attention.plan(KvRows(((3, 1),), (0,), (6,), (3, 1)))
    torch.testing.assert_close(case.attention.forward(0, q, k, v), reference(q, k, v, 0, (0, 0, 1, 1), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_freed_page_held_never_reaches_the_next_owner(backend, block, poison, dtype):
    case = Case(backend, (0, 1, 1), windows=(None, 3), dtype=dtype, block=block)
    case.cache.k[:, : case.cache.num_pages] = poison
    case.cache.v[:, : case.cache.num_pages] = poison
    case.step([("a", 6), ("b", 1), ("c", 33)])
    case.step([("b", 1), ("c", 1), ("a", 1)])
    for row in "abc":
        case.finish(row)
    case.step([("d", 40), ("e", 15)])
    for _ in range(3):
        case.step([("e", 1), ("d", 1)])


def test_one_rows_nan_stays_in_its_row(backend, block):
    case = Case(backend, (0, 0), windows=(None,), dtype=torch.float32, block=block)
    case.step([("bad", 5), ("good", 9)])
    case.cache.v[:, case.tables["bad"]] = float("nan")
    starts, tables = (5, 9), (tuple(case.tables["bad"]), tuple(case.tables["good"]))
    case.attention.plan(KvRows(tables, starts, (1, 1)))
    q, k, v = case.tensor(2, 2), case.tensor(2, 1), case.tensor(2, 1)
    bad, good = case.attention.forward(0, q, k, v)
    assert bad.isnan().any() and good.isfinite().all()


class Replay(Case):
    """A case whose queries, keys and values are a function of row, position and layer: however they are batched."""

    def step(self, rows):
        self.rows = [(row, start) for row, count in rows for start in range(self.length(row), self.length(row) + count)]
        self.calls = 0
        return super().step(rows)

    def length(self, row):
        return len(self.history[row][0][0]) if row in self.history else 0

    def tensor(self, count, heads):
        assert count == len(self.rows)
        kind, self.calls = self.calls, self.calls + 1
        generator = torch.Generator()
        made = [
            torch.randn(heads, self.head_dim, generator=generator.manual_seed((row * 1000 + start) * 100 + kind))
            for row, start in self.rows
        ]
        return torch.stack(made).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_a_token_the_same_bits_however_it_is_chunked_batched_and_shared_out(block, dtype):
    def play(steps, num_threads):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            case = Replay(CpuAttention.create, (0, 0, 0, 1, 1, 1), windows=(None, 200), dtype=dtype, block=block)
            seen = {}
            for rows in steps:
                outs = case.step(rows)
                for index, key in enumerate(case.rows):
                    seen[key] = [out[index] for out in outs]
            return seen
        finally:
            torch.set_num_threads(before)

    whole = play([[(1, 401), (2, 7)]], 1)
    chunked = play([[(1, 150)], [(2, 3), (1, 130)], [(1, 120), (2, 1)], [(1, 1), (2, 1)], *[[(2, 1)]] * 2], 2)
    alone = play([[(1, 400)], [(1, 1)], [(2, 7)]], 2)
    assert whole.keys() == chunked.keys() == alone.keys()
    for key, outs in whole.items():
        for other in (chunked, alone):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(outs, other[key], strict=True)), key


def test_a_cpu_with_a_compiler_takes_the_kernel_and_other_dtypes_plain_torch():
    for dtype, expected in ((torch.bfloat16, CpuAttention), (torch.float32, CpuAttention), (torch.float16, TorchAttention)):
        assert type(default_attention(KvCache(1, 2, 4, 1, 8, dtype, "cpu"), (0,), 1.0, (None,))) is expected
