"""The one rule: every sequence's computed tokens chase its known tokens, within a step's budget.

Prefill, a chunk of it, what a prefix hit left over, decode, and the recomputation after a
preemption or a lost worker are all this rule. In a step decodes come first (one token each; a long
prompt never holds them up), then prompts already begun, then whoever waits, in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import NewSequence, StepPlan
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sealing import seal, seal_slot
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import Index, Roster, Slots


@dataclass(slots=True)
class Counters:
    """Totals since start, for status and metrics."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(slots=True)
class _Draft:
    """A plan in the making: what the running compute, then who enters."""

    slots: Slots  # rows that compute
    index: Index  # the same
    computed: NDArray[np.int32]
    planned: NDArray[np.int32]
    chunks: NDArray[np.int32] | None = None  # tokens each row computes; None: one each
    budget: int = 0
    appended_slots: list[int] = field(default_factory=list)
    appended_block_ids: list[int] = field(default_factory=list)
    admitted: list[NewSequence] = field(default_factory=list)
    admitted_chunks: list[int] = field(default_factory=list)
    admitted_sampled: list[int] = field(default_factory=list)  # slots

    def keep(self, chunks: NDArray[np.int32]) -> None:
        """Keeps the rows that compute something."""
        computes = chunks > 0
        self.slots, self.index, self.chunks = (
            self.slots[computes],
            self.index[computes],
            chunks[computes],
        )
        self.computed, self.planned = self.computed[computes], self.planned[computes]


