"""Rebuilds the state from the live sequences and their tokens, after an exception on the way.

Tokens are the truth: slots, blocks, queue and prefix cache may have been left half changed, so none
of them is read. What the call had begun is undone, so that each client has had exactly the tokens
that its sequence holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.sequence import NOTHING_PREPARED, Sequence, Status
from scheduler_svc.core.step.plan import StepPlan
from scheduler_svc.core.step.state import SchedulerState


@dataclass(slots=True)
class Unfinished:
    """Changes of a call that no client knows of yet."""

    plan: StepPlan | None = None  # whose result is being applied
    num_tokens: NDArray[np.int32] | None = None  # of its sampled slots, before
    ended: list[Sequence] = field(default_factory=list)
    late: list[Sequence] = field(default_factory=list)  # got a token without a slot; one entry each

    def undo(self, state: SchedulerState, live: dict[str, Sequence]) -> None:
        """Takes back tokens, reports and ends; those that ended are live again."""
        live.update((sequence.request.request_id, sequence) for sequence in self.ended)
        plan, before = self.plan, self.num_tokens
        if plan is None or before is None:
            return
        for due in plan.due_prompt_outputs:
            delivered = due.sequence.num_prompt_outputs_delivered
            due.sequence.num_prompt_outputs_delivered = min(delivered, due.begin)
        by_slot = dict(zip(plan.running.slots.tolist(), plan.running.sequences, strict=True))
        for slot, num_tokens in zip(plan.sampled_slots.tolist(), before.tolist(), strict=True):
            sequence = by_slot[slot]
            if num_late := self.late.count(sequence):
                sequence.token_ids = sequence.token_ids[:-num_late]
            elif sequence.slot == slot:
                state.table.num_tokens[slot] = num_tokens
            elif sequence in self.ended:
                sequence.token_ids = sequence.token_ids[:num_tokens]


def rescue(
    state: SchedulerState, live: Iterable[Sequence], leaving: Iterable[Sequence] = ()
) -> None:
    """Sends every live sequence back to an empty queue, those that ran first; ends the leaving."""
    staying = sorted(live, key=lambda sequence: sequence.number)
    for sequence in (*staying, *leaving):
        slot = sequence.slot
        if slot is not None and state.table.sequence[slot] is sequence:
            sequence.token_ids = state.table.tokens(slot)
        sequence.slot = None
        sequence.status = Status.FINISHED
    for sequence in staying:
        sequence.status = Status.PREEMPTED if sequence.has_run else Status.WAITING
        sequence.num_awaited, sequence.preparations = 0, NOTHING_PREPARED
        sequence.lose_kv()
        sequence.forget_hashes(state.config.hash_namespace, state.config.weights_version)
    state.rebuild(staying)
