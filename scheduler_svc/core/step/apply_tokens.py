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
from scheduler_svc.core.request.config import Policy, SchedulerConfig
from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.request import FinishReason, TokenIds
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


@dataclass(slots=True)  # mutable for speed, as plans are
class TokenUpdate:
    """Tokens of a step as columns, and the sequences that they end."""

    clients: NDArray[np.int32]
    handles: NDArray[np.uint32]
    token_ids: TokenIds
    sampled_rows: Index | None  # row of the result per token; None: all rows, in order
    ends: list[End]

    def with_ends(
        self, finished: list[Finished], deliveries: list[PromptOutputDelivery]
    ) -> StepOutputs:
        """What the step brought to the clients."""
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
        """Appends the tokens of a step, one for each slot that sampled.

        Notes in `appended_late` the sequences that had no slot any more.
        """
        table, token_ids, slots = self._state.table, result.token_ids, plan.sampled_slots
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
            seal(table, self._state.pool.cache, index, position)
        if self._config.policy is Policy.FAIR:
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
                if (problem := result.dead_ends.get(row)) is None:
                    ends.append(End(sequence, FinishReason.ERROR, _NOT_FINITE))
                else:
                    ends.append(End(sequence, FinishReason.DEAD_END, problem))
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
