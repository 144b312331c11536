"""Rules for drafts: rows that verify them advance by a range that only the result tells."""

import numpy as np

from scheduler_svc.core import Drafts, OutOfStep, StepResult
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.step.plan import WorkerDraft
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.fake_worker import sampled_token
from tests.scheduler_svc.core.world import VOCAB_SIZE, World, rule

MOST_DRAFTED = 5


def draw_drafts(world: World, draw: Draw) -> Drafts:
    """Drafts for some running sequences, each right up to a place of its own.

    At times the worker makes them itself.
    """
    drafts: dict[int, TokenIds | WorkerDraft] = {}
    by_worker = not draw.integer(0, 3)
    for sequence in world.scheduler.internal_state.running.sequences:
        if draw.integer(0, 2):
            assert sequence.slot is not None
            if by_worker:
                drafts[sequence.slot] = WorkerDraft(draw.integer(0, MOST_DRAFTED))
                continue
            known = int(world.scheduler.view.num_tokens(sequence))
            name, count = sequence.request.request_id, draw.integer(0, MOST_DRAFTED)
            token_ids = [sampled_token(name, known + n, VOCAB_SIZE) for n in range(count)]
            for n in range(draw.integer(0, MOST_DRAFTED), count):
                token_ids[n] = (token_ids[n] + 1) % VOCAB_SIZE
            drafts[sequence.slot] = np.array(token_ids, dtype=np.int32)
    return drafts


def _may_plan(world: World) -> bool:
    return world.may_plan and bool(world.scheduler.num_running)


@rule(weight=12, when=_may_plan)
def plan_a_step_with_drafts(world: World, draw: Draw) -> None:
    world.schedule(drafts=draw_drafts(world, draw))


@rule(weight=2, when=_may_plan)
def plan_a_step_with_drafts_and_few_prompt_tokens(world: World, draw: Draw) -> None:
    world.schedule(draw.pick([1, 5]), draw_drafts(world, draw))


@rule(weight=8, when=_may_plan)
def run_on_with_drafts(world: World, draw: Draw) -> None:
    for _ in range(draw.integer(1, 8)):
        while world.may_plan and world.schedule(drafts=draw_drafts(world, draw)) is not None:
            pass
        if world.results:
            world.update()


@rule(
    weight=0.5, when=lambda world: bool(world.results) and world.results[0].num_sampled is not None
)
def refuse_more_tokens_than_were_drafted(world: World, draw: Draw) -> None:
    result = world.results[0]
    assert result.num_sampled is not None
    if not len(result.num_sampled):
        return
    counts, more = result.num_sampled.copy(), MOST_DRAFTED + 1
    counts[draw.integer(0, len(counts) - 1)] += more
    token_ids = np.append(result.token_ids, np.zeros(more, dtype=np.int32))
    with world.unchanged():
        try:
            world.scheduler.update(StepResult(result.step_id, token_ids, num_sampled=counts))
        except OutOfStep:
            return
    raise AssertionError(f"{counts} tokens were taken for rows with fewer drafts")
