"""The host tier: what it keeps, in which order it reads, what its bounds do. Reads are stepped by hand, but for the thread's tests."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.engine.resources.lora.reader import Reader, ThreadReader
from mstar.engine.resources.lora.slots import FAILED, IN_FLIGHT, READY
from mstar.engine.resources.lora.store import LoraAdapterStore
from mstar.errors import AdapterError
from tests.unit.engine.lora_pools import PATIENCE_S, Clock, promptly


class ByHand(Reader):
    """Reads happen when the test says so."""

    def __init__(self):
        self.replaced = 0
        self.waits = 0
        self.while_waiting = lambda: None

    def start(self, source):
        self.source = source

    def wake(self):
        assert self.source.lock._is_owned()

    def wait(self, timeout_s):
        """One look at the world while a step thread waits; the lock is free meanwhile, as it is in a Condition's wait."""
        self.waits += 1
        self.source.lock.release()
        try:
            self.while_waiting()
        finally:
            self.source.lock.acquire()

    def replace(self):
        self.replaced += 1

    def close(self):
        pass

    def begin(self):
        with self.source.lock:
            return self.source.take()

    def end(self, task):
        self.source.run(task)

    def step(self) -> bool:
        task = self.begin()
        if task is None:
            return False
        self.end(task)
        return True

    def run_dry(self):
        while self.step():
            pass


class Tier:
    """A store over a reader function that logs its reads; a path in `refused` fails, `cancels` asks whether it was given up.

    `sizes` are the bytes of the copies by name (10 unless told otherwise); with `told` the store knows them from the start.
    """

    def __init__(self, names="ABCD", capacity=2, read_timeout_s=30.0, clock=None, max_bytes=None, sizes=(), told=False):
        self.clock = clock or Clock()
        self.sizes = dict.fromkeys("ABCDEZ", 10) | dict(sizes)
        self.reads: list[str] = []
        self.refused: dict[str, Exception] = {}
        self.cancels: list[bool] = []
        self.changes: list[tuple[str, int]] = []
        self.reader = ByHand()
        self.store = LoraAdapterStore(
            self._read, capacity=capacity, read_timeout_s=read_timeout_s, clock=self.clock, reader=self.reader,
            max_bytes=max_bytes, size_of=lambda copy: self.sizes.get(copy[1], 10),
            on_change=lambda name: self.changes.append((name, self.store.state(name))),
        )  # fmt: skip
        self.told = told
        for name in names:
            self.serve(name)

    def serve(self, name):
        self.store.serve(name, f"/{name}", f"digest {name}", self.sizes[name] if self.told else None)

    def _read(self, path, digest, cancelled):
        self.reads.append(path)
        self.cancels.append(cancelled())
        if path in self.refused:
            raise self.refused[path]
        return f"{path} {digest}"

    def hold(self, *names):
        for name in names:
            self.store.hold(name)

    def ready(self):
        return self.store.host_names()


def test_a_name_is_served_once_until_it_is_forgotten():
    store = Tier("A").store
    assert store.serves("A") and not store.serves("Z")
    with pytest.raises(AdapterError) as caught:
        store.serve("A", "/other")
    assert caught.value.status == 409
    store.forget("A")
    assert not store.serves("A")
    store.serve("A", "/other")


def test_a_copy_is_read_once_from_its_served_path_with_its_digest():
    tier = Tier()
    tier.hold("A", "A")
    assert tier.store.state("A") == IN_FLIGHT
    tier.reader.run_dry()
    assert tier.store.state("A") == READY and tier.store.copy("A") == "/A digest A" and tier.reads == ["/A"]
    assert tier.changes == [("A", READY)] and tier.store.counts() == (1, 0)


def test_nothing_is_read_before_a_request_names_it():
    tier = Tier()
    tier.reader.run_dry()
    assert tier.reads == [] and tier.store.state("A") == FAILED  # a name that the tier does not hold


def test_a_name_that_is_not_served_has_failed():
    tier = Tier()
    tier.hold("Z")
    assert tier.store.state("Z") == FAILED and tier.store.error("Z").status == 404
    with pytest.raises(AdapterError):
        tier.store.copy("Z")


