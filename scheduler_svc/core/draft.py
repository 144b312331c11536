"""A plan in the making: what the running compute, then who enters."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.plan import Asked, Held, NewSequence
from scheduler_svc.core.reports import ask
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import Index, Slots


@dataclass(slots=True)
class Counters:
    """Totals since start, for status and metrics."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_forks: int = 0


@dataclass(slots=True)
class Draft:
    """Filled by the planner with those who run, then by admission with those who enter."""

    step_id: int
    slots: Slots  # rows that compute
    index: Index  # the same
    computed: NDArray[np.int32]
    planned: NDArray[np.int32]
    chunks: NDArray[np.int32] | None = None  # tokens each row computes; None: one each
    num_steps: int = 1  # more: a grant, in each of whose steps every row decodes
    budget: int = 0
    appended_slots: list[int] = field(default_factory=list)
    appended_block_ids: list[int] = field(default_factory=list)
    admitted: list[NewSequence] = field(default_factory=list)
    admitted_chunks: list[int] = field(default_factory=list)
    admitted_sampled: list[int] = field(default_factory=list)  # slots
    asked: list[Asked] = field(default_factory=list)
    prompt_ends: list[Sequence] = field(default_factory=list)
    read_slots: list[int] = field(default_factory=list)  # whose blocks are shared or copied
    held: Held | None = None  # why the queue did not move on; None: nobody waits

    def inquire(self, sequence: Sequence, slot: int, end: int) -> None:
        """Notes what a row that computes up to `end` brings beside KV and a token."""
        asked = ask(sequence, slot, end)
        if asked is not None:
            self.asked.append(asked)
        if sequence.request.is_prompt_only and end == sequence.num_prompt:
            self.prompt_ends.append(sequence)

    def keep(self, chunks: NDArray[np.int32]) -> None:
        """Keeps the rows that compute something."""
        computes = chunks > 0
        self.slots, self.index, self.chunks = (
            self.slots[computes],
            self.index[computes],
            chunks[computes],
        )
        self.computed, self.planned = self.computed[computes], self.planned[computes]
