"""All-reduce kernel with the memory of all ranks in one process: any order of send and receive."""

from itertools import pairwise

import pytest
import torch

from kernels import reference
from kernels.comm import all_reduce
from kernels.comm.inboxes import EMPTY_BYTE, Inboxes

EPS = 1e-6
NUM_SLOTS = 3
DTYPES = [torch.float32, torch.float16]
# Of the norm alone, which kernel and reference sum up in float32 in another order before they round
# it once: the two may be neighbours. In bfloat16 these are up to 2^-7 apart, in float16 2^-10.
NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


class Ranks:
    """The memory of each rank, and the inboxes as seen from each."""

    def __init__(self, size: int, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.full(
            (size, NUM_SLOTS, size, num_bytes), EMPTY_BYTE, dtype=torch.uint8, device=device
        )
        addresses = torch.tensor([part.data_ptr() for part in self.memory], device=device)
        self.inboxes = [
            Inboxes(addresses, rank, size, num_bytes, NUM_SLOTS) for rank in range(size)
        ]

    def is_empty(self) -> bool:
        return bool((self.memory == EMPTY_BYTE).all())


def random(shape, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def check(size, shape, dtype, device, has_residual, has_norm):
    ranks = Ranks(size, 2 * shape[0] * shape[1] * dtype.itemsize, device)
    parts = [random(shape, dtype, device, seed) for seed in range(size)]
    residual = random(shape, dtype, device, 100) if has_residual else None
    weight = random(shape[1:], dtype, device, 101) if has_norm else None
    for part, inboxes in zip(parts, ranks.inboxes, strict=True):
        all_reduce.send(part, inboxes, 1)
    results = [
        all_reduce.receive(part, inboxes, 1, residual, weight, EPS)
        for part, inboxes in zip(parts, ranks.inboxes, strict=True)
    ]
    total, normed = reference.all_reduce(parts, residual, weight, EPS)
    for ours, ours_normed in results:
        assert torch.equal(ours, total)
        if normed is None:
            assert ours_normed is None
        else:
            tolerance = NORM_TOLERANCE[dtype]
            torch.testing.assert_close(ours_normed, normed, rtol=tolerance, atol=1e-5)
    for (_, one), (_, other) in pairwise(results):
        assert one is None or torch.equal(one, other)
    assert ranks.is_empty()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, torch.float32), (2, torch.float16), (4, torch.float32), (8, torch.float16)],
)
@pytest.mark.parametrize("neighbours", ["none", "residual", "residual norm"])
def test_every_rank_gets_the_same_sum_rounded_once(size, dtype, neighbours, device):
    check(size, (3, 100), dtype, device, "residual" in neighbours, "norm" in neighbours)


def test_a_row_in_pieces_and_more_rows_than_programs(device):
    check(2, (2, 2048), torch.float16, device, has_residual=True, has_norm=False)
    check(2, (130, 16), torch.float16, device, has_residual=True, has_norm=True)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rows_of_a_table_in_parts_come_from_the_rank_that_has_them(has_norm, device):
    ranks = Ranks(2, 4096, device)
    table = random((10, 24), torch.float32, device, 1)
    ids = torch.tensor([9, 0, 5, 4, 4], device=device)
    weight = random((24,), torch.float32, device, 2) if has_norm else None
    shares = [
        all_reduce.TableRows(part.contiguous(), ids, first)
        for first, part in ((0, table[:5]), (5, table[5:]))
    ]
    for share, inboxes in zip(shares, ranks.inboxes, strict=True):
        all_reduce.send(share, inboxes, 2)
    for share, inboxes in zip(shares, ranks.inboxes, strict=True):
        total, normed = all_reduce.receive(share, inboxes, 2, None, weight, EPS)
        assert torch.equal(total, table[ids])
        if weight is not None:
            expected = reference.rms_norm(table[ids], weight, EPS)
            torch.testing.assert_close(normed, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096), (7, 4096), (256, 4096), (512, 4096), (300, 1024)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_bfloat16_in_the_sizes_of_models(shape, has_norm, device):
    check(2, shape, torch.bfloat16, device, has_residual=True, has_norm=has_norm)


def test_a_rank_may_be_a_call_ahead_of_its_peers(device):
    """Rank 0 sends as early as the rules allow, before rank 1 has read the previous call's rows."""
    ranks, slots = Ranks(2, 4096, device), [0, 1, 2, 0, 2, 1, 0]
    rows = [1 + call % 3 for call in range(len(slots))]  # stale elements follow shorter calls
    parts = [[random((n, 32), torch.float32, device, 2 * n + r) for r in (0, 1)] for n in rows]
    fast, slow = ranks.inboxes
    all_reduce.send(parts[0][0], fast, slots[0])
    for call, slot in enumerate(slots):
        mine, yours = parts[call]
        all_reduce.send(yours, slow, slot)
        total, _ = all_reduce.receive(mine, fast, slot)
        if call + 1 < len(slots):
            all_reduce.send(parts[call + 1][0], fast, slots[call + 1])
        late, _ = all_reduce.receive(yours, slow, slot)
        assert torch.equal(total, mine + yours)
        assert torch.equal(late, total)
    assert ranks.is_empty()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_looks_like_an_empty_element_arrives_as_nan(dtype, device):
    ranks = Ranks(2, 4096, device)
    word = torch.int16 if dtype.itemsize == 2 else torch.int32
    parts = [random((1, 16), dtype, device, seed) for seed in (0, 1)]
    parts[0].view(word)[0, 5] = -1
    for part, inboxes in zip(parts, ranks.inboxes, strict=True):
        all_reduce.send(part, inboxes, 0)
    total, _ = all_reduce.receive(parts[1], ranks.inboxes[1], 0)
    assert total.isnan().nonzero().tolist() == [[0, 5]]


def test_what_does_not_fit_is_refused_by_name(device):
    inboxes = Ranks(2, 64, device).inboxes[0]
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="x has 96 bytes, an inbox 64"):
        all_reduce.send(torch.zeros(3, 8, device=device), inboxes, 0)
    with pytest.raises(ValueError, match="slot 3 of 3"):
        all_reduce.send(x, inboxes, 3)
    with pytest.raises(ValueError, match=r"residual must be contiguous \(2, 8\)"):
        all_reduce.receive(x, inboxes, 0, residual=torch.zeros(1, 8, device=device))
    with pytest.raises(ValueError, match=r"norm_weight must be \[8\]"):
        all_reduce.receive(x, inboxes, 0, norm_weight=torch.zeros(4, device=device))
    with pytest.raises(TypeError, match="residual is torch"):
        all_reduce.receive(x, inboxes, 0, residual=x.half())
    with pytest.raises(ValueError, match="got torch"):
        all_reduce.send(x.long(), inboxes, 0)
