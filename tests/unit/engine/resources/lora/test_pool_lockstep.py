"""L06-L10: ranks that exchange nothing about their slots and decide the same."""

from __future__ import annotations

import random

import pytest

from mstar.errors import AdapterError
from tests.unit.engine.lora_pools import PATIENCE_S, OutOfStep, path_of, wants


@pytest.mark.parametrize("seed", range(8))
def test_l06_slot_tables_follow_from_the_order_of_admits_and_removes_alone(instances, seed):
    """Three ranks read, load and unload each at its own time; only admits and removes come in one order. Tables stay equal."""
    draw = random.Random(seed)
    instance = instances(tp_size=3, max_loras=2, max_cpu_loras=2)
    live: dict[str, str] = {}
    for number in range(30):
        rid, name = f"r{number}", draw.choice("ABCD")
        while len({*live.values(), name}) > 2:
            ended = draw.choice(sorted(live))
            del live[ended]
            instance.remove(ended)
        live[rid] = name
        for rank in draw.sample(instance.ranks, 3):
            if draw.random() < 0.3:
                rank.pool.unload_adapter("F")
            elif not rank.pool.serves("F"):
                rank.pool.register_adapter("F", path_of("F"))
            rank.clock.now += draw.choice([0, 0, 3.5])
            rank.pool.ingest_request(rid, wants(name))
        instance.admit(*draw.sample(sorted(live), len(live)))
        instance.assert_alike()
    for rank in instance.ranks:
        for rid, name in live.items():
            rank.assert_runs(rid, path_of(name))


def test_l06_a_teardown_between_the_same_two_admits_gives_every_rank_the_same_victims(instances):
    """And one that lands elsewhere does not: that is what `after_tp_seq` is for."""
    for lands_late in (False, True):
        instance = instances(tp_size=2, max_loras=2)
        for rid, name in (("a", "A"), ("b", "B")):
            instance.run(rid, name)
        first, second = (rank.pool for rank in instance.ranks)
        first.remove_request("a")
        if not lands_late:
            second.remove_request("a")
        instance.ingest("x", "B")
        instance.admit("x")
        if lands_late:
            second.remove_request("a")
        assert (first.digest() == second.digest()) is not lands_late


def test_l07_whether_an_adapter_loaded_is_agreed_in_one_collective_before_anything_is_installed(instances):
    instance = instances(tp_size=3, max_loras=2)
    instance.ingest("a", "A")
    instance.ranks[2].reads.fail(path_of("B"))
    instance.ingest("b", "B")
    contexts = instance.admit("b", "a")
    assert instance.agreement.rounds == [[[0, 0], [0, 0], [2, 0]]]
    for rank, ctx in zip(instance.ranks, contexts, strict=True):
        assert list(ctx.failed) == ["b"] and rank.holders() == {"A": 1} and rank.pool.num_installs == 1
    instance.assert_alike()


