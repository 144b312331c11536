"""Who enters a step: the waiting, in the order of the policy, as far as there is room.

The order says whose turn it is; this module says whether there is room, what an admitted sequence
computes first, whom to look past, and who makes way for somebody more urgent.
"""

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.draft import Counters, Draft
from scheduler_svc.core.plan import Cause, Held, NewSequence
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sealing import seal_slot
from scheduler_svc.core.sequence import Sequence, Status

_HELD_BY_SLOTS, _HELD_BY_BUDGET = Held(Cause.SLOTS), Held(Cause.BUDGET)


class Admission:
    """Moves sequences from the queue into slots."""

    def __init__(self, config: SchedulerConfig, residency: Residency, counters: Counters) -> None:
        self._config = config
        self._residency = residency
        self._counters = counters
        # Who did not fit when so many blocks were free, and by how many it was short.
        self._blocked: dict[Sequence, tuple[int, int]] = {}

    def reset(self) -> None:
        """Other blocks are there than before."""
        self._blocked.clear()

    # --- entering --------------------------------------------------------------------------------

    def draft_waiting(self, draft: Draft) -> None:
        """Admits whoever fits, looking past a few that do not."""
        residency = self._residency
        if not len(residency.waiting):
            return
        entered: list[Sequence] = []
        passed: list[Sequence] = []
        while draft.budget > 0 and residency.free_slots and self._may_look_past(passed):
            sequence = residency.waiting.take()
            if sequence is None:
                break
            if sequence.num_awaited or self._would_rob(passed, sequence):
                passed.append(sequence)
                break
            if not self._admit(draft, sequence):
                passed.append(sequence)
                continue
            entered.append(sequence)
            for overtaken in passed:
                overtaken.num_overtaken += 1
        draft.held = self._why_held(draft, passed)
        for sequence in reversed(passed):
            residency.waiting.put_back(sequence)
        self._blocked = {s: self._blocked[s] for s in passed if s in self._blocked}
        if entered:
            residency.join_roster(entered)

    def _may_look_past(self, passed: list[Sequence]) -> bool:
        """Whether the next may be tried although these did not fit.

        A sequence that was preempted is not passed at all: it would be robbed of what it gave up.
        """
        return len(passed) <= self._config.queue_window and all(
            s.status is Status.WAITING and s.num_overtaken < self._config.max_overtakes
            for s in passed
        )

    def _would_rob(self, passed: list[Sequence], sequence: Sequence) -> bool:
        order = self._residency.waiting.order
        return any(order.is_more_urgent(waiting, sequence) for waiting in passed)

    def _why_held(self, draft: Draft, passed: list[Sequence]) -> Held | None:
        residency = self._residency
        if not passed and not len(residency.waiting):
            return None
        if passed:
            if passed[0].num_awaited:
                return Held(Cause.TOKEN, first=passed[0].request.request_id)
            num_free, short = residency.pool.num_free, {}
            for sequence, (num_free_then, short_then) in self._blocked.items():
                if sequence in passed:
                    short[sequence.request.request_id] = short_then + num_free_then - num_free
            return Held(Cause.BLOCKS, passed[0].request.request_id, short)
        return _HELD_BY_BUDGET if residency.free_slots else _HELD_BY_SLOTS

    def _admit(self, draft: Draft, sequence: Sequence) -> bool:
        """Moves a sequence into a slot, if there are blocks for its first chunk."""
        config, residency = self._config, self._residency
        num_free = residency.pool.num_free
        if sequence in self._blocked and num_free <= self._blocked[sequence][0]:
            return False  # looking its prompt up again would cost more the longer it is
        shared, chunk, num_new = self._first_chunk(sequence, draft.budget)
        # Shared blocks that nobody holds leave the free queue, too.
        short = num_new + residency.pool.num_free_among(shared) - num_free
        if short > 0:
            self._blocked[sequence] = num_free, short
            return False
        self._blocked.pop(sequence, None)
        num_cached = len(shared) * config.block_size
        block_ids = residency.enter(sequence, shared, num_new)
        if sequence.num_cached is None:
            sequence.num_cached = num_cached
            num_tokens = len(sequence.token_ids)
            self._counters.prefix_query_tokens += num_tokens
            self._counters.prefix_hit_tokens += num_cached
            if config.policy is Policy.FAIR:
                residency.share.charge_prompt(sequence.request.tenant, num_tokens - num_cached)
        self._draft_entry(draft, sequence, num_cached, chunk, block_ids)
        return True

    def _first_chunk(self, sequence: Sequence, budget: int) -> tuple[list[int], int, int]:
        """The cached blocks, the tokens computed at once, and the blocks that these need."""
        config = self._config
        shared = self.cached_blocks(sequence)
        num_cached = len(shared) * config.block_size
        chunk = min(len(sequence.token_ids) - num_cached, budget)
        if config.long_prefill_token_threshold:
            chunk = min(chunk, config.long_prefill_token_threshold)
        return shared, chunk, -(-(num_cached + chunk) // config.block_size) - len(shared)

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves what has to be computed."""
        if not self._config.enable_prefix_caching or sequence.is_private:
            return []
        usable = sequence.num_skippable // self._config.block_size
        hashes = sequence.block_hashes(self._config.block_size)[:usable]
        return self._residency.pool.cache.lookup(hashes, sequence.token_ids, sequence.root)

    def _draft_entry(
        self, draft: Draft, sequence: Sequence, num_cached: int, chunk: int, block_ids: list[int]
    ) -> None:
        """Books the first chunk of a sequence that has just got its slot."""
        table, slot = self._residency.table, sequence.slot
        assert slot is not None
        table.num_computed[slot] = num_cached + chunk
        table.last_step[slot] = draft.step_id
        report_begin = sequence.num_report_planned
        draft.inquire(sequence, slot, num_cached + chunk)
        is_prompt_only = sequence.request.is_prompt_only
        if not (is_prompt_only or sequence.has_to_report):
            table.inquiring.discard(slot)
        if num_cached + chunk == len(sequence.token_ids) and not is_prompt_only:
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
                report_begin=report_begin,
            )
        )
        draft.admitted_chunks.append(chunk)
        draft.budget -= chunk

    # --- making way ------------------------------------------------------------------------------

    def make_way(self) -> None:
        """Before the running are drafted: the least important leave for somebody more urgent.

        Only when enough of them run to make the difference. What they held may still be fenced; it
        is then on its way, and nobody else has to leave for it.
        """
        residency = self._residency
        if self._config.policy is not Policy.PRIORITY or not residency.roster.sequences:
            return
        head, running = residency.waiting.peek(), list(residency.roster.sequences)
        if head is None or head.num_awaited:
            return
        is_more_urgent = residency.waiting.order.is_more_urgent
        if not is_more_urgent(head, running[-1]):
            return
        shared, _, num_new = self._first_chunk(head, self._config.max_num_batched_tokens)
        need = num_new + residency.pool.num_free_among(shared)
        victims = [s for s in running if is_more_urgent(head, s)]
        to_gain = sum(int(residency.table.num_blocks[s.slot]) for s in victims)
        if need > residency.num_coming_blocks + to_gain:
            return
        while need > residency.num_coming_blocks or not residency.num_coming_slots:
            if not victims:
                break
            residency.preempt(victims.pop())
        residency.renew_roster()
