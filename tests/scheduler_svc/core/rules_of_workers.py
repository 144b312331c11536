"""Rules for shell and worker: steps, valid and invalid results, losses and replacements."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scheduler_svc.core import OutOfStep, StepResult
from scheduler_svc.core.estimate.forecast import forecast
from scheduler_svc.core.estimate.step_time import StepTime
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.world import World, rule


def _may_plan(world: World) -> bool:
    return world.may_plan


def _awaits(world: World) -> bool:
    return bool(world.results)  # a granted step that has not begun has none


# --- steps ---------------------------------------------------------------------------------------


@rule(weight=20, when=_may_plan)
def plan_a_step(world: World, draw: Draw) -> None:
    world.schedule()


@rule(weight=6, when=_may_plan)
def plan_a_step_with_few_prompt_tokens(world: World, draw: Draw) -> None:
    world.schedule(draw.pick([1, 2, 5]))


@rule(weight=8, when=_may_plan)
def plan_as_far_ahead_as_allowed(world: World, draw: Draw) -> None:
    while world.may_plan and world.schedule() is not None:
        pass


@rule(weight=24, when=_awaits)
def take_a_result(world: World, draw: Draw) -> None:
    world.update()


@rule(weight=4, when=_awaits)
def take_all_results(world: World, draw: Draw) -> None:
    while world.results:
        world.update()


@rule(weight=8, when=_may_plan)
def run_on(world: World, draw: Draw) -> None:
    for _ in range(draw.integer(1, 8)):
        while world.may_plan and world.schedule() is not None:
            pass
        if world.results:
            world.update()


# --- results with errors -------------------------------------------------------------------------


@rule(weight=0.5, when=_awaits)
def take_a_result_with_a_bad_row(world: World, draw: Draw) -> None:
    world.update((draw.integer(0, 5),))


@rule(weight=0.1, when=_awaits)
def take_a_result_with_bad_rows_only(world: World, draw: Draw) -> None:
    world.update(tuple(range(len(world.results[0].token_ids))))


def _refuse(world: World, distort: Callable[[StepResult], StepResult]) -> None:
    wrong = distort(world.results[0])
    with world.unchanged():
        try:
            world.scheduler.update(wrong)
        except OutOfStep:
            return
        raise AssertionError(f"{wrong} was taken for the result of {world.results[0].step_id}")


@rule(weight=0.5, when=_awaits)
def refuse_a_result_of_another_step(world: World, draw: Draw) -> None:
    shift = draw.pick([-2, -1, 1, 2])  # repeated, or early
    _refuse(world, lambda r: StepResult(r.step_id + shift, r.token_ids))


@rule(weight=0.5, when=_awaits)
def refuse_a_result_of_another_length(world: World, draw: Draw) -> None:
    shorter = draw.integer(0, 1) and len(world.results[0].token_ids)
    more = np.array([1], dtype=np.int32)
    _refuse(
        world,
        lambda r: replace(
            r, token_ids=r.token_ids[:-1] if shorter else np.append(r.token_ids, more)
        ),
    )


@rule(weight=0.5, when=_awaits)
def refuse_a_bad_row_that_does_not_exist(world: World, draw: Draw) -> None:
    row = draw.pick([-1, 0, 7])
    beyond = len(world.results[0].token_ids) + row if row >= 0 else row
    _refuse(world, lambda r: replace(r, bad_rows=(beyond,)))


@rule(weight=0.2, when=lambda world: not world.scheduler.num_in_flight)
def refuse_a_result_nobody_awaits(world: World, draw: Draw) -> None:
    world.results.append(StepResult(world.scheduler.last_step_id, np.empty(0, dtype=np.int32)))
    _refuse(world, lambda result: result)
    world.results.clear()


# --- workers come and go -------------------------------------------------------------------------


@rule(weight=0.2, when=lambda world: not world.is_worker_away)
def restart_the_worker(world: World, draw: Draw) -> None:
    world.lose_worker()


@rule(weight=0.2, when=lambda world: not world.is_worker_away)
def replace_the_worker(world: World, draw: Draw) -> None:
    world.lose_worker(draw.integer(2, 24), draw.integer(0, 24))


@rule(weight=0.2)
def lose_the_worker(world: World, draw: Draw) -> None:
    """Loses the worker, which stays away; losing it again changes nothing."""
    world.send_worker_away()


@rule(weight=0.3, when=lambda world: bool(world.scheduler.num_in_flight))
def kill_the_worker(world: World, draw: Draw) -> None:
    """A death: those in its step compute alone from now on, and end at the second one there."""
    plan = world.scheduler.oldest_in_flight
    assert plan is not None
    in_step = {s.request.request_id for s in plan.sequences()}
    condemned = {s.request.request_id for s in plan.sequences() if s.is_suspect}
    world.send_worker_away(is_death=True)
    before = set(world.live)
    world.give_up()
    assert before - set(world.live) >= condemned & before, "a second death at one place"
    assert all(s.is_suspect for s in world.scheduler.live() if s.request.request_id in in_step)


@rule(weight=0.1)
def salvage_what_an_exception_left(world: World, draw: Draw) -> None:
    """Rebuilds the core as after an exception; some requests are at fault."""
    at_fault = [draw.pick(world.live), "missing"] if world.live and draw.integer(0, 1) else []
    world.salvage(at_fault)


@rule(weight=6, when=lambda world: world.is_worker_away)
def attach_a_worker(world: World, draw: Draw) -> None:
    world.bring_worker_back(draw.pick([None, draw.integer(2, 24)]))


@rule(weight=0.3, when=lambda world: bool(world.live))
def give_a_request_up(world: World, draw: Draw) -> None:
    world.fail([draw.pick(world.live), "missing"])


@rule(weight=0.1, when=lambda world: bool(world.scheduler.num_in_flight))
def give_a_whole_step_up(world: World, draw: Draw) -> None:
    """Loses the worker and fails all requests of its step, as after repeated losses."""
    plan = world.scheduler.oldest_in_flight
    assert plan is not None
    world.send_worker_away()
    world.fail([sequence.request.request_id for sequence in plan.sequences()])
    world.bring_worker_back()


# --- read-only calls -----------------------------------------------------------------------------


@rule(weight=0.5)
def forecast_the_queue(world: World, draw: Draw) -> None:
    step_time = StepTime(0.01, 1e-4, draw.pick([0.0, 1e-6]))
    with world.unchanged():
        foreseen = forecast(world.scheduler, step_time)
    times_s = [0.0, *foreseen.admissions_s, foreseen.drained_s]
    assert times_s == sorted(times_s), "a later request is admitted before an earlier one"
    assert len(foreseen.admissions_s) == world.scheduler.num_waiting


@rule(weight=0.2)
def name_who_never_fits(world: World, draw: Draw) -> None:
    with world.unchanged():
        assert world.scheduler.misfits() == [], "the shell has failed them"


@rule(weight=0.4, when=lambda world: world.is_worker_away)
def hand_everybody_over_and_take_them_back(world: World, draw: Draw) -> None:
    """Hands over all sequences and adopts them, as when no other group has room."""
    leaving = world.scheduler.migration.migrate_out()
    world.check()
    if draw.integer(0, 1):
        leaving.reverse()
    for sequence in leaving:
        assert world.scheduler.migration.can_hold(sequence)
        world.scheduler.migration.migrate_in(sequence)
        world.check()


@rule(weight=0.4, when=lambda world: bool(world.scheduler.num_waiting))
def hand_over_who_waits_and_take_some_back(world: World, draw: Draw) -> None:
    """Drains: who waits leaves while steps run, and comes back when no other group has room."""
    migration = world.scheduler.migration
    migration.close()
    leaving = migration.migrate_waiting()
    world.check()
    if draw.integer(0, 1):
        leaving.reverse()
    for sequence in leaving:
        assert migration.can_hold(sequence)
        migration.migrate_in(sequence)
        world.check()
    if draw.integer(0, 3):  # a closed scheduler plans little
        migration.reopen()


@rule(weight=8.0, when=lambda world: world.scheduler.internal_state.is_closed)
def end_the_drain(world: World, draw: Draw) -> None:
    world.scheduler.migration.reopen()
