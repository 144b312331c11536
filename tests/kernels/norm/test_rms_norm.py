"""RMS norm kernels against their reference, computed in float32."""

import pytest
import torch

from kernels import reference
from kernels.norm.rms_norm import add_rms_norm, rms_norm

SHAPES = [(1, 64), (3, 100), (5, 576), (2, 5120)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_normed_and_inputs_kept(shape, dtype, device, assert_close):
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=device).to(dtype)
    x_before, residual_before = x.clone(), residual.clone()
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), expected)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert_close(total, x.float() + residual.float())
    assert_close(normed, reference.rms_norm(x.float() + residual.float(), weight.float(), 1e-5))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_a_weight_of_float32_is_applied_before_rows_are_rounded(device):
    x = torch.randn(3, 100, device=device).half()
    weight = 1 + torch.rand(100, device=device) * 2**-12  # no number of float16
    expected = reference.rms_norm(x, weight, 1e-5)
    assert expected.dtype == torch.float16
    assert torch.equal(expected, reference.rms_norm(x.float(), weight, 1e-5).half())
    for normed in (rms_norm(x, weight, 1e-5), add_rms_norm(x, 0 * x, weight, 1e-5)[0]):
        assert normed.dtype == torch.float16
        assert (normed - expected).abs().max() <= 2**-9  # a bit of the largest
        assert (normed == expected).float().mean() > 0.98


def test_rows_may_be_a_slice_of_wider_ones(device, assert_close):
    wide = torch.randn(4, 300, device=device)
    weight = torch.randn(100, device=device)
    expected = reference.rms_norm(wide[:, 100:200], weight, 1e-6)
    assert_close(rms_norm(wide[:, 100:200], weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_added_may_have_a_factor(dtype, device, assert_close):
    x, residual = (torch.randn(3, 100, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(100, device=device).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, 0.22)
    exact = [each.float() for each in (x, residual, weight)]
    wanted = reference.add_rms_norm(*exact, 1e-5, 0.22)
    assert_close(total, x.float() * 0.22 + residual.float())
    assert_close(normed, wanted[0])
    assert torch.equal(wanted[1], torch.add(exact[1], exact[0], alpha=0.22))


def test_epsilon_keeps_a_row_of_zeros_finite(device):
    x, weight = torch.zeros(1, 64, device=device), torch.ones(64, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-6), x)


def test_wrong_arguments_are_refused_by_name(device):
    x, weight = torch.randn(2, 64, device=device), torch.ones(64, device=device)
    with pytest.raises(ValueError, match=r"weight must be contiguous \[64\]"):
        rms_norm(x, weight[:32], 1e-6)
    with pytest.raises(ValueError, match=r"or float32, got torch\.float16"):
        rms_norm(x, weight.half(), 1e-6)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        add_rms_norm(x, x[:1], weight, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1024), (256, 1024), (8192, 4096)])
def test_real_sizes_in_bfloat16(shape, device, assert_close):
    x, residual = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(shape[1], device=device).bfloat16()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert_close(total, x.float() + residual.float())
    assert_close(normed, reference.rms_norm(x.float() + residual.float(), weight.float(), 1e-6))
