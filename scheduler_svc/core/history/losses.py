"""Attributes the loss of a worker to the requests that it was computing."""

from collections.abc import Iterable

from scheduler_svc.core.request.blame import MAX_DEATHS, Blame
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.sequence import End, Sequence
from scheduler_svc.core.step.plan import StepPlan


def note_loss(plan: StepPlan, is_first_step: bool, is_death: bool) -> None:
    """Adds a loss to each sequence of the oldest step in flight when the worker was lost."""
    places = plan.num_computed_after.tolist()
    for sequence, place in zip(plan.sequences(), places, strict=True):
        sequence.blame = sequence.blame or Blame()
        sequence.blame.note(len(sequence.token_ids), is_first_step)
        if is_death:
            sequence.blame.note_death(place)


def hopeless(sequences: Iterable[Sequence]) -> list[str]:
    """Request ids of the sequences that were running when worker after worker was lost."""
    return [
        s.request.request_id for s in sequences if s.blame is not None and s.blame.should_give_up
    ]


def hopeless_ends(sequences: Iterable[Sequence], why: str) -> list[End]:
    """The ends of the hopeless among the sequences; `why` is the last worker's end."""
    given_up = [s for s in sequences if s.blame is not None and s.blame.should_give_up]
    return [_hopeless_end(sequence, why) for sequence in given_up]


def _hopeless_end(sequence: Sequence, why: str) -> End:
    reason, message = FinishReason.ERROR, "worker after worker was lost in its steps"
    if sequence.blame is not None and sequence.blame.is_poison:
        reason = FinishReason.POISON
        blame = sequence.blame
        count = f"{blame.num_deaths} processes in a row"
        if blame.num_deaths < MAX_DEATHS:
            count = f"{blame.num_deaths_in_all} processes, one after the other,"
        message = f"{count} died where this request was computed"
    return End(sequence, reason, f"{message}; the last one: {why}")


def clear_suspects(plan: StepPlan) -> None:
    """Clears the sequences of a step that is done and passed the place of their last death."""
    for sequence, num_tokens in zip(plan.sequences(), plan.num_computed_after, strict=True):
        if sequence.blame is not None:
            sequence.blame.computed(int(num_tokens))
