"""The norm of an output, added to the residual stream, against the two steps of the reference."""

import pytest
import torch

from kernels import reference
from kernels.norm.output_norm import add_output_norm
from kernels.norm.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 2560)])
def test_it_is_a_norm_a_sum_and_a_norm(shape, dtype, scale, device, assert_close):
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight, next_weight = (torch.rand(shape[1], device=device).to(dtype) for _ in range(2))
    kept = x.clone(), residual.clone()
    total, normed = add_output_norm(x, weight, residual, EPS, scale, next_weight)
    exact = reference.rms_norm(x.float(), weight.float(), EPS) * scale + residual.float()
    assert_close(total, exact)
    assert_close(normed, reference.rms_norm(exact, next_weight.float(), EPS))
    assert torch.equal(kept[0], x) and torch.equal(kept[1], residual)
    alone, none = add_output_norm(x, weight, residual, EPS, scale)
    assert none is None
    assert_close(alone, exact)


def test_its_bits_are_those_of_the_kernels_in_turn(device):
    """With a weight of float32, too: what is added is rounded before it is added."""
    x, residual = (torch.randn(4, 300, device=device).half() for _ in range(2))
    weight = torch.randn(300, device=device)
    next_weight = torch.randn(300, device=device).half()
    total, normed = add_output_norm(x, weight, residual, EPS, 1.0, next_weight)
    expected = add_rms_norm(rms_norm(x, weight, EPS), residual, next_weight, EPS)
    assert torch.equal(normed, expected[0]) and torch.equal(total, expected[1])


def test_rows_of_zeros_and_no_rows_are_served(device):
    zeros, ones = torch.zeros(1, 64, device=device), torch.ones(64, device=device)
    total, normed = add_output_norm(zeros, ones, zeros, EPS, 1.0, ones)
    assert torch.equal(total, zeros) and torch.equal(normed, zeros)
    assert add_output_norm(zeros[:0], ones, zeros[:0], EPS)[0].shape == (0, 64)


def test_wrong_arguments_are_refused_by_name(device):
    x, weight = torch.randn(2, 64, device=device), torch.ones(64, device=device)
    with pytest.raises(ValueError, match=r"weight must be contiguous \[64\]"):
        add_output_norm(x, weight, x, EPS, 1.0, weight[:32])
    with pytest.raises(ValueError, match="residual must be contiguous"):
        add_output_norm(x, weight, x[:1], EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2560), (32, 2560), (4096, 5376)])
def test_real_sizes_in_bfloat16(shape, device, assert_close):
    x, residual = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(shape[1], device=device)
    total, _ = add_output_norm(x, weight, residual, EPS)
    exact = reference.rms_norm(x.float(), weight, EPS) + residual.float()
    assert_close(total, exact)
