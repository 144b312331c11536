"""GEMMs with narrow weights stand where those with plain weights stand, with the same results."""

import pytest
import torch

from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.scaled import ScaledWeight
from worker_svc.models.fused_gemms import FusedLinear, Hidden, NormedLinear
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import Linear
from worker_svc.models.stored.narrow_gemms import (
    NarrowLinear,
    NormedNarrowLinear,
    gemm_of,
    normed_gemm_of,
)

CPU = torch.device("cpu")
EPS, N, K = 1e-5, 32, 64


def stored(kind: str, seed: int) -> GroupedWeight | ScaledWeight:
    generator = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        return ScaledWeight.rounded(torch.randn((N, K), generator=generator))
    group = 32 if kind == "int4" else 8
    integers = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    scales = torch.rand((N, K // group), generator=generator) / 8 + 0.01
    return GroupedWeight(integers, scales, -8 * scales, 4)


def layer(kind: str) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    """A layer of two parts with a bias, its weight and its bias."""
    linear = Linear.empty(K, 2 * N, bias=True, dtype=torch.float32, device=CPU)
    parts = [stored(kind, seed) for seed in (1, 2)]
    for begin, part in zip((0, N), parts, strict=True):
        linear.rows(begin, begin + N).put_narrow(part)
    assert linear.bias is not None
    linear.bias.copy_(torch.randn(2 * N, generator=torch.Generator().manual_seed(3)))
    return linear, torch.cat([part.dequantized() for part in parts]), linear.bias


@pytest.mark.parametrize("num_rows", [1, 32, 33])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_products_are_those_of_the_numbers(kind: str, num_rows: int) -> None:
    linear, weight, bias = layer(kind)
    gemm = gemm_of(linear)
    assert isinstance(gemm, NarrowLinear) and linear.take_narrow() is None
    x, residual = torch.randn(num_rows, K), torch.randn(num_rows, 2 * N)
    expected = x @ weight.T + bias
    torch.testing.assert_close(gemm(x), expected, atol=1e-4, rtol=1e-4)
    added = gemm.added(x, residual.clone())
    torch.testing.assert_close(added, expected + residual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_normed", [False, True])
def test_the_norm_comes_first_and_nothing_is_left_to_divide_by(is_normed: bool) -> None:
    linear, weight, bias = layer("int4")
    norm = RMSNorm(K, EPS, torch.float32, CPU)
    norm.weight.uniform_(0.5, 1.5)
    gemm = normed_gemm_of(norm, linear)
    assert isinstance(gemm, NormedNarrowLinear) and not gemm.norms(1)
    x = torch.randn(3, K)
    normed = norm(x)
    expected = normed @ weight.T + bias
    hidden = Hidden(x, normed if is_normed else None)
    found, rms_of = gemm(hidden, EPS)
    assert rms_of is None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    gate, up = expected.chunk(2, dim=1)
    gated = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gemm.gated(hidden, EPS), gated, atol=1e-4, rtol=1e-4)
    gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gemm.gated(hidden, EPS, gelu=True), gated, atol=1e-4, rtol=1e-4)


def test_groups_that_are_no_tiles_become_plain_numbers() -> None:
    linear, weight, _ = layer("fine")
    gemm = gemm_of(linear)
    assert isinstance(gemm, FusedLinear) and torch.equal(gemm.weight, weight)


def test_plain_layers_stay_plain() -> None:
    norm = RMSNorm(K, EPS, torch.float32, CPU)
    norm.weight.fill_(1)
    linear = Linear(torch.randn(N, K))
    assert isinstance(gemm_of(linear), FusedLinear)
    assert isinstance(normed_gemm_of(norm, linear), NormedLinear)


def test_parts_of_two_layouts_become_plain_numbers() -> None:
    linear = Linear.empty(K, 2 * N, bias=False, dtype=torch.float32, device=CPU)
    grouped, scaled = stored("int4", 1), stored("fp8", 2)
    assert isinstance(grouped, GroupedWeight) and isinstance(scaled, ScaledWeight)
    linear.rows(0, N).put_narrow(grouped)
    linear.rows(N, 2 * N).put_narrow(scaled)
    assert linear.take_narrow() is None
    assert torch.equal(linear.weight, torch.cat([grouped.dequantized(), scaled.dequantized()]))
    with pytest.raises(ValueError, match=r"\[32, 64\]: not \[64, 64\]"):
        linear.rows(0, 2 * N).put_narrow(scaled)
