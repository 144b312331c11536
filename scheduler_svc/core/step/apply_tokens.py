"""Token update: appends the tokens of a step to their sequences and finds those that end.

It knows tokens and rows. The scheduler checks first which step a result answers, and afterwards
ends the sequences.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.sealing import seal
from scheduler_svc.core.kv.slots import Index, Slots
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.request import FinishReason, Request, TokenIds
from scheduler_svc.core.request.sequence import End, Sequence, Status
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step.plan import (
    Finished,
    PromptOutputDelivery,
    StepOutputs,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.step.state import SchedulerState

_NOT_FINITE = "the model's logits were not finite"


@dataclass(slots=True)
class _Range:
    """Tokens of one sequence, from a row of the result on."""

    request: Request
    token_ids: TokenIds
    first: int


@dataclass(slots=True)  # mutable for speed, as plans are
class TokenUpdate:
    """Tokens of a step as columns, and the sequences that they end."""

    clients: NDArray[np.int32]
    handles: NDArray[np.uint32]
    token_ids: TokenIds
    sampled_rows: Index | None  # row of the result per token; None: all rows, in order
    ends: list[End]

    def add(self, ranges: list[_Range]) -> None:
        """Adds the tokens of sequences with drafts, all at once: a step may have many of them."""
        assert self.sampled_rows is not None
        counts = [len(one.token_ids) for one in ranges]
        clients = np.array([one.request.client for one in ranges], dtype=np.int32)
        handles = np.array([one.request.handle for one in ranges], dtype=np.uint32)
        self.clients = np.concatenate([self.clients, clients.repeat(counts)])
        self.handles = np.concatenate([self.handles, handles.repeat(counts)])
        self.token_ids = np.concatenate([self.token_ids, *(one.token_ids for one in ranges)])
        rows = [np.arange(r.first, r.first + n) for r, n in zip(ranges, counts, strict=True)]
        self.sampled_rows = np.concatenate([self.sampled_rows, *rows])

    def with_ends(
        self, finished: list[Finished], deliveries: list[PromptOutputDelivery]
    ) -> StepOutputs:
        """The step's outputs for the clients."""
        rows = self.sampled_rows
        return StepOutputs(self.clients, self.handles, self.token_ids, finished, rows, deliveries)


