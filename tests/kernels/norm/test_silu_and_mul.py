"""SiLU-and-mul kernel against its reference, computed in float32."""

import pytest
import torch

from kernels import reference
from kernels.norm.silu_and_mul import silu_and_mul

EPS = 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 200), (5, 3072)])
def test_the_first_half_gates_the_second(shape, dtype, device, assert_close):
    x = torch.randn(shape, device=device).to(dtype) * 3
    assert_close(silu_and_mul(x), reference.silu_and_mul(x.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "hidden"), [(200, 64), (3072, 1500)])
def test_a_product_is_divided_by_the_root_mean_squares_of_its_rows(
    width, hidden, dtype, device, assert_close
):
    rows = torch.randn((5, hidden), device=device)
    rows = (rows * torch.arange(1, 6, device=device)[:, None]).to(dtype)
    x = torch.randn((5, 2 * width), device=device).to(dtype)
    factor = (rows.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert_close(silu_and_mul(x, rows, EPS), reference.silu_and_mul(x.float() * factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 200), (5, 3072)])
def test_gelu_in_place_of_silu(shape, dtype, device, assert_close):
    torch.manual_seed(3)  # a single gate may be so far below 0 that all of it is rounding
    x = torch.randn(shape, device=device).to(dtype) * 3
    assert_close(silu_and_mul(x, gelu=True), reference.gelu_and_mul(x.float()))


@pytest.mark.parametrize("gelu", [False, True])
def test_a_large_negative_gate_closes(gelu, device):
    x = torch.tensor([[-80.0, 5.0]], device=device)
    assert abs(silu_and_mul(x, gelu=gelu).item()) < 1e-30


def test_an_odd_width_and_rows_of_another_number_are_refused(device):
    with pytest.raises(ValueError, match=r"even width, got \(2, 3\)"):
        silu_and_mul(torch.randn(2, 3, device=device))
    with pytest.raises(ValueError, match=r"rms_of must be contiguous \[2, N\], got \(3, 4\)"):
        silu_and_mul(torch.randn(2, 4, device=device), torch.randn(3, 4, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 6144), (256, 6144), (8192, 24576)])
def test_real_sizes_in_bfloat16(shape, device, assert_close):
    x = torch.randn(shape, device=device).bfloat16()
    assert_close(silu_and_mul(x), reference.silu_and_mul(x.float()))
