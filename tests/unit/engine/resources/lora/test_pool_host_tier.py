"""L23-L27: copies in host memory, the reader thread, loads and unloads at run time."""

from __future__ import annotations

import threading

import pytest

from mstar.config import ServeConfig
from mstar.engine.resources.base import ResourceReqConfig
from mstar.engine.resources.lora.slots import FAILED, IN_FLIGHT, READY
from mstar.errors import AdapterError
from tests.unit.engine.lora_pools import PATIENCE_S, path_of, promptly, wants


def test_l23_files_are_read_on_the_reader_thread_from_the_ingest_on(instances):
    instance = instances(tp_size=2)
    instance.ingest("a", "A")
    for rank in instance.ranks:
        assert rank.reads.began == [path_of("A")] and rank.reads.threads == {"mstar-reader"}
    instance.admit("a")
    assert threading.current_thread().name not in instance.leader.reads.threads
    assert all(rank.reads.began == [path_of("A")] for rank in instance.ranks)


def test_l23_a_read_holds_up_neither_requests_nor_steps_nor_questions(instances):
    instance = instances(max_loras=2)
    instance.run("b", "B")
    pool, reads = instance.pool, instance.leader.reads
    reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    reads.wait_began(path_of("A"))
    promptly(lambda: pool.ingest_request("base", None))
    promptly(lambda: instance.admit("b", "base"))
    assert promptly(lambda: instance.leader.reserve("a")) is None
    assert promptly(lambda: pool.unload_adapter("C")) and promptly(lambda: pool.serves("B"))
    instance.leader.assert_runs("b", path_of("B"))
    promptly(lambda: pool.remove_request("base"))


def test_l23_one_read_serves_all_requests_on_an_adapter(instances):
    instance = instances()
    for rid in ("a1", "a2", "a3"):
        instance.ingest(rid, "A")
    assert instance.leader.reads.began == [path_of("A")]


def test_l23_a_read_past_its_bound_has_failed_and_a_fresh_thread_reads_on(instances):
    instance = instances(read_timeout_s=30.0)
    leader = instance.leader
    leader.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    leader.reads.wait_began(path_of("A"))
    leader.clock.now += 30
    leader.pool.store.expire()
    assert leader.pool.store.state("A") == IN_FLIGHT
    leader.clock.now += 1
    leader.pool.store.expire()
    assert leader.pool.store.state("A") == FAILED and leader.pool.store.error("A").code == "adapter_read_timeout"
    instance.run("b", "B")  # the stuck thread still stands in A's read
    leader.assert_runs("b", path_of("B"))
    leader.reads.let()
    assert leader.ask("a").error.code == "adapter_read_timeout"  # what comes late is not taken


def test_l23_the_bounds_are_in_order_read_agreement_stuck_rank():
    fields = {"model": "m", "lora_read_timeout_s": 5.0, "agreement_timeout_s": 6.0, "stuck_rank_timeout_s": 7.0}
    assert ServeConfig(**fields)
    for late, early in (("lora_read_timeout_s", 6.0), ("agreement_timeout_s", 7.0), ("agreement_timeout_s", 5.0)):
        with pytest.raises(ValueError, match="must hold"):
            ServeConfig(**{**fields, late: early})


def test_l24_a_remove_that_races_an_ingest_leaves_one_rank_without_a_copy_and_nothing_diverges(instances):
    """The follower sees remove, ingest; the leader ingest, remove: the follower's admit waits for a whole read."""
    instance = instances(tp_size=2, max_loras=1, max_cpu_loras=1)
    leader, follower = instance.ranks
    instance.ingest("first", "A")
    leader.pool.ingest_request("second", wants("A"))
    leader.pool.remove_request("first")
    follower.pool.remove_request("first")
    follower.pool.ingest_request("evicts", wants("B"))
    follower.wait_read("B")
    follower.pool.remove_request("evicts")
    follower.reads.hold(path_of("A"))
    follower.pool.ingest_request("second", wants("A"))
    admit = instance.begin_admit("second")
    assert instance.agreement.wait_round(1) == [[0], [1]]
    follower.reads.let()
    assert not any(ctx.failed for ctx in admit.result(PATIENCE_S))
    instance.assert_alike()
    for rank in instance.ranks:
        rank.assert_runs("second", path_of("A"))


