"""When a step with drafts is planned, how many each row gets, and whom they may cost.

The same for drafts of any source: a drafter says how likely those of each row come true.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import Drafts, Scheduler, Sequence, StepPlan
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.speculation.acceptance import Acceptance, Verified
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.delays import Delays, StepEffect
from scheduler_svc.speculation.lengths import DraftableRows
from scheduler_svc.speculation.options import SpeculationOptions
from scheduler_svc.speculation.prices import StepPrices


@dataclass(frozen=True, slots=True)
class CameOfDrafts:
    """The fate of one request's drafts."""

    slot: int
    sequence: Sequence
    num_known: int  # tokens before the first of them
    num_drafts: int
    num_accepted: int


class StepDrafter(ABC):
    """The drafts of one core; belongs to the event loop's thread."""

    def __init__(self, options: SpeculationOptions, core: Scheduler) -> None:
        self._options = options
        self._core = core
        self._late_step_id: int | None = None  # of the step that awaited others for drafts' sake
        self._acceptance = Acceptance(options.num_speculative_tokens)
        self._max_positions = len(core.view.num_known)  # that a step may sample at: one a slot
        self._delays = Delays(self._max_positions)

    def propose(self) -> Drafts | None:
        """Drafts by slot, for the rows whose drafts pay; none for all others.

        None if no step is to be planned now. A step with drafts is alone: were others to go on
        meanwhile, rows would part for ever into two steps, each of which takes almost as long as
        one with all.
        """
        oldest = self._core.oldest_in_flight
        is_verifying = oldest is not None and bool(oldest.drafts)
        drafts = NO_DRAFTS if is_verifying else self.drafts()
        if is_verifying or (oldest is not None and drafts):
            self._late_step_id = self._core.last_step_id + 1
            return None
        return drafts

    def came(self, plan: StepPlan) -> list[CameOfDrafts]:
        """The fate of a step's drafts; not of requests that it ended."""
        num_computed = dict(zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True))
        found, view = [], self._core.view
        for slot, draft in plan.drafts.items():
            if (sequence := view.sequence_in(slot)) is not None:
                num_known = num_computed[slot] + 1
                num_accepted = max(view.num_tokens(sequence) - num_known - 1, 0)
                found.append(CameOfDrafts(slot, sequence, num_known, len(draft), num_accepted))
        return found

    @abstractmethod
    def drafts(self) -> Drafts:
        """Drafts by slot of the next step."""

    def begin(self, slot: int) -> None:
        """A request has entered this slot."""
        self._delays.begin(slot)

    def has_waited(self, plan: StepPlan) -> bool:
        """True if a step began late for drafts' sake."""
        return plan.step_id == self._late_step_id

    def learn(
        self, done: AnsweredStep, verified: Mapping[int, Verified], prices: StepPrices | None
    ) -> None:
        """Takes note of what came of each slot's drafts, and of whom the step made later."""
        if verified:
            self._acceptance.learn(list(verified.values()))
        if prices is not None:
            running = self._core.view.running_slots()
            accepted = {slot: row.num_accepted for slot, row in verified.items()}
            effect = StepEffect(done, running, accepted, prices, self.has_waited(done.plan))
            self._delays.stepped(effect)

    def rows(self, drafting: Several[Sequence], probabilities: Several[float]) -> DraftableRows:
        """The next step's rows, if these requests [R] are drafted for.

        `probabilities` [R]: that a draft comes true if those before it did.
        """
        gains = self._acceptance.expected(np.array(probabilities))
        slots = np.array([s.slot for s in drafting], dtype=np.intp)
        others = self._core.view.running_but(slots)
        left_s = self._delays.left_s(np.concatenate([slots, others]))
        # Requests that may enter have their places first.
        max_drafts = self._max_positions - len(left_s) - self._core.num_waiting
        return DraftableRows(gains, left_s, max_drafts)
