"""The gate in front of the host tier: no more distinct adapters ingested at a time than it holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.conductor.gate import HostTierGate


def test_adapters_beyond_the_tier_wait_and_come_in_as_others_leave():
    gate = HostTierGate(2)
    assert gate.enter("a", "A") and gate.enter("b", "B") and not gate.enter("c", "C") and not gate.enter("d", "D")
    assert dict(gate.waiting()) == {"c": "C", "d": "D"} and len(gate) == 2
    assert gate.leave("a") == ["c"] and gate.leave("b") == ["d"] and len(gate) == 0


def test_base_requests_and_adapters_that_are_inside_pass():
    gate = HostTierGate(1)
    assert gate.enter("a", "A") and not gate.enter("b", "B")
    assert gate.enter("base", None) and gate.enter("a2", "A")
    assert gate.leave("base") == [] and gate.leave("a") == []
    assert gate.leave("a2") == ["b"]


def test_all_that_wait_for_an_adapter_come_in_with_it():
    gate = HostTierGate(1)
    gate.enter("a", "A")
    for rid, name in (("b1", "B"), ("c", "C"), ("b2", "B")):
        assert not gate.enter(rid, name)
    assert gate.leave("a") == ["b1", "b2"]
    assert gate.leave("b1") == [] and gate.leave("b2") == ["c"]


def test_one_that_ends_while_it_waits_is_forgotten():
    gate = HostTierGate(1)
    gate.enter("a", "A")
    gate.enter("b", "B")
    gate.enter("c", "C")
    assert gate.leave("b") == [] and gate.leave("unknown") == []
    assert gate.leave("a") == ["c"]


class Gate(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 3))
    def start(self, capacity):
        self.gate, self.capacity, self.count = HostTierGate(capacity), capacity, 0
        self.inside: dict[str, str | None] = {}
        self.waiting: dict[str, str] = {}

    @rule(adapter=st.sampled_from([None, *"ABCDE"]))
    def enter(self, adapter):
        self.count += 1
        rid = f"r{self.count}"
        if self.gate.enter(rid, adapter):
            self.inside[rid] = adapter
        else:
            self.waiting[rid] = adapter

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        rid = data.draw(st.sampled_from(sorted([*self.inside, *self.waiting])))
        self.inside.pop(rid, None)
        self.waiting.pop(rid, None)
        entered = self.gate.leave(rid)
        assert entered == [other for other in self.waiting if other in entered], "out of order"
        for other in entered:
            self.inside[other] = self.waiting.pop(other)

    @invariant()
    def keeps_its_promises(self):
        if not hasattr(self, "gate"):
            return
        distinct = {adapter for adapter in self.inside.values() if adapter is not None}
        assert len(distinct) <= self.capacity and dict(self.gate.waiting()) == self.waiting
        if self.waiting:
            assert len(distinct) == self.capacity, "one waits though there is room"
            assert not distinct & set(self.waiting.values()), "one waits for an adapter that is inside"


Gate.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_any_order_of_arrivals_and_ends = Gate.TestCase
