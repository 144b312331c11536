"""Rows in 8-bit floats: what they are rounded to, and what scales make of sums."""

import math

import pytest
import torch
from torch.nn import functional as F

from kernels import reference
from kernels.quantized import rounded_rows
from kernels.quantized.scaled import FLOAT8, LARGEST

types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales[:, None]


@types
@pytest.mark.parametrize("width", [16, 96, 1500])
def test_a_row_is_rounded_by_its_own_largest_number(width, dtype, device):
    x = torch.randn(5, width, device=device).mul(
        torch.tensor([1e-6, 1, 3, 1e4, 0])[:, None].to(device)
    )
    x = x.to(dtype)
    values, scales = rounded_rows.rounded(x)
    assert values.dtype == FLOAT8
    largest = x.float().abs().amax(1)
    torch.testing.assert_close(scales[:4] * LARGEST, largest[:4])
    assert scales[4] == 1.0
    # Three bits of mantissa: half of the last one, and the least subnormal number of a row.
    bound = x.float().abs() / 16 + scales[:, None] * 2.0**-10
    assert ((wide(values, scales) - x.float()).abs() <= bound * 1.001).all()


def test_a_row_of_numbers_whose_inverse_is_infinite_becomes_zero(device):
    x = torch.tensor([[1e-38, 0.0] * 8, [1e-34, 0.0] * 8], device=device)
    values, scales = rounded_rows.rounded(x)
    assert torch.equal(wide(values, scales)[0], torch.zeros(16, device=device))
    torch.testing.assert_close(wide(values, scales)[1], x[1])


@types
def test_its_norm_is_rounded(dtype, device):
    x, norm = torch.randn(3, 96, device=device).to(dtype), torch.rand(96, device=device).to(dtype)
    values, scales = rounded_rows.rounded(x, norm, 1e-6)
    expected = reference.rms_norm(x, norm, 1e-6).float()
    assert (wide(values, scales) - expected).norm() <= 0.04 * expected.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(bad, device):
    x = torch.ones(3, 32, device=device)
    x[1, 5] = bad
    values, scales = rounded_rows.rounded(x)
    sums = values.float() @ torch.ones(32, 16, device=device)
    found = rounded_rows.rescaled(sums, scales, torch.ones(16, device=device))
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], torch.full_like(found[[0, 2]], 32.0))


@types
@pytest.mark.parametrize("width", [32, 2080])
def test_sums_are_rescaled(width, dtype, device):
    y, residual = (torch.randn(4, width, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(width, device=device).to(dtype)
    scales, by_output = torch.rand(4, device=device), torch.rand(width, device=device)
    expected = y.float() * scales[:, None] * by_output
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        rounded_rows.rescaled(y.clone(), scales, by_output).float(), expected, **near
    )
    found = rounded_rows.rescaled(y.clone(), scales, by_output, bias, residual).float()
    torch.testing.assert_close(found, expected + bias + residual.float(), **near)
    gate, up = expected.chunk(2, dim=1)
    found = rounded_rows.gated(y, scales, by_output).float()
    torch.testing.assert_close(found, F.silu(gate) * up, **near)


@types
@pytest.mark.parametrize("width", [32, 1040])
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_is_rescaled_is_rounded_in_the_same_kernel(width, has_bias, dtype, device):
    y, residual = (torch.randn(4, width, device=device).to(dtype) for _ in range(2))
    norm, bias = (torch.rand(width, device=device).to(dtype) for _ in range(2))
    given = torch.rand(4, device=device), torch.rand(width, device=device)
    added = bias if has_bias else None
    expected = rounded_rows.rescaled(y.clone(), *given, added, residual)
    wanted = rounded_rows.rounded(expected, norm, 1e-5)
    found = rounded_rows.rescaled_and_rounded(y, *given, added, residual, norm, 1e-5)
    assert torch.equal(y, expected)
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-6, atol=0.0)
    steps = wide(*found) - wide(*wanted)
    # Where sums are added in another order, a number may fall on the other side of a boundary.
    assert (steps != 0).float().mean() < 0.01


def test_rows_too_wide_for_a_program_are_refused(device):
    y, ones = torch.zeros(1, 32784, device=device), torch.ones(32784, device=device)
    with pytest.raises(ValueError, match="at most 32768"):
        rounded_rows.rescaled_and_rounded(y, ones[:1], ones, None, y, ones, 1e-5)
