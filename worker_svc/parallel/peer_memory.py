"""Device memory of every rank that all ranks of the host can write.

A rank's kernels access a peer's memory by address, like their own. The kernels define the order of
writes (`kernels/comm/all_reduce.py`).
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.comm.inboxes import EMPTY_BYTE, Inboxes

# Bytes that one rank sends per call: with one peer, 512 rows of 4096 in bfloat16. Everything is
# sent to every peer, so larger sums, or more peers, are faster through a library.
SENT_BYTES = 4 << 20


class Slot(IntEnum):
    """Inboxes for calls that never follow each other directly, by the order of a step.

    Gathers may follow each other, and alternate.
    """

    ATTENTION = 0
    MLP = 1
    EMBEDDING = 2
    ODD_GATHER = 3
    EVEN_GATHER = 4


@dataclass(slots=True)
class PeerMemory:
    """This rank's memory and the inboxes of all ranks."""

    own: Tensor  # must live as long as peers may write
    inboxes: Inboxes
    _num_gathers: int = 0

    def gather(self, part: Tensor) -> Tensor | None:
        """Gathers a tensor of each rank to [size, *shape]; None if it is too large for that."""
        from kernels.comm import all_gather  # noqa: PLC0415 - Triton is only where CUDA is

        if not part.is_contiguous() or not all_gather.fits(part.nbytes, self.inboxes):
            return None
        self._num_gathers += 1
        slot = Slot.ODD_GATHER if self._num_gathers % 2 else Slot.EVEN_GATHER
        return all_gather.all_gather(part, self.inboxes, slot)


def inbox_size(size: int) -> int:
    """Bytes of an inbox, in whole KiB."""
    return SENT_BYTES // (size - 1) >> 10 << 10


def reaches_all(rank: int, size: int) -> bool:
    """Whether this rank's device can access the memory of all others."""
    others = (peer for peer in range(size) if peer != rank)
    return all(torch.cuda.can_device_access_peer(rank, peer) for peer in others)


def open_peer_memory(rank: int, size: int, device: torch.device) -> PeerMemory:
    """Allocates this rank's part and maps the others'; ranks may write once all have returned."""
    from torch.distributed import _symmetric_memory as symmetric_memory  # noqa: PLC0415 - slow

    inbox_bytes = inbox_size(size)
    num_bytes = len(Slot) * size * inbox_bytes
    own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    own.fill_(EMPTY_BYTE)
    assert dist.group.WORLD is not None  # made by who calls this
    handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
    views = [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(size)]
    addresses = torch.tensor([view.data_ptr() for view in views], device=device)
    torch.cuda.synchronize(device)
    return PeerMemory(own, Inboxes(addresses, rank, size, inbox_bytes, len(Slot)))
