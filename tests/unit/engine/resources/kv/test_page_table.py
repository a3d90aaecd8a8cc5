"""The page table against a simple model, its prefix keys, and a digest that does not depend on when it is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.engine.resources.kv.pages import PageTable, block_keys
from mstar.errors import CapacityError, ProtocolError

SIZE = 2
TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=9)


def published(table, rid, tokens, cache_key=b""):
    """Extend `rid` to hold `tokens` and offer all full blocks."""
    table.extend(rid, len(tokens))
    keys = block_keys(cache_key, tokens, table.block_size)
    for block, key in enumerate(keys):
        table.publish(rid, block, key)
    return keys


@settings(deadline=None)
@given(TOKENS, st.integers(0, 9), st.binary(max_size=4))
def test_keys_are_of_full_blocks_and_chain_so_they_can_be_made_in_pieces(tokens, first, cache_key):
    keys = block_keys(cache_key, tokens, SIZE)
    assert len(keys) == len(tokens) // SIZE and len(set(keys)) == len(keys)
    known = block_keys(cache_key, tokens[:first], SIZE)
    assert keys[: len(known)] == known and block_keys(cache_key, tokens, SIZE, known) == keys


@settings(deadline=None)
@given(TOKENS, TOKENS, st.sampled_from([b"", b"a"]), st.sampled_from([b"", b"a"]))
def test_c65_a_key_is_equal_exactly_where_adapter_and_all_tokens_so_far_are(one, two, key_of_one, key_of_two):
    keys = [block_keys(key_of_one, one, SIZE), block_keys(key_of_two, two, SIZE)]
    for block in range(min(map(len, keys))):
        same = key_of_one == key_of_two and one[: (block + 1) * SIZE] == two[: (block + 1) * SIZE]
        assert (keys[0][block] == keys[1][block]) is same


def test_c65_the_same_prompt_under_two_adapters_and_the_base_shares_nothing():
    table, prompt = PageTable(16, SIZE), [1, 2, 3, 1, 2]
    for adapter in (b"A", b"B", b""):
        assert table.match(block_keys(adapter, prompt, SIZE)) == []
        published(table, adapter.decode() or "base", prompt, adapter)
    for adapter in (b"A", b"B", b""):
        assert table.match(block_keys(adapter, prompt, SIZE)) == list(table.table(adapter.decode() or "base"))[:2]


def test_pages_are_taken_oldest_first_and_blank_ones_before_cached_ones():
    table = PageTable(4, SIZE)
    assert table.extend("a", 3) == [0, 1] and table.extend("b", 1) == [2]
    table.publish("a", 0, b"key")
    table.release("a")
    assert table.num_free() == 3 and table.num_cached() == 1
    assert table.extend("c", 4) == [1, 3]  # blank ones; page 0 may still be found
    assert table.match([b"key"]) == [0]
    assert table.extend("c", 6) == [0] and table.match([b"key"]) == [] and table.num_cached() == 0


def test_a_released_prefix_is_evicted_from_its_end():
    table = PageTable(3, SIZE)
    keys = published(table, "a", [1, 2, 3, 4, 5, 6])
    table.release("a")
    table.extend("b", 2)
    assert table.match(keys) == [0, 1]
    table.extend("b", 4)
    assert table.match(keys) == [0]


def test_attached_pages_are_shared_and_come_free_with_their_last_user():
    table = PageTable(4, SIZE)
    keys = published(table, "a", [1, 2, 3, 4])
    table.attach("b", keys)
    table.extend("b", 5)
    assert list(table.table("b")) == [0, 1, 2] and table.num_free() == 1
    table.release("a")
    assert not table.is_free(0) and table.num_free() == 1
    table.release("b")
    assert table.num_free() == 4 and table.num_cached() == 2


def test_attaching_what_is_not_there_means_that_ranks_differ():
    table = PageTable(4, SIZE)
    keys = published(table, "a", [1, 2])
    for rid, wanted in (("b", [*keys, b"unknown"]), ("a", keys)):
        with pytest.raises(ProtocolError):
            table.attach(rid, wanted)
    assert not table.table("b")


def test_too_few_pages_take_none_and_leave_no_trace():
    table = PageTable(3, SIZE)
    table.extend("a", 4)
    before, lines = table.digest(), table.lines()
    with pytest.raises(CapacityError, match="request b needs 2 more KV pages, 1 of 3 are free"):
        table.extend("b", 3)
    assert table.digest() == before and table.lines() == lines
    table.attach("b", [])  # it never began


def test_shrink_undoes_growth_and_release_ends_it():
    table = PageTable(4, SIZE)
    table.extend("a", 2)
    table.extend("a", 7)
    table.shrink("a", 1)
    assert list(table.table("a")) == [0] and table.num_free() == 3
    table.shrink("a", 0)
    assert list(table.table("a")) == [] and table.num_free() == 4
    table.release("a")
    table.release("never")


def test_the_first_page_to_hold_a_key_keeps_it():
    table = PageTable(4, SIZE)
    published(table, "a", [1, 2])
    published(table, "b", [1, 2])
    assert table.match(block_keys(b"", [1, 2], SIZE)) == [0]
    table.release("b")
    assert table.num_cached() == 0


def test_the_digest_is_of_what_happened_in_its_order():
    one, two = PageTable(4, SIZE), PageTable(4, SIZE)
    one.extend("a", 1)
    one.extend("b", 1)
    two.extend("b", 1)
    two.extend("a", 1)
    assert one.digest() != two.digest() and one.digest() == one.digest()
    three = PageTable(4, SIZE)
    three.digest()
    three.extend("a", 1)
    three.num_free(), three.lines(), three.match([b"x"]), three.digest()
    three.extend("b", 1)
    assert three.digest() == one.digest()


RIDS = [f"r{number}" for number in range(5)]


class Pages(RuleBasedStateMachine):
    """A model keeps every request's tokens; a page is right when it holds what its request's key says. A twin is never asked anything."""

    @initialize(num_pages=st.integers(1, 8))
    def start(self, num_pages):
        self.table, self.twin = PageTable(num_pages, SIZE), PageTable(num_pages, SIZE)
        self.tokens: dict[str, list[int]] = {}
        self.content: dict[int, object] = {}  # page -> whose tokens lie there, as a key
        self.num_published: dict[str, int] = {}

    def both(self, call):
        outcomes = []
        for table in (self.table, self.twin):
            try:
                outcomes.append(call(table))
            except CapacityError:
                outcomes.append("full")
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    @rule(rid=st.sampled_from(RIDS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, rid, tokens):
        """A newcomer attaches what the cache has of its prompt and takes pages for the rest."""
        if rid in self.tokens:
            return
        keys = block_keys(b"", tokens, SIZE)
        matched = self.table.match(keys[: (len(tokens) - 1) // SIZE])
        for page, key in zip(matched, keys, strict=False):
            assert self.content[page] == key, "a cached page holds something else"
        self.both(lambda table: table.attach(rid, keys[: len(matched)]))
        free = self.table.num_free()
        need = self.table.pages_for(len(tokens)) - len(matched)
        fresh = self.both(lambda table: table.extend(rid, len(tokens)))
        if need > free:
            assert fresh == "full"
            self.both(lambda table: table.shrink(rid, 0))
            return
        assert len(fresh) == need
        self.tokens[rid], self.num_published[rid] = tokens, len(matched)
        for page in fresh:
            self.content[page] = None

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        rid = data.draw(st.sampled_from(sorted(self.tokens)))
        count = len(self.tokens[rid]) + 1
        fresh = self.both(lambda table: table.extend(rid, count))
        if fresh != "full":
            self.tokens[rid] = [*self.tokens[rid], token]
            self.content.update(dict.fromkeys(fresh))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def compute(self, data):
        """Fill and offer the next full block."""
        rid = data.draw(st.sampled_from(sorted(self.tokens)))
        keys, block = block_keys(b"", self.tokens[rid], SIZE), self.num_published[rid]
        if block < len(keys):
            self.content[self.table.table(rid)[block]] = keys[block]
            self.both(lambda table: table.publish(rid, block, keys[block]))
            self.num_published[rid] += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data):
        rid = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[rid], self.num_published[rid]
        self.both(lambda table: table.release(rid))

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "table"):
            return
        table = self.table
        table.digest()
        used = {page for rid in self.tokens for page in table.table(rid)}
        assert table.num_free() == table.num_pages - len(used) and all(table.is_free(p) is (p not in used) for p in range(table.num_pages))
        assert table.num_cached() <= table.num_free()
        for rid, tokens in self.tokens.items():
            pages = list(table.table(rid))
            assert len(pages) == table.pages_for(len(tokens)) and len(set(pages)) == len(pages)
            keys = block_keys(b"", tokens, SIZE)
            for block in range(self.num_published[rid]):
                assert self.content[pages[block]] == keys[block]
            own = [page for page in pages if sum(page in table.table(other) for other in self.tokens) > 1]
            assert all(self.content[page] is not None for page in own), "an unfilled page is shared"

    def teardown(self):
        if hasattr(self, "table"):
            assert self.twin.digest() == self.table.digest() and self.twin.lines() == self.table.lines()


Pages.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_a_page_table_agrees_with_a_simple_model = Pages.TestCase
