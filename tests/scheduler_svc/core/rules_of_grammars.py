"""Rules for grammars: who has one, when the worker is asked for it, and what it answers."""

from scheduler_svc.core import Status
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.world import World, rule


def _is_preparing(world: World) -> bool:
    return not world.is_worker_away and bool(world.worker.preparing)


@rule(weight=3)
def submit_with_a_grammar(world: World, draw: Draw) -> None:
    world.submit(
        world.draw_prompt(draw, 1, 12),
        max_tokens=draw.integer(1, 10),
        priority=draw.integer(-1, 1),
        has_grammar=True,
    )


@rule(weight=1)
def submit_with_a_grammar_and_a_deadline(world: World, draw: Draw) -> None:
    deadline_s = world.scheduler.now_s + draw.integer(1, 40) / 8
    prompt = world.draw_prompt(draw, 1, 12)
    world.submit(prompt, max_tokens=12, has_grammar=True, deadline_s=deadline_s)


@rule(weight=1)
def submit_siblings_with_a_grammar(world: World, draw: Draw) -> None:
    group, prompt = f"g{len(world.requests)}", world.draw_prompt(draw, 1, 12)
    for has_grammar in (True, draw.pick([True, False])):
        world.submit(prompt, max_tokens=5, fork_group=group, has_grammar=has_grammar)


@rule(weight=8, when=lambda world: not world.is_worker_away)
def ask_for_grammars(world: World, draw: Draw) -> None:
    world.ask_for_grammars()


@rule(weight=12, when=_is_preparing)
def answer_that_a_grammar_is_ready(world: World, draw: Draw) -> None:
    world.answer_grammar(draw.pick(list(world.worker.preparing)))


@rule(weight=0.7, when=_is_preparing)
def answer_that_a_grammar_is_bad(world: World, draw: Draw) -> None:
    world.answer_grammar(draw.pick(list(world.worker.preparing)), "it cannot be followed")


@rule(weight=0.7, when=lambda world: bool(world.live_in(Status.WAITING_FOR_GRAMMAR)))
def abort_one_that_waits_for_its_grammar(world: World, draw: Draw) -> None:
    world.abort(draw.pick(world.live_in(Status.WAITING_FOR_GRAMMAR)))


@rule(weight=0.3)
def answer_for_a_grammar_that_is_not_awaited(world: World, draw: Draw) -> None:
    unknown = world.scheduler.internal_state.grammars._last_id + draw.integer(1, 3)
    with world.unchanged():
        assert world.scheduler.grammar_prepared(unknown, draw.pick(["", "bad"])) is None
