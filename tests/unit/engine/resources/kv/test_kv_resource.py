"""KV pages as a resource: promises on the leader, pages at the admit, and the way back of each."""

from __future__ import annotations

import pytest

from mstar.engine.resources.base import ASKS, EngineResourceInfo, ResourceReqConfig, StepContext
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.errors import CapacityError, ProtocolError
from mstar.types import Row, SamplingParams, Step
from tests.unit.engine.lora_pools import CPU

SIZE = 4


def resource(num_pages=8, *, caching=True, decides=True):
    return KvResource(KvSpec(num_pages, SIZE, caching), decides=decides)


def ingest(kv, rid, tokens, *, cache_key=b"", output=(), prompt_logprobs=None):
    prompt = tuple(range(tokens)) if isinstance(tokens, int) else tuple(tokens)
    sampling = SamplingParams(8, seed=1, prompt_logprobs=prompt_logprobs)
    kv.ingest_request(rid, ResourceReqConfig(prompt, sampling, cache_key=cache_key, output=output))


def ask(kv, rid):
    return kv.ask(rid, "llm", "step")


def reserve(kv, rid):
    return kv.reserve(rid, "llm", "step")


def run(kv, *rows, preempted=(), sampled=()):
    """Admit, plan and commit (rid, start, number of tokens)."""
    ctx = StepContext(Step(1, tuple(Row(*row) for row in rows), preempted))
    kv.admit(ctx.step, ctx)
    plan = kv.plan(ctx.step, ctx)
    ctx.sampled = dict(sampled)
    kv.commit(ctx.step, ctx)
    return plan


def start(kv, rid, tokens, **fields):
    ingest(kv, rid, tokens, **fields)
    count = tokens if isinstance(tokens, int) else len(tokens)
    return run(kv, (rid, 0, count), sampled={rid: 7})


def test_a_newcomer_asks_once_and_is_promised_pages_for_all_its_tokens():
    kv = resource()
    ingest(kv, "a", 9)
    assert ask(kv, "a") is ASKS and reserve(kv, "a") == 3
    assert ask(kv, "a") is None
    run(kv, ("a", 0, 9))
    assert ask(kv, "a") is None and kv.pages.num_free() == 5


def test_promises_of_one_round_never_exceed_the_free_pages():
    kv = resource(4)
    for rid, tokens in (("a", 9), ("b", 5), ("c", 3)):
        ingest(kv, rid, tokens)
    assert (reserve(kv, "a"), reserve(kv, "b"), reserve(kv, "c")) == (3, None, 1)
    assert kv.waits_for("b") == "pages"
    kv.cancel("a")
    assert reserve(kv, "b") == 2
    run(kv, ("c", 0, 3), ("b", 0, 5))
    assert kv.pages.num_free() == 1


def test_a_promise_counts_on_the_cached_pages_it_matched_and_nobody_else_may():
    kv = resource(4, caching=True)
    start(kv, "old", 8)
    kv.remove_request("old")
    assert kv.pages.num_free() == 4 and kv.pages.num_cached() == 2
    ingest(kv, "same", 9)
    ingest(kv, "big", list(range(100, 109)))
    ingest(kv, "small", list(range(50, 54)))
    assert kv.cached_tokens("same") == 8 and reserve(kv, "same") == 1
    assert reserve(kv, "big") is None  # two free pages are spoken for, one is promised
    assert reserve(kv, "small") == 1
    plan = run(kv, ("same", 8, 1), ("small", 0, 4))
    assert plan.starts == (8, 0) and kv.pages.num_free() == 0


def test_a_match_pins_only_pages_that_are_free():
    kv = resource(4)
    start(kv, "old", 8)  # running: its two pages are taken anyway
    for rid, tokens in (("same", 9), ("other", range(50, 54)), ("third", range(60, 64))):
        ingest(kv, rid, tokens)
    assert [reserve(kv, rid) for rid in ("same", "other", "third")] == [1, 1, None]


def test_at_least_one_token_is_left_to_compute():
    kv = resource()
    start(kv, "old", 8)
    for tokens, cached in ((8, 4), (9, 8), (4, 0), (5, 4)):
        ingest(kv, f"r{tokens}", tokens)
        assert kv.cached_tokens(f"r{tokens}") == cached


