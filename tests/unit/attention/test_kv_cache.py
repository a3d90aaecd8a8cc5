"""The KV pages of a rank."""

from __future__ import annotations

import torch

from mstar.engine.resources.kv.cache import KvCache


def test_zeroing_pages_clears_every_layer_and_nothing_else():
    cache = KvCache(2, 5, 4, 3, 8, torch.float32, "cpu")
    cache.k.fill_(float("nan"))
    cache.v.fill_(1.0)
    cache.zero([1, 3])
    assert (cache.k[:, [1, 3]] == 0).all() and (cache.v[:, [1, 3]] == 0).all()
    assert cache.k[:, [0, 2, 4]].isnan().all() and (cache.v[:, [0, 2, 4]] == 1).all()
    cache.zero([])


def test_a_page_costs_what_page_bytes_says_and_one_more_page_stays_zero():
    cache = KvCache(2, 5, 4, 3, 8, torch.bfloat16, "cpu")
    held = cache.k.numel() * cache.k.element_size() + cache.v.numel() * cache.v.element_size()
    assert held == 6 * KvCache.page_bytes(2, 4, 3, 8, torch.bfloat16)
    assert cache.zero_page == 5
