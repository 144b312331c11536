"""Scheduler state: slots, blocks, the queue, the running set, and the fence around freed memory.

The fence: steps are planned before earlier ones have finished, so a sequence may leave while a step
that still touches its slot and blocks is in flight. These are handed out again only after the last
such step was acknowledged.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.kv.block_moves import BlockMoves
from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.block_table import BlockTable, TableRow
from scheduler_svc.core.kv.cache_changes import CacheChanges
from scheduler_svc.core.kv.chain import Chain
from scheduler_svc.core.kv.disk_index import DiskIndex
from scheduler_svc.core.kv.host_pool import HostPool
from scheduler_svc.core.kv.loans import Loans
from scheduler_svc.core.kv.prefix_cache import NULL_BLOCK
from scheduler_svc.core.kv.pulls import LentBlocks, PullCounts, Pulls
from scheduler_svc.core.kv.session_pool import SessionPool
from scheduler_svc.core.kv.slots import RunningSet, SlotTable
from scheduler_svc.core.kv.state_snapshots import StateSnapshots
from scheduler_svc.core.kv.tier import Tier, TierName
from scheduler_svc.core.kv.transfers import KvTransfers, TransferCounts
from scheduler_svc.core.queue.fair_share import FairShare
from scheduler_svc.core.queue.fork_groups import ForkGroups
from scheduler_svc.core.queue.policies import make_order
from scheduler_svc.core.queue.requirement_waits import RequirementWaits
from scheduler_svc.core.queue.waiting import WaitingQueue
from scheduler_svc.core.request.config import CachePolicy, Preemption, SchedulerConfig
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.request.session_hint import ToldSession
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step.start import Start, TableStart


@dataclass(frozen=True, slots=True)
class _Fenced:
    """Blocks, and a slot if the sequence left, that step `last_step` may still touch."""

    last_step: int
    slot: int | None
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """The room that a worker has; what the core plans by changes with the worker."""

    num_blocks: int  # the null block included
    num_host_blocks: int
    num_state_snapshots: int
    num_tier_blocks: int
    num_disk_blocks: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> "WorkerRoom":
        """That of the first worker."""
        return cls(
            config.num_blocks,
            config.num_host_blocks,
            config.num_state_snapshots,
            config.num_tier_blocks,
            config.num_disk_blocks,
        )


class SchedulerState:
    """Slots, blocks, queue and running set: all state that planning reads and changes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.share = FairShare(config.tenant_weights)
        # What is prepared takes memory of the worker, so it is not for all of a long queue.
        max_prepared = 2 * config.max_num_seqs
        self.requirements = RequirementWaits(config.prepared_kinds, max_prepared)
        self.waiting = WaitingQueue(make_order(config, self.share), self.requirements)
        self.table = SlotTable(config.max_num_seqs, config.max_model_len, config.groups)
        self.fork_groups = ForkGroups()
        self.suspects: set[Sequence] = set()  # the live ones that compute alone
        self.num_preemptions = 0
        self.num_swapped_out = 0  # blocks
        self.num_swapped_in = 0
        self.transfer_counts = TransferCounts()
        self.pull_counts = PullCounts()
        self.transfers: KvTransfers | None = None  # None: the worker has no tier
        self.now_s = 0.0  # latest time reported by the shell
        self.acked_step = 0
        self._num_evictions_before = 0  # of earlier workers' pools
        self._num_awaited_before = 0  # the same, of blocks that a waiting sequence would have found
        self._block_sizes = [group.block_size for group in config.groups]
        self.pool = self._make_pool(config.num_blocks)
        self.changes: CacheChanges | None = None  # of the prefix caches, if they are followed
        self.is_worker_away = False
        self.is_closed = False  # no sequence enters that has not run
        self._next_number = 0
        self.ended_loans: list[LentBlocks] = []  # of other groups, to be given back
        self.clear(WorkerRoom.of(config))

    def clear(self, room: WorkerRoom, kept: tuple[Tier, ...] = ()) -> None:
        """Frees all slots and blocks, as on a worker that has just started, or kept its tiers."""
        # None: no prefix can be skipped, or all that there are, since sequences have no states.
        self.snapshots: StateSnapshots | None = None
        if self.config.enable_prefix_caching and self.config.num_state_snapshots:
            self.snapshots = StateSnapshots(self.config, room.num_state_snapshots)
        self.host = HostPool(room.num_host_blocks)
        self._moves = BlockMoves()  # since the last plan
        self._num_evictions_before += self.pool.num_evictions
        self._num_awaited_before = self.num_awaited_evicted
        self.pool = self._make_pool(room.num_blocks)
        if self.changes is not None:
            self.changes.clear()
            self.pool.follow(self.changes)
        tiers = self._tiers(room, kept) if self.config.enable_prefix_caching else ()
        self.transfers = KvTransfers(self.pool, tiers, self.transfer_counts) if tiers else None
        ids, counts = self.transfer_counts, self.pull_counts
        self.pulls = Pulls(self.pool, self.config.block_size, ids, counts, self.ended_loans)
        self.loans = Loans(self.pool)
        self.running = RunningSet(())
        self.free_slots = list(reversed(range(self.config.max_num_seqs)))
        self.freed_slots: list[int] = []  # since the last plan, to be reported to the worker
        self.preempted: list[str] = []  # request ids since the last plan, for the debug view
        self.num_fenced_blocks = 0
        self.departed: dict[int, Sequence] = {}  # fenced slot to the sequence that awaits its token
        self._fenced: list[_Fenced] = []
        if self.sessions is not None:
            for sequence in self.waiting:
                self._expect(self.sessions, sequence)

    def _tiers(self, room: WorkerRoom, kept: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """The tiers of a worker, the fastest first; those that it has kept are among them."""
        counts, before = self.transfer_counts.of, {(t.name, t.num_blocks): t for t in kept}
        tiers = list[Tier]()
        if num_blocks := room.num_tier_blocks:
            made = Tier(num_blocks, self.config.block_size, counts[TierName.HOST])
            tiers.append(before.get((made.name, num_blocks), made))
        if num_blocks := room.num_disk_blocks:
            old = None if self.transfers is None else self.transfers.disk
            # Files outlive their process: those that were to be dropped still are.
            drops_all = old is not None and old.is_void
            disk = DiskIndex(num_blocks, counts[TierName.DISK], drops_all=drops_all)
            tiers.append(before.get((disk.name, num_blocks), disk))
        return tuple(tiers)

    def _make_pool(self, num_blocks: int) -> BlockPool:
        """An empty pool by the cache policy; `sessions` is the same one where it is by sessions."""
        self.sessions: SessionPool | None = None
        if self.config.cache_policy is CachePolicy.LRU or not self.config.enable_prefix_caching:
            return BlockPool(num_blocks, *self._block_sizes)
        self.sessions = SessionPool(num_blocks, *self._block_sizes)
        self.sessions.now_s = self.now_s
        return self.sessions

    def _expect(self, sessions: SessionPool, sequence: Sequence) -> None:
        """Notes what a waiting sequence would find, in the prefix cache and in the tiers."""
        found: list[int] = []
        num_tokens, size = len(sequence.token_ids), self.config.block_size
        if not sequence.is_private and (len(sessions.cache) or self.transfers is not None):
            end = sequence.num_skippable // size
            found = sessions.cache.likely(sequence.block_hashes(size)[:end])
            if not sequence.has_run:
                sequence.num_found_waiting = max(sequence.num_found_waiting, len(found) * size)
            if self.transfers is not None:
                chain = Chain.of(sequence, len(found), end, size)
                num_tokens -= size * self.transfers.num_likely(chain)
        sessions.expect(sequence.number, found, num_tokens)

    def follow_caches(self) -> None:
        """Has changes of the prefix caches noted from now on, if there are any."""
        if self.config.enable_prefix_caching:
            self.changes = CacheChanges()
            self.pool.follow(self.changes)

    def receive(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        if self.is_worker_away:
            sequence.timeline.enter(Phase.WORKER_AWAY, self.now_s)
        if sequence.is_suspect:
            self.suspects.add(sequence)
        self.fork_groups.add(sequence)
        self.enqueue(sequence)

    @property
    def is_idle_with_freed_slots(self) -> bool:
        """True if no sequence runs, and the worker does not know that of all yet."""
        return bool(self.freed_slots) and not self.running.sequences

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends; if it was running the caller renews the running set."""
        if sequence.status is Status.RUNNING:
            self.leave(sequence, Status.FINISHED)
        else:
            sequence.status = Status.FINISHED
            is_fetching = sequence in self.waiting.fetching
            self.waiting.discard(sequence)
            self.host.release(sequence)
            self.stop_fetching(sequence, was_awaited=is_fetching)
            self.no_longer_waits(sequence)
        self.fork_groups.remove(sequence)
        self.suspects.discard(sequence)

    def no_longer_waits(self, sequence: Sequence) -> None:
        """Keeps nothing in the prefix cache for a sequence that has left the queue for good."""
        if self.sessions is not None:
            self.sessions.not_expected(sequence.number)

    def rebuild(self, sequences: list[Sequence]) -> None:
        """Frees everything and queues these sequences; reads nothing of the state before."""
        self.table.clear()
        self.running, self.departed, self._fenced = RunningSet(()), {}, []
        self.waiting.clear(make_order(self.config, self.share))
        self.fork_groups.clear()
        for sequence in sequences:
            self.fork_groups.add(sequence)
        ran = [s for s in sequences if s.status is Status.PREEMPTED]
        for sequence in (*reversed(ran), *(s for s in sequences if s not in ran)):
            self.enqueue(sequence)
        self.note_suspects(sequences)

    def note_suspects(self, live: Iterable[Sequence]) -> None:
        """Finds anew which of the live sequences are suspect."""
        self.suspects = {sequence for sequence in live if sequence.is_suspect}

    def next_number(self) -> int:
        """A new sequence number; never the same twice."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def num_state_snapshots(self) -> int:
        """Number of snapshots that the worker has room for, if sequences have states."""
        return 0 if self.snapshots is None else self.snapshots.num_snapshots

    @property
    def num_coming_blocks(self) -> int:
        """Number of blocks that are free, or will be once steps and transfers are done."""
        num_transferred = 0 if self.transfers is None else self.transfers.num_held
        num_transferred += self.pulls.num_coming
        return self.pool.num_free + self.num_fenced_blocks + num_transferred

    @property
    def num_coming_slots(self) -> int:
        """Number of slots that are free, or will be once the steps in flight are done."""
        return len(self.free_slots) + sum(fenced.slot is not None for fenced in self._fenced)

    @property
    def num_evictions(self) -> int:
        """Cached blocks handed out anew since the start, over all workers."""
        return self._num_evictions_before + self.pool.num_evictions

    @property
    def num_awaited_evicted(self) -> int:
        """Number of these that a waiting sequence would have found; 0 where no session is known."""
        now = 0 if self.sessions is None else self.sessions.num_awaited_evicted
        return self._num_awaited_before + now

    def enter(self, sequence: Sequence, start: Start, num_new_blocks: list[int]) -> list[list[int]]:
        """Moves a waiting sequence into a slot; returns its block tables, by group.

        A table has null blocks, then the start's shared blocks, then new ones, so many for each
        group. The caller has checked that a slot and enough blocks are free, and adds the sequence
        to the running set.
        """
        self.pool.share(start.all_shared)
        if self.sessions is not None:
            last = start.shared[-1] if start.shared else None
            request = sequence.request
            told = ToldSession.of(request.session, request.tenant, request.cache_salt)
            shared = start.all_shared
            self.sessions.enter(sequence.number, request.arrival_s, last, shared, told)
        rows = []
        for group, num_new in enumerate(num_new_blocks):
            table = start.more[group - 1] if group else start
            new_blocks = self.pool.take(num_new)
            self._fill(table, new_blocks)
            known = [NULL_BLOCK] * table.num_null + table.shared
            block_ids = known + table.given + new_blocks
            num_sealed = len(known) if self.config.enable_prefix_caching else 0
            rows.append(TableRow(block_ids, table.num_null, num_sealed))
        self.host.release(sequence)
        self.pulls.enter(sequence, start.given)
        if self.transfers is not None:
            self.transfers.forget_tries(sequence)
        slot = self.free_slots.pop()
        self.table.enter(sequence, slot, start.num_computed, rows)
        if self.snapshots is not None:
            self.snapshots.enter(sequence, slot, start.num_computed, start.num_matched)
            if start.snapshot is not None:
                self.snapshots.begin_after(start.snapshot, slot)
        sequence.timeline.enter(Phase.PREFILL, self.now_s)
        return [row.block_ids for row in rows]

    def _fill(self, start: Start | TableStart, new_blocks: list[int]) -> None:
        """Adds the copies that the worker makes into the first new blocks of a table."""
        if start.host_blocks:
            self._moves.from_host.extend(start.host_blocks)
            self._moves.swapped_in.extend(new_blocks[: len(start.host_blocks)])
            self.num_swapped_in += len(start.host_blocks)
        if start.copied_from is not None:
            self._moves.copied_from.append(start.copied_from)
            self._moves.copied_to.append(new_blocks[0])

    @property
    def has_moves(self) -> bool:
        """True if the next plan copies blocks."""
        return bool(self._moves)

    def take_moves(self) -> BlockMoves | None:
        """Returns the block copies for the plan under construction; None when there are none."""
        self.host.planned()
        if not self._moves:
            return None
        moves, self._moves = self._moves, BlockMoves()
        return moves

    def leave(self, sequence: Sequence, status: Status) -> None:
        """Frees a running sequence's slot and blocks; the caller renews the running set."""
        slot = sequence.slot
        assert slot is not None
        table = self.table
        sequence.num_awaited = int(table.num_planned[slot] - table.num_tokens[slot])
        block_ids = table.held_blocks(slot)
        if self.sessions is not None:
            size, num_computed = self.config.block_size, int(table.num_computed[slot])
            num_answer = max(num_computed - sequence.num_prompt, 0)
            num_answer_blocks = (num_answer // size + 2) * len(table.tables)
            is_over = status is Status.FINISHED
            self.sessions.leave(sequence.number, block_ids, num_answer_blocks, is_over=is_over)
        table.leave(slot, status)
        if self.snapshots is not None:
            self.snapshots.leave(slot)
        if table.last_step[slot] <= self.acked_step:
            self._recycle(slot, block_ids)
            return
        if status is Status.PREEMPTED and sequence.num_awaited:
            self.departed[slot] = sequence
        self._fenced.append(_Fenced(int(table.last_step[slot]), slot, block_ids))
        self.num_fenced_blocks += len(block_ids)

    def forget(self, slot: int) -> None:
        """Evicts a slot's blocks from the prefix cache, since their KV is not valid.

        The slot may be fenced: its row still lists the blocks.
        """
        for table, cache in zip(self.table.tables, self.pool.caches, strict=True):
            for block_id in table.held_blocks(slot):
                cache.evict(block_id)
        sequence = self.table.sequence[slot] or self.departed.get(slot)
        if self.snapshots is not None and sequence is not None:
            self.snapshots.forget(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the queue with its tokens, and its KV if swapped out."""
        if self.config.preemption is not Preemption.SWAP or not self._swap_out(sequence):
            sequence.lose_kv()
        self.leave(sequence, Status.PREEMPTED)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(sequence.request.request_id)
        sequence.timeline.enter(Phase.PREEMPTED, self.now_s)
        self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Adds a sequence to the queue: one that has run first, one that requires more apart."""
        if self.requirements.must_wait(sequence):
            self.waiting.hold(sequence)
            if not self.is_worker_away:
                sequence.timeline.enter(Phase.PREPARING, self.now_s)
        elif sequence.status is Status.PREEMPTED:
            self.waiting.put_back(sequence)
        else:
            self.waiting.append(sequence)
        if self.sessions is not None:
            self._expect(self.sessions, sequence)

    def _swap_out(self, sequence: Sequence) -> bool:
        """Plans a copy of a sequence's KV to host memory; False if it has no room there.

        The blocks are freed as usual: the copy is made before any row computes.
        """
        slot, table = sequence.slot, self.table
        assert slot is not None
        if slot in table.drafting_slots:
            return False  # how much of its KV will be valid is not known
        num_computed, sizes = int(table.num_computed[slot]), []
        for blocks in table.tables:
            num_null = int(blocks.num_null[slot])
            sizes.append((num_null, -(-num_computed // blocks.block_size) - num_null))
        swapped = self.host.put(sequence, num_computed, sizes)
        if swapped is None:
            return False
        for blocks, stored in zip(table.tables, swapped.tables, strict=True):
            num_blocks = len(stored.host_blocks)
            self._moves.swapped_out.extend(blocks.held_blocks(slot)[:num_blocks])
            self._moves.to_host.extend(stored.host_blocks)
            self.num_swapped_out += num_blocks
        return True

    def slide(self) -> None:
        """Frees the blocks before the attention window of every later token, of each group."""
        for table in self.table.tables:
            if table.group.window is not None:
                self._slide(table, table.group.window)

    def _slide(self, table: BlockTable, window: int) -> None:
        slots, index = self.table, self.running.index
        # Steps in flight compute known tokens and the ones after them.
        computed = np.minimum(slots.num_computed[index], slots.num_tokens[index] - 1)
        num_null = (computed - window + 1) // table.block_size
        for row in (num_null > table.num_null[index]).nonzero()[0].tolist():
            slot = int(index[row])
            block_ids = table.drop_blocks(slot, int(num_null[row]))
            if slots.last_step[slot] <= self.acked_step:
                self.pool.release(block_ids)
            else:
                self._fenced.append(_Fenced(int(slots.last_step[slot]), None, block_ids))
                self.num_fenced_blocks += len(block_ids)

    def forget_prefixes(self) -> int:
        """Empties the prefix cache; no KV computed so far can be found again.

        Running sequences keep their blocks, swapped ones their copy. Returns the number of blocks
        forgotten.
        """
        for sequence in (*self.host.sequences, *self.pulls.sequences, *self.loans.sequences):
            sequence.is_private = True
        for sequence in self.running.sequences:
            assert sequence.slot is not None
            sequence.is_private = True
            self.table.never_seal(sequence.slot)
        if self.snapshots is not None:
            self.snapshots.forget_all()
        if self.transfers is not None:
            self.transfers.forget_contents()
        return self.pool.forget_contents()

    def set_priority(self, sequence: Sequence, priority: int) -> None:
        """Changes the priority of a live sequence, running or waiting."""
        changed = replace(sequence.request, priority=priority)
        if sequence.status in (Status.PREPARING, Status.WAITING_FOR_KV):
            sequence.request = changed
        elif sequence.status is Status.RUNNING:
            sequence.request = changed
            self.running = RunningSet(self.waiting.order.by_seniority(self.running.sequences))
        else:
            self.waiting.order.change(sequence, changed)

    def join_running(self, entered: list[Sequence]) -> None:
        """Adds sequences that have received a slot to the running set."""
        running = (*self.running.sequences, *entered)
        self.running = RunningSet(self.waiting.order.by_seniority(running))

    def renew_running(self) -> None:
        """Removes sequences that have left from the running set."""
        running = (s for s in self.running.sequences if s.status is Status.RUNNING)
        self.running = RunningSet(tuple(running))

    def acknowledge(self, step_id: int) -> None:
        """Frees slots and blocks fenced by steps up to this one, which have all finished."""
        self.acked_step = step_id
        if not self._fenced:
            return
        still_fenced = []
        for fenced in self._fenced:
            if fenced.last_step > step_id:
                still_fenced.append(fenced)
                continue
            self.num_fenced_blocks -= len(fenced.block_ids)
            if fenced.slot is None:
                self.pool.release(fenced.block_ids)
            else:
                self.departed.pop(fenced.slot, None)
                self._recycle(fenced.slot, fenced.block_ids)
        self._fenced = still_fenced

    def move_fence(self, last_step: int) -> None:
        """Lowers all fences to this step: later ones were planned and will not be computed."""
        self._fenced = [
            replace(fenced, last_step=min(fenced.last_step, last_step)) for fenced in self._fenced
        ]

    def await_kv(self, sequence: Sequence, transfer_id: int) -> None:
        """Lets a sequence, which was taken from the queue, wait for a transfer."""
        self.waiting.await_kv(sequence, transfer_id)
        sequence.timeline.enter(Phase.KV, self.now_s)

    def queue_fetched(self, transfer_ids: Collection[int], *, may_repeat: bool = False) -> None:
        """Queues the sequences that waited for one of these transfers, perhaps to wait again."""
        for sequence in self.waiting.kv_came(transfer_ids):
            if may_repeat and self.transfers is not None:
                self.transfers.may_repeat(sequence)
            sequence.timeline.enter(sequence.waiting_phase, self.now_s)
            if self.sessions is not None:
                self._expect(self.sessions, sequence)

    def await_move(self, sequence: Sequence, loan_id: int) -> None:
        """Lets a sequence that has lost its slot wait until it can leave with its blocks."""
        self.await_kv(sequence, loan_id)
        if self.sessions is not None:
            self._expect(self.sessions, sequence)

    def stop_fetching(self, sequence: Sequence, *, was_awaited: bool) -> None:
        """Forgets a sequence that has left the queue; cancels what only it awaited, if it did."""
        self.pulls.drop(sequence)
        self.loans.drop(sequence)
        if self.transfers is not None:
            self.transfers.forget_tries(sequence)
            if was_awaited:
                self.transfers.cancel_fetches(self.waiting.fetching.values())

    def evacuate(self, room: WorkerRoom, *, keeps_tier: bool = False) -> int:
        """Sends running sequences back to the queue, in order: the worker and its KV are gone.

        The contents of its tiers are kept if it may be the same that comes back. Returns how many
        were running.
        """
        survivors = self.running.sequences
        self.waiting.kv_came(set(self.waiting.fetching.values()))
        for sequence in self.departed.values():
            sequence.num_awaited = 0  # these tokens will never arrive; they are sampled again
        for sequence in (*survivors, *self.host.sequences):
            sequence.lose_kv()
        for sequence in reversed(survivors):
            assert sequence.slot is not None
            self.table.leave(sequence.slot, Status.PREEMPTED)
            self.enqueue(sequence)
        self.requirements.worker_lost()
        self.pulls.end_all()
        kept: tuple[Tier, ...] = ()
        if keeps_tier and self.transfers is not None:
            kept = self.transfers.end_all()
        self.clear(room, kept)
        return len(survivors)

    def _recycle(self, slot: int, block_ids: list[int]) -> None:
        self.pool.release(block_ids)
        self.free_slots.append(slot)
        self.freed_slots.append(slot)
