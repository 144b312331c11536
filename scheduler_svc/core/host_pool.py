"""Host memory for the KV of preempted sequences: which host block holds what of whom.

It deals in numbers only; the worker owns the memory and moves the bytes. A host block that a plan
reads or writes is not handed out again within the same plan, so the order of its moves is free.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence's KV in host memory."""

    num_computed: int  # tokens with KV
    num_null: int  # leading blocks that no token to come reads, and that are nowhere
    host_blocks: list[int]  # of the blocks behind those, in the order of its table


class HostPool:
    """The free host blocks, and what the others hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._freed: list[int] = []  # since the last plan: free once the next one is made
        self._held: dict[Sequence, Swapped] = {}

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free) + len(self._freed)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Whose KV is here."""
        return self._held.keys()

    def find(self, sequence: Sequence) -> Swapped | None:
        """What is here of a sequence."""
        return self._held.get(sequence)

    def put(
        self, sequence: Sequence, num_blocks: int, num_computed: int, num_null: int
    ) -> list[int] | None:
        """Host blocks for a sequence's KV; None, and nothing changes, when there are not enough."""
        if num_blocks > len(self._free):
            return None
        host_blocks = [self._free.pop() for _ in range(num_blocks)]
        self._held[sequence] = Swapped(num_computed, num_null, host_blocks)
        return host_blocks

    def release(self, sequence: Sequence) -> None:
        """A sequence is back in its blocks, or gone."""
        swapped = self._held.pop(sequence, None)
        if swapped is not None:
            self._freed += swapped.host_blocks

    def planned(self) -> None:
        """A plan is made: what was freed before it can be handed out again."""
        if self._freed:
            self._free += self._freed
            self._freed = []