def test_reads_come_in_order_of_their_requests():
    tier = Tier(capacity=4)
    tier.hold("C", "A", "D")
    tier.reader.run_dry()
    assert tier.reads == ["/C", "/A", "/D"]


def test_idle_copies_are_kept_until_the_place_is_needed_least_recently_used_first():
    tier = Tier(capacity=2)
    tier.hold("A", "B")
    tier.reader.run_dry()
    for name in "BA":
        tier.store.drop(name)
    assert sorted(tier.ready()) == ["A", "B"]
    tier.hold("A")  # used again: B is the one to go
    tier.store.drop("A")
    tier.hold("C")
    tier.reader.run_dry()
    assert sorted(tier.ready()) == ["A", "C"] and tier.store.state("B") == FAILED


def test_filling_a_slot_is_a_use_of_the_copy():
    tier = Tier(capacity=2)
    tier.hold("A", "B")
    tier.reader.run_dry()
    tier.store.copy("A")
    for name in "AB":
        tier.store.drop(name)
    tier.hold("C")
    tier.reader.run_dry()
    assert sorted(tier.ready()) == ["A", "C"]


def test_a_held_copy_is_never_dropped_and_the_bound_holds_later_reads_back():
    tier = Tier(capacity=1)
    tier.hold("A", "B")
    tier.reader.run_dry()
    assert tier.ready() == ["A"] and tier.store.state("B") == IN_FLIGHT
    tier.store.drop("A")
    tier.reader.run_dry()
    assert tier.ready() == ["B"]


def test_c60_as_many_adapters_as_the_bound_says_fit():
    for capacity in (1, 2, 4):
        tier = Tier(capacity=capacity)
        tier.hold(*"ABCD")
        tier.reader.run_dry()
        assert len(tier.ready()) == capacity


def test_a_later_request_does_not_take_up_an_idle_copy_whose_place_an_earlier_read_needs():
    """Else two tiers could each hold what a later request needs and read nothing for an earlier one."""
    tier = Tier(capacity=2)
    for name in "AB":
        tier.hold(name)
        tier.reader.run_dry()
        tier.store.drop(name)
    tier.hold("C", "D", "A")
    tier.reader.run_dry()
    assert tier.ready() == ["C", "D"] and tier.store.state("A") == IN_FLIGHT


def test_c63_idle_copies_turn_over_when_adapters_take_turns():
    tier = Tier(capacity=2)
    for name in "ABCDABCD":
        tier.hold(name)
        tier.reader.run_dry()
        assert tier.store.state(name) == READY and len(tier.ready()) <= 2
        tier.store.drop(name)


# bytes


def test_c60_a_copy_of_exactly_the_bytes_that_are_allowed_is_served_and_one_byte_more_is_refused_with_both_numbers():
    tier = Tier(max_bytes=100, sizes={"A": 100, "B": 101})
    tier.hold("A")
    tier.reader.run_dry()
    assert tier.store.state("A") == READY and tier.store.host_bytes() == 100
    tier.store.drop("A")
    tier.hold("B")
    refused = tier.store.check("/B", None)
    tier.reader.run_dry()
    for error in (tier.store.error("B"), refused.exception(0)):
        assert (error.code, error.status) == ("adapter_exceeds_host_tier", 400)
        assert error.message == "The adapter's copy on this rank takes 101 bytes, but this server's `max_cpu_lora_bytes` is 100."
    assert tier.store.counts() == (2, 1)


def test_c60_idle_copies_go_least_recently_used_first_until_the_next_ones_bytes_fit():
    tier = Tier("ABCDE", capacity=5, max_bytes=100, sizes={"A": 30, "B": 30, "C": 30, "D": 60, "E": 10}, told=True)
    tier.hold(*"ABC")
    tier.reader.run_dry()
    for name in "BAC":
        tier.store.drop(name)
    tier.store.copy("B")  # used last
    tier.hold("E")
    tier.reader.run_dry()
    assert sorted(tier.ready()) == ["A", "B", "C", "E"] and tier.store.host_bytes() == 100
    tier.hold("D")
    tier.reader.run_dry()
    assert sorted(tier.ready()) == ["B", "D", "E"] and tier.store.host_bytes() == 100


