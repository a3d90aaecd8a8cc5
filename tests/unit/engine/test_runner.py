"""The resource cycle of one step: order, rollback, what is sampled and scored, and the fingerprint."""

from __future__ import annotations

import pytest

from mstar.engine.requests import RequestState, request_state
from mstar.engine.resources.base import ResourceReqConfig
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.engine.runner import Runner, Sampled
from mstar.errors import CapacityError, RequestError
from mstar.types import Row, SamplingParams, Step, TokenLogprob, TokenLogprobs
from tests.unit.engine.leader_loop import count_tokens
from tests.unit.engine.lora_pools import path_of, wants


def runner_of(instances, model=count_tokens, *, num_pages=16, **spec):
    instance = instances(**spec)
    kv = KvResource(KvSpec(num_pages, 4))
    return instance, kv, Runner([instance.pool, kv], model)


def step(seq, *rows, preempted=()):
    return Step(seq, tuple(Row(*row) for row in rows), preempted)


def ingest(runner, instance, rid, adapter, **fields):
    runner.ingest(rid, wants(adapter, **fields))
    if adapter is not None:
        instance.leader.wait_read(adapter)


def test_tokens_of_prompt_and_output_are_one_sequence():
    request = RequestState("r", (1, 2, 3), [4, 5], SamplingParams(8, seed=1))
    assert request.num_tokens == 5
    assert [request.tokens(start, 2) for start in range(4)] == [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert request.tokens(0, 5) == [1, 2, 3, 4, 5] and request.tokens(4, 1) == [5]


def test_a_pin_has_no_state_and_a_resumed_request_counts_what_was_sent():
    assert request_state("pin", ResourceReqConfig()) is None
    resumed = request_state("r", ResourceReqConfig((1,), SamplingParams(8, seed=1), output=(2, 3)))
    assert resumed.num_resumed == 2 and resumed.output == [2, 3]


def test_packed_tokens_positions_and_the_logits_that_are_wanted(instances):
    seen = []

    def model(inputs):
        seen.append(inputs)
        return count_tokens(inputs)

    instance, _, runner = runner_of(instances, model)
    ingest(runner, instance, "a", "A", tokens=5)
    ingest(runner, instance, "b", None, tokens=3)
    runner.execute(step(1, ("a", 0, 3), ("b", 0, 3)))
    assert (seen[0].tokens, seen[0].positions) == ([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2])
    assert [(job.request.rid, job.first_logit, job.num_logits, job.samples) for job in seen[0].jobs] == [("b", 5, 1, True)]
    runner.execute(step(2, ("b", 3, 1), ("a", 3, 2)))
    assert (seen[1].tokens, seen[1].positions) == ([3, 3, 4], [3, 3, 4])
    assert [(job.request.rid, job.first_logit) for job in seen[1].jobs] == [("b", 0), ("a", 2)]


def test_the_fingerprint_is_given_right_after_the_admit_and_before_the_forward(instances):
    happened = []

    def model(inputs):
        happened.append("forward")
        return count_tokens(inputs)

    instance, _, runner = runner_of(instances, model)
    ingest(runner, instance, "a", "A")
    outcome = runner.execute(step(1, ("a", 0, 3)), happened.append)
    assert happened == [outcome.fingerprint, "forward"] and outcome.fingerprint != runner.fingerprint()
    assert outcome.sampled == {"a": 3} and [(t.rid, t.position, t.token_id) for t in outcome.tokens] == [("a", 0, 3)]


def test_the_fingerprint_covers_slots_pages_and_the_last_ids_and_not_requests_names_or_copies(instances):
    def fingerprints(token, *, noise):
        def model(inputs):
            return [Sampled(job.request.rid, token) for job in inputs.jobs]

        instance, _, runner = runner_of(instances, model)
        ingest(runner, instance, "a", "A")
        if noise:
            runner.ingest("waiting", wants("B"))
            instance.pool.unload_adapter("F")
            instance.pool.register_adapter("G", path_of("G"))
        runner.execute(step(1, ("a", 0, 3)))
        return runner.fingerprint(), runner.lines()

    assert fingerprints(7, noise=False) == fingerprints(7, noise=True)
    assert fingerprints(7, noise=False)[0] != fingerprints(8, noise=False)[0]
    assert fingerprints(7, noise=False)[1][-1] == "last ids a:7\n"


def test_asking_for_the_fingerprint_changes_none(instances):
    seen = []
    for ask in (False, True):
        instance, _, runner = runner_of(instances, max_loras=1)
        ingest(runner, instance, "a", "A")
        runner.execute(step(1, ("a", 0, 3)))
        if ask:
            runner.fingerprint()
        instance.leader.reads.fail(path_of("B"))
        ingest(runner, instance, "b", "B")
        runner.execute(step(2, ("a", 3, 1), ("b", 0, 3)))
        runner.remove("b")
        if ask:
            runner.fingerprint()
        runner.execute(step(3, ("a", 4, 1)))
        seen.append(runner.fingerprint())
    assert seen[0] == seen[1]


def test_a_row_that_failed_to_load_runs_nothing_and_the_others_go_on(instances):
    instance, kv, runner = runner_of(instances)
    instance.leader.reads.fail(path_of("B"), "torn file")
    ingest(runner, instance, "a", "A")
    ingest(runner, instance, "b", "B")
    outcome = runner.execute(step(1, ("b", 0, 3), ("a", 0, 3)))
    assert outcome.failed["b"].message == "torn file" and outcome.sampled == {"a": 3}
    assert not kv.pages.table("b")
    runner.remove("b")
    assert runner.execute(step(2, ("a", 3, 1))).failed == {}


def test_logits_that_are_no_numbers_fail_their_row_alone(instances):
    def model(inputs):
        error = RequestError("not finite", code="non_finite_logits", status=500)
        return [Sampled(job.request.rid, None, error=error if job.request.rid == "bad" else None) for job in inputs.jobs]

    instance, _, runner = runner_of(instances, model)
    for rid in ("good", "bad"):
        ingest(runner, instance, rid, None)
    outcome = runner.execute(step(1, ("bad", 0, 3), ("good", 0, 3)))
    assert list(outcome.failed) == ["bad"] and outcome.tokens == [] and runner.request("bad").output == []


def test_l22_a_refusal_by_a_later_resource_rolls_the_earlier_ones_back(instances):
    instance, kv, runner = runner_of(instances, num_pages=1)
    ingest(runner, instance, "a", "A")
    ingest(runner, instance, "b", "B")
    with pytest.raises(CapacityError):
        runner.execute(step(1, ("a", 0, 3), ("b", 0, 3)))
    assert instance.leader.holders() == {"A": 0, "B": 0} and kv.pages.num_free() == 1
    assert runner.execute(step(2, ("b", 0, 3))).sampled == {"b": 3}


def test_l03_a_preempted_request_keeps_its_slot(instances):
    instance, kv, runner = runner_of(instances)
    ingest(runner, instance, "a", "A")
    ingest(runner, instance, "b", None)
    runner.execute(step(1, ("a", 0, 3), ("b", 0, 3)))
    runner.execute(step(2, ("b", 3, 1), preempted=("a",)))
    assert not kv.pages.table("a") and instance.leader.holders() == {"A": 1}
    outcome = runner.execute(step(3, ("a", 0, 4)))
    assert outcome.tokens[0].position == 1 and instance.pool.num_installs == 1


def test_prompt_scores_are_gathered_over_chunks_and_come_with_the_first_token(instances):
    score = TokenLogprobs(TokenLogprob(1, -1.0, 1))

    def model(inputs):
        results = []
        for job in inputs.jobs:
            following = min(job.num_logits, len(job.request.prompt) - 1 - job.row.start)
            results.append(Sampled(job.request.rid, 9 if job.samples else None, prompt_logprobs=[score] * following))
        return results

    _, _, runner = runner_of(instances, model)
    sampling = SamplingParams(4, seed=1, prompt_logprobs=0)
    runner.ingest("a", ResourceReqConfig(tuple(range(5)), sampling))
    assert runner.execute(step(1, ("a", 0, 2))).tokens == []
    (token,) = runner.execute(step(2, ("a", 2, 3))).tokens
    assert token.prompt_logprobs == (None, *[score] * 4)
    (token,) = runner.execute(step(3, ("a", 5, 1))).tokens
    assert token.prompt_logprobs is None and token.position == 1


def test_prompt_scores_begin_anew_after_a_preemption(instances):
    score = TokenLogprobs(TokenLogprob(1, -1.0, 1))

    def model(inputs):
        return [Sampled(job.request.rid, 9 if job.samples else None, prompt_logprobs=[score] * 2) for job in inputs.jobs]

    _, _, runner = runner_of(instances, model)
    runner.ingest("a", ResourceReqConfig(tuple(range(4)), SamplingParams(4, seed=1, prompt_logprobs=0)))
    runner.execute(step(1, ("a", 0, 2)))
    runner.execute(step(2, preempted=("a",)))
    runner.execute(step(3, ("a", 0, 2)))
    (token,) = runner.execute(step(4, ("a", 2, 2))).tokens
    assert len(token.prompt_logprobs) == 5


def test_a_step_of_no_tokens_runs_no_forward(instances):
    def model(inputs):
        raise AssertionError("nothing to compute")

    instance, _, runner = runner_of(instances, model, max_loras=1)
    runner.ingest("pin", ResourceReqConfig((), None, "A"))
    instance.leader.wait_read("A")
    outcome = runner.execute(step(1, ("pin", 0, 0)))
    assert outcome.tokens == [] and instance.leader.holders() == {"A": 1}
    runner.execute(step(2))
    runner.remove("pin")
    assert instance.leader.holders() == {"A": 0}


def test_requests_end_once_in_every_resource(instances):
    instance, kv, runner = runner_of(instances)
    ingest(runner, instance, "a", "A")
    runner.execute(step(1, ("a", 0, 3)))
    assert runner.num_requests == 1 and runner.is_ingested("a")
    runner.remove("a")
    assert runner.num_requests == 0 and runner.request("a") is None and not runner.is_ingested("a")
    assert kv.pages.num_free() == 16 and instance.leader.holders() == {"A": 0}


def test_what_a_rank_counts(instances):
    instance, _, runner = runner_of(instances)
    ingest(runner, instance, "a", "A", tokens=5)
    runner.execute(step(1, ("a", 0, 5)))
    outcome = runner.execute(step(2, ("a", 5, 1)))
    assert (runner.stats.num_steps, runner.stats.num_tokens) == (2, 6) and runner.stats.last is outcome
