"""Admits waiting sequences to a step, in the order of the policy, as far as there is room.

The policy decides the order; this module decides whether there is room, which tokens an admitted
sequence computes first, which sequences may be overtaken, and which are preempted for a more urgent
one.
"""

from enum import Enum

import numpy as np

from scheduler_svc.core.kv.sealing import seal_slot
from scheduler_svc.core.request.config import Policy, SchedulerConfig
from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.step.cheapest_first import MAX_COMPARED, CheapestFirst
from scheduler_svc.core.step.draft import Counters, Draft
from scheduler_svc.core.step.plan import AdmissionHold, Cause, EnteringSequence
from scheduler_svc.core.step.reuse import Reuse
from scheduler_svc.core.step.start import Start
from scheduler_svc.core.step.state import SchedulerState
from scheduler_svc.core.step.tier_use import begin_fetch
from scheduler_svc.core.step.whole_pictures import whole_chunk

MAX_AWAITING = 64  # most sequences examined per step that await their fork group
_HELD_BY_SLOTS, _HELD_BY_BUDGET = AdmissionHold(Cause.SLOTS), AdmissionHold(Cause.BUDGET)
_HELD_BY_PREPARATION = AdmissionHold(Cause.PREPARATION)
_HELD_BY_KV = AdmissionHold(Cause.KV)
_HELD_BY_DRAIN = AdmissionHold(Cause.DRAIN)


class _Outcome(Enum):
    """The result of trying to admit one sequence."""

    ENTERED = "entered"
    NO_ROOM = "no room"
    AWAITS_KV = "awaits KV"  # of its prompt, from a tier
    AWAITS_FORK_GROUP = "awaits fork group"  # another sequence computes the same prompt


class _SetAside:
    """Sequences tried in a step but not admitted, in the order in which they were tried."""

    def __init__(self) -> None:
        self.everyone: list[Sequence] = []
        self.passed: list[Sequence] = []  # those of them without room
        self.too_soon: list[Sequence] = []  # those of them that would take what is kept for others

    @property
    def num_awaiting(self) -> int:
        """Number of them that await another sequence of their fork group."""
        return len(self.everyone) - len(self.passed) - len(self.too_soon)

    def await_turn(self, sequence: Sequence) -> None:
        """Adds a sequence whose turn has not come; others pass it."""
        self.everyone.append(sequence)
        self.too_soon.append(sequence)

    def add(self, sequence: Sequence, outcome: _Outcome) -> None:
        """Adds a sequence that was not admitted."""
        self.everyone.append(sequence)
        if outcome is _Outcome.NO_ROOM:
            self.passed.append(sequence)


