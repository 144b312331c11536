"""Gives running rows the blocks that they need for what they compute.

Where none are free, the last running sequences are preempted in favour of earlier ones. A row gets
the blocks of all KV groups or none.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.draft import Draft
from scheduler_svc.core.step.state import SchedulerState

Needs = list[int]  # blocks by group


class Growth:
    """Appends blocks to the tables of a draft's rows."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self._config = config
        self._state = state

    def grow(
        self, draft: Draft, chunks: NDArray[np.int32], rows: NDArray[np.intp], needs: list[int]
    ) -> bool:
        """Allocates `needs[i]` blocks for `rows[i]`; False when some rows had to do without.

        Only where there is one group.
        """
        total = sum(needs)
        if total > self._state.pool.num_free:
            wanted = zip(rows.tolist(), ([need] for need in needs), strict=True)
            self._grow_under_pressure(draft, chunks, wanted)
            return False
        if total > len(rows):
            for slot, need in zip(draft.slots[rows].tolist(), needs, strict=True):
                self.append(draft, slot, [need])
            return True
        block_ids = self._state.pool.take(total)
        self._state.table.tables[0].append_block_each(draft.index[rows], block_ids)
        draft.appended_slots += draft.slots[rows].tolist()
        draft.appended_block_ids += block_ids
        return True

    def grow_all(self, draft: Draft, chunks: NDArray[np.int32]) -> bool:
        """Allocates the blocks of all groups for chunks [rows]; False as in `grow`."""
        lacking = self._lacking(draft, draft.computed + chunks)
        if int(lacking.sum()) > self._state.pool.num_free:
            rows = np.flatnonzero(lacking.any(axis=1))
            wanted = zip(rows.tolist(), lacking[rows].tolist(), strict=True)
            self._grow_under_pressure(draft, chunks, wanted)
            return False
        self._append_all(draft, lacking)
        return True

    def grow_for_grant(self, draft: Draft) -> bool:
        """Allocates a grant's blocks, halving its steps to fit; False if not even one fits."""
        if not self._state.table.more:
            return self._grow_one_for_grant(draft)
        while draft.num_steps:
            lacking = self._lacking(draft, draft.computed + np.int32(draft.num_steps))
            if int(lacking.sum()) <= self._state.pool.num_free:
                self._append_all(draft, lacking)
                return True
            draft.num_steps //= 2
        return False

    def _grow_one_for_grant(self, draft: Draft) -> bool:
        room = self._state.table.capacity[draft.index] - draft.computed
        while draft.num_steps:
            rows = (room < draft.num_steps).nonzero()[0]
            shortage = draft.num_steps - room[rows]
            needs = (-(-shortage // self._config.block_size)).tolist()
            total = sum(needs)
            if total <= self._state.pool.num_free:
                chunks = np.full(len(room), draft.num_steps, dtype=np.int32)
                return not total or self.grow(draft, chunks, rows, needs)
            draft.num_steps //= 2
        return False

    def grow_alone(self, draft: Draft, slot: int, num_tokens: int) -> bool:
        """Allocates blocks so that a slot holds so many tokens; False if there are too few."""
        lacking = self._lacking(draft, np.array([num_tokens], dtype=np.int32))
        if int(lacking.sum()) > self._state.pool.num_free:
            return False
        self.append(draft, slot, lacking[0].tolist())
        return True

    def append(self, draft: Draft, slot: int, needs: Needs) -> None:
        """Allocates blocks for one slot, which are free."""
        for group, num_blocks in enumerate(needs):
            if num_blocks:
                block_ids = self._state.pool.take(num_blocks)
                self._state.table.tables[group].append_blocks(slot, block_ids)
                slots, appended = draft.appended_to(group)
                slots += [slot] * num_blocks
                appended += block_ids

    def _append_all(self, draft: Draft, lacking: NDArray[np.int32]) -> None:
        """Allocates the blocks [rows, groups] that the rows lack, which are free."""
        for group, column in enumerate(lacking.T):
            rows = np.flatnonzero(column)
            if not len(rows):
                continue
            table, needs = self._state.table.tables[group], column[rows]
            block_ids = self._state.pool.take(int(needs.sum()))
            slots, appended = draft.appended_to(group)
            slots += np.repeat(draft.slots[rows], needs).tolist()
            appended += block_ids
            if len(block_ids) == len(rows):
                table.append_block_each(draft.index[rows], block_ids)
                continue
            ends = np.cumsum(needs).tolist()
            for row, end, need in zip(rows.tolist(), ends, needs.tolist(), strict=True):
                table.append_blocks(int(draft.slots[row]), block_ids[end - need : end])

    def _lacking(self, draft: Draft, num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """[rows, groups] blocks that the rows lack to hold so many tokens each."""
        tables = self._state.table.tables
        return np.stack([table.lacking(draft.index, num_tokens) for table in tables], axis=1)

    def _grow_under_pressure(
        self, draft: Draft, chunks: NDArray[np.int32], wanted: Iterable[tuple[int, Needs]]
    ) -> None:
        """Allocates blocks row by row, in order of admission, preempting the last running ones.

        A row only ever loses to an earlier one, so a victim has no blocks from this draft yet.
        """
        running = list(self._state.running.sequences)
        for row, needs in wanted:
            if row >= len(running):  # preempted in favour of an earlier row
                break
            if self._make_room(row, sum(needs), running):
                self.append(draft, int(draft.slots[row]), needs)
            else:
                chunks[row] = 0
        chunks[len(running) :] = 0
        self._state.renew_running()

    def _make_room(self, row: int, need: int, running: list[Sequence]) -> bool:
        """Preempts from the end of `running`, finally the row itself, until `need` are free."""
        state = self._state
        while need > state.pool.num_free:
            if need <= state.num_coming_blocks:
                return False  # enough blocks will be free soon: this row skips the step
            if state.pulls.drop_arrived():
                continue
            if self._may_slide(running):
                return False
            state.preempt(running.pop())
            if row >= len(running):
                return False
        return True

    def _may_slide(self, running: list[Sequence]) -> bool:
        """True if the only running sequence will free blocks once the steps in flight are done.

        Those steps decide how far its window reaches; with none in flight it has room.
        """
        slot = running[-1].slot
        is_in_flight = self._state.table.last_step[slot] > self._state.acked_step
        return bool(self._config.has_window and len(running) == 1 and is_in_flight)
