"""The worker of a virtual server: answers steps with outputs that are known, and says how long.

It verifies drafts as a worker does: a row advances up to the first draft that is not the token in
its place, and by that token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import SchedulerConfig, StepPlan, StepResult
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core.step.plan import WorkerDraft
from simulator.capacity.draft_model import DraftedRow, VirtualDraftModel
from simulator.capacity.outputs import Outputs
from simulator.capacity.step_times import num_context_tokens


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """The answer to a step, and the seconds that the worker computes it."""

    result: StepResult
    duration_s: float


class TimedWorker:
    """Takes the steps of one core in order."""

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        outputs: Outputs,
        draft_step_time: StepTime | None = None,
    ) -> None:
        """`draft_step_time`: of its draft model; None: it has none."""
        self._step_time = step_time
        self._outputs = outputs
        self._draft_model = (
            None if draft_step_time is None else VirtualDraftModel(config, draft_step_time)
        )
        num_slots = config.max_num_seqs
        # By slot: the sequence's tokens, where they are output; unused rows take no memory.
        self._token_ids = np.empty((num_slots, config.max_model_len), dtype=np.int32)
        self._num_prompt = [0] * num_slots
        self._handle = [0] * num_slots

    def step(self, plan: StepPlan) -> VirtualStep:
        """Computes the next step."""
        for new in plan.new_sequences:
            request = new.request
            self._enter(new.slot, request.handle, len(request.prompt_token_ids))
        duration_s = self._step_time.of(plan.num_tokens, num_context_tokens(plan))
        if not plan.drafts:
            ends = self._by_slot(plan.slots, plan.num_computed_after)
            slots = plan.sampled_slots
            return VirtualStep(
                StepResult(plan.step_id, self._token_ids[slots, ends[slots]]), duration_s
            )
        drafted = self._verified(plan)
        if self._draft_model is not None:
            duration_s += self._draft_model.draft(drafted)
        return VirtualStep(self._result(plan, drafted), duration_s)

    def _enter(self, slot: int, handle: int, num_prompt: int) -> None:
        token_ids = self._outputs.of(handle)[: self._token_ids.shape[1] - num_prompt]
        self._token_ids[slot, num_prompt : num_prompt + len(token_ids)] = token_ids
        self._handle[slot], self._num_prompt[slot] = handle, num_prompt
        if self._draft_model is not None:
            self._draft_model.enter(slot)

    def _verified(self, plan: StepPlan) -> list[DraftedRow]:
        num_computed = self._by_slot(plan.slots, plan.num_computed)
        rows = []
        for slot, draft in plan.drafts.items():
            num_known = int(num_computed[slot]) + 1  # the last known token is computed with them
            if isinstance(draft, WorkerDraft):
                begin = num_known - self._num_prompt[slot]
                draft = self._outputs.foresee(self._handle[slot], begin, len(draft))
            true = self._token_ids[slot, num_known : num_known + len(draft)]
            differ = np.flatnonzero(draft != true)
            num_accepted = int(differ[0]) if len(differ) else len(draft)
            rows.append(DraftedRow(slot, num_known, len(draft), num_accepted))
        return rows

    def _result(self, plan: StepPlan, drafted: list[DraftedRow]) -> StepResult:
        begins = self._by_slot(plan.slots, plan.num_computed_after)
        num_sampled = np.ones(len(begins), dtype=np.int32)  # by slot
        for row in drafted:
            begins[row.slot], num_sampled[row.slot] = row.num_known, row.num_accepted + 1
        slots = plan.sampled_slots
        counts = num_sampled[slots]
        firsts = np.cumsum(counts) - counts
        places = np.repeat(begins[slots] - firsts, counts) + np.arange(counts.sum())
        token_ids = self._token_ids[np.repeat(slots, counts), places]
        return StepResult(plan.step_id, token_ids, num_sampled=counts)

    def _by_slot(self, slots: NDArray[np.int32], values: NDArray[np.int32]) -> NDArray[np.int32]:
        found = np.zeros(len(self._handle), dtype=np.int32)
        found[slots] = values
        return found