def test_reads_wait_for_bytes_that_are_in_use_and_small_copies_do_not_pass_a_large_one():
    tier = Tier("ABCDE", capacity=5, max_bytes=100, sizes={"A": 50, "B": 30, "C": 40, "D": 5}, told=True)
    tier.hold(*"ABCD")
    tier.reader.run_dry()
    assert tier.ready() == ["A", "B"] and tier.store.state("C") == tier.store.state("D") == IN_FLIGHT
    checked = tier.store.check("/E", None)  # keeps nothing, so it waits for nothing
    tier.reader.run_dry()
    assert checked.result(0) and tier.reads == ["/A", "/B", "/E"]
    tier.store.drop("B")
    tier.reader.run_dry()
    assert tier.ready() == ["A", "C", "D"] and tier.store.host_bytes() == 95


def test_a_read_that_an_admit_needs_goes_over_the_bytes_and_what_is_over_goes_first_chance():
    tier = Tier(capacity=4, max_bytes=15, told=True)
    tier.hold("A", "B")
    tier.reader.run_dry()
    assert tier.ready() == ["A"]
    tier.store.urge(["B"])
    tier.reader.run_dry()
    assert tier.store.host_bytes() == 20
    tier.store.drop("A")
    assert tier.ready() == ["B"] and tier.store.host_bytes() == 10


def test_a_size_that_is_not_known_yet_is_learnt_from_the_first_read():
    tier = Tier(capacity=4, max_bytes=15)
    tier.hold("A", "B", "C")
    tier.reader.run_dry()
    assert tier.ready() == ["A", "B"], "B began in a tier that was not full, C did not"
    for name in "ABC":
        tier.store.drop(name)
    tier.hold("B", "A")
    tier.reader.run_dry()
    assert tier.ready() == ["B"] and tier.store.host_bytes() == 10
    tier.store.forget("B")
    assert tier.store.host_bytes() == 0
    full = Tier(max_bytes=10)
    full.hold("A", "B")
    full.reader.run_dry()
    assert full.ready() == ["A"], "a tier that is full by bytes is full"


def test_a_size_is_forgotten_with_its_name():
    tier = Tier(capacity=4, max_bytes=15)
    tier.hold("B")
    tier.reader.run_dry()
    tier.store.drop("B")
    tier.store.forget("B")
    tier.serve("B")  # other weights, of which nothing is known
    tier.hold("A", "B")
    tier.reader.run_dry()
    assert tier.ready() == ["A", "B"]


def test_pins_which_may_never_end_keep_no_read_out_of_the_tier():
    tier = Tier("ABCDE", capacity=5, max_bytes=10, told=True)
    tier.store.hold("A", pinned=True)
    tier.store.hold("B", pinned=True)
    tier.hold("C", "D")
    tier.reader.run_dry()
    assert tier.ready() == ["A", "B", "C"] and tier.store.state("D") == IN_FLIGHT
    tier.store.drop("C")
    tier.reader.run_dry()
    assert tier.ready() == ["A", "B", "D"]
    tier.store.drop("A", pinned=True)
    tier.store.drop("D")
    assert tier.ready() == ["B"] and tier.store.host_bytes() == 10


def test_an_urgent_read_goes_ahead_of_the_queue_and_over_the_bound():
    tier = Tier(capacity=1)
    tier.hold("A", "B", "C", "D")
    tier.reader.step()
    assert not tier.reader.step()
    tier.store.urge(["D"])
    tier.reader.run_dry()
    assert tier.reads == ["/A", "/D"] and tier.ready() == ["A", "D"]
    tier.store.urge(["B", "C"])
    tier.reader.run_dry()
    assert tier.reads == ["/A", "/D", "/B", "/C"]


def test_what_was_read_over_the_bound_is_let_go_of_first_chance():
    tier = Tier(capacity=1)
    tier.hold("A", "D")
    tier.reader.step()
    tier.store.urge(["D"])
    tier.reader.run_dry()
    tier.store.drop("A")
    assert tier.ready() == ["D"]


