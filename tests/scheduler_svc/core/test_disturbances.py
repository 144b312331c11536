"""Disturbances: aborts, preemptions, failed rows, lost workers."""

import numpy as np
import pytest

from scheduler_svc.core import (
    CachePolicy,
    FinishReason,
    OutOfStep,
    Refused,
    Scheduler,
    Status,
    StepOutputs,
    StepResult,
)
from scheduler_svc.core.invariants import check_invariants
from tests.scheduler_svc.core.builders import (
    answer,
    make_request,
    make_scheduler,
    plan_step,
    rows,
    step,
)

EOS = 0


def ends(outputs: StepOutputs) -> dict[str, FinishReason]:
    """Request id to finish reason of the ends of a step."""
    return {finished.request.request_id: finished.reason for finished in outputs.finished}


# --- aborts --------------------------------------------------------------------------------------


def test_an_unknown_id_cannot_be_aborted() -> None:
    assert make_scheduler().abort("missing") is None


def reach(scheduler: Scheduler, state: str) -> None:
    """Brings request a into a state; b is older and needs a's blocks."""
    if state == "waiting":
        scheduler.add(make_request("a", 4, max_tokens=2))
        return
    scheduler.add(make_request("b", range(100, 108), max_tokens=8))
    scheduler.add(make_request("a", 8, max_tokens=8))
    plan_step(scheduler)
    if state == "prefill in flight":
        return
    if state == "preempted in flight":
        assert scheduler.schedule() is None
        return
    answer(scheduler, 500, 500)
    if state == "running":
        return
    assert rows(plan_step(scheduler)) == {"b": 1}
    answer(scheduler, 500)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("waiting", Status.WAITING),
        ("prefill in flight", Status.RUNNING),
        ("running", Status.RUNNING),
        ("preempted in flight", Status.PREEMPTED),
        ("preempted", Status.PREEMPTED),
    ],
)
def test_an_abort_works_in_every_state(state: str, status: Status) -> None:
    scheduler = make_scheduler(blocks=4)
    reach(scheduler, state)
    sequence = scheduler.find("a")
    assert sequence is not None and sequence.status is status
    finished = scheduler.abort("a")
    assert finished is not None and finished.reason is FinishReason.ABORT
    assert sequence.status is Status.FINISHED and scheduler.find("a") is None
    check_invariants(scheduler)
    seen: list[FinishReason] = []
    while scheduler.num_in_flight or scheduler.find("b"):
        if not scheduler.num_in_flight:
            plan_step(scheduler)
        plan = scheduler.oldest_in_flight
        assert plan is not None
        outputs = answer(scheduler, *[500] * len(plan.sampled_slots))
        assert "a" not in ends(outputs)
        seen += ends(outputs).values()
        check_invariants(scheduler)
    assert seen == ([] if state == "waiting" else [FinishReason.LENGTH])
    assert scheduler.internal_state.pool.num_free == 4


def test_an_aborted_running_request_says_what_it_had() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2))
    step(scheduler, 70)
    plan_step(scheduler)
    sequence = scheduler.find("a")
    assert sequence is not None
    finished = scheduler.abort("a")
    assert finished is not None
    assert sequence.token_ids.tolist() == [1, 2, 70]
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (2, 1)


# --- preemption ----------------------------------------------------------------------------------


def two_that_need_each_others_blocks(**rest: object) -> Scheduler:
    scheduler = make_scheduler(blocks=4)
    scheduler.add(make_request("a", range(100, 108), max_tokens=8))
    scheduler.add(make_request("b", 8, **{"max_tokens": 8, "handle": 9, **rest}))
    return scheduler


def test_a_preempted_request_comes_back_with_all_its_tokens() -> None:
    scheduler = two_that_need_each_others_blocks()
    step(scheduler, 500, 70)
    while scheduler.find("a"):
        step(scheduler, 500)
    plan = plan_step(scheduler)
    (resumed,) = plan.new_sequences
    assert resumed.token_ids.tolist() == [*range(1, 9), 70]
    assert len(resumed.request.prompt_token_ids) == 8, "what was prompt stays prompt"
    assert len(plan.sampled_slots) == 1
    for token in range(71, 78):
        outputs = step(scheduler, token) if token > 71 else answer(scheduler, token)
    (finished,) = outputs.finished
    assert (finished.reason, finished.num_output_tokens) == (FinishReason.LENGTH, 8)


