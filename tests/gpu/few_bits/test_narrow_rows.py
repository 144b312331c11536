"""Weights in 4 and 8 bits on a GPU: the fused kernels of few rows, and products in 8 bits."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from kernels import fp8, reference
from kernels.cluster import narrow_rows
from kernels.quantized import rounded_rows, rounding
from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.linear import dequantized
from kernels.quantized.narrow import NarrowWeight
from kernels.quantized.scaled import FLOAT8, ScaledWeight
from tests.pairs import pairwise
from worker_svc.models.fused_gemms import Hidden
from worker_svc.models.stored.narrow_gemms import NarrowLinear, NormedNarrowLinear, added

CUDA = torch.device("cuda")
EPS = 1e-6


def with_offsets(weight: GroupedWeight) -> GroupedWeight:
    """With offsets that are no multiples of scales, as GGUF files have them."""
    return replace(weight, offsets=weight.offsets * 1.01)


KINDS = {
    "float8": lambda w: ScaledWeight.rounded(w),
    "float8 by blocks": lambda w: ScaledWeight.rounded(w).regrouped(128),
    "int4 by 32": lambda w: rounding.quantized(w, 4, 32),
    "int4 by 64": lambda w: rounding.quantized(w, 4, 64),
    "int4 by 128": lambda w: rounding.quantized(w, 4, 128),
    "int4 by 32, with offsets": lambda w: with_offsets(rounding.quantized(w, 4, 32)),
    "int4 by 128, with offsets": lambda w: with_offsets(rounding.quantized(w, 4, 128)),
    "int8 by 32": lambda w: rounding.quantized(w, 8, 32),
    "int8 by 128": lambda w: rounding.quantized(w, 8, 128),
    "int8 by 16, with offsets": lambda w: with_offsets(rounding.quantized(w, 8, 16)),
}
SHAPES = ((32, 128), (96, 384), (6144, 4096), (4096, 12_288))
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32)


def prepared(weight: NarrowWeight):
    """(its kernels, the weight as they read it)."""
    found = narrow_rows.kernels_for(weight, torch.bfloat16)
    assert found is not None
    return found


def make(kind: str, shape: tuple[int, int], num_rows: int):
    """(weight, what it counts as, x, norm, bias, residual)."""
    random = torch.Generator(CUDA).manual_seed(sum(shape) + num_rows)
    n, k = shape
    plain = torch.randn(shape, device=CUDA, generator=random) * 0.02
    weight = NarrowWeight.of(KINDS[kind](plain))
    assert weight is not None
    x, residual = (
        torch.randn((num_rows, width), device=CUDA, generator=random).bfloat16() for width in (k, n)
    )
    norm = (torch.rand(k, device=CUDA, generator=random) + 0.5).bfloat16()
    bias = torch.randn(n, device=CUDA, generator=random).bfloat16()
    return weight, dequantized(weight, torch.bfloat16).float(), x, norm, bias, residual


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float = 8e-3) -> None:
    assert found.shape == expected.shape
    distance = (found.float() - expected.float()).norm() / expected.float().norm()
    assert distance <= bound


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shape", "rows"), pairwise(tuple(KINDS), SHAPES, ROWS))
def test_few_rows_are_multiplied_by_what_is_stored(kind, shape, rows) -> None:
    weight, wide, x, norm, bias, residual = make(kind, shape, rows)
    kernels, weight = prepared(weight)
    plain = x.float() @ wide.t()
    assert_near(kernels.linear(x, weight), plain)
    assert_near(kernels.linear(x, weight, bias, residual), plain + bias + residual.float())
    normed = reference.rms_norm(x, norm, EPS).float() @ wide.t()
    assert_near(kernels.linear(x, weight, norm=norm, eps=EPS), normed)
    gate, up = normed.chunk(2, dim=1)
    gated = kernels.linear(x, weight, norm=norm, eps=EPS, gated=True)
    assert_near(gated, F.silu(gate) * up, 1.6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_lanes_keeps_the_numbers(kind) -> None:
    weight, wide, *_ = make(kind, (96, 384), 1)
    _, prepared_weight = prepared(weight)
    assert prepared_weight.is_paired is (kind.startswith("int") and "offsets" not in kind)
    assert torch.equal(dequantized(prepared_weight, torch.bfloat16).float(), wide)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_and_among_others(kind, shape) -> None:
    weight, _, x, norm, bias, residual = make(kind, shape, 8)
    kernels, weight = prepared(weight)

    def results(first: int, last: int) -> list[torch.Tensor]:
        rows = x[first:last]
        return [
            kernels.linear(rows, weight, bias, residual[first:last]),
            kernels.linear(rows, weight, norm=norm, eps=EPS),
            kernels.linear(rows, weight, norm=norm, eps=EPS, gated=True),
        ]

    together = results(0, len(x))
    for row in range(len(x)):
        for alone, all_rows in zip(results(row, row + 1), together, strict=True):
            assert torch.equal(alone[0], all_rows[row])


@pytest.mark.gpu
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    weight, wide, x, norm, *_ = make("int4 by 32", (96, 384), 5)
    kernels, weight = prepared(weight)
    x[2, 7] = float("nan")
    found = kernels.linear(x, weight, norm=norm, eps=EPS)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert_near(found[others], (reference.rms_norm(x, norm, EPS).float() @ wide.t())[others])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 33, 64, 200])
def test_many_rows_are_rounded_and_multiplied_in_8_bits(rows) -> None:
    weight, wide, x, norm, bias, residual = make("float8", (6144, 4096), rows)
    linear = NarrowLinear.of(weight, bias, torch.bfloat16)
    assert linear.unit is not None
    plain = x.float() @ wide.t()
    bound = 0.04  # of rows in 3 bits of mantissa
    assert_near(linear(x), plain + bias, bound)
    expected = plain + bias + residual.float()
    assert_near(linear.added(x, residual.clone()), expected, bound)
    normed = NormedNarrowLinear(NarrowLinear.of(weight, None, torch.bfloat16), norm)
    expected = reference.rms_norm(x, norm, EPS).float() @ wide.t()
    assert_near(normed(Hidden(x), EPS)[0], expected, bound)
    gate, up = expected.chunk(2, dim=1)
    assert_near(normed.gated(Hidden(x), EPS), F.silu(gate) * up, 2 * bound)
    x[5, 0] = float("inf")
    found = normed(Hidden(x), EPS)[0]
    assert found[5].isnan().all()
    assert found[:5].isfinite().all()
    assert found[6:].isfinite().all()


@pytest.mark.gpu
def test_the_device_rounds_as_integer_operations_do() -> None:
    """All numbers of a type, down to subnormal ones and up to the largest of a row."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = halves[halves.isfinite()].reshape(-1, 16).cuda()
    values, scales = rounded_rows.rounded(x)
    scaled = x.float() * (1 / scales)[:, None]
    expected = fp8.narrowed(scaled, torch.ones(len(x), device="cuda"), FLOAT8)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 256])
def test_what_is_between_two_products_in_8_bits_is_rounded_on_the_way(rows) -> None:
    """The same as by separate kernels, but where sums of squares are added in another order."""
    weight, _, x, norm, bias, residual = make("float8", (4096, 4096), rows)
    linear = NarrowLinear.of(weight, bias, torch.bfloat16)
    reader = NormedNarrowLinear(NarrowLinear.of(weight, None, torch.bfloat16), norm)
    apart = Hidden(linear.added(x, residual.clone()))
    found = added(linear, x, residual.clone(), reader, EPS)
    assert apart.rounded is None and found.rounded is not None
    assert torch.equal(found.residual, apart.residual)
    assert_near(reader(found, EPS)[0], reader(apart, EPS)[0].float(), 1e-3)
    assert_near(reader.gated(found, EPS), reader.gated(apart, EPS).float(), 1e-3)
    x[5, 0] = float("inf")
    found = reader(added(linear, x, residual.clone(), reader, EPS), EPS)[0]
    assert found[5].isnan().all() and found[:5].isfinite().all() and found[6:].isfinite().all()
