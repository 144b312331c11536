"""Rows that verify drafts: they advance by a range, so each awaits its last step before the next.

The drafts come from outside: what they are changes how soon a token is known, never which it is.
"""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.step.draft import Draft
from scheduler_svc.core.step.plan import Drafts, WorkerDraft
from scheduler_svc.core.step.state import SchedulerState


class Speculation:
    """Adds drafts to the rows of a step under construction."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self._config = config
        self._state = state

    def hold(self, draft: Draft, chunks: NDArray[np.int32], drafts: Drafts) -> None:
        """Leaves out the rows [rows] whose next token is not known yet and will be drafted from."""
        table = self._state.table
        is_held = table.are_among(draft.index, [*drafts, *table.drafting_slots])
        chunks[is_held & (draft.planned > table.num_tokens[draft.index])] = 0

    def add(self, draft: Draft, chunks: NDArray[np.int32], drafts: Drafts, budget: int) -> bool:
        """Adds drafts to the chunks of rows that decode, as far as there is room; False: to none.

        Drafts come last: they take neither budget from a prompt already begun nor a block from
        another sequence.
        """
        left = min(budget - int(chunks.sum()), self._positions_left(chunks))
        fitting: dict[int, TokenIds | WorkerDraft] = {}
        table, index = self._state.table, draft.index
        for row in np.flatnonzero(table.are_among(index, drafts) & (chunks == 1)).tolist():
            slot = int(index[row])
            if table.is_prefilling[slot]:
                continue
            # One more token is sampled than there are drafts.
            num_tokens = int(table.num_tokens[slot])
            room = int(table.max_len[slot]) - num_tokens - 1
            if (snapshots := self._state.snapshots) is not None:
                room = min(room, snapshots.room_for_drafts(slot, num_tokens))
            token_ids = drafts[slot][: min(room, left)]
            if len(token_ids):
                fitting[row] = token_ids
                left -= len(token_ids)
        if not fitting:
            return False
        rows = np.array(list(fitting), dtype=np.intp)
        longer = chunks.copy()
        longer[rows] += [len(token_ids) for token_ids in fitting.values()]
        if not self._has_blocks(draft, longer):
            return False
        chunks[:] = longer
        draft.drafts = {int(index[row]): token_ids for row, token_ids in fitting.items()}
        table.drafting_slots.update(draft.drafts)
        return True

    def _positions_left(self, chunks: NDArray[np.int32]) -> int:
        """The number of tokens that the step may still sample: at most one for each slot.

        The worker's memory for logits is of that size. Sequences that may enter in this step have
        theirs, too.
        """
        most, num_running = self._config.max_num_seqs, len(chunks)
        num_entering = min(self._state.waiting.num_admissible, most - num_running)
        return most - int(np.count_nonzero(chunks)) - num_entering

    def _has_blocks(self, draft: Draft, chunks: NDArray[np.int32]) -> bool:
        """True if the step's rows [rows] need no more blocks than are free."""
        after, tables = draft.computed + chunks, self._state.table.tables
        needs = sum(int(table.lacking(draft.index, after).sum()) for table in tables)
        return needs <= self._state.pool.num_free
