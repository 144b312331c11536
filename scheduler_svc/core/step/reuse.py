"""Finds the KV of a waiting sequence that exists already and need not be computed.

It may be in blocks of the prefix cache, in host memory, or in blocks of another sequence of the
fork group, which computed the same prompt. This module changes nothing; admission applies the start
with the most tokens.
"""

from scheduler_svc.core.kv.host_pool import Swapped
from scheduler_svc.core.kv.sliding_window import first_read
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.step.plan import EnteringSequence
from scheduler_svc.core.step.start import Start
from scheduler_svc.core.step.state import SchedulerState


class Reuse:
    """Finds where sequences begin to compute."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self._config = config
        self._state = state

    def find(self, sequence: Sequence, entered: list[EnteringSequence]) -> Start | None:
        """Returns the start that leaves the fewest tokens to compute.

        Returns None while another sequence of the fork group computes the same prompt: blocks of
        sequences in `entered`, admitted to this very step, can be copied only in the next.
        """
        start = self.cached(sequence)
        swapped = self._state.host.find(sequence)
        if swapped is not None:
            start = self._swapped(sequence, swapped, start)
        if sequence.request.fork_group:
            return self._forked(sequence, start, entered)
        return start

    def cached(self, sequence: Sequence) -> Start:
        """The start after the longest cached prefix that may be skipped."""
        config = self._config
        if not config.enable_prefix_caching or sequence.is_private:
            return Start()
        token_ids, size = sequence.token_ids, config.block_size
        hashes = sequence.block_hashes(size)[: sequence.num_skippable // size]
        cache, origins = self._state.pool.cache, None
        if sequence.origins is not None:
            origins = sequence.origins.of_blocks(0, len(hashes), size)
        if not config.sliding_window:
            shared = cache.lookup(hashes, token_ids, sequence.root, origins)
            return Start(len(shared) * size, shared=shared)
        num_null, shared = cache.lookup_window(
            hashes, token_ids, sequence.root, config.sliding_window, origins
        )
        return Start((num_null + len(shared)) * size, num_null, shared)

    def _swapped(self, sequence: Sequence, swapped: Swapped, cached: Start) -> Start:
        # Granted steps that were taken back after the preemption counted as computed at that time.
        num_computed = min(swapped.num_computed, sequence.num_skippable)
        size, window = self._config.block_size, self._config.sliding_window
        num_null = first_read(num_computed, window) // size
        if num_computed <= cached.num_computed or swapped.num_null > num_null:
            return cached
        shared = [] if window else cached.shared
        begin = num_null - swapped.num_null + len(shared)
        end = -(-num_computed // size) - swapped.num_null
        host_blocks = swapped.host_blocks[begin:end]
        return Start(num_computed, num_null, shared, host_blocks)

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
        size, table = self._config.block_size, self._state.table
        num_null = first_read(num_computed, self._config.sliding_window) // size
        if table.num_null[slot] > num_null:
            return None  # it has gone on and freed blocks that this one would read
        num_full, rest = divmod(num_computed, size)
        block_ids = table.blocks(slot)
        return Start(
            num_computed,
            num_null,
            shared=block_ids[num_null:num_full],
            copied_from=block_ids[num_full] if rest else None,
            sibling=sibling,
        )

    @staticmethod
    def _is_dated(sequence: Sequence) -> bool:
        """Whether its KV is older than the last reset of the prefix cache, so not to be reused."""
        return sequence.is_private and not sequence.request.skip_prefix_cache
