"""All-gather kernel: any bits, with the memory of all ranks in one process."""

import pytest
import torch

from kernels.comm import all_gather
from kernels.comm.inboxes import EMPTY_BYTE, Inboxes


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [(1,), (3, 2), (2, 700)])
def test_every_rank_gets_the_bits_of_all_in_their_order(size, shape, device):
    memory = torch.full((size, 3, size, 1 << 14), EMPTY_BYTE, dtype=torch.uint8, device=device)
    addresses = torch.tensor([part.data_ptr() for part in memory], device=device)
    inboxes = [Inboxes(addresses, rank, size, 1 << 14, 3) for rank in range(size)]
    parts = [torch.randint(-3, 3, shape, dtype=torch.int32, device=device) for _ in range(size)]
    parts[0].fill_(-1)  # all bits set, as in an empty 32-bit word
    parts = [part.view(torch.float32) for part in parts]
    for part, own in zip(parts, inboxes, strict=True):
        all_gather.send(part, own, 2)
    for part, own in zip(parts, inboxes, strict=True):
        gathered = all_gather.receive(part, own, 2)
        assert gathered.shape == (size, *shape)
        assert torch.equal(gathered.view(torch.int32), torch.stack(parts).view(torch.int32))
    assert (memory == EMPTY_BYTE).all()


def test_what_does_not_fit_is_refused(device):
    inboxes = Inboxes(torch.zeros(2, dtype=torch.int64, device=device), 0, 2, 64, 3)
    assert all_gather.fits(32, inboxes)
    assert not all_gather.fits(36, inboxes)
    assert not all_gather.fits(6, inboxes)
    with pytest.raises(ValueError, match="got 36 bytes"):
        all_gather.send(torch.zeros(9, device=device), inboxes, 0)
    with pytest.raises(ValueError, match="slot 3 of 3"):
        all_gather.send(torch.zeros(8, device=device), inboxes, 3)
