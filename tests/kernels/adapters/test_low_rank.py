"""Sums with adapters equal y + B (A x) row by row, and no other row changes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adapters.group_rows import group_rows
from kernels.adapters.low_rank import add_low_rank
from tests.kernels.adapters.stacked import Stacked, state_of

QKV = ((0, 48), (48, 80), (96, 130))  # outputs between the second and the third have no adapter
WHOLE = ((0, 150),)
Close = Callable[[Tensor, Tensor], None]


def check(
    made: Stacked, places: list[int], dtype: torch.dtype, device: torch.device, close: Close,
    eps: float | None = None, factor: float = 1.0,
) -> None:  # fmt: skip
    """Compares rows that have an adapter, and asserts that all else keeps its bits."""
    generator = torch.Generator().manual_seed(len(places))
    count, layer = len(places), made.layer
    width = layer.num_outputs + 3  # the last outputs are no adapter's
    x = torch.randn(count, layer.num_inputs, generator=generator).mul(factor).to(dtype)
    y = torch.randn(count, width, generator=generator).to(dtype)
    wanted = made.added(x, places, width)
    if eps is not None:
        wanted *= torch.rsqrt(x.double().square().mean(1, keepdim=True) + eps)
    wanted += y.double()
    slots = torch.arange(count, dtype=torch.int32, device=device)
    rows = group_rows(slots, state_of(places, device), len(made.stacks.values), count)
    found = y.clone().to(device)
    add_low_rank(x.to(device), found, layer, made.stacks, rows, eps)
    having = [row for row, place in enumerate(places) if place >= 0 and len(made.a[place][0])]
    others = sorted({*range(count)} - {*having})
    assert torch.equal(found[others].cpu(), y[others])
    covered = torch.zeros(width, dtype=torch.bool)
    for begin, end in layer.parts:
        covered[begin:end] = True
    assert torch.equal(found[:, ~covered].cpu(), y[:, ~covered])
    if having:
        close(found[having].cpu(), wanted[having])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 8, 16, 256])
def test_ranks_at_edges(
    rank: int, dtype: torch.dtype, device: torch.device, assert_close: Close
) -> None:
    made = Stacked.drawn([rank, max(1, rank // 2)], 72, QKV, dtype, device)
    check(made, [0, -1, 1, 1, -1, 0, 0], dtype, device, assert_close)


@pytest.mark.parametrize("count", [1, 7, 33, 130, 300])
def test_numbers_of_rows(count: int, device: torch.device, assert_close: Close) -> None:
    made = Stacked.drawn([16, 3, 24], 144, WHOLE, torch.bfloat16, device, max_rank=48)
    random = np.random.default_rng(count)
    check(made, random.integers(-1, 3, count).tolist(), torch.bfloat16, device, assert_close)
    check(made, [-1] * count, torch.bfloat16, device, assert_close)
    check(made, [2] * count, torch.bfloat16, device, assert_close)


def test_every_row_has_another(device: torch.device, assert_close: Close) -> None:
    count = 33
    made = Stacked.drawn([8] * count, 64, QKV, torch.float32, device)
    check(made, list(range(count))[::-1], torch.float32, device, assert_close)


def test_sums_in_parts(device: torch.device, assert_close: Close) -> None:
    """A layer so wide that programs divide its inputs, the last of them a rest."""
    made = Stacked.drawn([16, 4], 3 * 1024 + 40, WHOLE, torch.float32, device)
    check(made, [1, 0, -1, 1], torch.float32, device, assert_close, eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_before_their_norm(
    dtype: torch.dtype, device: torch.device, assert_close: Close
) -> None:
    made = Stacked.drawn([16, 5], 72, QKV, dtype, device)
    check(made, [0, 1, -1, 0] * 5, dtype, device, assert_close, eps=1e-5, factor=30.0)


def test_an_adapter_without_the_layer(device: torch.device, assert_close: Close) -> None:
    made = Stacked.drawn([0, 8], 72, QKV, torch.float32, device)
    check(made, [0, 1, 0, -1], torch.float32, device, assert_close)


def test_the_largest_numbers_stay_finite(device: torch.device) -> None:
    """A x is near the end of the range of float32, above which nothing of it can be kept."""
    made = Stacked.drawn([8], 64, WHOLE, torch.bfloat16, device)
    made.stacks.values.fill_(2.0**-120)
    x = torch.full((3, 64), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16, device=device)
    y = torch.zeros((3, made.layer.num_outputs), dtype=torch.bfloat16, device=device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    rows = group_rows(slots, state_of([0, -1, 0], device), 1, 3)
    add_low_rank(x, y, made.layer, made.stacks, rows)
    wanted = 64 * 8 * float(x[0, 0]) * 2.0**-240
    torch.testing.assert_close(y[0, :150].double().cpu(), torch.full((150,), wanted).double())
    assert not y[1].any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    made = Stacked.drawn([8], 64, WHOLE, torch.float32, device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    rows = group_rows(slots, state_of([0, -1, 0], device), 1, 3)
    y = torch.zeros((3, made.layer.num_outputs), device=device)
    with pytest.raises(ValueError, match="of a layer"):
        add_low_rank(torch.zeros((3, 65), device=device), y, made.layer, made.stacks, rows)
    with pytest.raises(ValueError, match="groups of 3 rows, not of 2"):
        add_low_rank(torch.zeros((2, 64), device=device), y[:2], made.layer, made.stacks, rows)
    with pytest.raises(TypeError, match="x in torch"):
        x = torch.zeros((3, 64), device=device, dtype=torch.bfloat16)
        add_low_rank(x, y, made.layer, made.stacks, rows)