def test_l07_a_step_without_a_miss_has_no_collective(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.run("a", "A")
    assert len(instance.agreement.rounds) == 1
    instance.ingest("a2", "A")
    instance.ingest("base", None)
    for rids in (("a",), ("a", "a2"), ("base", "a", "a2"), ("base",)):
        instance.admit(*rids)
    assert len(instance.agreement.rounds) == 1


def test_l07_all_misses_of_a_step_share_one_collective_with_one_entry_per_adapter(instances):
    instance = instances(tp_size=2, max_loras=3)
    for rid, name in (("a", "A"), ("b", "B"), ("b2", "B"), ("c", "C")):
        instance.ingest(rid, name)
    instance.admit("a", "b", "b2", "c")
    assert instance.agreement.rounds == [[[0, 0, 0], [0, 0, 0]]]


def test_l08_load_and_unload_at_no_agreed_place_change_nothing_that_an_admit_decides_from(instances):
    instance = instances(tp_size=2, max_loras=2, adapters="ABC")
    for rid, name in (("a", "A"), ("b", "B")):
        instance.run(rid, name)
    instance.remove("a")
    before = instance.pool.lines()
    late = instance.ranks[1].pool
    assert instance.pool.unload_adapter("A")  # resident and unheld; the other rank has not heard of it yet
    instance.pool.load_adapter_async("X", path_of("X")).result(PATIENCE_S)
    assert instance.pool.lines() == before
    instance.assert_alike()
    instance.run("c", "C")
    instance.assert_alike()
    assert late.unload_adapter("A")
    late.load_adapter_async("X", path_of("X")).result(PATIENCE_S)
    instance.assert_alike()
    instance.remove("b")
    instance.run("x", "X")
    instance.assert_alike()


def test_l09_unload_forgets_at_once_what_no_live_request_names(instances):
    instance = instances()
    instance.run("a", "A")
    instance.remove("a")
    pool = instance.pool
    assert pool.store.host_names() == ["A"] and pool.unload_adapter("A")
    assert not pool.serves("A") and pool.store.host_names() == [] and instance.leader.slot_of("A") is None


def test_l09_unload_waits_for_the_last_live_request_that_names_it(instances):
    instance = instances()
    instance.run("a", "A")
    instance.ingest("waiting", "A")  # live, though it holds no slot yet
    pool = instance.pool
    assert not pool.unload_adapter("A") and not pool.serves("A")
    instance.remove("a")
    assert pool.store.host_names() == ["A"] and instance.leader.slot_of("A") == 1
    instance.admit("waiting")
    instance.leader.assert_runs("waiting", path_of("A"))
    instance.remove("waiting")
    assert pool.store.host_names() == [] and instance.leader.slot_of("A") is None


def test_l09_the_slot_of_an_unloaded_adapter_keeps_its_weights_unheld_until_evicted(instances):
    instance = instances(max_loras=1)
    instance.run("a", "A")
    instance.remove("a")
    ranks = instance.pool.layer_ranks("down", 0).clone()
    before = instance.pool.lines()
    instance.pool.unload_adapter("A")
    assert instance.pool.lines() == before and instance.pool.layer_ranks("down", 0).equal(ranks) and ranks[1] > 0
    instance.run("b", "B")
    instance.leader.assert_runs("b", path_of("B"))


def test_l09_a_reload_under_the_same_name_never_serves_the_old_weights(instances):
    instance = instances(max_loras=3)
    instance.run("old", "A")
    instance.remove("old")
    assert instance.pool.unload_adapter("A")
    instance.serve("A", "/adapters/A-second")
    instance.run("new", "A")
    instance.leader.assert_runs("new", "/adapters/A-second")


def test_l09_a_reload_after_live_requests_ended_never_serves_the_old_weights(instances):
    instance = instances(max_loras=3)
    instance.run("old", "A")
    assert not instance.pool.unload_adapter("A")
    instance.leader.assert_runs("old", path_of("A"))
    instance.remove("old")
    instance.serve("A", "/adapters/A-second")
    instance.run("new", "A")
    instance.leader.assert_runs("new", "/adapters/A-second")


def test_l09_a_load_that_was_unloaded_while_it_read_never_answers_for_its_successor(instances):
    instance = instances(adapters="")
    pool, reads = instance.pool, instance.leader.reads
    reads.hold("/first", "/second")
    first = pool.load_adapter_async("A", "/first")
    pool.unload_adapter("A")
    second = pool.load_adapter_async("A", "/second")
    reads.let("/first", "/second")
    second.result(PATIENCE_S)
    with pytest.raises(AdapterError):
        first.result(PATIENCE_S)
    instance.run("a", "A")
    instance.leader.assert_runs("a", "/second")


def test_l09_a_read_under_way_at_the_unload_never_becomes_the_copy_of_the_reload(instances):
    instance = instances()
    pool, reads = instance.pool, instance.leader.reads
    reads.hold(path_of("A"))
    instance.ingest("gone", "A", settled=False)
    reads.wait_began(path_of("A"))
    instance.remove("gone")
    assert pool.unload_adapter("A")
    instance.serve("A", "/adapters/A-second")
    instance.ingest("new", "A", settled=False)
    reads.let()
    instance.leader.wait_read("A")
    instance.admit("new")
    instance.leader.assert_runs("new", "/adapters/A-second")


def test_l10_an_admit_looks_up_a_name_only_for_a_request_that_names_it(instances):
    """The ranks differ about a name that no request of the step names, and admit alike."""
    instance = instances(tp_size=2, max_loras=2)
    for rid, name in (("a", "A"), ("b", "B")):
        instance.run(rid, name)
    instance.remove("a")
    instance.pool.unload_adapter("A")
    assert instance.ranks[0].slot_of("A") is None and instance.ranks[1].slot_of("A") == 1
    instance.ingest("c", "C")
    instance.admit("c", "b")
    instance.assert_alike()
    instance.remove("c")
    instance.ingest("b2", "B")
    instance.admit("b2")
    instance.assert_alike()


def test_l10_without_the_conductors_order_ranks_part_at_the_next_request_on_the_name(instances):
    """What breaks where a request is ingested before the reload reached every rank: one finds old weights, the other misses."""
    instance = instances(tp_size=2, max_loras=2)
    instance.run("a", "A")
    instance.remove("a")
    assert instance.pool.unload_adapter("A")
    instance.pool.register_adapter("A", "/adapters/A-second")  # reached rank 0 alone
    instance.ingest("next", "A")
    with pytest.raises(OutOfStep):
        instance.admit("next")


def test_l10_with_the_conductors_order_the_next_request_on_the_name_misses_everywhere(instances):
    instance = instances(tp_size=2, max_loras=2)
    instance.run("a", "A")
    instance.remove("a")
    for rank in instance.ranks:
        assert rank.pool.unload_adapter("A")
        rank.pool.register_adapter("A", "/adapters/A-second")
    instance.run("next", "A")
    instance.assert_alike()
    for rank in instance.ranks:
        rank.assert_runs("next", "/adapters/A-second")
