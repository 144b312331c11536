"""Migration: sequences of a lost worker's scheduler continue at another, without losses."""

import pytest

from scheduler_svc.core import FinishReason, Phase, Scheduler, hopeless
from scheduler_svc.core.history.losses import hopeless_ends
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.request.blame import MAX_DEATHS_IN_ALL, MAX_REFUSALS_IN_ALL
from tests.scheduler_svc.core.builders import (
    answer,
    make_request,
    make_scheduler,
    plan_step,
    rows,
    step,
)


def move_all(source: Scheduler, target: Scheduler) -> None:
    """Migrates all as the engine does: those that have run last first, which keeps their order."""
    leaving = source.migration.migrate_out()
    ran = [sequence for sequence in leaving if sequence.num_cached is not None]
    for sequence in (*reversed(ran), *(s for s in leaving if s not in ran)):
        assert target.migration.can_hold(sequence)
        target.migration.migrate_in(sequence)
    check_invariants(source)
    check_invariants(target)


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_moved_sequence_goes_on_where_it_was(block_size: int) -> None:
    source, target = make_scheduler(), make_scheduler(block_size=block_size)
    source.add(make_request("a", 9, max_tokens=4, handle=3, client=2))
    step(source, 70)
    step(source, 71)
    plan_step(source)  # in flight when the worker is lost
    source.worker_lost()
    move_all(source, target)
    plan = plan_step(target)
    (entered,) = plan.new_sequences
    assert entered.token_ids.tolist() == [*range(1, 10), 70, 71]
    assert rows(plan) == {"a": 11}
    outputs = answer(target, 72)
    assert (outputs.clients.tolist(), outputs.handles.tolist()) == ([2], [3])
    (finished,) = step(target, 73).finished
    assert finished.reason is FinishReason.LENGTH
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (9, 4)
    assert not list(source.live()) and source.schedule() is None


def test_who_ran_goes_first_and_everybody_keeps_the_order() -> None:
    source, target = make_scheduler(max_num_seqs=2), make_scheduler(max_num_seqs=1)
    for name in "abcd":
        source.add(make_request(name, 3, max_tokens=2))
    target.add(make_request("t", 3))
    step(source)
    source.worker_lost()
    move_all(source, target)
    waiting = [s.request.request_id for s in target.internal_state.waiting]
    assert waiting == ["a", "b", "t", "c", "d"]


def test_a_deadline_moves_along() -> None:
    source, target = make_scheduler(), make_scheduler()
    source.add(make_request("a", 3, arrival_s=1.0, deadline_s=5.0))
    source.worker_lost()
    move_all(source, target)
    assert source.next_deadline_s is None and source.expire(9.0) == []
    (finished,) = target.expire(9.0)
    assert finished.reason is FinishReason.EXPIRED and "4.000 s" in finished.message


def test_the_parts_of_a_moved_requests_time_add_up() -> None:
    source, target = make_scheduler(), make_scheduler()
    sequence = source.add(make_request("a", 3, arrival_s=1.0))
    source.now_s = target.now_s = 2.0
    step(source)
    source.now_s = target.now_s = 4.0
    source.worker_lost()
    target.now_s = 5.0
    move_all(source, target)
    spent_s = sequence.timeline.spent_s(8.0)
    assert spent_s[Phase.WORKER_AWAY] == 1.0 and spent_s[Phase.PREEMPTED] == 3.0
    assert sum(spent_s.values()) == sequence.timeline.age_s(8.0) == 7.0


def test_what_does_not_fit_is_not_held() -> None:
    source = make_scheduler()
    sequence = source.add(make_request("a", 3, max_tokens=40))
    source.worker_lost()
    source.migration.migrate_out()
    assert make_scheduler(blocks=11).migration.can_hold(sequence)  # the last token needs no room
    assert not make_scheduler(blocks=10).migration.can_hold(sequence)
    assert not make_scheduler(max_model_len=42).migration.can_hold(sequence)
    twin = make_scheduler()
    twin.add(make_request("a", 3))
    assert not twin.migration.can_hold(sequence)


def lose_in_step(scheduler: Scheduler, num_steps: int = 0, *, is_death: bool | None = None) -> None:
    """The worker completes some steps, then is lost in the next one: it dies, or refuses it.

    None: a connection was lost, and it lives.
    """
    for _ in range(num_steps):
        step(scheduler)
    plan_step(scheduler)
    scheduler.worker_lost()
    if is_death is not None:
        scheduler.judge_loss(is_death)
    scheduler.worker_back()


