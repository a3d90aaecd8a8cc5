"""The KV page table: which pages each request's tokens lie in, which full pages may be shared, which come free next.

Pure: no torch, clock, threads or randomness; equal on every rank given the same calls in the same order.

    in use        one or more requests reference it
    free, cached  nobody references it, its content is indexed and may be found again
    free, blank   nobody references it, its content means nothing

Free pages are taken oldest first, so a cached page lives as long as its place in that order. A block's key chains over the tokens
before it and starts from the request's `cache_key` (the adapter weights' digest): no key is made anywhere else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from mstar.errors import CapacityError, ProtocolError


def block_keys(cache_key: bytes, tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of the full blocks of `tokens`, chained from `cache_key`. `known` are those of the first blocks, already made."""
    keys = list(known)
    parent = keys[-1] if keys else hashlib.blake2b(b"mstar-kv" + cache_key, digest_size=16).digest()
    for first in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[first : first + block_size])
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        keys.append(parent)
    return keys


class PageTable:
    """Pages `[0, num_pages)` of `block_size` tokens."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.num_pages = num_pages
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(num_pages))
        self._refs = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._chain = b""

    # what is

    def num_free(self) -> int:
        """Pages nobody references, cached ones among them."""
        return len(self._free)

    def num_cached(self) -> int:
        """Free pages whose content may be found again."""
        return sum(1 for page in self._free if page in self._key_of)

    def table(self, rid: str) -> Sequence[int]:
        """The pages of `rid`, in order; empty where it has none."""
        return self._tables.get(rid, ())

    def is_free(self, page: int) -> bool:
        """Whether nobody references `page`."""
        return page in self._free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The longest run of pages that hold the blocks of `keys`, from the first."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    # changes

    def attach(self, rid: str, keys: Sequence[bytes]) -> None:
        """Begin `rid`'s table with the cached pages of `keys`. Raises ProtocolError where one is not there: ranks differ."""
        pages = self.match(keys)
        if len(pages) != len(keys) or rid in self._tables:
            raise ProtocolError(f"request {rid}: {len(keys)} cached blocks were promised, {len(pages)} are here")
        for page in pages:
            self._refs[page] += 1
            self._free.pop(page, None)
        self._tables[rid] = pages
        self._note(f"attach {rid} {pages}")

    def extend(self, rid: str, num_tokens: int) -> list[int]:
        """Grow `rid`'s table to hold `num_tokens`; returns the fresh pages. Raises CapacityError, then nothing is taken."""
        need = self.pages_for(num_tokens) - len(self._tables.get(rid, ()))
        if need <= 0:
            return []
        if need > len(self._free):
            raise CapacityError(f"request {rid} needs {need} more KV pages, {len(self._free)} of {self.num_pages} are free")
        fresh = []
        for _ in range(need):
            page, _none = self._free.popitem(last=False)
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]
            self._refs[page] = 1
            fresh.append(page)
        self._tables.setdefault(rid, []).extend(fresh)
        self._note(f"extend {rid} {fresh}")
        return fresh

    def shrink(self, rid: str, num_pages: int) -> None:
        """Undo growth: let go of `rid`'s pages beyond the first `num_pages` (a rollback)."""
        table = self._tables.get(rid, [])
        self._unref(reversed(table[num_pages:]))
        del table[num_pages:]
        if not table:
            self._tables.pop(rid, None)
        self._note(f"shrink {rid} {num_pages}")

    def publish(self, rid: str, block: int, key: bytes) -> None:
        """`rid`'s block is full and computed: it may be shared from now on. The first page to hold a key keeps it."""
        page = self._tables[rid][block]
        if key in self._page_of or page in self._key_of:
            return
        self._key_of[page] = key
        self._page_of[key] = page
        self._note(f"publish {page} {key.hex()}")

    def release(self, rid: str) -> None:
        """Let go of all of `rid`'s pages; the last block comes free first, so prefixes stay cached longest."""
        table = self._tables.pop(rid, None)
        if table is None:
            return
        self._unref(reversed(table))
        self._note(f"release {rid}")

    # proof

    def digest(self) -> bytes:
        """A hash of every change so far, in order: equal exactly where table, free list and index came about alike.

        Asking changes nothing: when a rank looks must not show in what it sees.
        """
        return self._chain

    def lines(self) -> list[str]:
        """The state as text, for the dump where two ranks differ."""
        lines = [f"kv {rid} pages={pages}\n" for rid, pages in sorted(self._tables.items())]
        lines.append(f"kv free={list(self._free)}\n")
        lines.append(f"kv index={sorted((page, key.hex()) for page, key in self._key_of.items())}\n")
        return lines

    def _unref(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free[page] = None
                if page not in self._key_of:  # blank pages are taken before cached ones
                    self._free.move_to_end(page, last=False)

    def _note(self, change: str) -> None:
        self._chain = hashlib.blake2b(self._chain + change.encode(), digest_size=16).digest()
