"""Which request is blamed for crashes: the one that kills again when it is tested alone, and nobody else."""

from __future__ import annotations

import random

import pytest

from mstar.conductor.suspects import Suspects


class Instance:
    """A scripted instance: requests run together until one of the poisoned is in a step. As the conductor drives `Suspects`."""

    def __init__(self, live, poison=(), is_heard=lambda: True):
        """`is_heard` says whether a rank gets to say which step it begins before that step kills it."""
        self.is_heard = is_heard
        self.suspects = Suspects()
        self.live = dict.fromkeys(live)
        self.poison = frozenset(poison)
        self.blamed = []
        self.num_crashes = 0
        self.told = set()
        self.up()

    def up(self):
        self.proven = set()
        self.open = set()
        for rid in self.live:
            self.let_in(rid)

    def let_in(self, rid):
        if self.suspects.let_in(rid, is_new=rid not in self.told):
            self.told.add(rid)
            self.open.add(rid)
            self.suspects.opened(rid)

    def step(self, rids=None):
        """One step of all open requests (or `rids` of them); False where it killed the instance."""
        rids = [rid for rid in self.live if rid in self.open and (rids is None or rid in rids)]
        is_deadly = bool(self.poison & set(rids))
        if not is_deadly or self.is_heard():
            self.suspects.began(rids)
        if is_deadly:
            self.crash()
            return False
        for rid in rids:
            self.token(rid)
        return True

    def token(self, rid):
        self.proven.add(rid)
        following = self.suspects.cleared(rid)
        if following is not None and following in self.live:
            self.let_in(following)

    def end(self, rid):
        del self.live[rid]
        self.token(rid)

    def crash(self):
        self.num_crashes += 1
        culprit = self.suspects.crashed(self.live, self.proven)
        if culprit is not None:
            self.blamed.append(culprit)
            self.end(culprit)
        self.up()


def test_a_poisoned_request_among_others_ends_and_the_others_go_on():
    instance = Instance("abcp", poison="p")
    for _ in range(20):
        instance.step()
    assert instance.blamed == ["p"]
    assert instance.open == {"a", "b", "c"}


def test_a_poisoned_request_alone_ends_at_its_third_crash():
    instance = Instance("p", poison="p")
    assert [instance.step() for _ in range(4)] == [False, False, False, True]
    assert instance.blamed == ["p"] and instance.num_crashes == 3


def test_a_rank_that_dies_before_it_can_say_what_it_does_blames_whom_it_was_told_of():
    instance = Instance("p", poison="p", is_heard=lambda: False)
    assert [instance.step() for _ in range(4)] == [False, False, False, True]
    assert instance.blamed == ["p"] and instance.num_crashes == 3


def test_steps_of_others_that_were_heard_of_hide_no_poison_that_kills_unheard():
    """After a restart those whose adapters are read first run first; the poison's step kills before anybody hears of it."""
    instance = Instance("abp", poison="p", is_heard=lambda: False)
    for _ in range(4):
        instance.step("ab")
        instance.step()
    assert instance.blamed == ["p"] and instance.num_crashes == 3


@pytest.mark.parametrize("num_older", range(6))
@pytest.mark.parametrize("name", ["a-poison", "z-poison"])
def test_one_that_arrives_at_every_restart_keeps_no_poison_from_being_found(name, num_older):
    instance = Instance([*(f"m{index}" for index in range(num_older)), name], poison=[name])
    for arrival in range(12):
        instance.step()
        instance.live[f"n{arrival}"] = None
        instance.let_in(f"n{arrival}")
    assert instance.blamed == [name] and instance.num_crashes <= 5


def test_two_poisoned_requests_that_crash_by_turns_are_both_found():
    instance = Instance("pq", poison="pq")
    for rid in "pqpqpqpqpq":
        if rid in instance.live:
            instance.step([rid])
    assert sorted(instance.blamed) == ["p", "q"]


def test_two_crashes_blame_nobody():
    """An operator's kill -9 may come twice."""
    instance = Instance("a")
    instance.suspects.began("a")
    instance.crash()
    instance.suspects.began("a")
    instance.crash()
    assert instance.blamed == [] and instance.open == {"a"}