@pytest.mark.parametrize(
    ("rest", "token", "reason"),
    [
        ({}, 70, None),
        ({}, EOS, FinishReason.STOP),
        ({"min_tokens": 2}, EOS, None),
        ({"stop_token_ids": (70,)}, 70, FinishReason.STOP),
        ({"max_tokens": 1}, 70, FinishReason.LENGTH),
    ],
)
def test_the_token_of_a_request_preempted_meanwhile_still_counts(
    rest: dict[str, object], token: int, reason: FinishReason | None
) -> None:
    scheduler = two_that_need_each_others_blocks(**rest)
    plan_step(scheduler)
    assert scheduler.schedule() is None
    assert scheduler.num_running == 1
    outputs = answer(scheduler, 500, token)
    assert dict(zip(outputs.handles.tolist(), outputs.token_ids.tolist(), strict=True)) == {
        0: 500,
        9: token,
    }
    assert ends(outputs).get("b") is reason
    waiting = list(scheduler.internal_state.waiting)
    assert [s.token_ids.tolist() for s in waiting] == ([] if reason else [[*range(1, 9), token]])
    check_invariants(scheduler)


def test_whoever_awaits_a_token_is_not_resumed_before_it_comes() -> None:
    scheduler = two_that_need_each_others_blocks()
    plan_step(scheduler)
    assert scheduler.schedule() is None
    scheduler.abort("a")
    assert scheduler.schedule() is None
    answer(scheduler, 500, 70)
    plan = plan_step(scheduler)
    assert plan.new_sequences[0].token_ids.tolist() == [*range(1, 9), 70]


def test_the_only_request_never_preempts_itself_for_ever() -> None:
    scheduler = make_scheduler(blocks=4)
    scheduler.add(make_request("a", 4, max_tokens=13))
    for _ in range(13):
        assert step(scheduler, 500).token_ids.tolist() == [500]
    assert scheduler.find("a") is None and scheduler.internal_state.num_preemptions == 0


# --- failures ------------------------------------------------------------------------------------


def test_a_bad_row_fails_one_request_and_not_its_batch() -> None:
    scheduler = make_scheduler()
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        scheduler.add(make_request(name, range(first, first + 4), handle=first))
    outputs = step(scheduler, 70, -1, 72, bad_rows=(1,))
    assert ends(outputs) == {"b": FinishReason.ERROR}
    assert outputs.finished[0].message == "the model's logits were not finite"
    assert outputs.handles.tolist() == [100, 300]
    assert outputs.token_ids.tolist() == [70, 72]
    check_invariants(scheduler)


def test_a_row_that_its_own_parameters_leave_no_token_ends_with_the_reason_why() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, 4))
    plan = plan_step(scheduler)
    tokens = np.array([70, 0], dtype=np.int32)
    result = StepResult(plan.step_id, tokens, (1,), dead_ends={1: "nothing is left"})
    outputs = scheduler.update(result)
    assert ends(outputs) == {"b": FinishReason.DEAD_END}
    assert outputs.finished[0].message == "nothing is left"
    assert outputs.token_ids.tolist() == [70]
    check_invariants(scheduler)


def test_a_bad_row_of_a_request_preempted_meanwhile_fails_it() -> None:
    scheduler = two_that_need_each_others_blocks()
    plan_step(scheduler)
    scheduler.schedule()
    outputs = answer(scheduler, 500, -1, bad_rows=(1,))
    assert ends(outputs) == {"b": FinishReason.ERROR}
    assert scheduler.num_waiting == 0
    check_invariants(scheduler)


def test_a_bad_row_of_a_request_that_has_ended_means_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    plan_step(scheduler)
    scheduler.abort("a")
    assert answer(scheduler, -1, bad_rows=(0,)).finished == []


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_a_failed_row_computed_is_not_reused(is_preempted: bool) -> None:
    """Its KV may be invalid, as its logits are."""
    scheduler = two_that_need_each_others_blocks()
    plan_step(scheduler)
    if is_preempted:
        scheduler.schedule()
    answer(scheduler, 500, -1, bad_rows=(1,))
    scheduler.abort("a")
    scheduler.add(make_request("b again", 8, max_tokens=8))
    assert plan_step(scheduler).new_sequences[0].num_computed_tokens == 0


