"""Steps that may be taken back: which of those in flight, and when they had better be.

A grant runs on by itself, several steps ahead of what is known. That is right as long as nothing
happens; once somebody arrives or leaves, the steps that have not begun were planned for a state
that is not wanted any more.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from scheduler_svc.core.plan import OutOfStep, StepPlan
from scheduler_svc.core.residency import Residency

MAX_FRAMES = 3  # grants and single steps that a worker takes before it has answered the first
_ENDED_PART = 8  # one row in so many computes in vain: worth a cut


@dataclass(frozen=True, slots=True)
class Cut:
    """Granted steps that the worker should leave out, as far as they have not begun."""

    first_step_id: int
    last_step_id: int


class Grants:
    """Watches over the steps in flight; plans nothing and changes no counters."""

    def __init__(self, in_flight: deque[StepPlan], residency: Residency) -> None:
        self._in_flight = in_flight
        self._residency = residency
        self.pending: Cut | None = None  # asked for, not answered
        self._somebody_left = False

    def reset(self) -> None:
        """Nothing is in flight any more."""
        self.pending, self._somebody_left = None, False

    def granted(self) -> None:
        """A grant was planned, for those who run now."""
        self._somebody_left = False

    def left(self) -> None:
        """Somebody was ended from outside; what they held should be free soon."""
        self._somebody_left = True

    @property
    def has_room(self) -> bool:
        """Whether the worker would take another frame, and no cut is on its way."""
        if self.pending is not None:
            return False
        grants = {plan.grant_id for plan in self._in_flight if plan.grant_id is not None}
        num_single = sum(plan.grant_id is None for plan in self._in_flight)
        return len(grants) + num_single < MAX_FRAMES

    def cut(self, num_kept: int) -> Cut | None:
        """What to ask the worker to leave out now; None if that is not worth it.

        Never worth it are `num_kept` steps or fewer: those can be planned behind.
        """
        if self.pending is not None or not self._in_flight:
            return None
        newest = self._in_flight[-1]
        if newest.grant_id is None or not self._is_outdated(newest):
            return None
        # What was planned behind a grant needs it to run to its end.
        granted = list(takewhile(lambda plan: plan.grant_id is not None, reversed(self._in_flight)))
        if len(granted) <= num_kept:
            return None
        self._somebody_left = False
        self.pending = Cut(granted[-1].step_id, newest.step_id)
        return self.pending

    def skip(self, first_step_id: int, last_step_id: int) -> list[StepPlan]:
        """Takes what the worker left out from the steps in flight; the answer to the pending cut.

        Raises OutOfStep, with nothing changed, when it does not fit.
        """
        cut, in_flight = self.pending, self._in_flight
        if cut is None or last_step_id != cut.last_step_id:
            raise OutOfStep(f"steps up to {last_step_id} were skipped, {cut} was asked for")
        oldest = in_flight[0].step_id if in_flight else last_step_id + 1
        if not max(cut.first_step_id, oldest) <= first_step_id <= last_step_id + 1:
            raise OutOfStep(
                f"step {first_step_id} was skipped, {cut} was asked for and step {oldest} "
                "is to be answered next"
            )
        self.reset()
        return [in_flight.pop() for _ in range(first_step_id, last_step_id + 1)]

    def _is_outdated(self, newest: StepPlan) -> bool:
        if len(self._residency.waiting) or self._somebody_left:
            return True
        num_rows = len(newest.slots)
        num_live = np.count_nonzero(self._residency.table.is_live[newest.slots])
        return bool((num_rows - num_live) * _ENDED_PART >= num_rows)
