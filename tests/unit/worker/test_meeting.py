"""How ranks find each other in a store that may hold what dead ranks wrote."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from mstar.errors import WorkerError
from mstar.worker.meeting import Meeting

BOUND_S = 60.0


def meet(path, size, timeout_s=BOUND_S, absent=()):
    """All ranks of one start in threads; their meetings, or what each raised."""
    found = {}

    def come(rank):
        try:
            found[rank] = Meeting(f"file://{path}", rank, size, timeout_s)
        except WorkerError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_have_one_epoch_and_hear_what_one_tells(tmp_path):
    meetings = meet(tmp_path / "store", 3)
    assert len({meeting.epoch for meeting in meetings.values()}) == 1
    meetings[0].tell("place", "tcp://a:1")
    assert [meetings[rank].hear("place") for rank in (1, 2)] == ["tcp://a:1"] * 2


def test_a_second_start_on_the_same_store_hears_nothing_of_the_first(tmp_path):
    """As under torchrun, whose store outlives the ranks."""
    first = meet(tmp_path / "store", 2)
    first[0].tell("place", "old")
    second = meet(tmp_path / "store", 2)
    assert second[0].epoch == second[1].epoch != first[0].epoch
    second[0].tell("place", "new")
    assert second[1].hear("place") == "new"


def test_a_follower_that_comes_before_the_new_rank_0_waits_for_it(tmp_path):
    meet(tmp_path / "store", 2)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    early = {}
    thread = threading.Thread(target=lambda: early.setdefault(1, Meeting(f"file://{tmp_path}/store", 1, 2, BOUND_S)))
    thread.start()
    while not store.check(["mstar/call/1"]):
        pass
    late = Meeting(f"file://{tmp_path}/store", 0, 2, BOUND_S)
    thread.join()
    assert early[1].epoch == late.epoch


def test_those_who_do_not_come_are_named(tmp_path):
    found = meet(tmp_path / "store", 4, timeout_s=0.5, absent=(1, 3))
    assert str(found[0]) == "TP ranks [1, 3] did not come within 0.5 s"
    found = meet(tmp_path / "other", 2, timeout_s=0.5, absent=(0,))
    assert "got no answer of rank 0" in str(found[1])


def test_what_nobody_tells_is_an_error_in_time(tmp_path):
    meetings = meet(tmp_path / "store", 2, timeout_s=0.5)
    with pytest.raises(WorkerError, match="did not hear of the place"):
        meetings[1].hear("place")


def test_one_rank_meets_nobody():
    meeting = Meeting("file:///nowhere/at/all", 0, 1, BOUND_S)
    assert meeting.store is None and meeting.epoch
    meeting.tell("place", "x")


def test_a_store_that_cannot_be_reached_is_named(tmp_path):
    with pytest.raises(WorkerError, match="cannot reach the store"):
        Meeting("tcp://127.0.0.1:1", 1, 2, 0.5)
