"""The delay of each request against its time without drafts.

A step that brings T tokens does the work of a step of T rows without drafts; what it takes beyond
that is lost to all rows that run. A draft that comes true regains for its row what a step takes
however few its rows are: the row needs one step less. So among requests that come at once, one for
which nothing is drafted ends when it would have ended without drafts, later by what was lost: its
steps take longer while others draft, and less once they have left the sooner.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.slots import Index
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.prices import StepPrices

SHARE = 0.01  # of the time since a request began that drafts may cost it


@dataclass(frozen=True, slots=True)
class StepEffect:
    """The effect of a step."""

    step: AnsweredStep
    running: Index  # slots of the rows that run
    accepted: dict[int, int]  # drafts that came true, by slot
    prices: StepPrices  # for so many rows
    has_waited: bool  # whether it was planned when no other was in flight, for the sake of drafts

    @property
    def lost_s(self) -> float:
        """Seconds that the step took beyond the work that it did."""
        done, prices = self.step, self.prices
        if not done.plan.drafts:
            has_idled = self.has_waited and done.is_decode
            return max(done.period_s - done.duration_s, 0.0) if has_idled else 0.0
        expected_s = prices.drafted_s(done.num_drafted)
        # A disturbed step counts twice at most; what one with prompts would take is not known.
        taken_s = min(done.period_s, 2 * expected_s) if done.is_decode else expected_s
        num_accepted = done.num_tokens - len(done.plan.sampled_slots)
        return taken_s - prices.plain_s - prices.row_s * num_accepted


class Delays:
    """Delays of the requests in a core's slots, in seconds."""

    def __init__(self, num_slots: int) -> None:
        self._age_s = np.zeros(num_slots)
        self._late_s = np.zeros(num_slots)  # below 0: sooner

    def begin(self, slot: int) -> None:
        """Another request has this slot."""
        self._age_s[slot] = self._late_s[slot] = 0.0

    def stepped(self, effect: StepEffect) -> None:
        """Takes note of a step."""
        self._age_s[effect.running] += effect.step.duration_s
        self._late_s[effect.running] += effect.lost_s
        for slot, count in effect.accepted.items():
            self._late_s[slot] -= count * effect.prices.fixed_s

    def left_s(self, slots: Index) -> NDArray[np.float64]:
        """Seconds that drafts may still cost each of these rows [R]; below 0: they are too late."""
        left: NDArray[np.float64] = SHARE * self._age_s[slots] - self._late_s[slots]
        return left
