"""L34: one pool per node of a model (a vision encoder before its LLM). L35: the protocol that the pool shares with every resource."""

from __future__ import annotations

import inspect

import pytest
import torch

from mstar.engine.resources.base import ASKS, EngineResourceInfo, Resource, StepContext
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.resources.lora.addressing import LoraAddressing
from mstar.engine.resources.lora.pool import LoraAdapterPool, LoraStep
from mstar.engine.resources.lora.store import LoraAdapterStore
from mstar.engine.runner import Runner
from mstar.engine.scheduler import Scheduler, SchedulerLimits
from mstar.errors import CapacityError
from mstar.types import Row, Step
from tests.unit.engine.leader_loop import count_tokens
from tests.unit.engine.lora_pools import CPU, LAYERS, Instance, lora_step, path_of, tiny_spec, wants


def two_nodes(instances, *, encoder_slots=1, llm_slots=2) -> tuple[Instance, Instance]:
    return instances(max_loras=encoder_slots, node_name="vision", graph_walks=("encode",)), instances(max_loras=llm_slots)


def ingest(nodes, rid, adapter):
    for node in nodes:
        node.ingest(rid, adapter)


def test_l34_a_request_holds_a_slot_in_each_nodes_pool_until_it_is_removed(instances):
    nodes = encoder, llm = two_nodes(instances)
    ingest(nodes, "a", "A")
    encoder.admit("a")
    llm.admit("a")
    for _ in range(2):  # the encoder ran once; the LLM goes on
        llm.admit("a")
        assert encoder.leader.holders() == {"A": 1} and llm.leader.holders() == {"A": 1}
    for node in nodes:
        node.remove("a")
        assert node.leader.holders() == {"A": 0}


def test_l34_each_pool_admits_only_its_own_nodes_rows(instances):
    nodes = encoder, llm = two_nodes(instances)
    ingest(nodes, "text", "A")
    ingest(nodes, "image", "B")
    encoder.admit("image")
    llm.admit("text", "image")
    assert encoder.leader.holders() == {"B": 1} and llm.leader.holders() == {"A": 1, "B": 1}


def test_l34_none_in_a_pool_whose_targets_its_adapter_has_nothing_for(instances):
    nodes = encoder, llm = two_nodes(instances, encoder_slots=1)
    encoder.serve("T", "/nothing", has_something=False)  # adapts the LLM alone
    llm.serve("T", path_of("T"))
    ingest(nodes, "t", "T")
    ingest(nodes, "a", "A")
    assert encoder.leader.ask("t") is None and llm.leader.ask("t") is ASKS
    encoder.admit("t", "a")
    llm.admit("t", "a")
    assert encoder.leader.holders() == {"A": 1} and llm.leader.holders() == {"T": 1, "A": 1}
    llm.leader.assert_runs("t", path_of("T"))
    assert not encoder.pool.runs_adapters(["t"]) and llm.pool.runs_adapters(["t"])


def test_l34_a_row_that_holds_an_llm_slot_never_waits_on_the_encoders_pool(instances):
    """It took the encoder's slot first and keeps it, so the two pools' waits form no cycle."""
    nodes = encoder, llm = two_nodes(instances, encoder_slots=1, llm_slots=1)
    ingest(nodes, "a", "A")
    ingest(nodes, "b", "B")
    for node in nodes:
        assert node.leader.reserve("a") == 1
        node.admit("a")
    assert encoder.leader.reserve("b") is None  # waits in front of both, holding neither
    assert encoder.leader.ask("a") is None and llm.leader.ask("a") is None
    assert llm.leader.holders() == {"A": 1}


def test_l34_the_scheduler_takes_slots_in_graph_order_all_or_none(instances):
    """Where the LLM's pool is full, the encoder's promise is given back: nobody holds one pool and waits for the other."""
    nodes = encoder, llm = two_nodes(instances, encoder_slots=2, llm_slots=1)
    kv = KvResource(KvSpec(32, 4))
    resources = [encoder.pool, llm.pool, kv]
    scheduler, runner = Scheduler(SchedulerLimits(8, 64, 4), resources, kv), Runner(resources, count_tokens)
    for rid, name in (("a", "A"), ("b", "B")):
        runner.ingest(rid, wants(name))
        for node in nodes:
            node.leader.wait_read(name)
        scheduler.add(rid, 3, uses_slot=True)
    choice = scheduler.choose()
    assert [row.rid for row in choice.rows] == ["a"] and scheduler.queue.rids() == ["b"]
    encoder.ingest("c", "C")
    assert encoder.leader.reserve("c") == 1  # b's was cancelled
    runner.execute(Step(1, choice.rows))
    assert encoder.leader.holders() == {"A": 1} and llm.leader.holders() == {"A": 1}


def test_l34_one_runner_drives_both_pools_each_with_a_plan_of_its_own(instances):
    nodes = encoder, llm = two_nodes(instances)
    encoder.serve("T", "/nothing", has_something=False)
    llm.serve("T", path_of("T"))
    seen = {}

    def model(step):
        seen.update(step.plan_results)
        return count_tokens(step)

    runner = Runner([encoder.pool, llm.pool, KvResource(KvSpec(32, 4))], model)
    assert encoder.pool.name != llm.pool.name
    runner.ingest("t", wants("T"))
    for node in nodes:
        node.leader.wait_read("T")
    runner.execute(Step(1, (Row("t", 0, 3),)))
    assert seen[encoder.pool.name] is None and isinstance(seen[llm.pool.name], LoraAddressing)
    runner.remove("t")
    assert llm.leader.holders() == {"T": 0}


