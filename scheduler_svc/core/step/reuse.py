"""Finds the KV of a waiting sequence that exists already and need not be computed.

It may be in blocks of the prefix cache, in host memory, or in blocks of another sequence of the
fork group, which computed the same prompt. This module changes nothing; admission applies the start
with the most tokens.
"""

from dataclasses import replace

from scheduler_svc.core.kv.common_hit import common_hit
from scheduler_svc.core.kv.host_pool import Swapped
from scheduler_svc.core.kv.prefix_cache import PrefixCache
from scheduler_svc.core.kv.pulls import Arrived
from scheduler_svc.core.kv.state_snapshots import StateSnapshots
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.step.plan import EnteringSequence
from scheduler_svc.core.step.start import Start, TableStart
from scheduler_svc.core.step.state import SchedulerState


class Reuse:
    """Finds where sequences begin to compute."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self._config = config
        self._groups = config.groups
        self._state = state

    def find(self, sequence: Sequence, entered: list[EnteringSequence]) -> Start | None:
        """Returns the start that leaves the fewest tokens to compute.

        Returns None while another sequence of the fork group computes the same prompt: blocks of
        sequences in `entered`, admitted to this very step, can be copied only in the next.
        """
        start = self.cached(sequence)
        if self._config.has_states:
            return start  # a copy of blocks is not all that a sequence is
        swapped = self._state.host.find(sequence)
        if swapped is not None:
            start = self._swapped(sequence, swapped, start)
        arrived = self._state.pulls.find(sequence)
        if arrived is not None:
            start = self._arrived(sequence, arrived, start)
        if sequence.request.fork_group:
            return self._forked(sequence, start, entered)
        return start

    def _nothing(self) -> Start:
        return Start(more=tuple(TableStart() for _ in self._groups[1:]))

    def cached(self, sequence: Sequence) -> Start:
        """The start after the longest cached prefix that may be skipped."""
        config, groups = self._config, self._groups
        if not config.enable_prefix_caching or sequence.is_private:
            return self._nothing()
        pool, most = self._state.pool, sequence.num_skippable
        if config.has_states:
            if self._state.snapshots is None:
                return self._nothing()
            return self._after_a_snapshot(sequence, most, self._state.snapshots)
        if len(groups) == 1 and groups[0].window is None:
            return self._cached_by_one(sequence, pool.cache, most)
        num_computed, hits = common_hit(groups, pool.caches, sequence, most)
        return Start.of(num_computed, [TableStart(hit.num_null, hit.shared) for hit in hits])

    def _after_a_snapshot(self, sequence: Sequence, most: int, snapshots: StateSnapshots) -> Start:
        """The start after the longest cached prefix whose states are in a snapshot."""
        groups, caches = self._groups, self._state.pool.caches
        end, hits = common_hit(groups, caches, sequence, most)
        num_matched = end
        num_computed, snapshot = snapshots.find(sequence, end)
        while end > num_computed:  # blocks before a window may be gone there, too
            end, hits = common_hit(groups, caches, sequence, num_computed)
            num_computed, snapshot = snapshots.find(sequence, end)
        start = Start.of(num_computed, [TableStart(hit.num_null, hit.shared) for hit in hits])
        return replace(start, snapshot=snapshot, num_matched=num_matched)

    def _cached_by_one(self, sequence: Sequence, cache: PrefixCache, most: int) -> Start:
        size, origins = self._config.block_size, None
        hashes = sequence.block_hashes(size)[: most // size]
        if sequence.origins is not None:
            origins = sequence.origins.of_blocks(0, len(hashes), size)
        shared = cache.lookup(hashes, sequence.token_ids, sequence.root, origins)
        return Start(len(shared) * size, shared=shared)

    def _swapped(self, sequence: Sequence, swapped: Swapped, cached: Start) -> Start:
        # Granted steps that were taken back after the preemption counted as computed at that time.
        num_computed = min(swapped.num_computed, sequence.num_skippable)
        if num_computed <= cached.num_computed:
            return cached
        tables = []
        for group, stored, hit in zip(self._groups, swapped.tables, cached.tables, strict=True):
            num_null = group.num_null(num_computed)
            if stored.num_null > num_null:
                return cached
            shared = hit.shared if group.window is None else []
            begin = num_null - stored.num_null + len(shared)
            end = -(-num_computed // group.block_size) - stored.num_null
            tables.append(TableStart(num_null, shared, stored.host_blocks[begin:end]))
        return Start.of(num_computed, tables)

    def _arrived(self, sequence: Sequence, arrived: Arrived, cached: Start) -> Start:
        """The start after what was pulled from another group, if that is further."""
        num_computed = min(arrived.num_tokens, sequence.num_skippable)
        num_given = -(-num_computed // self._config.block_size) - len(arrived.shared)
        if num_computed <= cached.num_computed or num_given < 1:
            return cached
        return Start(num_computed, shared=arrived.shared, given=arrived.given[:num_given])

    def _forked(
        self, sequence: Sequence, start: Start, entered: list[EnteringSequence]
    ) -> Start | None:
        """The start after another fork group member's prompt, except its last token."""
        wanted = min(sequence.num_prompt, sequence.num_skippable)
        if start.num_computed >= wanted or self._is_dated(sequence):
            return start
        table, is_awaited = self._state.table, False
        entered_slots = {new.slot for new in entered}
        for sibling in self._state.fork_groups.of(sequence):
            slot = sibling.slot
            if sibling.status is not Status.RUNNING or self._is_dated(sibling):
                continue
            assert slot is not None
            if slot in entered_slots or table.num_computed[slot] < wanted:
                is_awaited = True
            elif (fork := self._fork(sibling, slot, wanted)) is not None:
                return fork
        return None if is_awaited else start

    def _fork(self, sibling: Sequence, slot: int, num_computed: int) -> Start | None:
        tables = []
        for table in self._state.table.tables:
            num_null = table.group.num_null(num_computed)
            if table.num_null[slot] > num_null:
                return None  # it has gone on and freed blocks that this one would read
            num_full, rest = divmod(num_computed, table.block_size)
            block_ids = table.blocks(slot)
            copied_from = block_ids[num_full] if rest else None
            tables.append(TableStart(num_null, block_ids[num_null:num_full], [], copied_from))
        return Start.of(num_computed, tables, sibling)

    @staticmethod
    def _is_dated(sequence: Sequence) -> bool:
        """True if its KV is older than the last reset of the prefix cache, so not to be reused."""
        return sequence.is_private and not sequence.request.skip_prefix_cache
