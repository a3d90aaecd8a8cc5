"""The simulator's own parts: draws by key, the baton, channels, the reference table."""

from __future__ import annotations

import pytest

from mstar.sim.baton import StepThread
from mstar.sim.draws import Draws
from mstar.sim.probe import SaltedStr
from mstar.sim.reference import ReferenceTable
from mstar.sim.scenario import draw_scenario
from mstar.sim.tiny import Generation
from mstar.sim.world import Channel, Violation, World


def test_a_draw_follows_from_seed_and_key_alone():
    draws = Draws(7)
    first = draws.unit("read", 1, "a@1")
    draws.unit("something", "else")
    assert draws.unit("read", 1, "a@1") == first == Draws(7).unit("read", 1, "a@1")
    assert Draws(8).unit("read", 1, "a@1") != first
    assert draws.unit("read", 11, "a@1") != draws.unit("read", 1, "1a@1")


def test_draws_cover_their_range():
    draws = Draws(1)
    assert {draws.between(2, 4, index) for index in range(100)} == {2, 3, 4}
    assert not any(draws.chance(0.0, index) for index in range(50))
    delays = [draws.delay(2.0, index) for index in range(300)]
    assert 0.02 <= min(delays) < 0.1
    assert 5 < max(delays) <= 20
    assert draws.delay(0.0, "none") == 0


def test_the_baton_passes_at_each_park_and_ends_with_the_job():
    thread, said = StepThread(), []

    def job():
        said.append("one")
        thread.park()
        said.append("two")

    assert not thread.start(job)
    assert said == ["one"]
    assert thread.busy
    assert thread.resume()
    assert said == ["one", "two"]
    assert thread.error is None


def test_the_baton_brings_back_what_a_job_raised():
    thread = StepThread()

    def job():
        raise ValueError("broken")

    assert thread.start(job)
    assert isinstance(thread.error, ValueError)


def test_an_abandoned_job_unwinds_through_its_contexts():
    thread, left = StepThread(), []

    def job():
        try:
            thread.park()
        finally:
            left.append("left")

    thread.start(job)
    assert thread.abandon()
    assert left == ["left"]
    assert not thread.busy
    assert thread.start(lambda: None)


class Note:
    def __init__(self, key):
        self.key = key


@pytest.mark.parametrize("seed", range(20))
def test_a_channel_keeps_its_order_whatever_the_delays(seed):
    world = World(draw_scenario(seed))
    got = []
    channel = Channel(world, "c", 1.0, lambda note: got.append(note.key))
    other = Channel(world, "d", 1.0, lambda note: got.append(note.key))
    for index in range(10):
        channel.send(Note(f"c{index}"))
        other.send(Note(f"d{index}"))
    world.run()
    assert [key for key in got if key[0] == "c"] == [f"c{index}" for index in range(10)]
    assert [key for key in got if key[0] == "d"] == [f"d{index}" for index in range(10)]


def test_channels_are_not_ordered_against_each_other():
    orders = set()
    for seed in range(30):
        world = World(draw_scenario(seed))
        got = []
        for name in "cd":
            Channel(world, name, 1.0, lambda note, got=got: got.append(note.key)).send(Note(name))
        world.run()
        orders.add("".join(got))
    assert orders == {"cd", "dc"}


def test_events_without_end_are_a_livelock():
    world = World(draw_scenario(0))

    def again():
        world.after(1.0, again, "again")

    again()
    with pytest.raises(Violation, match="livelock"):
        world.run()


def test_a_salted_string_is_a_string_with_another_hash():
    one, two = SaltedStr("r1", 1), SaltedStr("r1", 2)
    assert one == two == "r1"
    assert len({hash(one), hash(two), hash("r1")}) == 3
    assert {one: "here"}[SaltedStr("r1", 1)] == "here"


def adapter(name):
    return Generation(name, f"{name}@1", 1, ("llm",))


def test_l05_the_reference_evicts_the_least_recently_used_unheld_slot():
    table = ReferenceTable(2)
    for rid, name in (("r0", "a"), ("r1", "b")):
        table.admit([(rid, adapter(name))], [[0]])
        table.give_back([rid])
    expected = table.admit([("r2", adapter("c"))], [[0]])
    assert expected.taken == ("r2",)
    assert table.lines() == [
        "clock 3\n",
        "slot 1 weights_of=c last_used=3 holders=['r2']\n",
        "slot 2 weights_of=b last_used=2 holders=[]\n",
    ]


def test_l18_the_reference_lets_residents_in_before_misses():
    table = ReferenceTable(2)
    table.admit([("r0", adapter("a"))], [[0]])
    table.give_back(["r0"])
    expected = table.admit([("r1", adapter("b")), ("r2", adapter("a"))], [[0]])
    assert not expected.refused
    assert "slot 1 weights_of=a" in table.lines()[1]


def test_l20_the_reference_fails_rows_before_slots_are_handed_out():
    table = ReferenceTable(1)
    expected = table.admit([("r0", adapter("a")), ("r1", adapter("b"))], [[2, 1], [2, 0]])
    assert (expected.failed, expected.taken, expected.num_agreements) == (("r0",), ("r1",), 2)


def test_the_reference_refuses_more_misses_than_slots_and_takes_nothing():
    table = ReferenceTable(1)
    expected = table.admit([("r0", adapter("a")), ("r1", adapter("b"))], [[0, 0]])
    assert expected.refused
    assert table.num_held() == 0
