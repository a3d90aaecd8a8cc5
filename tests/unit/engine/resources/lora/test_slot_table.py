"""The slot table, the reservations and the plan of one admit: pure, so they are driven directly."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.engine.resources.lora.slots import FAILED, IN_FLIGHT, READY, AdmitPlan, Install, Miss, Reservations, SlotTable
from mstar.errors import CapacityError


def admit(table, *rows, failed=()):
    picks = table.begin(rows)
    return table.finish(picks, failed)


def holders(table):
    return {slot.index: (slot.weights_of, sorted(slot.holders)) for slot in table.slots()}


def test_begin_holds_residents_and_lists_the_rest_before_anything_is_installed():
    table = SlotTable(3)
    admit(table, ("a", "A"), ("b", "B"))
    table.release("b")
    picks = table.begin([("c", "C"), ("b2", "B"), ("d", "D"), ("c2", "C")])
    assert picks.taken == (("b2", 2),) and picks.candidates == (3,)
    assert picks.misses == (Miss("C", ("c", "c2")), Miss("D", ("d",)))
    assert holders(table) == {1: ("A", ["a"]), 2: ("B", ["b2"]), 3: (None, [])}
    assert table.finish(picks, {"D"}) == (Install("C", 3, ("c", "c2"), None),)
    assert holders(table)[3] == ("C", ["c", "c2"])


def test_an_empty_admit_is_no_admit():
    table = SlotTable(2)
    before = table.digest()
    assert admit(table) == () and table.clock == 0 and table.digest() == before


def test_an_eviction_names_whose_weights_lay_there_and_takes_its_name_away():
    table = SlotTable(1)
    admit(table, ("a", "A"))
    table.release("a")
    assert admit(table, ("b", "B")) == (Install("B", 1, ("b",), "A"),)
    assert table.slot_of_adapter("A") is None and table.slot_of_adapter("B") == 1 and table.slot_of_request("b") == 1


def test_evicting_a_forgotten_generation_leaves_its_successors_entry_alone():
    table = SlotTable(2)
    admit(table, ("a", "A"))
    table.release("a")
    table.forget("A")
    admit(table, ("new", "A"))
    assert table.slot_of_adapter("A") == 2
    admit(table, ("b", "B"))
    assert table.slot_of_adapter("A") == 2 and table.slot_of_adapter("B") == 1


def test_a_refusal_takes_nothing_and_keeps_the_clock_going():
    table = SlotTable(2)
    admit(table, ("a", "A"))
    before = holders(table)
    with pytest.raises(CapacityError, match="2 adapters need a slot, 1 of 2 slots are free"):
        admit(table, ("a2", "A"), ("b", "B"), ("c", "C"))
    assert holders(table) == before and table.clock == 2 and table.slot_of_adapter("B") is None


def test_releasing_twice_or_what_holds_nothing_changes_nothing():
    table = SlotTable(1)
    admit(table, ("a", "A"))
    table.release("a")
    before = table.digest()
    table.release("a")
    table.release("never")
    assert table.digest() == before


def test_a_table_without_slots_serves_failures_only():
    table = SlotTable(0)
    assert admit(table, ("a", "A"), failed={"A"}) == ()
    with pytest.raises(CapacityError):
        admit(table, ("b", "B"))


def test_the_digest_covers_holders_clock_generation_and_use_but_not_names():
    def table(*, clock=False, name=True, generation="A", held=True, order="ab"):
        made = SlotTable(2)
        for rid in order:
            admit(made, (rid, {"a": generation, "b": "B"}[rid]))
        if not held:
            made.release("b")
        if clock:
            admit(made, ("x", "X"), failed={"X"})
        if not name:
            made.forget("B")
        return made.digest()

    assert table() == table() == table(name=False)
    assert len({table(), table(clock=True), table(generation="A2"), table(held=False), table(order="ba")}) == 5


NAMES = "ABCD"


class Tables(RuleBasedStateMachine):
    """Two tables get the same calls; one is asked for its digest all the time, the other at the end. A model keeps who should hold what."""

    @initialize(max_loras=st.integers(1, 3))
    def start(self, max_loras):
        self.asked, self.silent = SlotTable(max_loras), SlotTable(max_loras)
        self.adapter_of: dict[str, str] = {}
        self.resident: dict[int, str | None] = dict.fromkeys(range(1, max_loras + 1))
        self.used: dict[int, int] = dict.fromkeys(range(1, max_loras + 1), 0)
        self.slot_of: dict[str, int] = {}
        self.named: dict[str, int] = {}
        self.count = 0

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), failed=st.sets(st.sampled_from(NAMES)))
    def admit(self, names, failed):
        rows = []
        for name in names:
            self.count += 1
            rows.append((f"r{self.count}", name))
        clock = self.asked.clock + 1
        resident = [(rid, name) for rid, name in rows if name in self.named]
        wanted = list(dict.fromkeys(name for _, name in rows if name not in self.named and name not in failed))
        held = set(self.slot_of.values()) | {self.named[name] for _, name in resident}
        free = sorted((slot for slot in self.used if slot not in held), key=lambda slot: (self.used[slot], slot))
        results = []
        for table in (self.asked, self.silent):
            try:
                results.append(admit(table, *rows, failed=failed))
            except CapacityError:
                results.append(None)
        assert results[0] == results[1] and self.asked.clock == clock
        if len(wanted) > len(free):
            assert results[0] is None
            self.used.update((self.named[name], clock) for _, name in resident)
            return
        for rid, name in resident:
            self.slot_of[rid], self.used[self.named[name]] = self.named[name], clock
        for name, slot in zip(wanted, free, strict=False):
            self.named = {other: place for other, place in self.named.items() if place != slot}
            self.named[name], self.resident[slot], self.used[slot] = slot, name, clock
            self.slot_of.update((rid, slot) for rid, other in rows if other == name)
        self.adapter_of.update((rid, name) for rid, name in rows if rid in self.slot_of)

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data())
    def release(self, data):
        rid = data.draw(st.sampled_from(sorted(self.slot_of)))
        for table in (self.asked, self.silent):
            table.release(rid)
        self.used[self.slot_of.pop(rid)] = self.asked.clock
        del self.adapter_of[rid]

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name):
        """Only once nobody holds it: the pool sees to that."""
        if name not in self.adapter_of.values():
            for table in (self.asked, self.silent):
                table.forget(name)
            self.named.pop(name, None)

    @invariant()
    def agrees_with_the_model(self):
        self.asked.digest()
        for slot in self.asked.slots():
            held = sorted(rid for rid, place in self.slot_of.items() if place == slot.index)
            assert (slot.weights_of, slot.last_used, sorted(slot.holders)) == (self.resident[slot.index], self.used[slot.index], held)
            assert all(self.adapter_of[rid] == slot.weights_of for rid in held)
        for name in NAMES:
            assert self.asked.slot_of_adapter(name) == self.named.get(name)
            assert self.asked.is_held(name) is (name in self.adapter_of.values())
        assert self.asked.num_held() == len(set(self.slot_of.values())) <= self.asked.max_loras

    def teardown(self):
        if hasattr(self, "silent"):
            assert self.asked.digest() == self.silent.digest() and self.asked.lines() == self.silent.lines()


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_a_table_agrees_with_a_simple_model_whenever_it_is_asked_for_its_digest = Tables.TestCase


class Promises(RuleBasedStateMachine):
    """Promise, cancel, admit and remove in any order: every promised row finds a slot at its admit, in any order of rows."""

    @initialize(max_loras=st.integers(1, 3))
    def start(self, max_loras):
        self.table = SlotTable(max_loras)
        self.reservations = Reservations(self.table)
        self.waiting: dict[str, str] = {}
        self.running: list[str] = []
        self.count = 0

    @rule(name=st.sampled_from(NAMES))
    def promise(self, name):
        fits = self.reservations.fits(name)
        counted = self.table.num_held() + self.reservations.promised()
        shares = self.table.is_held(name) or name in self.waiting.values()
        assert fits is (shares or counted < self.table.max_loras)
        if fits:
            self.count += 1
            self.waiting[f"r{self.count}"] = name
            assert self.reservations.promise(f"r{self.count}", name) == (0 if shares else 1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        rid = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[rid]
        self.reservations.drop(rid)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data):
        rids = data.draw(st.lists(st.sampled_from(sorted(self.waiting)), min_size=1, unique=True))
        admit(self.table, *((rid, self.waiting[rid]) for rid in rids))
        for rid in rids:
            self.reservations.drop(rid)
            del self.waiting[rid]
        self.running.extend(rids)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def remove(self, data):
        rid = data.draw(st.sampled_from(self.running))
        self.running.remove(rid)
        self.table.release(rid)

    @invariant()
    def never_more_promises_than_slots(self):
        if hasattr(self, "table"):
            assert self.table.num_held() + self.reservations.promised() <= self.table.max_loras
            assert len(self.reservations) == len(self.waiting) and all(rid in self.reservations for rid in self.waiting)


Promises.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_l12_promises_are_always_kept = Promises.TestCase


def plan_of(*names, max_loras=4):
    table = SlotTable(max_loras)
    return table, AdmitPlan(table, [(f"r{index}", name) for index, name in enumerate(names)])


def test_a_plan_without_misses_has_nothing_to_agree():
    table = SlotTable(1)
    admit(table, ("a", "A"))
    plan = AdmitPlan(table, [("a2", "A")])
    assert plan.misses == () and plan.statuses(lambda name: FAILED) == [] and plan.finish() == ()


def test_a_plan_with_all_copies_ready_goes_straight_on():
    _, plan = plan_of("A", "B", "A")
    assert plan.statuses({"A": READY, "B": READY}.get) == [READY, READY]
    assert plan.agreed([READY, READY]) == ()
    assert [(install.adapter, install.slot, install.rids) for install in plan.finish()] == [("A", 1, ("r0", "r2")), ("B", 2, ("r1",))]


def test_a_plan_waits_only_where_the_agreement_holds_in_flight_and_for_no_failed_adapter():
    table, plan = plan_of("A", "B", "C")
    assert plan.agreed([READY, IN_FLIGHT, FAILED]) == ("A", "B")
    assert plan.failed == {"C"} and holders(table)[1] == (None, [])
    assert plan.agreed([READY, FAILED, READY]) == ()
    assert plan.failed == {"B", "C"}  # what failed once stays failed
    assert [install.adapter for install in plan.finish()] == ["A"]


def test_a_plan_with_only_failures_waits_for_nobody():
    _, plan = plan_of("A", "B")
    assert plan.agreed([FAILED, FAILED]) == () and plan.finish() == ()


def test_a_plan_reads_no_more_of_a_padded_vector_than_it_has_misses():
    _, plan = plan_of("A")
    assert plan.agreed([READY, IN_FLIGHT, FAILED, 0, 0]) == () and plan.failed == set()
