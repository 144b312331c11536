"""Snapshots of recurrent states: which are made, and after which one a prompt can begin.

A sequence with states can skip a cached prefix only where the states after it are kept, too. A
snapshot is made at the end of a block: before the end of a prompt, where the blocks that a prompt
found in the cache end, and from time to time while a sequence decodes. It is found by the hash of
that block, and what it is checked by is what blocks are checked by. This module knows numbers of
snapshots only: the worker holds the states.

Under pressure those give way first that a later one of the same sequence has made needless, unless
other sequences have begun after them; then those that were used longest ago.

A snapshot can be found once its tokens are known and surely computed. Until then its sequence
holds it; afterwards it waits, as a free block does, to be found or to be overwritten.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.block_table import MAX_INT32, Index
from scheduler_svc.core.kv.slots import SlotTable
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StateSave:
    """The states of a slot's sequence after its first `position` tokens go into a snapshot."""

    slot: int
    position: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class _Found:
    """A snapshot that can be found, as long as its content has this hash."""

    snapshot: int
    content: int


class StateSnapshots:
    """The snapshots of one worker: a pool of them, and the prefixes that they stand for."""

    def __init__(self, config: SchedulerConfig, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._block_size = config.block_size
        # A prefix hit ends where a block of every KV group ends.
        self._stride = lcm(*(group.block_size for group in config.groups))
        self.interval = -(-config.state_interval // self._stride) * self._stride
        # Number 0 is none, as block 0 is.
        self.pool = BlockPool(num_snapshots + 1, config.block_size)
        # Of each slot: the tokens after which its next snapshot is due; those due before others.
        self._due: NDArray[np.int32] = np.full(config.max_num_seqs, MAX_INT32, dtype=np.int32)
        self._first_due: dict[int, list[int]] = {}
        self._planned: dict[int, list[StateSave]] = {}  # by slot: cannot be found yet
        self._last: dict[int, _Found] = {}  # by slot: the last one made while it decodes
        # By slot: those that give way first once its next one can be found.
        self._passing: dict[int, list[_Found]] = {}
        self._parting: dict[int, int] = {}  # by slot: where its prompt parts from an earlier one
        # Sequences that have begun after each snapshot since it was made; one more where two part.
        self._num_begun: NDArray[np.int32] = np.zeros(num_snapshots + 1, dtype=np.int32)
        self._read: list[int] = []  # by sequences that enter in the step under construction

    def __len__(self) -> int:
        return self.pool.num_cached

    def find(self, sequence: Sequence, num_cached: int) -> tuple[int, int | None]:
        """The most of the first `num_cached` tokens that have a snapshot, and that snapshot.

        Returns (0, None) if none has.
        """
        size, origins = self._block_size, None
        hashes = sequence.block_hashes(size)[: num_cached // size]
        if sequence.origins is not None:
            origins = sequence.origins.of_blocks(0, len(hashes), size)
        found, runs = self.pool.cache.lookup_runs(
            hashes, sequence.token_ids, sequence.root, origins
        )
        here = np.flatnonzero(runs)
        if not len(here):
            return 0, None
        last = int(here[-1])
        return (last + 1) * size, found[last]

    def begin_after(self, snapshot: int, slot: int) -> None:
        """Keeps a snapshot that a sequence begins after, until its step is planned."""
        self.pool.share([snapshot])
        self._read.append(snapshot)
        self._num_begun[snapshot] += 1
        content = self.pool.cache.hash_of(snapshot)
        assert content is not None, "what is found has content"
        self._passing.setdefault(slot, []).append(_Found(snapshot, content))

    def enter(self, sequence: Sequence, slot: int, num_computed: int, num_matched: int) -> None:
        """Notes when a sequence's snapshots are due, by its tokens computed and those cached."""
        if sequence.is_private:
            self._due[slot] = MAX_INT32
            return
        # At least one token of a prompt is computed, so an equal prompt ends its hit here.
        num_tokens = len(sequence.token_ids)
        end = (num_tokens - 1) // self._stride * self._stride
        due, after = [], num_computed
        for position in (num_matched, end):
            if position >= after + self.interval:
                due.append(position)
                after = position
        if num_matched in due:
            self._parting[slot] = num_matched
        due.append((num_tokens // self.interval + 1) * self.interval)
        self._due[slot], *self._first_due[slot] = due

    def _set_due(self, slot: int, position: int) -> None:
        """Sets when the next snapshot after the one at `position` is due."""
        due = self._first_due[slot]
        self._due[slot] = due.pop(0) if due else position + self.interval

    def cross(self, index: Index, num_computed: NDArray[np.int32]) -> list[StateSave]:
        """The snapshots of these slots that are due by so many tokens; they are held from now on.

        One that finds no room is left out.
        """
        saves = []
        for row in (num_computed >= self._due[index]).nonzero()[0].tolist():
            slot, end = int(index[row]), int(num_computed[row])
            while (position := int(self._due[slot])) <= end:
                if self.pool.num_free:
                    save = StateSave(slot, position, self.pool.take(1)[0])
                    self._num_begun[save.snapshot] = position == self._parting.get(slot)
                    self._planned.setdefault(slot, []).append(save)
                    saves.append(save)
                self._set_due(slot, position)
        return saves

    def room_for_drafts(self, slot: int, num_sure: int) -> int:
        """The most tokens that a row may compute unsurely after the first `num_sure`.

        None of them is the last before a snapshot: one of a draft that is refused would be wrong.
        """
        due = int(self._due[slot])
        return due - num_sure - 1 if due > num_sure else due + self.interval - num_sure - 1

    def planned(self) -> None:
        """Lets go of what the planned step reads: a later step's snapshots are made after it."""
        if self._read:
            self.pool.release(self._read)
            self._read = []

    def seal(self, table: SlotTable) -> None:
        """Lets snapshots be found whose tokens are known and cannot be taken back."""
        for slot in list(self._planned):
            # All known tokens of a sequence that decodes but the last are surely computed.
            if table.is_prefilling[slot]:
                continue
            num_known, saves = int(table.num_tokens[slot]), self._planned[slot]
            while saves and saves[0].position < num_known:
                self._seal(table, saves.pop(0))
            if not saves:
                del self._planned[slot]

    def _seal(self, table: SlotTable, save: StateSave) -> None:
        slot, size, begin = save.slot, self._block_size, save.position - self._block_size
        sequence = table.sequence[slot]
        assert sequence is not None
        token_ids = table.token_ids[slot, : save.position]
        num_blocks = save.position // size
        hashes = [sequence.root, *sequence.extend_hashes(token_ids, size)[:num_blocks]]
        origins = sequence.origins
        self.pool.cache.insert(
            np.array([save.snapshot], dtype=np.int32),
            hashes[-1:],
            np.array(hashes[-2:-1], dtype=np.uint64),
            token_ids[begin:].reshape(1, size),
            None if origins is None else origins.of_blocks(num_blocks - 1, num_blocks, size),
        )
        self.pool.release([save.snapshot])
        made = _Found(save.snapshot, hashes[-1])
        for passed in self._passing.pop(slot, ()):
            self._let_pass(passed, made)
        if save.position % self.interval == 0:
            # A sequence goes on from its last one: the one before would keep another's away.
            self._discard(self._last.pop(slot, None))
            self._last[slot] = made
        else:
            self._passing[slot] = [made]

    def _discard(self, found: _Found | None) -> None:
        if found is None or self.pool.cache.hash_of(found.snapshot) != found.content:
            return
        if not self.pool.ref_count(found.snapshot):
            self.pool.discard(found.snapshot)

    def _let_pass(self, passed: _Found, made: _Found) -> None:
        """Has a snapshot give way first that one sequence, which has a later one, began after."""
        if self.pool.num_free > self.pool.num_cached:  # some are unused
            return
        is_kept = self.pool.cache.hash_of(passed.snapshot) != passed.content or passed == made
        if is_kept or self._num_begun[passed.snapshot] > 1 or self.pool.ref_count(passed.snapshot):
            return
        self.pool.demote(passed.snapshot)

    def leave(self, slot: int) -> None:
        """Lets go of the snapshots of a sequence that cannot be found yet."""
        self._due[slot] = MAX_INT32
        self._first_due.pop(slot, None)
        self._last.pop(slot, None)
        self._passing.pop(slot, None)
        self._parting.pop(slot, None)
        self.pool.release([save.snapshot for save in self._planned.pop(slot, ())])

    def forget(self, sequence: Sequence) -> None:
        """Forgets the snapshots of a sequence's blocks, since its states are not valid."""
        hashes = set(sequence.block_hashes(self._block_size))
        for snapshot in range(1, self.num_snapshots + 1):
            if self.pool.hash_of(snapshot) in hashes:
                self.pool.cache.evict(snapshot)

    def forget_all(self) -> None:
        """Forgets all snapshots; those of sequences that run will not be found either."""
        self._due[:] = MAX_INT32
        self._first_due.clear()
        self._last.clear()
        self._passing.clear()
        self._parting.clear()
        for saves in self._planned.values():
            self.pool.release([save.snapshot for save in saves])
        self._planned.clear()
        self.pool.forget_contents()
