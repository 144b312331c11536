"""Memory layout through which ranks exchange rows: each rank's memory is writable by all.

`all_reduce` and `all_gather` use it. This module does not load Triton.
"""

from dataclasses import dataclass

import torch

# No computation produces an element of these bytes, so it marks one that has not arrived.
EMPTY_BYTE = 0xFF


@dataclass(frozen=True, slots=True)
class Inboxes:
    """The memory of all ranks, [num_slots, size, num_bytes] bytes each, as mapped in one rank.

    In a call that uses slot s, rank r writes into [s, r] of each peer's memory. All bytes are
    EMPTY_BYTE before and after each call.
    """

    addresses: torch.Tensor  # [size] int64: mapped address of each rank's memory
    rank: int
    size: int
    num_bytes: int  # of one inbox
    num_slots: int

    def hold(self, num_bytes: int) -> bool:
        """True if num_bytes fit into one inbox."""
        return num_bytes <= self.num_bytes