def test_a_check_keeps_nothing_and_needs_no_place():
    tier = Tier(capacity=1)
    tier.hold("A")
    tier.reader.run_dry()
    checked = tier.store.check("/new", "digest new")
    tier.reader.run_dry()
    assert checked.result(0) == "/new digest new" and tier.ready() == ["A"] and tier.changes == [("A", READY)]
    tier.refused["/bad"] = AdapterError("torn", code="torn")
    refused = tier.store.check("/bad", None)
    tier.reader.run_dry()
    assert refused.exception(0).code == "torn"


def test_a_failed_read_stays_failed_for_all_its_requests_and_is_forgotten_with_the_last():
    tier = Tier()
    tier.refused["/A"] = AdapterError("torn file", code="torn")
    tier.hold("A", "A")
    tier.reader.run_dry()
    tier.hold("A")
    tier.reader.run_dry()
    assert tier.reads == ["/A"] and tier.store.error("A").code == "torn" and tier.store.counts() == (1, 1)
    for _ in range(3):
        assert tier.store.state("A") == FAILED
        tier.store.drop("A")
    del tier.refused["/A"]
    tier.hold("A")
    assert tier.store.state("A") == IN_FLIGHT
    tier.reader.run_dry()
    assert tier.store.state("A") == READY


def test_a_failed_read_that_nobody_holds_any_more_leaves_nothing():
    tier = Tier()
    tier.refused["/A"] = AdapterError("torn file", code="torn")
    tier.hold("A")
    task = tier.reader.begin()
    tier.store.drop("A")
    tier.reader.end(task)
    assert tier.store.error("A").code == "adapter_read_failed" and tier.ready() == []


def test_a_reader_that_crashes_fails_that_read_alone(caplog):
    tier = Tier()
    tier.refused["/A"] = OSError(5, "Input/output error")
    tier.hold("A", "B")
    with caplog.at_level(logging.CRITICAL, logger="mstar"):
        tier.reader.run_dry()
    assert tier.store.error("A").code == "adapter_read_failed" and tier.store.error("A").status == 500
    assert tier.ready() == ["B"]


def test_dropping_a_request_takes_its_read_out_of_the_queue():
    tier = Tier()
    tier.hold("A", "B")
    tier.store.drop("A")
    tier.reader.run_dry()
    assert tier.reads == ["/B"]


def test_a_request_that_comes_while_a_dropped_ones_read_runs_takes_that_read():
    tier = Tier()
    tier.hold("A")
    task = tier.reader.begin()
    tier.store.drop("A")
    tier.hold("A")
    tier.reader.end(task)
    assert tier.store.state("A") == READY
    tier.reader.run_dry()
    assert tier.reads == ["/A"]


def test_a_read_of_a_forgotten_generation_never_becomes_the_copy_of_its_successor():
    tier = Tier()
    tier.hold("A")
    task = tier.reader.begin()
    tier.store.drop("A")
    tier.store.forget("A")
    tier.store.serve("A", "/second", "digest second")
    tier.hold("A")
    tier.reader.end(task)
    assert tier.store.state("A") == IN_FLIGHT
    tier.reader.run_dry()
    assert tier.store.copy("A") == "/second digest second"


def test_forgetting_drops_copy_and_queued_read():
    tier = Tier()
    tier.hold("A", "B")
    tier.reader.step()
    for name in "AB":
        tier.store.forget(name)
    tier.reader.run_dry()
    assert tier.reads == ["/A"] and tier.ready() == [] and tier.store.state("B") == FAILED


def test_dropping_what_is_not_there_is_no_error():
    tier = Tier()
    tier.store.drop("A")
    assert tier.store.state("A") == FAILED


def test_a_read_past_its_bound_fails_is_told_so_and_comes_too_late():
    tier = Tier(read_timeout_s=30.0)
    tier.hold("A", "B")
    task = tier.reader.begin()
    tier.clock.now += 30.0
    tier.store.expire()
    assert tier.store.state("A") == IN_FLIGHT and tier.reader.replaced == 0
    tier.clock.now += 0.1
    tier.store.expire()
    assert tier.store.state("A") == FAILED and tier.reader.replaced == 1
    assert (tier.store.error("A").code, tier.store.error("A").status) == ("adapter_read_timeout", 503)
    tier.store.expire()
    assert tier.reader.replaced == 1
    tier.reader.end(task)
    assert tier.cancels == [True] and tier.store.state("A") == FAILED and tier.changes == [("A", FAILED)]
    tier.reader.run_dry()
    assert tier.store.state("B") == READY


