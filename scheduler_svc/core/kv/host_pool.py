"""Host memory for the KV of preempted sequences: host blocks by sequence.

It handles numbers only; the worker owns the memory and copies the bytes. A host block that a plan
reads or writes is not handed out again within the same plan, so the order of its copies is free.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """The blocks of one KV group."""

    num_null: int  # leading blocks that no later token reads; not stored
    host_blocks: list[int]  # the blocks after those, in table order


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence's KV in host memory."""

    num_computed: int  # tokens with KV
    tables: tuple[SwappedTable, ...]  # by group

    @property
    def host_blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block_id for table in self.tables for block_id in table.host_blocks]


class HostPool:
    """The free host blocks, and the ones that each sequence holds."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._freed: list[int] = []  # since the last plan: free once the next one is made
        self._held: dict[Sequence, Swapped] = {}

    @property
    def num_free(self) -> int:
        """Number of host blocks that hold nothing."""
        return len(self._free) + len(self._freed)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The sequences with KV in host memory."""
        return self._held.keys()

    def find(self, sequence: Sequence) -> Swapped | None:
        """A sequence's KV in host memory; None when there is none."""
        return self._held.get(sequence)

    def put(
        self, sequence: Sequence, num_computed: int, tables: list[tuple[int, int]]
    ) -> Swapped | None:
        """Allocates host blocks for a sequence's KV; None, changing nothing, if it does not fit.

        `tables` are (leading null blocks, blocks to store) of each group.
        """
        if sum(num_blocks for _, num_blocks in tables) > len(self._free):
            return None
        stored = [
            SwappedTable(num_null, [self._free.pop() for _ in range(num_blocks)])
            for num_null, num_blocks in tables
        ]
        swapped = self._held[sequence] = Swapped(num_computed, tuple(stored))
        return swapped

    def release(self, sequence: Sequence) -> None:
        """Frees the host blocks of a sequence that is running again or has ended."""
        swapped = self._held.pop(sequence, None)
        if swapped is not None:
            self._freed += swapped.host_blocks

    def planned(self) -> None:
        """Makes the blocks freed before this plan available again."""
        if self._freed:
            self._free += self._freed
            self._freed = []
