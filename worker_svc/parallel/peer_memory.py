"""Device memory of each rank that all ranks of the host can read and write.

Kernels access a peer's memory by address, like their own. They define the order of writes
(`kernels/comm/all_reduce.py`).
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.comm.inboxes import EMPTY_BYTE, Inboxes

# Bytes that a rank sends per call: 512 rows of 4096 in bfloat16 with one peer. Every peer receives
# the whole tensor, so for larger tensors or more peers NCCL is faster.
SENT_BYTES = 4 << 20


class Slot(IntEnum):
    """Inboxes of a step's collectives, in their order, so that none is used twice in succession.

    Gathers may follow each other and therefore alternate between two inboxes.
    """

    ATTENTION = 0
    MLP = 1
    EMBEDDING = 2
    ODD_GATHER = 3
    EVEN_GATHER = 4


@dataclass(slots=True)
class PeerMemory:
    """This rank's memory and the inboxes of all ranks."""

    own: Tensor  # kept alive, since peers write into it
    inboxes: Inboxes
    _num_gathers: int = 0

    def gather(self, part: Tensor) -> Tensor | None:
        """Gathers a tensor of each rank to [size, *shape]; None if an inbox is too small."""
        from kernels.comm import all_gather  # noqa: PLC0415 - needs Triton

        if not part.is_contiguous() or not all_gather.fits(part.nbytes, self.inboxes):
            return None
        self._num_gathers += 1
        slot = Slot.ODD_GATHER if self._num_gathers % 2 else Slot.EVEN_GATHER
        return all_gather.all_gather(part, self.inboxes, slot)


def inbox_size(size: int) -> int:
    """Size of one inbox in bytes, rounded down to KiB."""
    return SENT_BYTES // (size - 1) >> 10 << 10


def reaches_all(rank: int, size: int) -> bool:
    """True if this rank's device can access the memory of all other ranks' devices."""
    others = (peer for peer in range(size) if peer != rank)
    return all(torch.cuda.can_device_access_peer(rank, peer) for peer in others)


def open_peer_memory(rank: int, size: int, device: torch.device) -> PeerMemory:
    """Allocates and maps memory of all ranks; ranks may write once all of them have returned."""
    from torch.distributed import _symmetric_memory as symmetric_memory  # noqa: PLC0415 - slow

    inbox_bytes = inbox_size(size)
    num_bytes = len(Slot) * size * inbox_bytes
    own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    own.fill_(EMPTY_BYTE)
    assert dist.group.WORLD is not None  # created by the caller
    handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
    views = [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(size)]
    addresses = torch.tensor([view.data_ptr() for view in views], device=device)
    torch.cuda.synchronize(device)
    return PeerMemory(own, Inboxes(addresses, rank, size, inbox_bytes, len(Slot)))