def test_growth_is_promised_page_by_page():
    kv = resource(2)
    start(kv, "a", 3)
    assert kv.reserve_growth("a", 4)
    run(kv, ("a", 3, 1), sampled={"a": 7})
    assert kv.pages.num_free() == 1 and kv.reserve_growth("a", 5)
    run(kv, ("a", 4, 1), sampled={"a": 7})
    assert kv.pages.num_free() == 0 and kv.reserve_growth("a", 8) and not kv.reserve_growth("a", 9)


def test_two_cannot_be_promised_the_last_page():
    kv = resource(3)
    start(kv, "a", 4)
    start(kv, "b", 4)
    assert kv.reserve_growth("a", 5) and not kv.reserve_growth("b", 5)
    kv.clear_promises()
    assert kv.reserve_growth("b", 5)


def test_a_first_admit_takes_the_pages_of_the_whole_prompt_so_chunks_never_wait():
    kv = resource()
    ingest(kv, "a", 11)
    plan = run(kv, ("a", 0, 4))
    assert len(kv.pages.table("a")) == 3 and plan.block_tables == ((0,),) and plan.fresh_pages == (0, 1, 2)
    plan = run(kv, ("a", 4, 7))
    assert plan.block_tables == ((0, 1, 2),) and plan.fresh_pages == () and plan.starts == (4,) and plan.num_tokens == (7,)


def test_a_resumed_request_takes_pages_for_its_output_too():
    kv = resource()
    ingest(kv, "a", 6, output=(9, 9, 9))
    assert reserve(kv, "a") == 3
    run(kv, ("a", 0, 9))
    assert len(kv.pages.table("a")) == 3


def test_preemption_gives_up_the_pages_and_the_request_comes_back_as_if_new():
    kv = resource(4)
    start(kv, "a", 8)
    kv.preempt("a")
    assert not kv.pages.table("a") and kv.pages.num_free() == 4
    assert ask(kv, "a") is ASKS and kv.cached_tokens("a") == 8  # its own blocks, with the sampled token left to compute
    assert reserve(kv, "a") == 1
    plan = run(kv, ("a", 8, 1))
    assert plan.block_tables[0][:2] == (0, 1) and len(plan.block_tables[0]) == 3


def test_a_step_preempts_before_it_admits_and_the_leader_already_did():
    """The leader gave the pages up when it chose the step, a follower does it at the admit: the tables agree."""
    leader, follower = resource(3, caching=False), resource(3, caching=False, decides=False)
    for kv in (leader, follower):
        start(kv, "a", 8)
        ingest(kv, "b", 12)
    leader.preempt("a")
    for kv in (leader, follower):
        run(kv, ("b", 0, 12), preempted=("a",))
        assert not kv.pages.table("a") and len(kv.pages.table("b")) == 3
    assert leader.digest() == follower.digest() and leader.lines() == follower.lines()


def test_rollback_gives_back_exactly_what_this_admit_took():
    kv = resource(6)
    start(kv, "old", 4)
    kv.remove_request("old")
    start(kv, "a", 8)
    ingest(kv, "new", 9)
    before = {rid: tuple(kv.pages.table(rid)) for rid in ("a", "new")}
    free = kv.pages.num_free()
    ctx = StepContext(Step(2, (Row("a", 8, 1), Row("new", 4, 5))))
    kv.admit(ctx.step, ctx)
    assert kv.pages.num_free() < free
    kv.rollback_admit(ctx.step, ctx)
    assert {rid: tuple(kv.pages.table(rid)) for rid in ("a", "new")} == before and kv.pages.num_free() == free
    kv.admit(ctx.step, ctx)  # and the same step may come again
    assert len(kv.pages.table("a")) == len(kv.pages.table("new")) == 3


@pytest.mark.parametrize("caching", [True, False])
def test_an_admit_that_has_too_few_pages_takes_none(caching):
    kv = resource(4, caching=caching)
    start(kv, "a", 8)
    for rid in ("b", "c"):
        ingest(kv, rid, list(range(60, 65)))
    free = kv.pages.num_free()
    with pytest.raises(CapacityError):
        run(kv, ("a", 8, 1), ("b", 0, 5), ("c", 0, 5))
    assert kv.pages.num_free() == free and not kv.pages.table("b") and not kv.pages.table("c")
    run(kv, ("b", 0, 5))


