"""A step's record, so that it can be learned from."""

from dataclasses import dataclass

from scheduler_svc.core import StepPlan


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """A step that was answered."""

    plan: StepPlan
    duration_s: float  # from when it was sent or the step before was answered, the later of both
    period_s: float  # since the step before was answered
    num_tokens: int  # that came

    @property
    def is_decode(self) -> bool:
        """True if it computed tokens that were sampled, and nothing else."""
        plan = self.plan
        return bool(plan.num_tokens) and not plan.num_prefill_tokens and not plan.reset

    @property
    def num_drafted(self) -> int:
        """Drafts that it verified."""
        return sum(map(len, self.plan.drafts.values()))