def test_given_up_requests_end_once_with_the_reason_why() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        scheduler.add(make_request(name, 4))
    step(scheduler, 70)
    finished = scheduler.fail(["a", "b", "a", "missing"], "given up")
    assert [(f.request.request_id, f.reason, f.message) for f in finished] == [
        ("a", FinishReason.ERROR, "given up"),
        ("b", FinishReason.ERROR, "given up"),
    ]
    assert [f.num_output_tokens for f in finished] == [1, 0]
    check_invariants(scheduler)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lost_worker_costs_no_token_that_was_received(depth: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 6, max_tokens=6))
    scheduler.add(make_request("b", range(100, 120), max_tokens=6))
    step(scheduler, 70)
    for _ in range(depth + 1):
        plan_step(scheduler)
    assert scheduler.worker_lost() == 2
    assert (scheduler.num_in_flight, scheduler.num_waiting) == (0, 2)
    assert scheduler.internal_state.pool.num_free == 16
    assert len(scheduler.internal_state.pool.cache) == 0
    check_invariants(scheduler)
    plan = plan_step(scheduler)
    assert plan.reset and plan.freed_slots == []
    assert plan.step_id == depth + 3 and plan.ack_step_id == depth + 2
    assert rows(plan) == {"a": 7, "b": 1}
    assert plan.new_sequences[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6, 70]
    assert not plan_step(scheduler).reset


def test_results_of_a_lost_worker_are_out_of_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    late = plan_step(scheduler)
    scheduler.worker_lost()
    plan_step(scheduler)
    with pytest.raises(OutOfStep):
        scheduler.update(StepResult(late.step_id, np.array([5], dtype=np.int32)))


def test_a_token_lost_with_the_worker_is_awaited_no_more() -> None:
    scheduler = two_that_need_each_others_blocks()
    plan_step(scheduler)
    scheduler.schedule()  # b is preempted with its token in flight
    scheduler.worker_lost()
    check_invariants(scheduler)
    assert rows(plan_step(scheduler)) == {"a": 8, "b": 8}


def test_everyone_waits_in_the_old_order_after_a_loss() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 4))
    step(scheduler)
    scheduler.worker_lost()
    assert [s.request.request_id for s in scheduler.internal_state.waiting] == ["a", "b", "c"]


def test_requests_too_large_for_a_smaller_worker_are_named() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("small", 8, max_tokens=9))
    scheduler.add(make_request("large", 8, max_tokens=10))
    step(scheduler)
    assert scheduler.misfits() == []
    scheduler.worker_lost(num_blocks=5)
    assert scheduler.misfits() == ["large"]
    scheduler.fail(scheduler.misfits(), "the new worker is too small")
    while scheduler.find("small"):
        step(scheduler)
    assert scheduler.schedule() is None


def test_admission_follows_the_worker_of_today() -> None:
    scheduler = make_scheduler(blocks=4)
    scheduler.worker_lost(num_blocks=9)
    scheduler.add(make_request("a", 20, max_tokens=12))
    scheduler.worker_lost(num_blocks=5)
    with pytest.raises(Refused, match="the worker has 4"):
        scheduler.add(make_request("b", 20, max_tokens=12))


def test_a_suspect_without_room_for_all_its_tokens_waits_for_those_that_run() -> None:
    """It entered with one chunk and was preempted, for ever. Seen in a soak: seed 6, episode 2."""
    scheduler = make_scheduler(blocks=4, long_prefill_token_threshold=8)
    scheduler.add(make_request("b", 16, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("suspect", range(100, 112), max_tokens=1, num_deaths=1))
    ended = list[str]()
    for _ in range(12):
        while scheduler.num_in_flight < 2 and scheduler.schedule() is not None:
            check_invariants(scheduler)
        plan = scheduler.oldest_in_flight
        if plan is not None:
            ended += ends(answer(scheduler, *[500] * len(plan.sampled_slots)))
    assert ended == ["b", "suspect"] and not scheduler.view.num_preemptions


def test_a_short_suspect_does_not_hold_up_who_came_before_it_by_sessions() -> None:
    scheduler = make_scheduler(cache_policy=CachePolicy.SESSIONS)
    scheduler.add(make_request("first", 12, max_tokens=1))
    scheduler.add(make_request("suspect", range(100, 102), max_tokens=1, num_deaths=1))
    assert rows(plan_step(scheduler)) == {"first": 12}
    answer(scheduler, 500)
    assert rows(plan_step(scheduler)) == {"suspect": 2}
