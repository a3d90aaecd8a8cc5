"""The oracle notices: each test breaks the engine in one way, as a bug would, and a simulated seed must find it.

`make mutants` breaks the source itself in more ways; these keep the simulator honest in every run of the suite.
"""

from __future__ import annotations

import dataclasses
import time

from mstar.engine.admission import AdmissionQueue
from mstar.engine.lockstep.follower import FollowerSequence
from mstar.engine.resources.kv.resource import KvResource
from mstar.engine.resources.lora.pool import LoraAdapterPool
from mstar.engine.resources.lora.slots import FAILED, AdmitPlan, Reservations, SlotTable
from mstar.engine.resources.lora.store import LoraAdapterStore
from mstar.engine.resources.lora.weights import SlotWeights
from mstar.sim.check import run
from mstar.sim.lockstep import Follower
from mstar.sim.scenario import draw_scenario
from mstar.types import Remove, Step

SEEDS = 250


def found(settings=None):
    """The kind of the first promise that some seed breaks; None where all hold."""
    for seed in range(SEEDS):
        outcome = run(draw_scenario(seed).with_settings(settings or {}))
        if outcome.violation is not None:
            return outcome.violation.kind
    return None


def test_l04_overwriting_a_held_slot_is_found(monkeypatch):
    begin = SlotTable.begin

    def held_too(self, rows):
        picks = begin(self, rows)
        everyone = tuple(slot.index for slot in sorted(self._slots, key=lambda slot: (slot.last_used, slot.index)))
        return dataclasses.replace(picks, candidates=everyone)

    monkeypatch.setattr(SlotTable, "begin", held_too)
    assert found() is not None


def test_l05_a_wall_clock_lru_is_found(monkeypatch):
    hold = SlotTable._hold

    def by_time(self, rid, index):
        hold(self, rid, index)
        self._slots[index - 1].last_used = time.perf_counter_ns()

    monkeypatch.setattr(SlotTable, "_hold", by_time)
    assert found() == "slots"


def test_l06_removes_without_their_fence_are_found(monkeypatch):
    """Rank 1 lands removes as they arrive, not after the admit they belong to."""
    queue = Follower.from_leader

    def at_once(self, order):
        if self.tp_rank == 1 and isinstance(order.message, Remove) and not self.busy:
            self.runner.remove(self.own(order.message.rid))
            self.oracle.removed(self, str(order.message.rid))
        else:
            queue(self, order)

    monkeypatch.setattr(Follower, "from_leader", at_once)
    assert found() is not None


def test_l06_a_remove_that_lands_one_admit_late_on_one_rank_is_found(monkeypatch):
    monkeypatch.setattr(FollowerSequence, "check_remove", lambda self, remove: None)
    turn = Follower._turn

    def late(self):
        orders = self._orders
        if self.tp_rank == 1 and len(orders) > 1 and isinstance(orders[0], Remove) and isinstance(orders[1], Step):
            orders[0], orders[1] = orders[1], orders[0]
        turn(self)

    monkeypatch.setattr(Follower, "_turn", late)
    assert found() is not None


def test_l07_installing_before_the_agreement_is_found(monkeypatch):
    agree = LoraAdapterPool._agree_on

    def install_first(self, plan):
        for miss, slot in zip(plan.misses, plan.picks.candidates, strict=False):
            if self._store.state(miss.adapter) == 0:
                self._table._install(miss, slot)
        agree(self, plan)

    monkeypatch.setattr(LoraAdapterPool, "_agree_on", install_first)
    assert found() is not None


def test_l20_waiting_before_the_agreement_is_found(monkeypatch):
    agree = LoraAdapterPool._agree_on

    def wait_first(self, plan):
        self._store.wait([miss.adapter for miss in plan.misses], self.spec.copy_wait_s)
        agree(self, plan)

    monkeypatch.setattr(LoraAdapterPool, "_agree_on", wait_first)
    assert found() == "agreement"


def test_l20_failing_by_own_reads_alone_is_found(monkeypatch):
    agreed = AdmitPlan.agreed

    def own(self, result):
        waits = agreed(self, result)
        self.failed = {name for name in self.failed if self.own_state(name) == FAILED}
        return waits

    statuses = AdmitPlan.statuses

    def remember(self, state_of):
        self.own_state = state_of
        return statuses(self, state_of)

    monkeypatch.setattr(AdmitPlan, "statuses", remember)
    monkeypatch.setattr(AdmitPlan, "agreed", own)
    assert found() is not None