def test_a_check_past_its_bound_fails_its_future():
    tier = Tier(read_timeout_s=1.0)
    checked = tier.store.check("/slow", None)
    task = tier.reader.begin()
    tier.clock.now += 2
    tier.store.expire()
    assert checked.exception(0).code == "adapter_read_timeout"
    tier.reader.end(task)


def test_the_bound_counts_from_the_reads_own_start():
    tier = Tier(read_timeout_s=1.0)
    tier.hold("A", "B")
    tier.clock.now += 100
    tier.store.expire()
    tier.reader.run_dry()
    assert sorted(tier.ready()) == ["A", "B"]


def test_wait_ends_when_nothing_is_in_flight():
    tier = Tier()
    tier.hold("A", "B")
    tier.reader.while_waiting = tier.reader.step
    assert tier.store.wait(["B"], 10) and tier.reads == ["/B"]
    tier.refused["/A"] = AdapterError("torn", code="torn")
    assert tier.store.wait(["A", "B", "unknown"], 10) and tier.store.state("A") == FAILED
    assert tier.reader.waits == 2


def test_wait_gives_up_after_its_bound_and_says_so():
    tier = Tier()
    tier.hold("A")

    def a_second_passes():
        tier.clock.now += 1.0

    tier.reader.while_waiting = a_second_passes
    assert tier.store.wait(["A"], 5.0) is False and tier.reader.waits == 5


def test_wait_ends_a_read_past_its_bound():
    tier = Tier(read_timeout_s=3.0)
    tier.hold("A")
    tier.reader.begin()

    def a_second_passes():
        tier.clock.now += 1.0

    tier.reader.while_waiting = a_second_passes
    assert tier.store.wait(["A"], 60.0) and tier.store.error("A").code == "adapter_read_timeout"


def test_wait_does_other_things_meanwhile_outside_the_lock():
    tier = Tier()
    tier.hold("A")
    done = []

    def idle():
        done.append(promptly(lambda: tier.store.state("A")))
        tier.reader.step()

    assert tier.store.wait(["A"], 10, idle) and done == [IN_FLIGHT]


def test_a_change_is_told_outside_the_lock():
    tier = Tier()
    seen = []
    store = LoraAdapterStore(
        lambda path, digest, cancelled: path,
        capacity=1,
        reader=(reader := ByHand()),
        on_change=lambda name: seen.append(promptly(lambda: store.state(name))),
    )
    store.serve("A", "/A")
    store.hold("A")
    reader.run_dry()
    assert seen == [READY] and tier.store.counts() == (0, 0)


# the thread


def threaded(read, **fields):
    store = LoraAdapterStore(read, capacity=2, reader=ThreadReader(), **fields)
    for name in "AB":
        store.serve(name, f"/{name}")
    return store


def test_the_thread_reads_as_names_come_and_ends_when_closed():
    names, came = [], threading.Event()

    def read(path, digest, cancelled):
        names.append(threading.current_thread().name)
        return path

    store = threaded(read, on_change=lambda name: came.set())
    store.hold("A")
    assert came.wait(PATIENCE_S) and store.copy("A") == "/A" and names == ["mstar-reader"]
    store.close()
    store.hold("B")
    assert store.state("B") == IN_FLIGHT and names == ["mstar-reader"]


def test_a_stuck_thread_is_left_behind_and_a_fresh_one_reads_on():
    began, go, ended, came = threading.Event(), threading.Event(), threading.Event(), threading.Event()
    clock = Clock()

    def read(path, digest, cancelled):
        if path == "/A":
            began.set()
            go.wait(PATIENCE_S)
            ended.set()
        return path

    store = threaded(read, read_timeout_s=1.0, clock=clock, on_change=lambda name: came.set() if name == "B" else None)
    store.hold("A")
    store.hold("B")
    assert began.wait(PATIENCE_S)
    clock.now += 2
    store.expire()
    assert came.wait(PATIENCE_S) and store.state("A") == FAILED and store.state("B") == READY
    go.set()
    assert ended.wait(PATIENCE_S) and store.state("A") == FAILED
    store.close()