def test_newcomers_attach_before_anybody_takes_a_fresh_page():
    """Else the first row's fresh page could be the cached one that the second row was promised."""
    kv = resource(3)
    start(kv, "old", 4)
    kv.remove_request("old")
    kv.pages.extend("filler", 4)
    ingest(kv, "first", list(range(70, 74)))
    ingest(kv, "same", 5)
    kv.pages.release("filler")
    run(kv, ("first", 0, 4), ("same", 4, 1))
    assert kv.pages.table("same")[0] == 0


def test_a_promised_block_that_is_not_there_means_that_ranks_differ():
    kv = resource()
    ingest(kv, "a", 9)
    with pytest.raises(ProtocolError):
        run(kv, ("a", 8, 1))
    assert not kv.pages.table("a") and kv.pages.num_free() == 8


def test_blocks_are_offered_when_they_are_full_and_computed_not_before():
    kv = resource()
    ingest(kv, "a", 11)
    ingest(kv, "same", 11)
    run(kv, ("a", 0, 6))
    assert kv.cached_tokens("same") == 4
    run(kv, ("a", 6, 5), sampled={"a": 5})
    assert kv.cached_tokens("same") == 8
    run(kv, ("a", 11, 1))
    ingest(kv, "longer", [*range(11), 5, 1])
    assert kv.cached_tokens("longer") == 12


def test_rows_that_failed_run_nothing_and_offer_nothing():
    kv = resource()
    ingest(kv, "a", 8)
    ctx = StepContext(Step(1, (Row("a", 0, 8),)), failed={"a": None})
    kv.admit(ctx.step, ctx)
    assert kv.plan(ctx.step, ctx).block_tables == () and not kv.pages.table("a")
    kv.commit(ctx.step, ctx)
    assert kv.pages.num_cached() == 0


def test_c65_prefixes_are_shared_within_an_adapter_only():
    kv = resource(16)
    start(kv, "a", 9, cache_key=b"A")
    for rid, cache_key, cached in (("a2", b"A", 8), ("b", b"B", 0), ("base", b"", 0)):
        ingest(kv, rid, 9, cache_key=cache_key)
        assert kv.cached_tokens(rid) == cached


def test_c66_a_preempted_adapter_request_finds_its_own_blocks_and_the_base_does_not():
    kv = resource(16)
    start(kv, "a", 9, cache_key=b"A")
    kv.preempt("a")
    ingest(kv, "base", 9)
    assert kv.cached_tokens("a") == 8 and kv.cached_tokens("base") == 0
    run(kv, ("a", 8, 2), sampled={"a": 3})
    ingest(kv, "a2", 9, cache_key=b"A")
    assert kv.cached_tokens("a2") == 8 and kv.cached_tokens("base") == 0


def test_requests_that_score_their_prompt_and_servers_without_the_cache_share_nothing():
    kv = resource()
    start(kv, "a", 8)
    ingest(kv, "scored", 9, prompt_logprobs=2)
    assert kv.cached_tokens("scored") == 0
    off = resource(caching=False)
    start(off, "a", 8)
    ingest(off, "b", 9)
    assert off.cached_tokens("b") == 0 and off.pages.num_cached() == 0


def test_a_removed_request_frees_pages_and_promise():
    kv = resource(2)
    ingest(kv, "a", 8)
    assert reserve(kv, "a") == 2
    kv.remove_request("a")
    ingest(kv, "b", list(range(50, 58)))
    assert reserve(kv, "b") == 2
    run(kv, ("b", 0, 8))
    kv.remove_request("b")
    assert kv.pages.num_free() == 2


def test_a_remove_before_the_ingest_opens_nothing():
    kv = resource()
    kv.remove_request("a")
    ingest(kv, "a", 4)
    with pytest.raises(KeyError):
        reserve(kv, "a")
    ingest(kv, "b", 4)
    assert reserve(kv, "b") == 1


def test_a_follower_is_never_asked():
    kv = KvResource.build(KvSpec(8, SIZE), EngineResourceInfo(CPU, None, decides=False))
    ingest(kv, "a", 4)
    assert ask(kv, "a") is None
    assert KvResource.build(KvSpec(8, SIZE), EngineResourceInfo(CPU, None)).ask("a", "llm", "step") is ASKS
