"""Where ranks leave rows for each other: memory of each that all can write.

The layout that `all_reduce` writes and reads; importing it takes no Triton.
"""

from dataclasses import dataclass

import torch

# No computation makes a number of these bytes: an element that has them has not come yet.
EMPTY_BYTE = 0xFF


@dataclass(frozen=True, slots=True)
class Inboxes:
    """One memory per rank, [num_slots, size, num_bytes] bytes each, seen from one rank.

    In a call that uses slot s, rank r writes into [s, r] of each other's memory. All of it is
    EMPTY_BYTE before the first call, and again after each.
    """

    addresses: torch.Tensor  # [size] int64: where each rank's memory is in this address space
    rank: int
    size: int
    num_bytes: int  # what fits into one inbox
    num_slots: int

    def hold(self, num_bytes: int) -> bool:
        """Whether so much fits into one."""
        return num_bytes <= self.num_bytes
