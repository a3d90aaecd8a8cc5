"""Leader and follower: steps without gaps, teardowns at their fence, fingerprints held against each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.lockstep.follower import FingerprintMismatch, FollowerSequence
from mstar.engine.lockstep.leader import LeaderSequence
from mstar.errors import ProtocolError
from mstar.types import Remove, Row, Step

ROW = Row("a", 0, 1)


def test_steps_are_numbered_without_gaps_and_carry_what_was_chosen():
    leader = LeaderSequence()
    assert leader.last_seq == 0
    assert leader.step([ROW], ["b"], bucket=8) == Step(1, (ROW,), ("b",), bucket=8)
    assert leader.step([], []).seq == 2 and leader.last_seq == 2


def test_a_step_carries_the_fingerprint_of_the_last_admit():
    leader = LeaderSequence()
    assert leader.step([], []).fingerprint_seq == 0
    leader.admitted(1, b"one")
    step = leader.step([], [])
    assert (step.fingerprint_seq, step.fingerprint) == (1, b"one")
    assert leader.step([], []).fingerprint_seq == 1


def test_l06_a_teardown_is_stamped_with_the_last_step_sent():
    leader = LeaderSequence()
    assert leader.remove("a") == Remove("a", 0)
    leader.step([], [])
    leader.step([], [])
    assert leader.remove("a") == Remove("a", 2)


def test_l06_a_teardown_lands_after_its_steps_admit_and_before_the_next():
    follower = FollowerSequence()
    follower.check_remove(Remove("early", 0))
    with pytest.raises(ProtocolError, match="belongs after step 1; the last admitted here is 0"):
        follower.check_remove(Remove("a", 1))
    follower.admitted(1, b"")
    follower.check_remove(Remove("a", 1))
    follower.admitted(2, b"")
    with pytest.raises(ProtocolError):
        follower.check_remove(Remove("a", 1))
    assert follower.last_seq == 2


@pytest.mark.parametrize("seq", [0, 1, 3, 7])
def test_a_gap_or_a_repeated_step_is_a_broken_protocol(seq):
    follower = FollowerSequence()
    follower.check_step(Step(1, ()))
    follower.admitted(1, b"")
    with pytest.raises(ProtocolError, match="no gaps"):
        follower.check_step(Step(seq, ()))
    follower.check_step(Step(2, ()))


def test_a_fingerprint_that_differs_from_this_ranks_own_is_the_one_thing_that_must_not_happen():
    follower = FollowerSequence()
    follower.admitted(1, b"mine")
    follower.check_step(Step(2, (), fingerprint_seq=1, fingerprint=b"mine"))
    with pytest.raises(FingerprintMismatch, match=b"mine".hex()) as caught:
        follower.check_step(Step(2, (), fingerprint_seq=1, fingerprint=b"other"))
    assert caught.value.seq == 1 and isinstance(caught.value, ProtocolError)


def test_fingerprints_are_kept_by_step_also_some_steps_back():
    follower = FollowerSequence()
    for seq in range(1, 11):
        follower.admitted(seq, b"%d" % seq)
    follower.check_step(Step(11, (), fingerprint_seq=4, fingerprint=b"4"))
    with pytest.raises(FingerprintMismatch):
        follower.check_step(Step(11, (), fingerprint_seq=4, fingerprint=b"10"))


def test_old_fingerprints_do_not_pile_up():
    follower = FollowerSequence()
    for seq in range(1, 1000):
        follower.admitted(seq, b"x")
    follower.check_step(Step(1000, (), fingerprint_seq=1, fingerprint=b"forgotten long ago"))
    with pytest.raises(FingerprintMismatch):
        follower.check_step(Step(1000, (), fingerprint_seq=999, fingerprint=b"y"))


def test_requests_that_a_step_names_and_this_rank_has_not_ingested():
    step = Step(1, (Row("a", 0, 1), Row("b", 0, 0), Row("c", 0, 2)))
    assert FollowerSequence.missing(step, {"b"}.__contains__) == ["a", "c"]
    assert FollowerSequence.missing(step, lambda rid: True) == []


@settings(deadline=None)
@given(st.lists(st.sampled_from(["step", "remove"]), max_size=30), st.integers(0, 29), st.sampled_from(["drop", "twice", "swap"]))
def test_what_the_leader_sends_passes_and_any_loss_repeat_or_swap_of_a_step_does_not(events, place, damage):
    leader = LeaderSequence()
    sent: list[Step | Remove] = []
    for number, event in enumerate(events):
        if event == "step":
            sent.append(leader.step([], []))
            leader.admitted(leader.last_seq, b"%d" % leader.last_seq)
        else:
            sent.append(leader.remove(f"r{number}"))

    def play(messages):
        follower = FollowerSequence()
        for message in messages:
            if isinstance(message, Step):
                follower.check_step(message)
                follower.admitted(message.seq, b"%d" % message.seq)
            else:
                follower.check_remove(message)

    play(sent)
    steps = [index for index, message in enumerate(sent) if isinstance(message, Step)]
    if not steps or place >= len(sent):
        return
    index = steps[place % len(steps)]
    later = sent[index + 1 :]
    damaged = {"drop": later, "twice": [sent[index], sent[index], *later], "swap": [*later[:1], sent[index], *later[1:]]}[damage]
    broken = damaged != sent[index:] and (damage == "twice" or bool(later))
    if broken:
        with pytest.raises(ProtocolError):
            play([*sent[:index], *damaged])
