"""Attributes the loss of a worker to the requests that it was computing."""

from collections.abc import Iterable

from scheduler_svc.core.request.blame import Blame
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.plan import StepPlan


def note_loss(plan: StepPlan, is_first_step: bool) -> None:
    """Adds a loss to each sequence of the oldest step in flight when the worker was lost."""
    for sequence in plan.sequences():
        sequence.blame = sequence.blame or Blame()
        sequence.blame.note(len(sequence.token_ids), is_first_step)


def hopeless(sequences: Iterable[Sequence]) -> list[str]:
    """Request ids of the sequences that were running when worker after worker was lost."""
    return [
        s.request.request_id for s in sequences if s.blame is not None and s.blame.should_give_up
    ]