def test_l24_the_tiers_bound_holds_back_reads_that_no_admit_needs(instances):
    instance = instances(max_loras=2, max_cpu_loras=1)
    instance.ingest("a", "A")
    instance.ingest("b", "B", settled=False)
    leader = instance.leader
    leader.pool.load_adapter_async("X", path_of("X")).result(PATIENCE_S)  # checks need no place, so this read passes B's
    assert leader.pool.store.state("B") == IN_FLIGHT and leader.reads.began == [path_of("A"), path_of("X")]
    instance.remove("a")  # A is idle now and gives way
    leader.wait_read("B")
    assert leader.pool.store.host_names() == ["B"]


def test_l24_a_copy_that_an_admit_needs_is_read_at_once_over_the_bound_and_ahead_of_the_queue(instances):
    instance = instances(tp_size=2, max_loras=2, max_cpu_loras=1)
    leader, follower = instance.ranks
    leader.pool.ingest_request("c", wants("C"))  # the leader holds C, the follower A: what each rank's ingests left it
    leader.wait_read("C")
    follower.pool.ingest_request("a", wants("A"))
    follower.wait_read("A")
    follower.pool.ingest_request("b", wants("B"))
    follower.pool.ingest_request("c", wants("C"))
    contexts = promptly(lambda: instance.admit("c"))
    assert not any(ctx.failed for ctx in contexts)
    assert follower.reads.began == [path_of("A"), path_of("C")]  # B still waits for the bound
    assert sorted(follower.pool.store.host_names()) == ["A", "C"]
    instance.assert_alike()


def wait_until_read_out(rank):
    """Until the reader has begun and ended all that it may: the check of a load is last in its queue and needs no place."""
    rank.pool.store.check(path_of("Z"), None).result(PATIENCE_S)


def test_l24_the_tiers_bytes_hold_back_reads_that_no_admit_needs_and_pins_hold_back_none(instances):
    alone = instances(tp_size=2)
    alone.ingest("1", "A")
    size = max(rank.pool.store.host_bytes() for rank in alone.ranks)
    instance = instances(tp_size=2, max_loras=2, max_cpu_lora_bytes=size)
    for rank in instance.ranks:
        rank.pool.ingest_request("pin", ResourceReqConfig((), None, "A"))
        rank.wait_read("A")
    instance.admit("pin")
    instance.ingest("2", "B")  # read, though A fills the tier for ever
    instance.ingest("3", "C", settled=False)
    instance.admit("2")
    for rank in instance.ranks:
        wait_until_read_out(rank)
        assert rank.pool.store.state("C") == IN_FLIGHT and sorted(rank.pool.store.host_names()) == ["A", "B"]
    instance.remove("2")
    for rank in instance.ranks:
        rank.wait_read("C")
        assert sorted(rank.pool.store.host_names()) == ["A", "C"]
    instance.admit("3")
    instance.ranks[1].assert_runs("3", path_of("C"))
    instance.ingest("4", "A")
    instance.remove("pin", "3")  # the copy of A is in use by a request that ends, so others wait for it
    instance.ingest("5", "C", settled=False)
    for rank in instance.ranks:
        wait_until_read_out(rank)
        assert rank.pool.store.state("C") == IN_FLIGHT and rank.pool.store.host_names() == ["A"]
    instance.assert_alike()


def test_l24_a_load_tells_the_tier_how_large_the_copy_will_be(instances):
    (alone,) = instances().ranks
    for rid, name in ("1", "A"), ("2", "B"):
        alone.pool.ingest_request(rid, wants(name))
        alone.wait_read(name)
    (rank,) = instances(adapters="A", max_cpu_lora_bytes=alone.pool.store.host_bytes() - 1).ranks
    rank.pool.load_adapter_async("B", path_of("B")).result(PATIENCE_S)
    for rid, name in ("1", "A"), ("2", "B"):
        rank.pool.ingest_request(rid, wants(name))
    wait_until_read_out(rank)
    assert rank.pool.store.host_names() == ["A"] and rank.pool.store.state("B") == IN_FLIGHT
    rank.pool.remove_request("1")
    rank.wait_read("B")
    assert rank.pool.store.host_names() == ["B"]