def test_l20_a_slot_for_a_failed_row_is_found(monkeypatch):
    finish = SlotTable.finish
    monkeypatch.setattr(SlotTable, "finish", lambda self, picks, failed: finish(self, picks, ()))
    assert found() is not None


def test_l21_no_second_agreement_is_found(monkeypatch):
    def once(self, plan):
        self.num_agreements += 1
        waits = plan.agreed(self._agree(plan.statuses(self._store.state)))
        if waits:
            self._store.wait(waits, self.spec.copy_wait_s)
            plan.agreed(plan.statuses(self._settled_state))

    monkeypatch.setattr(LoraAdapterPool, "_agree_on", once)
    assert found() is not None


def test_l22_a_rollback_that_keeps_its_slots_is_found(monkeypatch):
    monkeypatch.setattr(LoraAdapterPool, "rollback_admit", lambda self, step, ctx: None)
    assert found({"refusals": 0.2}) is not None


def test_l12_promising_more_slots_than_there_are_is_found(monkeypatch):
    monkeypatch.setattr(Reservations, "fits", lambda self, adapter: True)
    assert found() in ("reservations", "promise", "refusal")


def test_l12_a_promise_that_outlives_its_step_is_found(monkeypatch):
    monkeypatch.setattr(LoraAdapterPool, "cancel", lambda self, rid: None)
    assert found({"num_pages": 24, "block_size": 1}) == "reservations"


def test_l09_forgetting_a_name_with_live_requests_is_found(monkeypatch):
    unload = LoraAdapterPool.unload_adapter

    def forget(self, name):
        if self._live.get(name) and self._store.serves(name):
            self._forget(name)
            return True
        return unload(self, name)

    monkeypatch.setattr(LoraAdapterPool, "unload_adapter", forget)
    assert found() is not None


def test_l10_a_request_ingested_after_its_unload_is_found():
    """Not the engine's break but the conductor's: it must hold an unload back while a request waits to be ingested."""
    assert found({"early_unload": True, "gate": True}) is not None


def test_l35_a_remove_before_its_ingest_that_leaves_no_mark_is_found(monkeypatch):
    remove = LoraAdapterPool.remove_request
    monkeypatch.setattr(LoraAdapterPool, "remove_request", lambda self, rid: remove(self, rid) if rid in self._requests else None)
    assert found() is not None


def test_l24_a_tier_that_drops_copies_in_use_is_found(monkeypatch):
    hold = LoraAdapterStore.hold

    def count_none(self, name, **how):
        hold(self, name, **how)
        self._entries[name].holders -= 1

    monkeypatch.setattr(LoraAdapterStore, "hold", count_none)
    assert found({"max_cpu_loras": 1, "max_loras": 1}) is not None


def test_a_slot_that_keeps_rows_of_its_last_occupant_is_found(monkeypatch):
    install = SlotWeights.install

    def dirty(self, slot, copy, *summed):
        self._written = {target: [0] * len(written) for target, written in self._written.items()}
        install(self, slot, copy, *summed)

    monkeypatch.setattr(SlotWeights, "install", dirty)
    assert found({"max_loras": 2}) == "weights"


def test_followers_that_keep_preempted_pages_are_found(monkeypatch):
    preempt = KvResource.preempt
    monkeypatch.setattr(KvResource, "preempt", lambda self, rid: preempt(self, rid) if self._decides else None)
    assert found({"num_pages": 24, "block_size": 1}) is not None


def test_a_request_overtaken_without_bound_is_found(monkeypatch):
    init = AdmissionQueue.__init__
    monkeypatch.setattr(AdmissionQueue, "__init__", lambda self, max_passes: init(self, 1000))
    assert found({"max_passes": 1}) == "fairness"


def test_l34_a_pool_that_admits_rows_failed_in_an_earlier_one_is_found(monkeypatch):
    admit = LoraAdapterPool.admit

    def forgetful(self, step, ctx):
        failed = dict(ctx.failed)
        ctx.failed.clear()
        admit(self, step, ctx)
        ctx.failed.update(failed)

    monkeypatch.setattr(LoraAdapterPool, "admit", forgetful)
    assert found({"two_nodes": True, "read_failures": 0.3}) is not None
