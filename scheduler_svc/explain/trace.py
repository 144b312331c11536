"""The last steps, with plan and duration; kept for debugging."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core import StepPlan
from scheduler_svc.explain.first_tokens import FirstTokens

KEPT_STEPS = 1024


@dataclass(slots=True)
class StepRecord:
    """One step; `duration_s` is None while it runs, or if its worker was lost."""

    plan: StepPlan
    sent_s: float
    duration_s: float | None = None


class Trace:
    """A ring of step records. Recording costs no more than keeping a reference."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._last_done_s = 0.0
        self.first_tokens = FirstTokens()

    def sent(self, plan: StepPlan, now_s: float) -> None:
        """Adds a step that is sent."""
        self._records.append(StepRecord(plan, now_s))

    def done(self, step_id: int, now_s: float) -> StepRecord:
        """Completes the record of a step, which must be among the last sent, and returns it.

        The step began when it was sent, or when the previous one was done.
        """
        for record in reversed(self._records):
            if record.plan.step_id == step_id:
                record.duration_s = now_s - max(record.sent_s, self._last_done_s)
                self._last_done_s = now_s
                return record
        raise KeyError(f"step {step_id} was never sent")

    def skipped(self, first_step_id: int) -> None:
        """Removes the steps from this one on, which will never run."""
        while self._records and self._records[-1].plan.step_id >= first_step_id:
            self._records.pop()

    @property
    def has_forgotten(self) -> bool:
        """True if older steps were dropped."""
        return len(self._records) == KEPT_STEPS

    def newest_first(self) -> Iterator[StepRecord]:
        """The records kept."""
        return reversed(self._records)
