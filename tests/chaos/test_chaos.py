"""The short version of `make chaos`: the whole list and hundreds of faults are in docs/reliability.md."""

from __future__ import annotations

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.run import random_kinds, run_chaos

SHORT = ("kill -9 leader", "SIGSTOP follower", "kill -9 front", "replace adapter")


@pytest.mark.xdist_group("chaos")
def test_no_stream_is_lost_and_no_token_is_wrong_whatever_dies(tmp_path):
    report = run_chaos(7, SHORT, tmp_path)
    assert not report.problems
    assert report.streams["complete"] >= 4 and report.num_tokens_checked > 500
    assert sum(fault.adapter_errors for fault in report.faults) >= 1, "the stream on the replaced adapter must end with an error"
    assert [fault.kind for fault in report.faults] == list(SHORT)


def test_a_seed_gives_the_same_faults_again_and_every_kind_comes():
    assert random_kinds(3, 28) == random_kinds(3, 28) != random_kinds(4, 28)
    assert sorted(random_kinds(3, 28)) == sorted([*FAULTS, *FAULTS])