def test_wait_on_the_thread_is_woken_by_the_read():
    began, go = threading.Event(), threading.Event()

    def read(path, digest, cancelled):
        began.set()
        go.wait(PATIENCE_S)
        return path

    store = threaded(read)
    store.hold("A")
    assert began.wait(PATIENCE_S)
    go.set()
    assert store.wait(["A"], PATIENCE_S) and store.copy("A") == "/A"
    store.close()


class Tiers(RuleBasedStateMachine):
    """Any order of holds, drops, unloads, urgent reads and read ends keeps the tier's promises."""

    @initialize(
        capacity=st.integers(1, 3), max_bytes=st.none() | st.integers(40, 90), sizes=st.lists(st.integers(1, 40), min_size=5, max_size=5)
    )
    def start(self, capacity, max_bytes, sizes):
        self.tier = Tier("ABCDE", capacity, max_bytes=max_bytes, sizes=dict(zip("ABCDE", sizes, strict=True)), told=True)
        self.capacity, self.max_bytes = capacity, max_bytes
        self.held: list[str] = []
        self.pins: list[str] = []
        self.ever_pinned: set[str] = set()
        self.urged: set[str] = set()
        self.running = None

    @rule(name=st.sampled_from("ABCDE"))
    def hold(self, name):
        self.tier.hold(name)
        self.held.append(name)

    @precondition(lambda self: len(self.pins) < self.capacity - 1)
    @rule(name=st.sampled_from("ABCDE"))
    def pin(self, name):
        self.tier.store.hold(name, pinned=True)
        self.pins.append(name)
        self.ever_pinned.add(name)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.tier.store.drop(self.pins.pop(), pinned=True)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(self.held))
        self.held.remove(name)
        self.tier.store.drop(name)

    @rule(name=st.sampled_from("ABCDE"))
    def reload(self, name):
        if name not in (*self.held, *self.pins):
            self.tier.store.forget(name)
            self.tier.serve(name)

    @precondition(lambda self: self.running is None)
    @rule()
    def begin(self):
        self.running = self.tier.reader.begin()

    @precondition(lambda self: self.running is not None)
    @rule(fails=st.booleans())
    def end(self, fails):
        path = self.running.source.path
        if fails:
            self.tier.refused[path] = AdapterError("torn", code="torn")
        self.tier.reader.end(self.running)
        self.tier.refused.clear()
        self.running = None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def urge(self, data):
        names = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=2))
        self.tier.store.urge(names)
        self.urged.update(names)

    @invariant()
    def keeps_its_bounds(self):
        if not hasattr(self, "tier"):
            return
        ready = set(self.tier.ready())
        assert len(ready) <= self.capacity + len(self.urged)
        host_bytes = self.tier.store.host_bytes()
        assert host_bytes == sum(self.tier.sizes[name] for name in ready)
        if self.max_bytes is not None:
            assert host_bytes <= self.max_bytes + sum(self.tier.sizes[name] for name in self.urged | self.ever_pinned)
        for name in "ABCDE":
            state = self.tier.store.state(name)
            if name in (*self.held, *self.pins):
                assert state in (READY, IN_FLIGHT, FAILED)
            else:
                assert state != IN_FLIGHT, "nobody waits for it"
            if state == READY:
                assert self.tier.store.copy(name) == f"/{name} digest {name}"

    def teardown(self):
        """Once others let go, every held name is read: none is forgotten by the queue."""
        if hasattr(self, "tier"):
            if self.running is not None:
                self.tier.reader.end(self.running)
            while self.pins:
                self.unpin()
            kept: list[str] = []
            for name in dict.fromkeys(self.held):
                fits = self.max_bytes is None or sum(self.tier.sizes[other] for other in (*kept, name)) <= self.max_bytes
                if len(kept) < self.capacity and fits:
                    kept.append(name)
                    continue
                for _ in range(self.held.count(name)):
                    self.tier.store.drop(name)
            self.held = kept
            self.tier.reader.run_dry()
            assert all(self.tier.store.state(name) != IN_FLIGHT for name in self.held)


Tiers.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_events_keeps_the_tiers_promises = Tiers.TestCase