class Planner:
    """Plans steps over a Residency; owns the order in which plans are numbered."""

    def __init__(self, config: SchedulerConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency
        self._next_step_id = 1
        self._previous_slots: Slots | None = None
        self._reset = True
        self._blocked: Sequence | None = None
        self._blocked_at = 0
        self.counters = Counters()

    def reset(self) -> None:
        """The next plan starts a worker that knows nothing."""
        self._reset = True
        self._previous_slots = None

    @property
    def last_step_id(self) -> int:
        """The newest step planned; 0 before the first."""
        return self._next_step_id - 1

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now."""
        num_preemptions = self._residency.num_preemptions
        draft = self._draft_running()
        if self._residency.num_preemptions == num_preemptions:
            self._draft_waiting(draft)  # whoever was just sent back must not be overtaken
        if not len(draft.slots) and not draft.admitted:
            return None
        return self._commit(draft)

    # --- the running -----------------------------------------------------------------------------

    def _draft_running(self) -> _Draft:
        table, roster = self._residency.table, self._residency.roster
        index = roster.index
        computed, planned = table.num_computed[index], table.num_planned[index]
        draft = _Draft(roster.slots, index, computed, planned)
        chunks = planned - computed
        is_last = planned >= table.max_len[index]  # its last token is on its way
        if np.count_nonzero(is_last):
            chunks[is_last] = 0
        is_decode_step = np.count_nonzero(chunks == 1) == len(chunks)
        if not is_decode_step:
            self._share_budget(chunks)
        shortage = computed + chunks - table.capacity[index]
        rows = (shortage > 0).nonzero()[0]
        if len(rows) and not self._grow(draft, chunks, rows, shortage[rows]):
            is_decode_step = False
        if not is_decode_step:
            draft.keep(chunks)
        num_tokens = len(index) if is_decode_step else int(chunks.sum())
        draft.budget = self._config.max_num_batched_tokens - num_tokens
        return draft

    def _share_budget(self, chunks: NDArray[np.int32]) -> None:
        """Cuts chunks to the budget: one token for each decode, the rest to prompts in order."""
        is_prompt = chunks > 1
        sizes = chunks[is_prompt]
        threshold = self._config.long_prefill_token_threshold
        if threshold:
            sizes = np.minimum(sizes, threshold)
        num_single = np.count_nonzero(chunks == 1)
        left = self._config.max_num_batched_tokens - num_single - (np.cumsum(sizes) - sizes)
        chunks[is_prompt] = np.clip(left, 0, sizes)

    def _grow(
        self,
        draft: _Draft,
        chunks: NDArray[np.int32],
        rows: NDArray[np.intp],
        shortage: NDArray[np.int32],
    ) -> bool:
        """Finds blocks for the rows that are short of tokens; False if not for all of them."""
        needs = -(-shortage // self._config.block_size)
        total = int(needs.sum())
        if total > self._residency.pool.num_free:
            self._grow_under_pressure(
                draft, chunks, zip(rows.tolist(), needs.tolist(), strict=True)
            )
            return False
        if total > len(rows):
            for slot, need in zip(draft.slots[rows].tolist(), needs.tolist(), strict=True):
                self._append(draft, slot, need)
            return True
        block_ids = self._residency.pool.take(total)
        self._residency.table.append_block_each(draft.index[rows], block_ids)
        draft.appended_slots += draft.slots[rows].tolist()
        draft.appended_block_ids += block_ids
        return True

    def _append(self, draft: _Draft, slot: int, num_blocks: int) -> None:
        block_ids = self._residency.pool.take(num_blocks)
        self._residency.table.append_blocks(slot, block_ids)
        draft.appended_slots += [slot] * num_blocks
        draft.appended_block_ids += block_ids

    def _grow_under_pressure(
        self, draft: _Draft, chunks: NDArray[np.int32], needs: Iterable[tuple[int, int]]
    ) -> None:
        """Row by row in order of admission; the newest running sequence makes room.

        Rows only ever lose to earlier ones, so a victim has no blocks from this draft yet.
        """
        running = list(self._residency.roster.sequences)
        for row, need in needs:
            if row >= len(running):  # preempted for an earlier row
                break
            if self._make_room(row, need, running):
                self._append(draft, int(draft.slots[row]), need)
            else:
                chunks[row] = 0
        chunks[len(running) :] = 0
        self._residency.renew_roster()

    def _make_room(self, row: int, need: int, running: list[Sequence]) -> bool:
        """Preempts from the end of `running`, at last the row itself, until `need` are free."""
        residency = self._residency
        while need > residency.pool.num_free:
            if need <= residency.pool.num_free + residency.num_fenced_blocks:
                return False  # enough is on its way: this row sits the step out
            residency.preempt(running.pop())
            if row >= len(running):
                return False
        return True

    # --- the waiting -----------------------------------------------------------------------------

    def _draft_waiting(self, draft: _Draft) -> None:
        residency = self._residency
        entered: list[Sequence] = []
        while draft.budget > 0 and residency.free_slots:
            sequence = residency.waiting.peek()
            if sequence is None or sequence.num_awaited or not self._admit(draft, sequence):
                break
            entered.append(sequence)
        if entered:
            residency.roster = Roster((*residency.roster.sequences, *entered))

    def _admit(self, draft: _Draft, sequence: Sequence) -> bool:
        """Moves the head of the queue into a slot, if there are blocks for its first chunk."""
        config, residency = self._config, self._residency
        num_free = residency.pool.num_free
        if sequence is self._blocked and num_free <= self._blocked_at:
            return False  # looking its prompt up again would cost more the longer it is
        num_tokens = len(sequence.token_ids)
        shared = self._cached_blocks(sequence)
        num_cached = len(shared) * config.block_size
        chunk = min(num_tokens - num_cached, draft.budget)
        if config.long_prefill_token_threshold:
            chunk = min(chunk, config.long_prefill_token_threshold)
        num_new = -(-(num_cached + chunk) // config.block_size) - len(shared)
        # Shared blocks that nobody holds leave the free queue, too.
        if num_new + residency.pool.num_free_among(shared) > num_free:
            self._blocked, self._blocked_at = sequence, num_free
            return False
        self._blocked = None
        residency.waiting.pop()
        block_ids = residency.enter(sequence, shared, num_new)
        if sequence.num_cached is None:
            sequence.num_cached = num_cached
            self.counters.prefix_query_tokens += num_tokens
            self.counters.prefix_hit_tokens += num_cached
        self._draft_entry(draft, sequence, num_cached, chunk, block_ids)
        return True

    def _draft_entry(
        self, draft: _Draft, sequence: Sequence, num_cached: int, chunk: int, block_ids: list[int]
    ) -> None:
        """Books the first chunk of a sequence that has just got its slot."""
        table, slot = self._residency.table, sequence.slot
        assert slot is not None
        table.num_computed[slot] = num_cached + chunk
        table.last_step[slot] = self._next_step_id
        if num_cached + chunk == len(sequence.token_ids):
            table.num_planned[slot] += 1
            draft.admitted_sampled.append(slot)
        if self._config.enable_prefix_caching:
            # Shared from now on, even within this step: a layer's KV is stored before it is read.
            seal_slot(table, self._residency.pool.cache, slot)
        draft.admitted.append(
            NewSequence(
                slot=slot,
                request=sequence.request,
                token_ids=sequence.token_ids,
                num_computed_tokens=num_cached,
                block_ids=block_ids,
                num_first_cached_tokens=sequence.num_cached or 0,
                stop_ids=sequence.stop_ids,
            )
        )
        draft.admitted_chunks.append(chunk)
        draft.budget -= chunk

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute."""
        if not self._config.enable_prefix_caching:
            return []
        usable = (len(sequence.token_ids) - 1) // self._config.block_size
        hashes = sequence.block_hashes(self._config.block_size)[:usable]
        return self._residency.pool.cache.lookup(hashes, sequence.token_ids)

    # --- the plan --------------------------------------------------------------------------------

    def _commit(self, draft: _Draft) -> StepPlan:
        """Books the running rows as computed and turns the draft into a plan."""
        residency, step_id = self._residency, self._next_step_id
        sampled = self._book(draft, step_id)
        slots, chunks, computed = draft.slots, draft.chunks, draft.computed
        num_decodes = len(slots) if chunks is None else int((chunks == 1).sum())
        if draft.admitted:
            ones = np.ones(len(slots), dtype=np.int32) if chunks is None else chunks
            slots = _extended(slots, [new.slot for new in draft.admitted])
            chunks = _extended(ones, draft.admitted_chunks)
            computed = _extended(computed, [new.num_computed_tokens for new in draft.admitted])
            sampled = _extended(sampled, draft.admitted_sampled)
        plan = StepPlan(
            step_id=step_id,
            ack_step_id=residency.acked_step,
            reset=self._reset,
            freed_slots=residency.freed_slots,
            new_sequences=draft.admitted,
            appended_slots=draft.appended_slots,
            appended_block_ids=draft.appended_block_ids,
            same_rows=chunks is None and slots is self._previous_slots,
            slots=slots,
            num_scheduled=chunks,
            num_computed=computed,
            sampled_slots=sampled,
            roster=residency.roster,
            preempted=residency.preempted,
            num_free_blocks=residency.pool.num_free,
        )
        residency.freed_slots, residency.preempted = [], []
        self._next_step_id = step_id + 1
        self._previous_slots, self._reset = slots, False
        self.counters.num_steps += 1
        if chunks is not None:
            self.counters.num_prefill_tokens += int(chunks.sum()) - num_decodes
        return plan

    def _book(self, draft: _Draft, step_id: int) -> Slots:
        """Counts the running rows' chunks as computed; returns the slots that sample."""
        table, index, chunks = self._residency.table, draft.index, draft.chunks
        table.last_step[index] = step_id
        if chunks is None:
            table.num_computed[index] = draft.planned
            table.num_planned[index] = draft.planned + 1
            return draft.slots
        after = draft.computed + chunks
        table.num_computed[index] = after
        samples = after == draft.planned
        table.num_planned[index[samples]] += 1
        if self._config.enable_prefix_caching:
            # Prompt blocks can be shared from now on: whoever reads them computes no earlier.
            seal(table, self._residency.pool.cache, index)
        sampled: Slots = draft.slots[samples]
        return sampled


def _extended(column: NDArray[np.int32], values: list[int]) -> NDArray[np.int32]:
    extended: NDArray[np.int32] = np.concatenate([column, np.array(values, dtype=np.int32)])
    return extended