def test_l24_an_adapter_over_the_bytes_is_refused_at_its_load_and_fails_its_rows_where_it_is_only_named(instances):
    instance = instances(tp_size=2, adapters="A", max_cpu_lora_bytes=10)
    for rank in instance.ranks:
        refused = rank.pool.load_adapter_async("X", path_of("X")).exception(PATIENCE_S)
        assert isinstance(refused, AdapterError) and refused.code == "adapter_exceeds_host_tier" and "is 10." in refused.message
        assert not rank.pool.serves("X")
    instance.ingest("1", "A")
    contexts = instance.admit("1")
    assert all(ctx.failed["1"].error.code == "adapter_exceeds_host_tier" for ctx in contexts)
    instance.assert_alike()


def test_l24_what_the_bytes_let_each_rank_keep_may_differ_and_no_slot_decision_reads_it(instances):
    """Uneven shards: what three adapters take on the last rank is not enough for three on the first. The same slots, the same answers."""

    def play(**spec):
        instance = instances(tp_size=4, max_loras=2, **spec)
        for number, name in enumerate("ABCABCAABBC"):
            instance.ingest(str(number), name)
            instance.admit(str(number))
            for rank in instance.ranks:
                rank.assert_runs(str(number), path_of(name))
            instance.assert_alike()
            instance.remove(str(number))
        return instance

    roomy = play()
    first, last = roomy.ranks[0].pool.store, roomy.ranks[3].pool.store
    assert first.host_names() == last.host_names() and first.host_bytes() > last.host_bytes()
    tight = play(max_cpu_lora_bytes=last.host_bytes())
    assert len(tight.ranks[0].pool.store.host_names()) < len(tight.ranks[3].pool.store.host_names()) == 3
    assert roomy.pool.lines() == tight.pool.lines()


def test_l25_a_load_is_read_checked_and_only_then_servable_and_the_read_is_not_kept(instances):
    instance = instances(adapters="")
    pool, reads = instance.pool, instance.leader.reads
    reads.hold(path_of("A"))
    loading = pool.load_adapter_async("A", path_of("A"), f"digest of {path_of('A')}")
    reads.wait_began(path_of("A"))
    assert not pool.serves("A") and not loading.done()
    reads.let()
    loading.result(PATIENCE_S)
    assert pool.serves("A") and pool.store.host_names() == []
    instance.run("a", "A")
    assert reads.began == [path_of("A")] * 2 and reads.threads == {"mstar-reader"}
    instance.leader.assert_runs("a", path_of("A"))


def test_l25_the_digest_is_checked_at_the_load_and_at_every_later_read(instances):
    instance = instances(adapters="")
    pool = instance.pool
    with pytest.raises(AdapterError, match="not what was checked"):
        pool.load_adapter_async("A", path_of("A"), "another digest").result(PATIENCE_S)
    assert not pool.serves("A")
    pool.load_adapter_async("A", path_of("A")).result(PATIENCE_S)  # no digest given: the one that the load found counts
    instance.run("a", "A")
    pool.register_adapter("B", path_of("B"), "another digest")
    instance.ingest("b", "B")
    assert pool.store.error("B").code == "adapter_changed"
    instance.remove("a", "b")
    pool.unload_adapter("A")
    pool.load_adapter_async("A", path_of("A")).result(PATIENCE_S)
    instance.leader.reads.change(path_of("A"))
    instance.ingest("a2", "A")
    assert pool.store.error("A").code == "adapter_changed"


