"""Prompt outputs (log probabilities, hidden states) per position, delivered exactly once.

A request may ask for outputs of a range of its prompt's positions. The worker sends them with the
step that computes those positions; the core does not see the values. It counts how far they are
planned and delivered, so that a sequence which is computed again, after a preemption or with
another worker, continues where it was. A prefix hit may only skip positions without outputs due.
"""

from collections.abc import Sequence as Many

from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.sequence import End, Sequence, Status
from scheduler_svc.core.step.plan import (
    PromptOutputDelivery,
    PromptOutputRange,
    ReceivedPromptOutput,
    StepPlan,
)
from scheduler_svc.core.step.state import SchedulerState

_NOT_FINITE = "the prompt outputs were not finite"


def plan_range(sequence: Sequence, slot: int, end: int) -> PromptOutputRange | None:
    """Returns the prompt outputs due from a row that computes up to `end`; None if none are."""
    begin, end = sequence.num_prompt_outputs_planned, min(end, sequence.request.prompt_output_end)
    if end <= begin:
        return None
    sequence.num_prompt_outputs_planned = end
    return PromptOutputRange(sequence, slot, begin, end)


def match(due: Many[PromptOutputRange], received: Many[ReceivedPromptOutput]) -> bool:
    """True if the outputs received are those due, all of them and in order."""
    wanted = [(one.slot, one.begin, one.end) for one in due]
    return wanted == [(one.slot, one.begin, one.end) for one in received]


def receive(
    plan: StepPlan, received: Many[ReceivedPromptOutput], state: SchedulerState
) -> tuple[list[PromptOutputDelivery], list[End]]:
    """Returns the outputs to deliver and the sequences to finish.

    To finish are sequences that asked only for prompt outputs, and those with non-finite values. A
    sequence preempted in the meantime receives its outputs now, and not a second time.
    """
    deliveries: list[PromptOutputDelivery] = []
    broken: list[Sequence] = []
    for row, (one, prompt_output) in enumerate(zip(plan.due_prompt_outputs, received, strict=True)):
        sequence = one.sequence
        if sequence.status is Status.FINISHED:
            continue
        if prompt_output.is_finite:
            with blaming(sequence.request.request_id):
                sequence.num_prompt_outputs_delivered = one.end
                deliveries.append(PromptOutputDelivery(sequence.request, row))
        else:
            state.forget(one.slot)
            broken.append(sequence)
    ends = [End(sequence, FinishReason.ERROR, _NOT_FINITE) for sequence in broken]
    ends += [
        End(sequence, FinishReason.LENGTH)
        for sequence in plan.prompt_ends
        if sequence.status is not Status.FINISHED and sequence not in broken
    ]
    return deliveries, ends
