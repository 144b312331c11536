"""Who holds which slot and which blocks, and when they may be given to somebody else.

The fence: steps are planned before earlier ones have finished, so a sequence may leave while a step
that still touches its slot and blocks is in flight. Those are handed out again only after the last
such step was acknowledged.
"""

from dataclasses import dataclass, replace

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.fair_share import FairShare
from scheduler_svc.core.order import make_order
from scheduler_svc.core.sequence import Sequence, Status
from scheduler_svc.core.slots import Roster, SlotTable
from scheduler_svc.core.timeline import Phase
from scheduler_svc.core.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Fenced:
    """A slot and blocks that step `last_step` may still touch."""

    last_step: int
    slot: int
    block_ids: list[int]


class Residency:
    """Slots, blocks, the running and the waiting: everything that planning reads and changes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.share = FairShare(config.tenant_weights)
        self.waiting = WaitingQueue(make_order(config, self.share))
        self.table = SlotTable(config.max_num_seqs, config.max_model_len, config.block_size)
        self.num_preemptions = 0
        self.now_s = 0.0  # as far as the shell has told
        self.acked_step = 0
        self._num_evictions_before = 0  # in pools of workers that are gone
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.is_worker_away = False
        self._next_number = 0
        self.clear(config.num_blocks)

    def clear(self, num_blocks: int) -> None:
        """All slots and blocks free, as on a worker that has just started."""
        self._num_evictions_before += self.pool.cache.num_evictions
        self.pool = BlockPool(num_blocks, self.config.block_size)
        self.roster = Roster(())
        self.free_slots = list(reversed(range(self.config.max_num_seqs)))
        self.freed_slots: list[int] = []  # since the last plan: the worker must hear of them
        self.preempted: list[str] = []  # since the last plan, for whoever asks why
        self.num_fenced_blocks = 0
        self.departed: dict[int, Sequence] = {}  # fenced slot: who still awaits a token from it
        self._fenced: list[_Fenced] = []

    def next_number(self) -> int:
        """The number of whoever comes now; no two sequences have the same."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def num_coming_blocks(self) -> int:
        """Blocks that are free, or will be once the steps in flight are done."""
        return self.pool.num_free + self.num_fenced_blocks

    @property
    def num_coming_slots(self) -> int:
        """The same of slots."""
        return len(self.free_slots) + len(self._fenced)

    @property
    def num_evictions(self) -> int:
        """Blocks handed out anew since the start although their content could have been found."""
        return self._num_evictions_before + self.pool.cache.num_evictions

    def enter(self, sequence: Sequence, shared: list[int], num_new_blocks: int) -> list[int]:
        """Gives a waiting sequence a slot, the cached blocks found for it and new ones behind them.

        The caller has checked that a slot and enough blocks are free, and appends to the roster.
        """
        self.pool.share(shared)
        block_ids = shared + self.pool.take(num_new_blocks)
        num_cached = len(shared) * self.config.block_size
        self.table.enter(sequence, self.free_slots.pop(), block_ids, num_cached)
        sequence.timeline.enter(Phase.PREFILL, self.now_s)
        return block_ids

    def leave(self, sequence: Sequence, status: Status) -> None:
        """Takes a running sequence's slot and blocks away; the roster is the caller's to renew."""
        slot = sequence.slot
        assert slot is not None
        table = self.table
        sequence.num_awaited = int(table.num_planned[slot] - table.num_tokens[slot])
        block_ids = table.blocks(slot)
        table.leave(slot, status)
        if table.last_step[slot] <= self.acked_step:
            self._recycle(slot, block_ids)
            return
        if status is Status.PREEMPTED and sequence.num_awaited:
            self.departed[slot] = sequence
        self._fenced.append(_Fenced(int(table.last_step[slot]), slot, block_ids))
        self.num_fenced_blocks += len(block_ids)

    def forget(self, slot: int) -> None:
        """What a slot computed is not to be trusted: nobody shall find its blocks any more.

        The slot may be fenced: its row still lists the blocks.
        """
        for block_id in self.table.blocks(slot):
            self.pool.cache.evict(block_id)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the queue; its tokens are kept."""
        self.leave(sequence, Status.PREEMPTED)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(sequence.request.request_id)
        sequence.timeline.enter(Phase.PREEMPTED, self.now_s)
        self.waiting.put_back(sequence)

    def forget_prefixes(self) -> int:
        """Empties the prefix cache; nothing computed so far is ever found again.

        Whoever runs keeps its blocks. Returns how many blocks were forgotten.
        """
        for sequence in self.roster.sequences:
            assert sequence.slot is not None
            sequence.is_private = True
            self.table.never_seal(sequence.slot)
        return self.pool.cache.clear()

    def set_priority(self, sequence: Sequence, priority: int) -> None:
        """Changes how urgent a live sequence is, wherever it stands."""
        changed = replace(sequence.request, priority=priority)
        if sequence.status is Status.RUNNING:
            sequence.request = changed
            self.roster = Roster(self.waiting.order.by_seniority(self.roster.sequences))
        else:
            self.waiting.order.change(sequence, changed)

    def join_roster(self, entered: list[Sequence]) -> None:
        """Adds whoever has got a slot."""
        running = (*self.roster.sequences, *entered)
        self.roster = Roster(self.waiting.order.by_seniority(running))

    def renew_roster(self) -> None:
        """Drops whoever left from the roster."""
        running = (s for s in self.roster.sequences if s.status is Status.RUNNING)
        self.roster = Roster(tuple(running))

    def acknowledge(self, step_id: int) -> None:
        """Every step up to this one has finished: what only they could touch is free now."""
        self.acked_step = step_id
        if not self._fenced:
            return
        still_fenced = []
        for fenced in self._fenced:
            if fenced.last_step > step_id:
                still_fenced.append(fenced)
                continue
            self.num_fenced_blocks -= len(fenced.block_ids)
            self.departed.pop(fenced.slot, None)
            self._recycle(fenced.slot, fenced.block_ids)
        self._fenced = still_fenced

    def move_fence(self, last_step: int) -> None:
        """No step after this one will be computed of those planned: wait for none of them."""
        self._fenced = [
            replace(fenced, last_step=min(fenced.last_step, last_step)) for fenced in self._fenced
        ]

    def evacuate(self, num_blocks: int) -> int:
        """The worker is gone, and every KV block with it: all who ran wait again, in their order.

        Returns how many ran.
        """
        survivors = self.roster.sequences
        for sequence in self.departed.values():
            sequence.num_awaited = 0  # those tokens will never come; they are sampled anew
        for sequence in reversed(survivors):
            assert sequence.slot is not None
            self.table.leave(sequence.slot, Status.PREEMPTED)
            self.waiting.put_back(sequence)
        self.clear(num_blocks)
        return len(survivors)

    def _recycle(self, slot: int, block_ids: list[int]) -> None:
        self.pool.release(block_ids)
        self.free_slots.append(slot)
        self.freed_slots.append(slot)
