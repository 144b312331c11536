"""Answers of a model that always says the same."""

import numpy as np

from scheduler_svc.core import Scheduler, StepPlan, StepResult
from scheduler_svc.core.scheduler import StepOutputs

TOKEN = 5  # what the model says


def answer(core: Scheduler, plan: StepPlan) -> tuple[StepOutputs, int]:
    """Applies the answer of the oldest step in flight: (what came of it, tokens sampled)."""
    counts = []
    for slot in plan.sampled_slots.tolist():
        drafts = np.asarray(plan.drafts.get(slot, ()))
        counts.append(1 + int(np.cumprod(drafts == TOKEN).sum()))
    num_sampled = np.array(counts, dtype=np.int32)
    tokens = np.full(num_sampled.sum(), TOKEN, dtype=np.int32)
    return core.update(StepResult(plan.step_id, tokens, num_sampled=num_sampled)), len(tokens)
