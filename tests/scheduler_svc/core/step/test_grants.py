"""Grants: many decode steps planned at once and cut short, without a different token."""

import random

import numpy as np
import pytest

from scheduler_svc.core import (
    Cut,
    FinishReason,
    OutOfStep,
    Scheduler,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.invariants import check_invariants
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler, step
from tests.scheduler_svc.core.draws import SeededDraw
from tests.scheduler_svc.core.granting import Granting
from tests.scheduler_svc.core.test_random_walks import add_random, patient_config
from tests.scheduler_svc.core.world import draw_config

EOS = 0


def run(
    seed: int, max_steps: int, lookahead: int = 1
) -> tuple[list[list[int]], dict[int, FinishReason], Granting]:
    """Runs the same requests from the same rounds, with grants of up to `max_steps` steps."""
    rng = random.Random(seed)
    simulation = Granting(patient_config(f"grants/{seed}"))
    pace = random.Random(seed + 1)
    for _ in range(6):
        for _ in range(rng.randint(0, 3)):
            add_random(simulation, rng)
        for _ in range(8):
            simulation.serve(max_steps, lookahead, pace)
    simulation.finish(max_steps, lookahead, pace)
    return simulation.outputs, simulation.ends, simulation


def test_grants_change_no_output() -> None:
    num_granted = num_skipped = 0
    for seed in range(16):
        *calm, _ = run(seed, max_steps=0, lookahead=0)
        for max_steps, lookahead in ((8, 1), (3, 0), (16, 2)):
            *granted, simulation = run(seed, max_steps, lookahead)
            assert granted == calm
            num_granted += simulation.num_granted
            num_skipped += simulation.num_skipped
    assert num_granted > 480 and num_skipped > 48, "the walks hardly met a grant"


@pytest.mark.parametrize("seed", range(16))
def test_the_books_agree_whatever_happens_to_a_grant(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Granting(draw_config(SeededDraw(f"grants/{seed}")))
    actions = {"add": 4, "serve": 40, "grant": 10, "cut": 3, "begin": 20, "abort": 1, "bad": 0.5}
    actions |= {"expire": 2, "lose": 0.5}
    for action in rng.choices(list(actions), list(actions.values()), k=300):
        if action == "add":
            add_random(simulation, rng)
        elif action == "serve":
            simulation.serve(rng.choice([0, 2, 8]), rng.choice([0, 1, 2]), rng)
        elif action == "grant":
            simulation.grant(rng.randint(1, 9))
        elif action == "cut":
            simulation.cut(rng.randint(0, 2))
        elif action == "begin" and simulation.not_begun:
            simulation.begin()
        elif action == "abort" and simulation.live:
            simulation.abort(rng.choice(simulation.live))
        elif action == "bad" and simulation.scheduler.num_in_flight:
            simulation.update((rng.randrange(6),))
        elif action == "expire":
            simulation.expire(simulation.scheduler.now_s + rng.random())
        elif action == "lose":
            simulation.lose_worker()
    simulation.finish(8, 1, rng)
    pool = simulation.scheduler.internal_state.pool
    assert pool.num_free == pool.num_usable


# --- grants --------------------------------------------------------------------------------------


def decoding(*max_tokens: int, **limits: object) -> Scheduler:
    """Requests a, b, ... of 4 tokens that have one output token each."""
    scheduler = make_scheduler(**limits)
    for number, limit in enumerate(max_tokens):
        first = 100 * number + 1
        scheduler.add(make_request("abcdefghi"[number], range(first, first + 4), max_tokens=limit))
    step(scheduler)
    return scheduler


def ids(plans: tuple[StepPlan, ...]) -> list[int]:
    return [plan.step_id for plan in plans]


def test_a_grant_is_steps_in_a_row_with_room_for_all_of_them() -> None:
    scheduler = decoding(20, 20)
    plans = scheduler.grant(6)
    assert ids(plans) == [2, 3, 4, 5, 6, 7]
    assert [plan.num_computed.tolist() for plan in plans] == [[n, n] for n in range(4, 10)]
    assert plans[0].appended_slots == [0, 0, 1, 1] and not plans[0].same_rows
    assert all(plan.same_rows and not plan.appended_slots for plan in plans[1:])
    assert scheduler.num_in_flight == 6
    check_invariants(scheduler)


def test_a_grant_ends_where_the_first_row_may_end() -> None:
    scheduler = decoding(5, 20)
    assert ids(scheduler.grant(8)) == [2, 3, 4, 5]
    plans = scheduler.grant(8)  # a's last token is in flight: b goes on alone
    assert ids(plans) == [6, 7, 8, 9, 10, 11, 12, 13]
    assert plans[0].slots.tolist() == [1]


def test_nothing_is_granted_while_somebody_waits_or_has_a_prompt_to_compute() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=4)
    scheduler.add(make_request("a", 6))
    assert scheduler.grant(8) == ()
    step(scheduler)
    assert scheduler.num_running == 1 and scheduler.grant(8) == (), "a part of its prompt is left"
    step(scheduler, 500)
    scheduler.add(make_request("b", 6))
    assert scheduler.grant(8) == (), "b waits"
    scheduler.abort("b")
    assert len(scheduler.grant(8)) == 8


def test_a_grant_is_shorter_when_blocks_are_short_and_preempts_nobody() -> None:
    scheduler = decoding(13, 13, blocks=5)  # each has a block of 4, three are free
    assert len(scheduler.grant(12)) == 3
    for _ in range(3):
        answer(scheduler, 500, 500)
    assert len(scheduler.grant(12)) == 1
    answer(scheduler, 500, 500)
    assert scheduler.grant(12) == (), "one block for two rows"
    assert scheduler.internal_state.num_preemptions == 0


def test_a_worker_is_sent_three_frames_at_most() -> None:
    scheduler = decoding(40)
    assert [len(scheduler.grant(2)) for _ in range(4)] == [2, 2, 2, 0]
    answer(scheduler, 500)
    assert scheduler.grant(2) == ()
    answer(scheduler, 500)
    assert len(scheduler.grant(2)) == 2


# --- cuts ----------------------------------------------------------------------------------------


def test_an_arrival_cuts_what_has_not_begun() -> None:
    scheduler = decoding(30)
    scheduler.grant(4)
    scheduler.grant(4)
    assert scheduler.cut() is None, "nothing came up"
    scheduler.add(make_request("b", 3))
    assert scheduler.cut(num_kept=8) is None, "the next step can be planned after these"
    assert scheduler.cut(num_kept=1) == Cut(2, 9)
    assert scheduler.cut() is None and scheduler.is_cutting, "it is asked for once"
    assert scheduler.schedule() is None and scheduler.grant(4) == ()
    assert scheduler.skip(4, 9) == 6
    assert scheduler.num_in_flight == 2 and not scheduler.is_cutting
    check_invariants(scheduler)
    plan = scheduler.schedule()
    assert plan is not None and plan.step_id == 10, "the ids of skipped steps are used up"
    assert plan.num_computed.tolist() == [6, 0] and not plan.same_rows
    check_invariants(scheduler)


def test_steps_planned_behind_a_grant_keep_it_from_being_cut() -> None:
    scheduler = decoding(30)
    scheduler.grant(2)
    scheduler.add(make_request("b", 3))
    assert scheduler.schedule() is not None
    scheduler.add(make_request("c", 3))
    assert scheduler.cut() is None


def test_an_abort_cuts_and_frees_what_was_held() -> None:
    scheduler = decoding(30, 30, 30, 30, 30, 30, 30, 30, 30, max_num_seqs=9, blocks=60)
    scheduler.grant(8)
    num_free = scheduler.internal_state.pool.num_free
    scheduler.abort("a")
    assert scheduler.cut(1) == Cut(2, 9)
    answer(scheduler, *[500] * 9)
    scheduler.skip(4, 9)
    assert scheduler.internal_state.pool.num_free == num_free, "step 3 still computes it"
    answer(scheduler, *[500] * 9)
    assert scheduler.internal_state.pool.num_free > num_free
    check_invariants(scheduler)


@pytest.mark.parametrize(("num_ends", "cuts"), [(1, False), (2, True)])
def test_stops_cut_when_many_rows_compute_in_vain(num_ends: int, cuts: bool) -> None:
    scheduler = decoding(*[30] * 9, max_num_seqs=9, blocks=60)
    scheduler.grant(8)
    outputs = answer(scheduler, *[EOS] * num_ends, *[500] * (9 - num_ends))
    assert len(outputs.finished) == num_ends
    assert (scheduler.cut(1) is not None) is cuts


def test_tokens_behind_a_stop_are_dropped() -> None:
    scheduler = decoding(30, 30)
    scheduler.grant(4)
    assert [f.reason for f in answer(scheduler, EOS, 500).finished] == [FinishReason.STOP]
    assert [answer(scheduler, 7, 500).token_ids.tolist() for _ in range(3)] == [[500]] * 3
    check_invariants(scheduler)


def test_a_deadline_ends_a_request_in_the_middle_of_a_grant() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, deadline_s=5.0))
    step(scheduler)
    scheduler.grant(8)
    assert [f.reason for f in scheduler.expire(5.0)] == [FinishReason.EXPIRED]
    assert scheduler.cut(1) == Cut(2, 9)


