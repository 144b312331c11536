"""GEMMs of normed rows: dividing by the RMS afterwards gives the same result."""

import pytest
import torch

from kernels import reference
from worker_svc.models.fused_gemms import Hidden, NormedLinear
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import Linear

EPS = 1e-5
NUM_ROWS, HIDDEN, WIDTH = 20, 64, 48  # too many rows for a GEMM with a fused norm
CPU = torch.device("cpu")


def make(dtype: torch.dtype, has_bias: bool = False) -> tuple[RMSNorm, Linear, torch.Tensor]:
    """A norm, the linear layer after it, and rows of very different magnitude."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(HIDDEN, EPS, dtype, CPU)
    norm.weight.copy_(torch.randn(HIDDEN, generator=generator).exp())
    linear = Linear.empty(HIDDEN, WIDTH, bias=has_bias, dtype=dtype, device=CPU)
    linear.weight.copy_(torch.randn((WIDTH, HIDDEN), generator=generator) / 8)
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(WIDTH, generator=generator))
    sizes = torch.logspace(-2, 3, NUM_ROWS)[:, None]
    return norm, linear, (torch.randn((NUM_ROWS, HIDDEN), generator=generator) * sizes).to(dtype)


def expected(norm: RMSNorm, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    y = reference.rms_norm(x.double(), norm.weight.double(), EPS) @ linear.weight.double().T
    return y if linear.bias is None else y + linear.bias.double()


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_a_product_divided_by_root_mean_squares_is_that_of_the_norm(
    dtype: torch.dtype, distance: float
) -> None:
    norm, linear, x = make(dtype)
    want = expected(norm, linear, x)
    y, rms_of = NormedLinear.of(norm, linear)(Hidden(x), EPS)
    assert rms_of is x
    rms = (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert ((y.double() / rms - want).norm(dim=1) / want.norm(dim=1)).max() < distance


def test_a_norm_made_on_the_way_is_taken_and_nothing_is_left_to_divide_by() -> None:
    norm, linear, x = make(torch.float32)
    want = expected(norm, linear, x)
    fused = NormedLinear.of(norm, linear)
    normed = reference.rms_norm(x, fused.norm, EPS)
    got, rms_of = fused(Hidden(x, normed), EPS)
    assert rms_of is None
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float32, True), (torch.float16, False)])
def test_what_a_later_division_would_spoil_is_normed_first(
    dtype: torch.dtype, has_bias: bool
) -> None:
    norm, linear, x = make(dtype, has_bias)
    x = (x * 30).clamp(-6e4, 6e4)  # near the float16 maximum, which GEMMs would exceed
    want = expected(norm, linear, x)
    got, rms_of = NormedLinear.of(norm, linear)(Hidden(x), EPS)
    assert rms_of is None
    assert (got.double() - want).norm() < 2e-3 * want.norm()
