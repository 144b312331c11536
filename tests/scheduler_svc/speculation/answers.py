"""Answers of a model that always says the same."""

from itertools import takewhile

import numpy as np

from scheduler_svc.core import Drafts, Scheduler, StepPlan, StepResult
from scheduler_svc.core.scheduler import StepOutputs

TOKEN = 5  # what the model says


def answer(
    core: Scheduler, plan: StepPlan, drafts: Drafts | None = None
) -> tuple[StepOutputs, int]:
    """Applies the answer of the oldest step in flight: (what came of it, tokens sampled).

    `drafts` are those that the worker made, if it made them.
    """
    # Loops, as a plan has many rows with few drafts or none.
    right = {
        slot: sum(1 for _ in takewhile(TOKEN.__eq__, tokens.tolist()))
        for slot, tokens in (drafts or plan.drafts).items()
    }
    counts = [1 + right.get(slot, 0) for slot in plan.sampled_slots.tolist()]
    num_sampled = np.array(counts, dtype=np.int32)
    said = np.full(num_sampled.sum(), TOKEN, dtype=np.int32)
    return core.update(StepResult(plan.step_id, said, num_sampled=num_sampled)), len(said)
