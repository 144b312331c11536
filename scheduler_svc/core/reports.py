"""What callers want to know of their prompts, position by position, told once whatever happens.

A request may ask for a report on a range of its prompt's positions: their log probabilities, their
hidden states. The worker answers with the step that computes them; what it says is not seen here.
The core counts how far that is planned and how far it has come, so that a sequence which is
computed again, after a preemption or with another worker, goes on reporting where it was. A prefix
hit may only skip what needs no report.
"""

from collections.abc import Sequence as Many

from scheduler_svc.core.plan import Asked, Report, StepPlan, Told
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import End, Sequence, Status

_NOT_FINITE = "what was asked of the prompt was not finite"


def ask(sequence: Sequence, slot: int, end: int) -> Asked | None:
    """Books what a row that computes up to `end` has to report, if anything."""
    begin, end = sequence.num_report_planned, min(end, sequence.request.report_end)
    if end <= begin:
        return None
    sequence.num_report_planned = end
    return Asked(sequence, slot, begin, end)


def answers(asked: Many[Asked], reports: Many[Report]) -> bool:
    """Whether these are the reports asked for, all of them and in order."""
    wanted = [(one.slot, one.begin, one.end) for one in asked]
    return wanted == [(one.slot, one.begin, one.end) for one in reports]


def receive(
    plan: StepPlan, reports: Many[Report], residency: Residency
) -> tuple[list[Told], list[End]]:
    """Returns the reports to deliver, and the sequences to finish.

    Those are the sequences that only asked about their prompt, and those whose report has
    non-finite values. A sequence that was preempted meanwhile gets its report too, once.
    """
    told: list[Told] = []
    broken: list[Sequence] = []
    for row, (one, report) in enumerate(zip(plan.asked, reports, strict=True)):
        sequence = one.sequence
        if sequence.status is Status.FINISHED:
            continue
        if report.is_finite:
            sequence.num_reported = one.end
            told.append(Told(sequence.request, row))
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