def test_a_cut_of_steps_that_have_all_begun_changes_nothing() -> None:
    scheduler = decoding(30)
    scheduler.grant(2)
    scheduler.add(make_request("b", 3))
    assert scheduler.cut() == Cut(2, 3)
    for _ in range(2):
        answer(scheduler, 500)
    assert scheduler.skip(4, 3) == 0
    plan = scheduler.schedule()
    assert plan is not None and plan.num_computed.tolist() == [6, 0]


@pytest.mark.parametrize(("first", "last"), [(1, 9), (2, 9), (11, 9), (5, 8), (5, 10)])
def test_an_answer_that_is_not_to_the_cut_changes_nothing(first: int, last: int) -> None:
    scheduler = decoding(30)
    scheduler.grant(8)
    with pytest.raises(OutOfStep):
        scheduler.skip(5, 9)
    answer(scheduler, 500)
    scheduler.add(make_request("b", 3))
    assert scheduler.cut() == Cut(3, 9)
    with pytest.raises(OutOfStep):
        scheduler.skip(first, last)
    assert scheduler.num_in_flight == 7 and scheduler.is_cutting


def test_a_block_whose_last_token_was_not_computed_after_all_is_not_found() -> None:
    """Its sequence leaves between the cut and the step that would have computed the token."""
    scheduler = decoding(30)
    scheduler.grant(8)
    for token in (501, 502, 503):  # tokens 1..4, 500..503: two blocks are known, not computed
        answer(scheduler, token)
    scheduler.abort("a")
    assert scheduler.cut() == Cut(5, 9)
    scheduler.skip(5, 9)
    scheduler.add(make_request("b", [1, 2, 3, 4, 500, 501, 502, 503, 9]))
    plan = scheduler.schedule()
    assert plan is not None and plan.new_sequences[0].num_computed_tokens == 4


def test_a_worker_lost_in_the_middle_of_a_grant_costs_no_token() -> None:
    scheduler = decoding(30)
    scheduler.grant(8)
    answer(scheduler, 70)
    scheduler.add(make_request("b", 3))
    assert scheduler.cut() is not None
    scheduler.worker_lost()
    check_invariants(scheduler)
    plan = scheduler.schedule()
    assert plan is not None and plan.reset and plan.step_id == 10
    assert plan.new_sequences[0].token_ids.tolist() == [1, 2, 3, 4, 500, 70]
    with pytest.raises(OutOfStep):
        scheduler.skip(5, 9)


def test_a_result_inside_a_grant_must_be_the_next_one() -> None:
    scheduler = decoding(30)
    scheduler.grant(4)
    with pytest.raises(OutOfStep, match="result of step 3, expected 2"):
        scheduler.update(StepResult(3, np.array([5], dtype=np.int32)))