def test_after_a_second_crash_with_common_suspects_they_resume_one_at_a_time_and_the_rest_at_once():
    instance = Instance("abp", poison="p")
    instance.step()
    instance.live["x"] = None  # came after the first crash, so it is in one step only
    instance.up()
    instance.step()
    assert instance.open == {"a", "x"}, "b and p wait while a is tested"
    assert instance.step()
    assert instance.open == {"a", "b", "x"}
    instance.step()
    assert instance.open == {"a", "b", "x", "p"}
    instance.step()
    assert instance.blamed == ["p"] and instance.open == {"a", "b", "x"}


def test_one_under_test_is_not_blamed_for_what_another_newcomer_to_the_step_may_have_done():
    instance = Instance("ap", poison="p")
    instance.step()
    instance.step()
    assert instance.open == {"a"}
    instance.live["q"] = None  # new, and poisoned as well
    instance.poison = frozenset("pq")
    instance.let_in("q")
    instance.step()
    assert instance.blamed == []
    for _ in range(6):
        instance.step()
    assert sorted(instance.blamed) == ["p", "q"] and list(instance.live) == ["a"]


def test_a_token_between_two_crashes_clears():
    instance = Instance("ab")
    instance.suspects.began("ab")
    instance.crash()
    instance.step(["a"])
    instance.suspects.began("ab")
    instance.crash()
    assert instance.open == {"a", "b"}, "only b is in both crashes: nobody has to wait"
    instance.suspects.began("a")
    instance.crash()
    assert instance.blamed == []


def test_a_crash_while_it_starts_blames_nobody_and_forgets_nothing():
    suspects = Suspects()
    blamed = []
    for _ in range(3):
        suspects.opened("p")
        suspects.began("p")
        blamed.append(suspects.crashed("p"))
        blamed.append(suspects.crashed("p"))  # killed while it starts: nobody was opened
    assert blamed == [None, None, None, None, "p", None]


def test_one_under_test_that_ends_passes_its_turn_on():
    instance = Instance("abp", poison="p")
    instance.step()
    instance.step()
    assert instance.open == {"a"}
    instance.end("a")  # its client went away
    assert "b" in instance.open and "p" not in instance.open


def test_one_that_waits_for_its_test_and_ends_leaves_the_queue():
    instance = Instance("abp", poison="p")
    instance.step()
    instance.step()
    instance.end("b")
    instance.step()
    assert instance.open == {"a", "p"}


def test_requests_that_ended_before_the_crash_are_no_suspects():
    suspects = Suspects()
    suspects.began("ab")
    suspects.crashed({"b"})
    suspects.began("ab")
    assert suspects.crashed({"a", "b"}) is None
    assert suspects.let_in("a", is_new=False) and suspects.let_in("b", is_new=False)


@pytest.mark.parametrize("share_heard", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_steps_every_poisoned_request_ends_and_no_other(seed, share_heard):
    draw = random.Random(seed)
    names = [f"r{index}" for index in range(draw.randint(1, 8))]
    poison = draw.sample(names, min(len(names), draw.randint(0, 3)))
    instance = Instance(names, poison, lambda: draw.random() < share_heard)
    for _ in range(300):
        if not instance.live:
            break
        some = [rid for rid in sorted(instance.open) if draw.random() < 0.7]
        instance.step(some or None)
        if draw.random() < 0.1:
            name = f"n{draw.random()}"
            instance.live[name] = None
            instance.let_in(name)
    assert sorted(instance.blamed) == sorted(poison)
    assert instance.num_crashes <= (2 + 2 * len(poison) if poison else 0), "the supervisor gives up after five restarts in a while"


@pytest.mark.parametrize("seed", range(100))
def test_kills_from_outside_blame_nobody_as_long_as_every_request_gets_on_between_them(seed):
    draw = random.Random(seed)
    instance = Instance([f"r{index}" for index in range(draw.randint(1, 6))])
    for _ in range(30):
        waiting = set(instance.live)
        while waiting:  # each gets a token, in some order of steps
            some = [rid for rid in sorted(instance.open) if draw.random() < 0.5]
            instance.step(some)
            waiting -= set(some)
        instance.suspects.began(sorted(instance.open))
        instance.crash()
    assert instance.blamed == []
