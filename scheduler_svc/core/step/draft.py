"""A step plan under construction: first the running rows, then the admitted ones."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.slots import Index, Slots
from scheduler_svc.core.kv.state_snapshots import StateSave
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.plan import (
    AdmissionHold,
    AppendedBlocks,
    EnteringSequence,
    PromptOutputRange,
    StepPlan,
    StepResult,
    WorkerDraft,
)
from scheduler_svc.core.step.prompt_outputs import plan_range


@dataclass(slots=True)
class Counters:
    """Totals since start, for status and metrics; none ever goes down."""

    num_steps: int = 0  # a granted step counts once it cannot be taken back
    num_prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    returned_query_tokens: int = 0  # the same of sequences that come back without their KV
    returned_hit_tokens: int = 0
    num_forks: int = 0
    num_drafts: int = 0  # whose verification was answered
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of those drafted
    num_capped_steps: int = 0  # whose prompt tokens the caller's limit held back

    def planned(self, plan: StepPlan) -> None:
        """Counts a step that will not be taken back."""
        self.num_steps += 1
        self.num_prefill_tokens += plan.num_prefill_tokens

    def answered(self, plan: StepPlan, result: StepResult) -> None:
        """Counts a granted step, which cannot be taken back any more, and what came of drafts."""
        if plan.grant_id is not None:
            self.planned(plan)
        if not plan.drafts:
            return
        self.num_drafts += len(plan.drafts)
        self.num_drafted_tokens += sum(map(len, plan.drafts.values()))
        self.num_accepted_tokens += len(result.token_ids) - len(plan.sampled_slots)

    def lost(self, plans: Iterable[StepPlan]) -> None:
        """Counts the steps in flight to a worker that is gone: granted ones are not taken back."""
        for plan in plans:
            if plan.grant_id is not None:
                self.planned(plan)


@dataclass(slots=True)
class Draft:
    """Filled by the planner with running rows, then by admission with new sequences."""

    step_id: int
    slots: Slots  # [rows] slots that compute
    index: Index  # [rows] the same, for indexing
    computed: NDArray[np.int32]
    planned: NDArray[np.int32]
    chunks: NDArray[np.int32] | None = None  # [rows] tokens per row; None: one each
    num_steps: int = 1  # more than 1: a grant, in each step of which every row decodes
    budget: int = 0
    is_capped: bool = False  # the caller limits the prompt tokens below the config's budget
    appended_slots: list[int] = field(default_factory=list)
    appended_block_ids: list[int] = field(default_factory=list)
    appended_to_groups: tuple[AppendedBlocks, ...] = ()  # after group 0, in order
    admitted: list[EnteringSequence] = field(default_factory=list)
    admitted_chunks: list[int] = field(default_factory=list)
    admitted_sampled: list[int] = field(default_factory=list)  # slots
    due_prompt_outputs: list[PromptOutputRange] = field(default_factory=list)
    prompt_ends: list[Sequence] = field(default_factory=list)
    read_slots: list[int] = field(default_factory=list)  # of shared or copied blocks
    drafts: dict[int, TokenIds | WorkerDraft] = field(default_factory=dict)  # to be verified
    state_saves: list[StateSave] = field(default_factory=list)
    hold: AdmissionHold | None = None  # why waiting sequences were not admitted; None: none wait

    def appended_to(self, group: int) -> tuple[list[int], list[int]]:
        """The slots and block ids appended to tables of a group, to be added to."""
        if not group:
            return self.appended_slots, self.appended_block_ids
        for appended in self.appended_to_groups:
            if appended.group == group:
                return appended.slots, appended.block_ids
        appended = AppendedBlocks(group, [], [])
        ordered = sorted((*self.appended_to_groups, appended), key=lambda one: one.group)
        self.appended_to_groups = tuple(ordered)
        return appended.slots, appended.block_ids

    def add_prompt_outputs(self, sequence: Sequence, slot: int, end: int) -> None:
        """Adds the prompt outputs due from a row that computes up to position `end`.

        Also records the end of a prompt-only sequence.
        """
        due = plan_range(sequence, slot, end)
        if due is not None:
            self.due_prompt_outputs.append(due)
        if sequence.request.is_prompt_only and end == sequence.num_prompt:
            self.prompt_ends.append(sequence)

    def keep(self, chunks: NDArray[np.int32]) -> None:
        """Removes the rows that compute nothing."""
        computes = chunks > 0
        self.slots, self.index, self.chunks = (
            self.slots[computes],
            self.index[computes],
            chunks[computes],
        )
        self.computed, self.planned = self.computed[computes], self.planned[computes]