class Admission:
    """Moves sequences from the queue into slots."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState, counters: Counters) -> None:
        self._config = config
        self._state = state
        self._counters = counters
        self.reuse = Reuse(config, state)
        self._groups = config.groups
        # By number of a sequence without room: blocks that were free then, and how many more it
        # needed. One that moves away and comes back has another number.
        self._blocked: dict[int, tuple[int, int]] = {}

    def reset(self) -> None:
        """Forgets what did not fit: the worker's blocks have changed."""
        self._blocked.clear()

    # --- entering --------------------------------------------------------------------------------

    def draft_waiting(self, draft: Draft) -> None:
        """Admits the sequences that fit, overtaking a few that do not."""
        state = self._state
        if not len(state.waiting):
            return
        entered: list[Sequence] = []
        aside, line = _SetAside(), None
        if state.sessions is not None:
            state.sessions.let_age()
            line = CheapestFirst(state.waiting, state.sessions)
        while draft.budget > 0 and state.free_slots and self._may_look_past(aside):
            sequence = state.waiting.take() if line is None else line.take()
            if sequence is None:
                break
            if state.requirements.must_wait(sequence):  # what was ready went with a worker
                state.enqueue(sequence)
                continue
            is_barred = sequence.num_awaited or sequence.is_suspect or self._is_shut_out(sequence)
            if not is_barred and self._comes_too_soon(sequence):
                aside.await_turn(sequence)
                continue
            if is_barred or self._would_rob(aside, sequence):
                aside.add(sequence, _Outcome.NO_ROOM)
                break
            outcome = self._admit(draft, sequence)
            if outcome is _Outcome.AWAITS_KV:
                continue
            if outcome is not _Outcome.ENTERED:
                aside.add(sequence, outcome)
                continue
            entered.append(sequence)
            for overtaken in aside.passed:
                overtaken.num_overtaken += 1
            if line is not None:
                line.put_back()  # another tenant may be first now
        if line is not None:
            line.put_back()
        draft.hold = self._why_on_hold(draft, aside)
        for sequence in reversed(aside.everyone):
            state.waiting.put_back(sequence)
        blocked = self._blocked
        self._blocked = {s.number: blocked[s.number] for s in aside.passed if s.number in blocked}
        if entered:
            state.join_running(entered)

    def draft_suspect(self, draft: Draft) -> bool:
        """Admits the next sequence, if it is a suspect and there is room, to a step of its own."""
        state = self._state
        sequence = state.waiting.take() if state.free_slots else None
        if sequence is None:
            return False
        if state.requirements.must_wait(sequence):
            state.enqueue(sequence)
            return False
        may_enter = sequence.is_suspect and not sequence.num_awaited
        may_enter = may_enter and not self._is_shut_out(sequence)
        may_enter = may_enter and self._has_room_for_all(sequence)
        if may_enter and self._admit(draft, sequence) is _Outcome.ENTERED:
            state.join_running([sequence])
            return True
        state.waiting.put_back(sequence)
        return False

    def _has_room_for_all(self, sequence: Sequence) -> bool:
        """True if a suspect can compute all its tokens while the others run.

        With room for its first chunk alone it would be preempted in their favour, and enter again,
        for ever.
        """
        state, num_tokens = self._state, len(sequence.token_ids)
        is_alone = not state.running.sequences
        return is_alone or self._config.blocks_needed(num_tokens + 1) <= state.pool.num_free

    def _may_look_past(self, aside: _SetAside) -> bool:
        """True if the next sequence may be tried although those in `aside` were not admitted.

        A preempted sequence is never overtaken: the next one would take the room that it gave up.
        One that awaits its fork group is always overtaken: it needs no room yet.
        """
        if len(aside.passed) > self._config.queue_window:
            return False
        if aside.num_awaiting > MAX_AWAITING or len(aside.too_soon) > MAX_COMPARED:
            return False
        return all(s.status is Status.WAITING for s in aside.everyone) and all(
            s.num_overtaken < self._config.max_overtakes for s in aside.passed
        )

    def _is_shut_out(self, sequence: Sequence) -> bool:
        return self._state.is_closed and not sequence.has_run

    def _comes_too_soon(self, sequence: Sequence) -> bool:
        """True if a sequence would take what is kept for others before its turn.

        It may if nothing runs, if it did before, or if it is more urgent than what runs.
        """
        sessions, running = self._state.sessions, self._state.running.sequences
        if sessions is None or not running or sequence.status is not Status.WAITING:
            return False
        if self._state.waiting.order.is_more_urgent(sequence, running[-1]):
            return False
        return not sessions.may_enter(sequence.number)

    def _would_rob(self, aside: _SetAside, sequence: Sequence) -> bool:
        order = self._state.waiting.order
        return any(order.is_more_urgent(waiting, sequence) for waiting in aside.everyone)

    def _why_on_hold(self, draft: Draft, aside: _SetAside) -> AdmissionHold | None:
        state, passed = self._state, aside.passed
        if not aside.everyone and not len(state.waiting):
            return None
        if passed:
            if self._is_shut_out(passed[0]):
                return _HELD_BY_DRAIN
            if passed[0].num_awaited:
                return AdmissionHold(Cause.TOKEN, first=passed[0].request.request_id)
            num_free, short = state.pool.num_free, {}
            by_number = {sequence.number: sequence.request.request_id for sequence in passed}
            for number, (num_free_then, short_then) in self._blocked.items():
                if number in by_number:
                    short[by_number[number]] = short_then + num_free_then - num_free
            return AdmissionHold(Cause.BLOCKS, passed[0].request.request_id, short)
        if aside.too_soon:
            return AdmissionHold(Cause.BLOCKS, aside.too_soon[0].request.request_id)
        if aside.everyone:
            return AdmissionHold(Cause.FORK_GROUP, first=aside.everyone[0].request.request_id)
        if not state.waiting.num_admissible:
            return _HELD_BY_KV if state.waiting.fetching else _HELD_BY_PREPARATION
        return _HELD_BY_BUDGET if state.free_slots else _HELD_BY_SLOTS

    def _admit(self, draft: Draft, sequence: Sequence) -> _Outcome:
        """Moves a sequence into a slot, if there are blocks for its first chunk."""
        with blaming(sequence.request.request_id):
            return self._try_to_enter(draft, sequence)

    def _try_to_enter(self, draft: Draft, sequence: Sequence) -> _Outcome:
        config, state = self._config, self._state
        num_free, is_sibling = state.pool.num_free, bool(sequence.request.fork_group)
        number = sequence.number
        if not is_sibling and number in self._blocked and num_free <= self._blocked[number][0]:
            return _Outcome.NO_ROOM  # a second cache lookup would cost in proportion to the prompt
        start = self.reuse.find(sequence, draft.admitted)
        if start is None:
            return _Outcome.AWAITS_FORK_GROUP
        chunk, num_new = self._first_chunk(sequence, start, draft.budget)
        if not chunk:
            return _Outcome.NO_ROOM  # for a picture that is to be computed whole
        # Shared blocks without a holder leave the free queue as well.
        num_taken = sum(num_new) + state.pool.num_free_among(start.all_shared)
        short = num_taken + self._rest_of_prompt(sequence, start, chunk) - num_free
        if short > 0 and not state.running.sequences and state.pulls.drop_arrived(sequence):
            return self._try_to_enter(draft, sequence)
        if short > 0:
            self._blocked[number] = num_free, short
            return _Outcome.NO_ROOM
        self._blocked.pop(number, None)
        if state.transfers is not None:
            transfer_id = begin_fetch(state, sequence, start)
            if transfer_id is not None:
                state.await_kv(sequence, transfer_id)
                return _Outcome.AWAITS_KV
        tables = state.enter(sequence, start, num_new)
        if sequence.num_cached is None:
            self._count_first(sequence, start)
            if config.policy is Policy.FAIR:
                num_tokens = len(sequence.token_ids) - start.num_computed
                state.share.charge_prompt(sequence.request.tenant, num_tokens)
        else:
            self._count_return(sequence, start)
        if start.sibling is not None and start.sibling.slot is not None:
            # The step reads the blocks of the other sequence, which must not be freed before it
            # ends.
            draft.read_slots.append(start.sibling.slot)
        self._draft_entry(draft, sequence, start, chunk, tables)
        return _Outcome.ENTERED

    def _rest_of_prompt(self, sequence: Sequence, start: Start, chunk: int) -> int:
        """Blocks that a sequence takes after its first chunk, and for which it must wait, too.

        By sessions one enters when it can compute its prompt: otherwise several begin, take blocks
        that others will read, and are preempted before their ends. Alone it may always try.
        """
        if self._state.sessions is None or not self._state.running.sequences:
            return 0
        num_begun, size = start.num_computed + chunk, self._config.block_size
        return -(-len(sequence.token_ids) // size) - -(-num_begun // size)

    def _count_first(self, sequence: Sequence, start: Start) -> None:
        """Counts prefix cache hits at a sequence's first admission; a fork counts as no lookup."""
        sequence.num_cached = min(start.num_computed, sequence.num_prompt)
        if self._state.sessions is not None:
            tokens = sequence.num_prompt, sequence.num_cached
            self._state.sessions.count_turn(sequence.number, *tokens)
        if start.sibling is not None:
            self._counters.num_forks += 1
            return
        if sequence.is_private or not self._config.enable_prefix_caching:
            return  # nothing was looked up
        self._counters.prefix_query_tokens += len(sequence.token_ids)
        self._counters.prefix_hit_tokens += start.num_computed

    def _count_return(self, sequence: Sequence, start: Start) -> None:
        """Counts prefix cache hits of a sequence that has run, and whose KV is not on the host."""
        if sequence.is_private or not self._config.enable_prefix_caching or start.host_blocks:
            return
        if start.sibling is None:
            self._counters.returned_query_tokens += len(sequence.token_ids)
            self._counters.returned_hit_tokens += start.num_computed

    def _first_chunk(self, sequence: Sequence, start: Start, budget: int) -> tuple[int, list[int]]:
        """Returns (tokens of the first chunk, new blocks by group for them and for the start)."""
        config = self._config
        chunk = min(len(sequence.token_ids) - start.num_computed, budget)
        if config.long_prefill_token_threshold:
            chunk = min(chunk, config.long_prefill_token_threshold)
        if config.keeps_pictures_whole:
            chunk = whole_chunk(sequence.request.extras, start.num_computed, chunk, budget)
        end, first = start.num_computed + chunk, self._groups[0]
        num_had = start.num_null + len(start.shared) + len(start.given)
        needs = [-(-end // first.block_size) - num_had]
        for group, table in zip(self._groups[1:], start.more, strict=True):
            needs.append(-(-end // group.block_size) - table.num_null - len(table.shared))
        return chunk, needs

    def _draft_entry(
        self,
        draft: Draft,
        sequence: Sequence,
        start: Start,
        chunk: int,
        tables: list[list[int]],
    ) -> None:
        """Adds the first chunk of a sequence that has just received its slot to the draft."""
        table, slot = self._state.table, sequence.slot
        assert slot is not None
        num_cached = start.num_computed
        table.num_computed[slot] = num_cached + chunk
        table.last_step[slot] = draft.step_id
        prompt_output_begin = sequence.num_prompt_outputs_planned
        draft.add_prompt_outputs(sequence, slot, num_cached + chunk)
        is_prompt_only = sequence.request.is_prompt_only
        if not (is_prompt_only or sequence.has_prompt_outputs_due):
            table.prompt_output_slots.discard(slot)
        if num_cached + chunk == len(sequence.token_ids) and not is_prompt_only:
            table.num_planned[slot] += 1
            draft.admitted_sampled.append(slot)
        if self._config.enable_prefix_caching:
            # Shareable from now on, even within this step: a layer stores its KV before reading it.
            seal_slot(table, self._state.pool.caches, slot)
        if self._state.snapshots is not None:
            index = np.array([slot], dtype=np.intp)
            draft.state_saves += self._state.snapshots.cross(index, table.num_computed[index])
        draft.admitted.append(
            EnteringSequence(
                slot=slot,
                request=sequence.request,
                token_ids=sequence.token_ids,
                num_computed_tokens=num_cached,
                block_ids=tables[0],
                group_block_ids=tuple(tables[1:]),
                state_snapshot=start.snapshot,
                num_first_cached_tokens=sequence.num_cached or 0,
                stop_ids=sequence.stop_ids,
                prompt_output_begin=prompt_output_begin,
                preparations=self._state.requirements.entered(sequence),
            )
        )
        draft.admitted_chunks.append(chunk)
        draft.budget -= chunk

    # --- making way ------------------------------------------------------------------------------

    def make_way(self) -> None:
        """Preempts the least urgent running sequences if a more urgent one waits.

        Runs before the running set is drafted, and only if preemption frees enough. Blocks freed
        this way may still be fenced; they count as coming, so that nothing else is preempted for
        the same need.
        """
        state = self._state
        if self._config.policy is not Policy.PRIORITY or not state.running.sequences:
            return
        head, running = state.waiting.peek(), list(state.running.sequences)
        if head is None or head.num_awaited or state.requirements.must_wait(head):
            return
        if self._is_shut_out(head):
            return
        is_more_urgent = state.waiting.order.is_more_urgent
        if not is_more_urgent(head, running[-1]):
            return
        with blaming(head.request.request_id):
            start = self.reuse.find(head, [])
        if start is None:
            return
        _, num_new = self._first_chunk(head, start, self._config.max_num_batched_tokens)
        need = sum(num_new) + state.pool.num_free_among(start.all_shared)
        victims = [s for s in running if is_more_urgent(head, s)]
        to_gain = sum(state.table.num_held(s.slot) for s in victims if s.slot is not None)
        if need > state.num_coming_blocks + to_gain:
            return
        while need > state.num_coming_blocks or not state.num_coming_slots:
            if not victims:
                break
            state.preempt(victims.pop())
        state.renew_running()
