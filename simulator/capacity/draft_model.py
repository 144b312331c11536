"""The time that a worker's draft model takes: it reads what it lacks, then drafts token by token.

As in the worker, it computes only where rows draft (decision 21). What it has read is counted by
slot, so a sequence that enters one is read from its first token, shared prefixes included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """A row whose drafts a step verifies."""

    slot: int
    num_known: int  # tokens before the first draft
    num_drafted: int
    num_accepted: int


class VirtualDraftModel:
    """The draft model of one worker."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime) -> None:
        self._step_time = step_time
        self._most_tokens = config.max_num_batched_tokens
        self._num_read = np.zeros(config.max_num_seqs, dtype=np.int64)  # by slot

    def enter(self, slot: int) -> None:
        """A sequence enters a slot, of which nothing was read."""
        self._num_read[slot] = 0

    def draft(self, rows: Sequence[DraftedRow]) -> float:
        """The seconds that the drafts of a step's rows take."""
        slots = np.array([row.slot for row in rows])
        num_known = np.array([row.num_known for row in rows])
        num_drafted = np.array([row.num_drafted for row in rows])
        # The last known token is always computed: the first draft is sampled after it.
        begins = np.minimum(self._num_read[slots], num_known - 1)
        num_tokens, context = int((num_known - begins).sum()), int(begins.sum())
        seconds = self._step_time.of(num_tokens, context)
        seconds += (-(-num_tokens // self._most_tokens) - 1) * self._step_time.of(0, 0)
        for place in range(1, int(num_drafted.max())):
            ends = num_known[num_drafted > place] + place
            seconds += self._step_time.of(len(ends), int((ends - 1).sum()))
        # The last draft is sampled here, and computed by the target alone.
        num_accepted = np.array([row.num_accepted for row in rows])
        self._num_read[slots] = num_known + np.minimum(num_accepted, num_drafted - 1)
        return seconds
