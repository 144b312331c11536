"""Attributes the loss of a worker to the requests that it was computing."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.request.blame import MAX_DEATHS, Blame
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.sequence import End, Sequence
from scheduler_svc.core.step.plan import StepPlan


@dataclass(slots=True)
class LostSteps:
    """The steps that were in flight when the worker was lost, until it is known what that was."""

    plans: tuple[StepPlan, ...] = ()

    def note(self, in_flight: Iterable[StepPlan]) -> None:
        """Keeps the steps in flight, if there are any."""
        self.plans = tuple(in_flight) or self.plans

    def blame(self, is_death: bool) -> None:
        """Makes sequences suspect: of a death those of the oldest step, which was being computed.

        Of a refusal those of all steps: which one was refused is not known.
        """
        places: dict[Sequence, int] = {}
        for plan in self.plans[:1] if is_death else self.plans:
            places.update(zip(plan.sequences(), plan.num_computed_after.tolist(), strict=True))
        for sequence, place in places.items():
            sequence.blame = sequence.blame or Blame()
            note = sequence.blame.note_death if is_death else sequence.blame.note_refusal
            note(place)
        self.plans = ()


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
    reason, message = FinishReason.ERROR, "the worker refused its steps again and again"
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
