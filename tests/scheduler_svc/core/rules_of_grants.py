"""Rules for grants: several decode steps granted, computed one by one, cut, taken back."""

from scheduler_svc.core import OutOfStep
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.world import World, rule


@rule(weight=6, when=lambda world: not world.is_worker_away)
def grant_steps(world: World, draw: Draw) -> None:
    max_steps = draw.integer(1, 12)
    if world.scheduler.num_in_flight <= max(world.max_depth, max_steps // 2):
        world.grant(max_steps)


@rule(weight=4, when=lambda world: not world.is_worker_away and world.cut_asked is None)
def serve_until_nobody_waits(world: World, draw: Draw) -> None:
    """Serves until the queue is empty, as the shell does, then grants."""
    max_steps = draw.integer(2, 12)
    for _ in range(30):
        if world.scheduler.num_in_flight <= max(world.max_depth, max_steps // 2):
            world.grant(max_steps)
        if world.scheduler.num_in_flight <= world.max_depth:
            world.schedule()
        if not world.scheduler.num_waiting or not world.scheduler.num_in_flight:
            break
        world.update()
    world.grant(max_steps)


@rule(weight=6, when=lambda world: bool(world.not_begun))
def compute_granted_steps(world: World, draw: Draw) -> None:
    for _ in range(draw.integer(1, len(world.not_begun))):
        world.begin()


@rule(weight=4, when=lambda world: bool(world.scheduler.num_in_flight))
def ask_for_a_cut(world: World, draw: Draw) -> None:
    if world.cut_asked is None:
        world.cut_asked = world.scheduler.cut(num_kept=draw.integer(0, world.max_depth))


def _is_cutting(world: World) -> bool:
    assert world.scheduler.is_cutting == (world.cut_asked is not None)
    return world.cut_asked is not None


@rule(weight=8, when=_is_cutting)
def leave_out_what_is_cut(world: World, draw: Draw) -> None:
    world.answer_cut()


@rule(weight=8, when=lambda world: world.first_left_out is not None)
def hear_what_was_left_out(world: World, draw: Draw) -> None:
    world.hear_of_cut()


@rule(weight=1, when=_is_cutting)
def plan_nothing_during_a_cut(world: World, draw: Draw) -> None:
    with world.unchanged():
        assert world.scheduler.schedule() is None
        assert not world.scheduler.grant(draw.integer(1, 8))
        assert world.scheduler.cut() is None, "one cut at a time"


@rule(weight=0.5)
def refuse_a_skip_nobody_asked_for(world: World, draw: Draw) -> None:
    last = world.scheduler.last_step_id
    if world.cut_asked is not None:
        last = world.cut_asked.last_step_id + draw.pick([-1, 1])
    with world.unchanged():
        try:
            world.scheduler.skip(last, last)
        except OutOfStep:
            return
    raise AssertionError(f"step {last} was taken back")