class TokenUpdates:
    """Writes sampled tokens into the slot table."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self._config = config
        self._state = state

    def take(
        self, plan: StepPlan, result: StepResult, appended_late: list[Sequence]
    ) -> TokenUpdate:
        """Appends the tokens of a step, one for each slot that sampled, more if drafts came true.

        Notes in `appended_late` the sequences that had no slot any more, once for each token.
        """
        if plan.drafts:
            return self._take_ranges(plan, result, appended_late)
        return self._take_one_each(plan, plan.sampled_slots, result, appended_late)

    def _take_one_each(
        self, plan: StepPlan, slots: Slots, result: StepResult, appended_late: list[Sequence]
    ) -> TokenUpdate:
        table, token_ids = self._state.table, result.token_ids
        # While the running set is the plan's, no sequence has left.
        running = self._state.running if plan.running is self._state.running else None
        everyone = running if running is not None and slots is running.slots else None
        index = slots.astype(np.intp) if everyone is None else everyone.index
        ends: list[End] = []
        late: list[tuple[Sequence, int]] = []
        sampled_rows: Index | None = None
        if result.bad_rows or not (running is not None or table.is_live[index].all()):
            everyone = None
            is_good, late = self._set_aside(slots, result, ends)
            index, token_ids = index[is_good], token_ids[is_good]
            sampled_rows = np.append(np.flatnonzero(is_good), [row for _, row in late])
            sampled_rows = sampled_rows.astype(np.intp)

        position = table.num_tokens[index]
        length = position + 1
        table.token_ids[index, position] = token_ids
        table.num_tokens[index] = length
        if self._config.enable_prefix_caching:
            # A granted step may still be taken back: only the tokens before this one are surely
            # computed.
            seal(table, self._state.pool.caches, index, position)
        if self._state.snapshots is not None:
            self._state.snapshots.seal(table)
        if self._state.share.is_shared:
            self._charge(index)
        facts = table.facts(index) if everyone is None else everyone.facts(table)
        clients, handles = facts.clients, facts.handles
        ends += self._ended(index, token_ids, length, facts.max_len)
        if late:
            late_ids = result.token_ids[[row for _, row in late]]
            ends += self._append_late(late, late_ids, appended_late)
            requests = [sequence.request for sequence, _ in late]
            clients = np.append(clients, [r.client for r in requests]).astype(np.int32)
            handles = np.append(handles, [r.handle for r in requests]).astype(np.uint32)
            token_ids = np.append(token_ids, late_ids)
        return TokenUpdate(clients, handles, token_ids, sampled_rows, ends)

    def _take_ranges(
        self, plan: StepPlan, result: StepResult, appended_late: list[Sequence]
    ) -> TokenUpdate:
        """Appends the tokens of a step in which some rows have drafts."""
        slots = plan.sampled_slots
        counts = result.num_sampled
        if counts is None:
            counts = np.ones(len(slots), dtype=np.int32)
        firsts = np.cumsum(counts) - counts
        has_drafts = self._state.table.are_among(slots, plan.drafts)
        plain = firsts[~has_drafts]
        update = self._take_one_each(plan, slots[~has_drafts], _part(result, plain), appended_late)
        if update.sampled_rows is None:
            update.sampled_rows = np.arange(len(plain), dtype=np.intp)
        update.sampled_rows = plain[update.sampled_rows].astype(np.intp)
        ranges = []
        for slot, first, count in zip(
            slots[has_drafts].tolist(),
            firsts[has_drafts].tolist(),
            counts[has_drafts].tolist(),
            strict=True,
        ):
            found = _part(result, np.arange(first, first + count))
            num_drafted = len(plan.drafts[slot])
            ranges += self._take_range(update, slot, num_drafted, first, found, appended_late)
        update.add(ranges)
        if self._state.snapshots is not None:
            self._state.snapshots.seal(self._state.table)
        return update

    def _take_range(
        self,
        update: TokenUpdate,
        slot: int,
        num_drafted: int,
        first: int,
        found: StepResult,
        appended_late: list[Sequence],
    ) -> list[_Range]:
        """Appends what one row with drafts brought; its tokens begin at `first` of the result.

        Returns what is to be told, nothing of a sequence that has ended.
        """
        state, table = self._state, self._state.table
        sequence = table.sequence[slot] or state.departed.get(slot)
        if sequence is None or sequence.status is Status.FINISHED:
            return []
        known = int(table.num_tokens[slot]) if sequence.slot == slot else len(sequence.token_ids)
        num_good = min(found.bad_rows, default=len(found.token_ids))
        token_ids, end = _until_its_end(sequence, known, found.token_ids[:num_good])
        with blaming(sequence.request.request_id):
            if sequence.slot == slot:
                last = table.settle(slot, token_ids)
                if self._config.enable_prefix_caching:
                    index = np.array([slot], dtype=np.intp)
                    seal(table, state.pool.caches, index, np.array([last], dtype=np.int32))
                if state.share.is_shared:
                    state.share.charge_output(sequence.request.tenant, len(token_ids))
            else:
                sequence.num_awaited -= 1 + num_drafted
                for token_id in token_ids.tolist():
                    state.waiting.append_token(sequence, token_id)
                    appended_late.append(sequence)
        if end is None and found.bad_rows:
            state.forget(slot)
            end = _failure(sequence, found.dead_ends.get(num_good))
        update.ends += [] if end is None else [end]
        return [_Range(sequence.request, token_ids, first)]

    def begin_decoding(self, slots: Slots) -> None:
        """Ends the prefill phase of slots that sample their first token since admission."""
        table = self._state.table
        for slot in slots[table.is_prefilling[slots]].tolist():
            table.is_prefilling[slot] = False
            sequence = table.sequence[slot]
            if sequence is not None:
                sequence.timeline.enter(Phase.DECODE, self._state.now_s)

    def _charge(self, index: Index) -> None:
        sequences = [self._state.table.sequence[slot] for slot in index.tolist()]
        tenants = Counter(s.request.tenant for s in sequences if s is not None)
        for tenant, num_tokens in tenants.items():
            self._state.share.charge_output(tenant, num_tokens)

    def _ended(
        self,
        index: Index,
        token_ids: TokenIds,
        length: NDArray[np.int32],
        max_len: NDArray[np.int32],
    ) -> list[End]:
        """Ends of the sequences whose newest token is a stop token or the last allowed."""
        table = self._state.table
        is_full = length >= max_len
        is_stop = None
        for column in table.stop_ids:
            is_here = column[index] == token_ids
            if np.count_nonzero(is_here):
                is_stop = is_here if is_stop is None else is_stop | is_here
        if is_stop is not None:
            is_stop &= length >= table.min_len[index]
        ends = is_full if is_stop is None else is_full | is_stop
        if not np.count_nonzero(ends):
            return []
        ended = []
        for row in np.flatnonzero(ends).tolist():
            sequence = table.sequence[index[row]]
            assert sequence is not None
            # A stop token that is also the last token allowed counts as a stop.
            stopped = is_stop is not None and is_stop[row]
            ended.append(End(sequence, FinishReason.STOP if stopped else FinishReason.LENGTH))
        return ended

    def _set_aside(
        self, slots: Slots, result: StepResult, ends: list[End]
    ) -> tuple[NDArray[np.bool_], list[tuple[Sequence, int]]]:
        """Separates rows that are not live or are bad from the others.

        Returns a mask of the good rows [rows], and (sequence, row) for tokens of preempted
        sequences. Adds failed sequences to `ends`; drops the tokens of ended ones.
        """
        state = self._state
        is_bad = np.zeros(len(slots), dtype=np.bool_)
        is_bad[list(result.bad_rows)] = True
        is_good = state.table.is_live[slots] & ~is_bad
        late = []
        for row in np.flatnonzero(~is_good).tolist():
            slot = int(slots[row])
            sequence = state.table.sequence[slot] or state.departed.get(slot)
            if sequence is None or sequence.status is Status.FINISHED:
                continue
            if is_bad[row]:
                state.forget(slot)
                ends.append(_failure(sequence, result.dead_ends.get(row)))
            else:
                late.append((sequence, row))
        return is_good, late

    def _append_late(
        self, late: list[tuple[Sequence, int]], token_ids: TokenIds, appended: list[Sequence]
    ) -> list[End]:
        """Appends tokens to sequences that were preempted while the token was in flight."""
        ends = []
        for (sequence, _), token_id in zip(late, token_ids.tolist(), strict=True):
            with blaming(sequence.request.request_id):
                self._state.waiting.append_token(sequence, token_id)
            appended.append(sequence)
            sequence.num_awaited -= 1
            length = len(sequence.token_ids)
            if token_id in sequence.stop_ids and length >= sequence.min_len:
                ends.append(End(sequence, FinishReason.STOP))
            elif length >= sequence.max_len:
                ends.append(End(sequence, FinishReason.LENGTH))
        return ends


def _part(result: StepResult, rows: NDArray[np.integer]) -> StepResult:
    """Some rows of a result, numbered anew."""
    if not result.bad_rows:
        return StepResult(result.step_id, result.token_ids[rows])
    bad = [n for n, row in enumerate(rows.tolist()) if row in result.bad_rows]
    dead_ends = {n: why for n in bad if (why := result.dead_ends.get(int(rows[n]))) is not None}
    return StepResult(result.step_id, result.token_ids[rows], tuple(bad), (), dead_ends)


def _until_its_end(
    sequence: Sequence, num_known: int, token_ids: TokenIds
) -> tuple[TokenIds, End | None]:
    """The tokens up to the one that ends a sequence of so many tokens, and its end if one does."""
    for count, token_id in enumerate(token_ids.tolist(), start=1):
        length = num_known + count
        if token_id in sequence.stop_ids and length >= sequence.min_len:
            return token_ids[:count], End(sequence, FinishReason.STOP)
        if length >= sequence.max_len:
            return token_ids[:count], End(sequence, FinishReason.LENGTH)
    return token_ids, None


def _failure(sequence: Sequence, problem: str | None) -> End:
    """The end of a sequence whose row has no token; `problem`: its own parameters left none."""
    if problem is None:
        return End(sequence, FinishReason.ERROR, _NOT_FINITE)
    return End(sequence, FinishReason.DEAD_END, problem)
