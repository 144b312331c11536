"""Short constructors and steps for tests of the core."""

from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np

from scheduler_svc.core import (
    Request,
    Scheduler,
    SchedulerConfig,
    StepOutputs,
    StepPlan,
    StepResult,
)

SMALL = SchedulerConfig(
    num_blocks=17,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=1000,
    eos_token_ids=(0,),
)


def make_scheduler(**limits: object) -> Scheduler:
    """A scheduler with small limits; `blocks` excludes the null block."""
    if "blocks" in limits:
        limits["num_blocks"] = int(str(limits.pop("blocks"))) + 1
    unknown = limits.keys() - {field.name for field in fields(SchedulerConfig)}
    assert not unknown, unknown
    return Scheduler(replace(SMALL, **limits))  # type: ignore[arg-type]


def make_request(request_id: str, prompt: int | Iterable[int], **rest: object) -> Request:
    """A request; a prompt given by its length counts up from 1."""
    token_ids = range(1, prompt + 1) if isinstance(prompt, int) else prompt
    return Request(request_id, np.array([*token_ids], dtype=np.int32), **rest)  # type: ignore[arg-type]


def plan_step(scheduler: Scheduler) -> StepPlan:
    """Plans a step and asserts that there is one."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(scheduler: Scheduler, *token_ids: int, bad_rows: tuple[int, ...] = ()) -> StepOutputs:
    """Answers the oldest step in flight."""
    plan = scheduler.oldest_in_flight
    assert plan is not None
    tokens = np.array(token_ids, dtype=np.int32)
    return scheduler.update(StepResult(plan.step_id, tokens, bad_rows))


def step(scheduler: Scheduler, *token_ids: int, bad_rows: tuple[int, ...] = ()) -> StepOutputs:
    """Plans and answers one step; by default every row samples 500."""
    plan = plan_step(scheduler)
    return answer(scheduler, *(token_ids or [500] * len(plan.sampled_slots)), bad_rows=bad_rows)


def rows(plan: StepPlan) -> dict[str, int]:
    """Request id to the number of tokens that a step computes, in batch order."""
    chunks = [1] * len(plan.slots) if plan.num_scheduled is None else plan.num_scheduled.tolist()
    names = [sequence.request.request_id for sequence in plan.sequences()]
    return dict(zip(names, chunks, strict=True))
