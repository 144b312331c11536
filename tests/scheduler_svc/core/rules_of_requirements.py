"""Rules for requirements: who has which, when the worker is asked for them, what it answers."""

import numpy as np

from scheduler_svc.core import GRAMMAR, RefusalKind, Request, Requirement, RequirementKind, Status
from scheduler_svc.core.request.requirement import Requirements
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.rules_of_clients import expect_refusal
from tests.scheduler_svc.core.world import World, rule


def _is_preparing(world: World) -> bool:
    return not world.is_worker_away and bool(world.worker.preparing)


def _some(world: World, draw: Draw) -> Requirements:
    """One or several requirements that the worker prepares, or a grammar, which may be read."""
    kinds = (RequirementKind.GRAMMAR, *world.config.prepared_kinds)
    drawn = [draw.pick(kinds) for _ in range(draw.pick([1, 1, 1, 2, 4]))]
    keys = [GRAMMAR.key if kind is GRAMMAR.kind else draw.pick("xy") for kind in drawn]
    return tuple(dict.fromkeys(map(Requirement, drawn, keys)))


@rule(weight=3)
def submit_with_requirements(world: World, draw: Draw) -> None:
    world.submit(
        world.draw_prompt(draw, 1, 12),
        max_tokens=draw.integer(1, 10),
        priority=draw.integer(-1, 1),
        requirements=_some(world, draw),
    )


@rule(weight=1)
def submit_with_requirements_and_a_deadline(world: World, draw: Draw) -> None:
    deadline_s = world.scheduler.now_s + draw.integer(1, 40) / 8
    prompt, requirements = world.draw_prompt(draw, 1, 12), _some(world, draw)
    world.submit(prompt, max_tokens=12, requirements=requirements, deadline_s=deadline_s)


@rule(weight=1)
def submit_siblings_with_requirements(world: World, draw: Draw) -> None:
    group, prompt = f"g{len(world.requests)}", world.draw_prompt(draw, 1, 12)
    for requirements in (_some(world, draw), draw.pick([(), _some(world, draw)])):
        world.submit(prompt, max_tokens=5, fork_group=group, requirements=requirements)


@rule(weight=0.5)
def submit_what_the_worker_does_not_prepare(world: World, draw: Draw) -> None:
    one = Requirement(draw.pick(list(RequirementKind)), "x")
    is_served = one.kind in (GRAMMAR.kind, *world.config.prepared_kinds)
    request = Request(
        "bad",
        np.array(world.draw_prompt(draw, 1, 4), dtype=np.int32),
        arrival_s=world.scheduler.now_s,
        requirements=(one, one) if is_served else (one,),
    )
    expect_refusal(world, request, RefusalKind.INVALID)


@rule(weight=8, when=lambda world: not world.is_worker_away)
def ask_for_requirements(world: World, draw: Draw) -> None:
    world.ask_for_requirements()


@rule(weight=12, when=_is_preparing)
def answer_that_a_requirement_is_ready(world: World, draw: Draw) -> None:
    world.answer_preparation(draw.pick(list(world.worker.preparing)))


@rule(weight=0.7, when=_is_preparing)
def answer_that_a_requirement_has_failed(world: World, draw: Draw) -> None:
    world.answer_preparation(draw.pick(list(world.worker.preparing)), "it cannot be had")


@rule(weight=0.7, when=lambda world: bool(world.live_in(Status.PREPARING)))
def abort_one_that_waits_for_its_requirements(world: World, draw: Draw) -> None:
    world.abort(draw.pick(world.live_in(Status.PREPARING)))


@rule(weight=0.3)
def answer_for_a_preparation_that_is_not_awaited(world: World, draw: Draw) -> None:
    unknown = world.scheduler.internal_state.requirements._last_id + draw.integer(1, 3)
    with world.unchanged():
        assert world.scheduler.prepared(unknown, draw.pick(["", "bad"])) is None
