"""Prompt outputs (log probabilities, hidden states) per position, delivered exactly once.

A request may ask for outputs of a range of its prompt's positions. The worker sends them with the
step that computes those positions; the core does not see the values. It counts how far they are
planned and delivered, so that a sequence which is computed again, after a preemption or with
another worker, continues where it was. A prefix hit may only skip positions without outputs due.
"""

from collections.abc import Sequence as Many

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.sequence import End, Sequence, Status
from scheduler_svc.core.step.plan import ReportDelivery, ReportedRange, ReportRange, StepPlan
from scheduler_svc.core.step.state import Residency

_NOT_FINITE = "the prompt outputs were not finite"


def ask(sequence: Sequence, slot: int, end: int) -> ReportRange | None:
    """Returns the prompt outputs due from a row that computes up to `end`; None if none are."""
    begin, end = sequence.num_report_planned, min(end, sequence.request.report_end)
    if end <= begin:
        return None
    sequence.num_report_planned = end
    return ReportRange(sequence, slot, begin, end)


def answers(asked: Many[ReportRange], reports: Many[ReportedRange]) -> bool:
    """Whether the reports are those asked for, all of them and in order."""
    wanted = [(one.slot, one.begin, one.end) for one in asked]
    return wanted == [(one.slot, one.begin, one.end) for one in reports]


def receive(
    plan: StepPlan, reports: Many[ReportedRange], residency: Residency
) -> tuple[list[ReportDelivery], list[End]]:
    """Returns the reports to deliver and the sequences to finish.

    To finish are sequences that asked only for prompt outputs, and those with non-finite values. A
    sequence preempted in the meantime receives its report now, and not a second time.
    """
    told: list[ReportDelivery] = []
    broken: list[Sequence] = []
    for row, (one, report) in enumerate(zip(plan.asked, reports, strict=True)):
        sequence = one.sequence
        if sequence.status is Status.FINISHED:
            continue
        if report.is_finite:
            sequence.num_reported = one.end
            told.append(ReportDelivery(sequence.request, row))
        else:
            residency.forget(one.slot)
            broken.append(sequence)
    ends = [End(sequence, FinishReason.ERROR, _NOT_FINITE) for sequence in broken]
    ends += [
        End(sequence, FinishReason.LENGTH)
        for sequence in plan.prompt_ends
        if sequence.status is not Status.FINISHED and sequence not in broken
    ]
    return told, ends
