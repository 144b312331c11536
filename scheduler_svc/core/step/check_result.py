"""Checks that a worker's answer fits the oldest step in flight."""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.step import prompt_outputs
from scheduler_svc.core.step.plan import OutOfStep, StepPlan, StepResult


def check_result(plan: StepPlan | None, result: StepResult) -> StepPlan:
    """Returns the plan that a result answers. Raises OutOfStep when it does not fit."""
    if plan is None or plan.step_id != result.step_id:
        raise OutOfStep(f"result of step {result.step_id}, expected {plan and plan.step_id}")
    num_tokens, num_rows = len(result.token_ids), len(plan.sampled_slots)
    if result.num_sampled is not None:
        _check_ranges(plan, result.num_sampled, num_tokens)
    elif num_tokens != num_rows:
        message = f"{num_tokens} tokens for {num_rows} rows that sample"
        raise OutOfStep(f"step {plan.step_id}: {message}")
    if result.bad_rows and not 0 <= min(result.bad_rows) <= max(result.bad_rows) < num_tokens:
        raise OutOfStep(f"step {plan.step_id}: bad_rows {result.bad_rows} has no such row")
    if (plan.due_prompt_outputs or result.prompt_outputs) and not prompt_outputs.match(
        plan.due_prompt_outputs, result.prompt_outputs
    ):
        raise OutOfStep(f"step {plan.step_id}: its prompt outputs are not those due")
    return plan


def _check_ranges(plan: StepPlan, num_sampled: NDArray[np.int32], num_tokens: int) -> None:
    """Raises OutOfStep unless each row has a token, and at most one more than it has drafts."""
    most = [1 + len(plan.drafts.get(slot, ())) for slot in plan.sampled_slots.tolist()]
    is_possible = len(num_sampled) == len(most) and num_tokens == num_sampled.sum()
    if not is_possible or (num_sampled < 1).any() or (num_sampled > most).any():
        raise OutOfStep(
            f"step {plan.step_id}: {num_sampled.tolist()} of {num_tokens} tokens for rows that "
            f"sample up to {most}"
        )
