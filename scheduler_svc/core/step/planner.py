"""Plans steps by one rule: computed tokens catch up with known tokens, within a token budget.

Prefill, a chunk of it, the rest after a prefix hit, decode, and the recomputation after a
preemption or a lost worker all follow this rule. Within a step, decodes come first (one token each,
so that a long prompt never delays them), then prompts already begun, then waiting sequences in the
order of the policy.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.sealing import seal
from scheduler_svc.core.kv.slots import Slots
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.admission import Admission
from scheduler_svc.core.step.budget import StepBudget
from scheduler_svc.core.step.draft import Counters, Draft
from scheduler_svc.core.step.growth import Growth
from scheduler_svc.core.step.plan import NO_DRAFTS, AdmissionHold, Cause, Drafts, StepPlan
from scheduler_svc.core.step.speculation import Speculation
from scheduler_svc.core.step.state import SchedulerState
from scheduler_svc.core.step.whole_pictures import whole_chunk

_HELD_BY_PREEMPTION = AdmissionHold(Cause.PREEMPTION)


class Planner:
    """Plans steps over the scheduler state and numbers them."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self._config = config
        self._state = state
        self._next_step_id = 1
        self._previous_slots: Slots | None = None
        self._reset = True
        self.counters = Counters()
        self._budget = StepBudget(config)
        self._admission = Admission(config, state, self.counters)
        self._speculation = Speculation(config, state)
        self._growth = Growth(config, state)
        self._has_window = config.has_window

    def reset(self) -> None:
        """Forgets the worker: the next plan is for one that holds no sequences."""
        self._reset = True
        self._previous_slots = None
        self._admission.reset()

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Number of a sequence's tokens that the prefix cache holds."""
        return self._admission.reuse.cached(sequence).num_computed

    @property
    def last_step_id(self) -> int:
        """Id of the last step planned; 0 before the first."""
        return self._next_step_id - 1

    def plan(self, most_prompt_tokens: int | None, drafts: Drafts) -> StepPlan | None:
        """Plans the next step; None when there is nothing to compute now."""
        if (changes := self._state.changes) is not None:
            changes.step_id = self._next_step_id
        self._budget.limit_prompts(most_prompt_tokens)
        self._admission.make_way()
        if self._has_window:
            self._state.slide()
        if self._state.suspects and (draft := self._draft_suspect()) is not None:
            return self._commit(draft)
        num_preemptions = self._state.num_preemptions
        draft = self._draft_running(drafts)
        if self._state.num_preemptions == num_preemptions:
            self._admission.draft_waiting(draft)
        else:
            draft.hold = _HELD_BY_PREEMPTION  # none may overtake the preempted one
        if not len(draft.slots) and not draft.admitted:
            if changes is not None:
                changes.step_id = self.last_step_id
            return None
        self.counters.num_capped_steps += draft.is_capped and draft.budget <= 0
        return self._commit(draft)

    def plan_release(self) -> StepPlan:
        """Plans a step that computes nothing and only reports the freed slots to the worker."""
        index = self._state.running.index[:0]
        slots, none = self._state.running.slots[:0], np.zeros(0, dtype=np.int32)
        return self._commit(Draft(self._next_step_id, slots, index, none, none))

    def plan_grant(self, max_steps: int) -> tuple[StepPlan, ...]:
        """Plans as many decode steps, up to `max_steps`, as every running sequence can make.

        Returns no steps unless the queue is empty, no prompt is left to compute, and there are free
        blocks for every token.
        """
        state = self._state
        table, running = state.table, state.running
        is_busy = state.waiting.num_admissible or state.suspects or table.drafting_slots
        if is_busy or self._reset or table.prompt_output_slots:
            return ()
        index, slots = running.index, running.slots
        left = table.max_len[index] - table.num_planned[index]
        if np.count_nonzero(left) < len(left):  # the last token of some is in flight
            index, slots, left = index[left > 0], slots[left > 0], left[left > 0]
        computed, planned = table.num_computed[index], table.num_planned[index]
        if not len(index) or np.count_nonzero(planned - computed == 1) < len(index):
            return ()
        draft = Draft(self._next_step_id, slots, index, computed, planned)
        draft.num_steps = min(max_steps, int(left.min()))
        if self._has_window:
            state.slide()
        if not self._growth.grow_for_grant(draft):
            return ()
        first = self._commit(draft, is_grant=True)
        return first, *(self._repeat(first, later) for later in range(1, draft.num_steps))

    def take_back(self, plans: list[StepPlan], last_step_id: int) -> None:
        """Takes back granted steps that will not be computed, those after step `last_step_id`.

        Their blocks stay with their sequences. Rows of sequences that have ended no longer count.
        """
        table, departed = self._state.table, self._state.departed
        for plan in plans:
            is_live = table.is_live[plan.slots]
            index = plan.slots[is_live]
            table.num_computed[index] -= 1
            table.num_planned[index] -= 1
            table.last_step[index] = last_step_id
            for slot in plan.slots[~is_live].tolist():
                if slot in departed:  # preempted: in the queue it awaits this token
                    departed[slot].num_awaited -= 1
        self._state.move_fence(last_step_id)
        self._previous_slots = None  # the worker's last step may not be the last one planned here

    def _repeat(self, first: StepPlan, later: int) -> StepPlan:
        """The step of a grant that comes `later` steps after its first."""
        return replace(
            first,
            step_id=first.step_id + later,
            freed_slots=[],
            appended_slots=[],
            appended_block_ids=[],
            appended_to_groups=(),
            state_saves=(),
            same_rows=True,
            num_computed=first.num_computed + later,
            preempted=[],
            moves=None,
            num_prefill_tokens=0,
        )

    # --- the suspects ----------------------------------------------------------------------------

    def _draft_suspect(self) -> Draft | None:
        """A step of one suspect alone: the running one, else the first in the queue.

        None when it cannot compute now; the others go on meanwhile.
        """
        table = self._state.table
        for sequence in self._state.running.sequences:
            if sequence.is_suspect:
                assert sequence.slot is not None
                return self._draft_alone(sequence.slot)
        none = self._state.running.index[:0]
        computed = table.num_computed[none]
        draft = Draft(self._next_step_id, none.astype(np.int32), none, computed, computed)
        draft.budget = self._budget.most
        return draft if self._admission.draft_suspect(draft) else None

    def _draft_alone(self, slot: int) -> Draft | None:
        """The next chunk of one running sequence; None when it has none, or no blocks for it."""
        table = self._state.table
        index = np.array([slot], dtype=np.intp)
        computed, planned = table.num_computed[index], table.num_planned[index]
        chunks = planned - computed
        if planned[0] >= table.max_len[slot] or not chunks[0] or slot in table.drafting_slots:
            return None
        budget = self._budget.share(chunks)
        if self._config.keeps_pictures_whole:
            self._keep_pictures_whole(index, computed, chunks, budget)
        draft = Draft(self._next_step_id, index.astype(np.int32), index, computed, planned)
        if not self._growth.grow_alone(draft, slot, int(computed[0] + chunks[0])):
            return None
        draft.keep(chunks)
        return draft

    # --- the running -----------------------------------------------------------------------------

    def _draft_running(self, drafts: Drafts) -> Draft:
        table, running = self._state.table, self._state.running
        index = running.index
        computed, planned = table.num_computed[index], table.num_planned[index]
        draft = Draft(self._next_step_id, running.slots, index, computed, planned)
        chunks = planned - computed
        is_last = planned >= running.facts(table).max_len  # the last token is in flight
        if np.count_nonzero(is_last):
            chunks[is_last] = 0
        if drafts or table.drafting_slots:
            self._speculation.hold(draft, chunks, drafts)
        is_decode_step = (
            np.count_nonzero(chunks == 1) == len(chunks) and not table.prompt_output_slots
        )
        budget = self._budget.beside(len(index)) if is_decode_step else self._budget.share(chunks)
        if self._config.keeps_pictures_whole and not is_decode_step:
            budget = self._keep_pictures_whole(index, computed, chunks, budget)
        if drafts and self._speculation.add(draft, chunks, drafts, budget):
            is_decode_step = False
        if table.more:
            is_decode_step &= self._growth.grow_all(draft, chunks)
        else:
            if not is_decode_step:
                shortage = computed + chunks - table.capacity[index]
                rows = (shortage > 0).nonzero()[0]
                needs = (-(-shortage[rows] // self._config.block_size)).tolist()
            else:
                rows = (computed >= table.capacity[index]).nonzero()[0]
                needs = [1] * len(rows)
            if len(rows) and not self._growth.grow(draft, chunks, rows, needs):
                is_decode_step = False
        if not is_decode_step:
            draft.keep(chunks)
        num_tokens = len(index) if is_decode_step else int(chunks.sum())
        draft.budget, draft.is_capped = budget - num_tokens, budget < self._budget.most
        return draft

    def _keep_pictures_whole(
        self,
        index: NDArray[np.integer],
        computed: NDArray[np.int32],
        chunks: NDArray[np.int32],
        budget: int,
    ) -> int:
        """Changes chunks [rows] that would cut a picture; returns the budget.

        A picture that has no room even alone among the decodes leaves none to new sequences: they
        would decode, too, and it would never have.
        """
        table, has_room = self._state.table, True
        for row in np.flatnonzero((table.extras_end[index] > computed) & (chunks > 0)).tolist():
            sequence, chunk = table.sequence[int(index[row])], int(chunks[row])
            assert sequence is not None
            most = self._budget.most - int(chunks.sum()) + chunk
            chunks[row] = whole_chunk(sequence.request.extras, int(computed[row]), chunk, most)
            has_room &= bool(chunks[row])
        return max(budget, int(chunks.sum())) if has_room else int(chunks.sum())

    # --- the plan --------------------------------------------------------------------------------

    def _commit(self, draft: Draft, is_grant: bool = False) -> StepPlan:
        """Marks the running rows' tokens as computed and turns the draft into a plan."""
        state, step_id = self._state, draft.step_id
        if state.changes is not None:
            state.changes.step_id = step_id + draft.num_steps - 1
        sampled = self._book(draft, step_id)
        slots, chunks, computed = draft.slots, draft.chunks, draft.computed
        num_prefill_tokens = self._num_prefill_tokens(draft)
        if draft.admitted:
            ones = np.ones(len(slots), dtype=np.int32) if chunks is None else chunks
            slots = _extended(slots, [new.slot for new in draft.admitted])
            chunks = _extended(ones, draft.admitted_chunks)
            computed = _extended(computed, [new.num_computed_tokens for new in draft.admitted])
            sampled = _extended(sampled, draft.admitted_sampled)
        plan = StepPlan(
            step_id=step_id,
            ack_step_id=state.acked_step,
            reset=self._reset,
            freed_slots=state.freed_slots,
            new_sequences=draft.admitted,
            appended_slots=draft.appended_slots,
            appended_block_ids=draft.appended_block_ids,
            appended_to_groups=draft.appended_to_groups,
            same_rows=chunks is None and slots is self._previous_slots,
            slots=slots,
            num_scheduled=chunks,
            num_computed=computed,
            sampled_slots=sampled,
            running=state.running,
            preempted=state.preempted,
            num_free_blocks=state.pool.num_free,
            hold=draft.hold,
            moves=state.take_moves(),
            grant_id=step_id if is_grant else None,
            due_prompt_outputs=draft.due_prompt_outputs,
            prompt_ends=draft.prompt_ends,
            num_prefill_tokens=num_prefill_tokens,
            drafts=draft.drafts or NO_DRAFTS,
            state_saves=tuple(draft.state_saves),
        )
        state.freed_slots, state.preempted = [], []
        self._next_step_id = step_id + draft.num_steps
        self._previous_slots, self._reset = slots, False
        return plan

    def _num_prefill_tokens(self, draft: Draft) -> int:
        """Tokens of a draft that were known when their sequence was admitted, of all its rows.

        A row that still awaits its first token computes a known one, or with look-ahead that first
        token itself; how many tokens it computes does not tell a decode from a last chunk of one.
        """
        table, index = self._state.table, draft.index
        num_tokens = sum(draft.admitted_chunks)
        rows = table.is_prefilling[index]
        if np.count_nonzero(rows):
            rows &= draft.computed < table.num_tokens[index]
            num_tokens += int(rows.sum() if draft.chunks is None else draft.chunks[rows].sum())
        return num_tokens

    def _book(self, draft: Draft, step_id: int) -> Slots:
        """Counts the running rows' chunks as computed; returns the slots that sample."""
        table, index, chunks = self._state.table, draft.index, draft.chunks
        table.last_step[index] = step_id + draft.num_steps - 1
        if draft.read_slots:
            table.last_step[draft.read_slots] = step_id
        if self._state.snapshots is not None:
            after = draft.computed + (draft.num_steps if chunks is None else chunks)
            draft.state_saves += self._state.snapshots.cross(index, after)
            self._state.snapshots.planned()
        if chunks is None:
            table.num_computed[index] = draft.computed + draft.num_steps
            table.num_planned[index] = draft.planned + draft.num_steps
            return draft.slots
        after = draft.computed + chunks
        table.num_computed[index] = after
        samples = after >= draft.planned
        if table.prompt_output_slots:
            self._plan_prompt_outputs(draft, after, samples)
        table.num_planned[index[samples]] = after[samples] + 1
        if self._config.enable_prefix_caching:
            # A step that reads these prompt blocks runs no earlier, so they can be shared from now
            # on.
            covered = np.minimum(after, table.num_tokens[index])
            seal(table, self._state.pool.caches, index, covered)
        sampled: Slots = draft.slots[samples]
        return sampled

    def _plan_prompt_outputs(
        self, draft: Draft, after: NDArray[np.int32], samples: NDArray[np.bool_]
    ) -> None:
        """Handles the few running rows that have prompt outputs to report or sample nothing."""
        table = self._state.table
        of_the_admitted, draft.due_prompt_outputs = draft.due_prompt_outputs, []
        for row in np.flatnonzero(table.are_among(draft.index, table.prompt_output_slots)).tolist():
            slot = int(draft.index[row])
            sequence = table.sequence[slot]
            assert sequence is not None
            with blaming(sequence.request.request_id):
                draft.add_prompt_outputs(sequence, slot, int(after[row]))
            if sequence.request.is_prompt_only:
                samples[row] = False
            elif not sequence.has_prompt_outputs_due:
                table.prompt_output_slots.discard(slot)
        draft.due_prompt_outputs += of_the_admitted  # admitted sequences come last in the batch


def _extended(column: NDArray[np.int32], values: list[int]) -> NDArray[np.int32]:
    extended: NDArray[np.int32] = np.concatenate([column, np.array(values, dtype=np.int32)])
    return extended