def test_l25_a_refusal_visible_now_raises_here(instances):
    instance = instances(adapters="AB")
    pool, reads = instance.pool, instance.leader.reads
    with pytest.raises(AdapterError) as served:
        pool.load_adapter_async("A", "/other")
    instance.run("a", "A")
    pool.unload_adapter("A")
    with pytest.raises(AdapterError) as retiring:
        pool.load_adapter_async("A", "/other")
    reads.hold("/slow")
    pool.load_adapter_async("C", "/slow")
    with pytest.raises(AdapterError) as loading:
        pool.load_adapter_async("C", "/other")
    codes = [caught.value.code for caught in (served, retiring, loading)]
    assert codes == ["adapter_already_loaded", "adapter_retiring", "adapter_already_loaded"]
    assert {caught.value.status for caught in (served, retiring, loading)} == {409}
    instance.remove("a")
    pool.load_adapter_async("A", "/other")  # it retired: the name is free


def test_l25_a_load_that_cannot_be_read_leaves_the_name_free(instances):
    instance = instances(adapters="")
    pool, reads = instance.pool, instance.leader.reads
    reads.fail(path_of("A"), "torn file")
    with pytest.raises(AdapterError, match="torn file"):
        pool.load_adapter_async("A", path_of("A")).result(PATIENCE_S)
    assert not pool.serves("A")
    reads.mend(path_of("A"))
    pool.load_adapter_async("A", path_of("A")).result(PATIENCE_S)
    instance.run("a", "A")


def test_l25_a_load_that_was_unloaded_meanwhile_fails_and_serves_nothing(instances):
    instance = instances(adapters="")
    pool, reads = instance.pool, instance.leader.reads
    reads.hold(path_of("A"))
    loading = pool.load_adapter_async("A", path_of("A"))
    assert not pool.unload_adapter("A")
    reads.let()
    with pytest.raises(AdapterError):
        loading.result(PATIENCE_S)
    assert not pool.serves("A")


def test_l26_unload_says_whether_it_was_forgotten_now(instances):
    instance = instances()
    pool = instance.pool
    assert pool.unload_adapter("B")
    instance.run("a", "A")
    assert not pool.unload_adapter("A") and not pool.unload_adapter("A")
    assert not pool.serves("A")
    instance.leader.assert_runs("a", path_of("A"))
    instance.admit("a")
    instance.remove("a")
    assert not pool.unload_adapter("A")  # forgotten when the last request ended


def test_l26_an_adapter_not_served_is_a_no_op(instances):
    instance = instances(adapters="A")
    instance.run("a", "A")
    before = instance.pool.lines()
    assert instance.pool.unload_adapter("never seen") is False
    assert instance.pool.lines() == before and instance.leader.holders() == {"A": 1}
    instance.pool.register_adapter("never seen", "/x")


def test_l26_a_request_that_waits_is_still_read_for_and_run_after_the_unload(instances):
    """A retiring adapter whose request was never admitted is still read and run."""
    instance = instances(max_loras=1)
    instance.ingest("a", "A")
    assert not instance.pool.unload_adapter("A")
    instance.admit("a")
    instance.leader.assert_runs("a", path_of("A"))


def test_l27_runs_adapters_follows_from_ingest_and_the_adapters_own_facts(instances):
    instance = instances(tp_size=2)
    instance.serve("N", "/nothing", has_something=False)
    for rid, name in (("a", "A"), ("base", None), ("n", "N")):
        for rank in instance.ranks:
            rank.pool.ingest_request(rid, wants(name))
    for rank in instance.ranks:
        runs = rank.pool.runs_adapters
        assert runs(["a"]) and runs(["base", "a", "n"]) and not runs(["base", "n"]) and not runs([])
    for rank in instance.ranks:
        rank.wait_read("A")
    assert instance.leader.pool.store.state("A") == READY


def test_l27_a_load_finds_out_itself_whether_the_adapter_has_something(instances):
    instance = instances(adapters="")
    for rank in instance.ranks:
        rank.pool.load_adapter_async("N", "/nothing").result(PATIENCE_S)
        rank.pool.load_adapter_async("A", path_of("A")).result(PATIENCE_S)
    instance.ingest("n", "N")
    instance.ingest("a", "A")
    assert not instance.pool.runs_adapters(["n"]) and instance.pool.runs_adapters(["a"])


def test_l27_it_does_not_wait_for_the_read(instances):
    instance = instances()
    instance.leader.reads.hold(path_of("A"))
    instance.ingest("a", "A", settled=False)
    assert promptly(lambda: instance.pool.runs_adapters(["a"]))
