"""Grants: decode steps planned ahead that may be taken back.

A grant runs several steps ahead of the known tokens. This is right as long as nothing changes; once
a request arrives or leaves, the steps that have not begun were planned for an outdated state.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from scheduler_svc.core.step.plan import OutOfStep, StepPlan
from scheduler_svc.core.step.state import SchedulerState

MAX_FRAMES = 3  # grants and single steps that a worker may hold unanswered
_ENDED_PART = 8  # a cut pays once one row in this many computes in vain


@dataclass(frozen=True, slots=True)
class Cut:
    """Granted steps, from first to last, that the worker shall skip if they have not begun."""

    first_step_id: int
    last_step_id: int


class Grants:
    """Tracks granted steps in flight; plans nothing and changes no counters."""

    def __init__(self, in_flight: deque[StepPlan], state: SchedulerState) -> None:
        self._in_flight = in_flight
        self._state = state
        self.pending: Cut | None = None  # sent to the worker, not answered
        self._somebody_left = False

    def reset(self) -> None:
        """Forgets cuts and departures: no step is in flight any more."""
        self.pending, self._somebody_left = None, False

    def granted(self) -> None:
        """Records that a grant was planned for the current running set."""
        self._somebody_left = False

    def left(self) -> None:
        """Records that a request was ended from outside; its slot and blocks should be freed."""
        self._somebody_left = True

    @property
    def has_room(self) -> bool:
        """True if the worker can hold another frame and no cut is pending."""
        if self.pending is not None:
            return False
        grants = {plan.grant_id for plan in self._in_flight if plan.grant_id is not None}
        num_single = sum(plan.grant_id is None for plan in self._in_flight)
        return len(grants) + num_single < MAX_FRAMES

    def cut(self, num_kept: int) -> Cut | None:
        """Returns the steps to ask the worker to skip; None when a cut does not pay.

        It never pays for `num_kept` steps or fewer: the next step can be planned after those.
        """
        if self.pending is not None or not self._in_flight:
            return None
        newest = self._in_flight[-1]
        if newest.grant_id is None or not self._is_outdated(newest):
            return None
        # A step planned after a grant needs the whole grant to run.
        granted = list(takewhile(lambda plan: plan.grant_id is not None, reversed(self._in_flight)))
        if len(granted) <= num_kept:
            return None
        self._somebody_left = False
        self.pending = Cut(granted[-1].step_id, newest.step_id)
        return self.pending

    def skip(self, first_step_id: int, last_step_id: int) -> list[StepPlan]:
        """Removes the steps that the worker skipped from those in flight, newest first.

        Raises OutOfStep, with nothing changed, when they do not answer the pending cut.
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
        if self._state.waiting.num_admissible or self._somebody_left:
            return True
        num_rows = len(newest.slots)
        num_live = np.count_nonzero(self._state.table.is_live[newest.slots])
        return bool((num_rows - num_live) * _ENDED_PART >= num_rows)