def test_lost_connections_count_for_nothing_however_many() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    for _ in range(3 * MAX_DEATHS_IN_ALL):
        lose_in_step(scheduler)
    assert hopeless(scheduler.live()) == []
    assert not scheduler.view.num_suspects


def test_whoever_is_in_two_refused_steps_at_one_place_is_hopeless() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    scheduler.add(make_request("b", 3))
    lose_in_step(scheduler, is_death=False)
    assert hopeless(scheduler.live()) == []
    assert scheduler.view.num_suspects == 2
    plan = plan_step(scheduler)
    assert [s.request.request_id for s in plan.sequences()] == ["a"], "alone"
    scheduler.worker_lost()
    scheduler.judge_loss(is_death=False)
    assert hopeless(scheduler.live()) == ["a"]
    (end,) = hopeless_ends(scheduler.live(), "INVALID_ARGUMENT: what")
    assert end.reason is FinishReason.ERROR
    assert "refused" in end.message and "what" in end.message


def test_a_refusal_makes_all_steps_in_flight_suspect_and_counts_once_for_each_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    step(scheduler)
    scheduler.add(make_request("b", 3))
    for _ in range(3):
        plan_step(scheduler)
    scheduler.worker_lost()
    scheduler.judge_loss(is_death=False)
    assert scheduler.view.num_suspects == 2 and hopeless(scheduler.live()) == []


def test_refusals_without_end_are_ended_although_tokens_come_in_between() -> None:
    scheduler = make_scheduler(blocks=20)
    scheduler.add(make_request("a", 3))
    for _ in range(MAX_REFUSALS_IN_ALL - 1):
        lose_in_step(scheduler, num_steps=1, is_death=False)
        assert hopeless(scheduler.live()) == []
    lose_in_step(scheduler, num_steps=1, is_death=False)
    assert hopeless(scheduler.live()) == ["a"]


def test_deaths_without_end_are_ended_although_tokens_come_in_between() -> None:
    scheduler = make_scheduler(blocks=20)
    scheduler.add(make_request("a", 3))
    for _ in range(MAX_DEATHS_IN_ALL - 1):
        lose_in_step(scheduler, num_steps=1, is_death=True)
        assert hopeless(scheduler.live()) == []
    lose_in_step(scheduler, num_steps=1, is_death=True)
    assert hopeless(scheduler.live()) == ["a"]
    (end,) = hopeless_ends(scheduler.live(), "it ended")
    assert end.reason is FinishReason.POISON
    assert "16 processes, one after the other, died" in end.message


def test_strikes_move_along() -> None:
    source, target = make_scheduler(), make_scheduler()
    source.add(make_request("a", 3))
    lose_in_step(source, is_death=False)
    source.worker_lost()
    move_all(source, target)
    lose_in_step(target, is_death=False)
    assert hopeless(target.live()) == ["a"]


def test_of_a_closed_scheduler_the_waiting_leave_and_the_running_finish() -> None:
    source, target = make_scheduler(max_num_seqs=2), make_scheduler()
    for name in "abcd":
        source.add(make_request(name, 3, max_tokens=3))
    plan_step(source)  # in flight while the others leave
    source.migration.close()
    leaving = source.migration.migrate_waiting()
    assert [sequence.request.request_id for sequence in leaving] == ["c", "d"]
    for sequence in leaving:
        target.migration.migrate_in(sequence)
    check_invariants(source)
    check_invariants(target)
    source.add(make_request("late", 3, max_tokens=3))
    answer(source, 70, 71)
    step(source, 72, 73)
    assert len(step(source, 74, 75).finished) == 2
    assert source.schedule() is None and [s.request.request_id for s in source.live()] == ["late"]
    assert rows(plan_step(target)) == {"c": 3, "d": 3}
    source.migration.reopen()
    assert rows(plan_step(source)) == {"late": 3}


def test_a_closed_scheduler_lets_those_in_that_it_preempted_itself() -> None:
    source = make_scheduler(num_blocks=4, block_size=4, max_num_seqs=2)
    for name in "ab":
        source.add(make_request(name, 3, max_tokens=8))
    source.migration.close()
    assert source.schedule() is None, "neither has run"
    source.migration.reopen()
    step(source, 1, 2)
    source.migration.close()
    ended: list[str] = []
    for token in range(10, 40):
        plan = source.schedule()
        if plan is None:
            break
        outputs = answer(source, *[token] * len(plan.sampled_slots))
        ended += [finished.request.request_id for finished in outputs.finished]
        check_invariants(source)
    assert sorted(ended) == ["a", "b"] and source.view.num_preemptions