def test_l34_a_later_nodes_refusal_gives_the_earlier_nodes_slot_back(instances):
    nodes = encoder, llm = two_nodes(instances, encoder_slots=2, llm_slots=1)
    runner = Runner([encoder.pool, llm.pool, KvResource(KvSpec(32, 4))], count_tokens)
    for rid, name in (("a", "A"), ("b", "B")):
        runner.ingest(rid, wants(name))
        for node in nodes:
            node.leader.wait_read(name)
    runner.execute(Step(1, (Row("a", 0, 3),)))
    with pytest.raises(CapacityError):
        runner.execute(Step(2, (Row("b", 0, 3),)))
    assert encoder.leader.holders() == {"A": 1, "B": 0} and llm.leader.holders() == {"A": 1}


# L35


SIGNATURES = {
    "__init__": ["spec", "device", "rank", "world_size", "backend", "dtype", "agree", "decides"],
    "addressing": ["grouping"],
    "admit": ["step", "ctx"],
    "ask": ["rid", "node_name", "graph_walk"],
    "base_only": [],
    "build": ["spec", "info"],
    "commit": ["step", "ctx"],
    "ingest_request": ["rid", "overrides"],
    "layer_delta": ["target", "layer_idx"],
    "layer_ranks": ["target", "layer_idx"],
    "load_adapter_async": ["name", "path", "digest"],
    "plan": ["step", "ctx"],
    "remove_request": ["rid"],
    "reserve": ["rid", "node_name", "graph_walk", "published"],
    "rollback_admit": ["step", "ctx"],
    "runs_adapters": ["rids"],
    "unload_adapter": ["name"],
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_l35_the_public_surface_is_the_reference_pages(method):
    parameters = inspect.signature(getattr(LoraAdapterPool, method)).parameters.values()
    positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD and item.name != "self"]
    assert positional == SIGNATURES[method] and inspect.getdoc(getattr(LoraAdapterPool, method)) is not None


def test_l35_build_makes_the_pool_of_one_rank():
    agreed = []

    def agree(statuses):
        agreed.append(statuses)
        return statuses

    info = EngineResourceInfo(CPU, torch.bfloat16, tp_rank=1, tp_size=2, agree=agree, decides=False)
    pool = LoraAdapterPool.build(tiny_spec(tp_size=2), info)
    assert isinstance(pool, Resource) and isinstance(pool.store, LoraAdapterStore)
    assert (pool.rank, pool.world_size, pool.dtype, pool.device, pool.decides) == (1, 2, torch.bfloat16, CPU, False)
    pool.ingest_request("a", wants("nobody serves it"))
    ctx = lora_step("a")[1]
    pool.admit(lora_step("a")[0], ctx)
    assert agreed == [[2]] and ctx.failed["a"].error.code == "adapter_not_served"
    pool.close()


def test_l35_the_adapters_of_the_spec_are_served_from_the_start(instances):
    instance = instances(adapters="")
    pool = LoraAdapterPool(tiny_spec(adapters={"S": path_of("S")}), CPU, read=instance.leader.reads)
    assert pool.serves("S") and pool.store.host_names() == [] and instance.leader.reads.began == []
    pool.close()


def test_l35_several_ranks_need_an_agreement():
    with pytest.raises(ValueError, match="agree"):
        LoraAdapterPool(tiny_spec(tp_size=2), CPU, 0, 2)


def test_l35_a_remove_before_its_ingest_leaves_a_mark_that_the_ingest_consumes(instances):
    instance = instances()
    kv = KvResource(KvSpec(8, 4))
    runner = Runner([instance.pool, kv], count_tokens)
    runner.remove("early")
    runner.ingest("early", wants("A"))
    assert not runner.is_ingested("early") and runner.request("early") is None and runner.num_requests == 0
    assert instance.leader.reads.began == [] and instance.pool.unload_adapter("A")  # nobody names A
    runner.ingest("next", wants("B"))
    assert runner.is_ingested("next")


def test_l35_each_mark_serves_one_request(instances):
    instance = instances()
    pool = instance.pool
    pool.remove_request("early")
    pool.ingest_request("other", wants("B"))
    pool.ingest_request("early", wants("A"))
    assert pool.runs_adapters(["other"])
    with pytest.raises(KeyError):
        pool.runs_adapters(["early"])


def test_l35_a_request_without_overrides_runs_on_the_base(instances):
    instance = instances()
    instance.pool.ingest_request("plain")
    assert not instance.pool.runs_adapters(["plain"]) and instance.leader.ask("plain") is None


def test_l35_plans_are_handed_on_in_the_context_and_the_cycle_ends_in_commit(instances):
    instance = instances()
    plans = []

    def model(step):
        assert instance.pool.active
        plans.append(dict(step.plan_results))
        return count_tokens(step)

    runner = Runner([instance.pool, KvResource(KvSpec(8, 4))], model)
    runner.ingest("a", wants("A"))
    instance.leader.wait_read("A")
    outcome = runner.execute(Step(1, (Row("a", 0, 3),)))
    assert set(plans[0]) == {instance.pool.name, "kv"} and not instance.pool.active
    assert [token.token_id for token in outcome.tokens] == [3]
    assert isinstance(plans[0][instance.pool.name], LoraAddressing) and plans[0]["kv"].num_tokens == (3,)


def test_l35_a_pin_takes_a_slot_with_a_row_of_no_tokens(instances):
    instance = instances(max_loras=1)
    instance.ingest("pin", "A")
    instance.admit("pin", tokens=0)
    assert instance.leader.holders() == {"A": 1}
    assert instance.pool.plan(LoraStep(("pin",), (0,)), StepContext(Step(1, ()))) is None
    assert len(instance.pool.layer_ranks("down", LAYERS - 1)) == 2
