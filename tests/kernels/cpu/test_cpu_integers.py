"""Products of integers with rows rounded to 8 bits, for each instruction set and dtype."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import Library
from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.rounding import quantized
from tests.kernels.cpu.cpu_cases import (
    COMBINATIONS,
    drawn_groups,
    randn,
    require,
    unaligned,
    whole_numbers,
    whole_weight,
)

Check = Callable[[Tensor, Tensor], None]
# Rows, outputs, bits, group, groups.
SIZES = (
    (1, 1, 4, 16, 1),
    (1, 77, 8, 32, 7),
    (2, 33, 4, 128, 3),
    (5, 32, 8, 128, 1),
    (16, 77, 4, 32, 5),
    (33, 40, 8, 64, 3),
    (99, 34, 4, 64, 2),
)


@pytest.fixture(params=COMBINATIONS)
def library(request: pytest.FixtureRequest) -> Library:
    return require(*request.param)


def product(library: Library, x: Tensor, weight: GroupedWeight) -> Tensor:
    """The product in float32, after checking that it is one of integers."""
    packed = library.pack_groups(weight, None)
    assert packed.arguments.rounds_inputs
    return library.linear(x, packed, torch.empty((len(x), weight.shape[0])))


def rounded(x: Tensor, group: int) -> Tensor:
    """Rows as the kernels round them, in float64."""
    groups = x.float().view(len(x), -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest >= 2.0**-112, torch.full_like(largest, 127) / largest, 0)
    return ((groups * inverse).round().double() * (largest / 127).double()).view(x.shape)


def drawn(outputs: int, inputs: int, bits: int, group: int) -> GroupedWeight:
    """A random weight, rounded to integers."""
    return quantized(randn(torch.float32, outputs, inputs, seed=5) + 0.1, bits, group)


@pytest.mark.parametrize(("rows", "outputs", "bits", "group", "num_groups"), SIZES)
def test_sums_are_those_of_integers_bit_for_bit(
    library: Library, rows: int, outputs: int, bits: int, group: int, num_groups: int
) -> None:
    """Every number on the way is a whole one, or a multiple of 1 / 512, below 2^24 of them."""
    x = whole_numbers(library.dtype, rows, group * num_groups, group)
    weight = whole_weight((outputs, x.shape[1]), bits, group)
    expected = (x.double() @ weight.dequantized().double().T).float()
    assert torch.equal(product(library, x, weight), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_any_numbers(library: Library, assert_close: Check, bits: int) -> None:
    x, weight = randn(library.dtype, 7, 160), drawn(45, 160, bits, 32)
    bias = randn(library.dtype, 45, seed=2)
    expected = rounded(x, 32) @ weight.dequantized().double().T
    assert_close(product(library, x, weight), expected)
    out = library.linear(x, library.pack_groups(weight, bias), x.new_empty((7, 45)))
    assert_close(out, expected + bias.double())


def test_halves_are_rounded_to_the_even_number(library: Library) -> None:
    x = torch.linspace(-63.5, 64, 256).repeat(2, 1).to(library.dtype)
    x[:, ::64] = 127
    weight = whole_weight((33, 256), 8, 64)
    expected = (x.double().round() @ weight.dequantized().double().T).float()
    assert torch.equal(product(library, x, weight), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours(library: Library, bits: int) -> None:
    x, weight = randn(library.dtype, 210, 320), drawn(48, 320, bits, 32)
    together = product(library, x, weight)
    for begin, count in ((0, 1), (1, 2), (7, 9), (36, 70), (209, 1)):
        some = product(library, x[begin : begin + count], weight)
        assert torch.equal(some, together[begin : begin + count])


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_rows(library: Library, assert_close: Check, bits: int) -> None:
    """Zeros, the largest numbers, one that hides all others, and numbers too small to divide by."""
    most = torch.finfo(library.dtype).max
    x = randn(library.dtype, 5, 96)
    x[0] = 0
    x[1] = most
    x[1, ::2] = -most
    x[2, 40] = 2.0**15
    x[3, 32:64] = 0
    x[4] = 2.0**-120
    weight = drawn(40, 96, bits, 32)
    out = product(
        library, x, replace(weight, scales=weight.scales / 64, offsets=weight.offsets / 64)
    )
    expected = rounded(x, 32) @ weight.dequantized().double().T / 64
    assert bool((out[0] == 0).all())
    assert bool((out[4] == 0).all())
    for row in (1, 2, 3):
        assert_close(out[row], expected[row])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_makes_its_row_nan(library: Library, bits: int, value: float) -> None:
    x, weight = randn(library.dtype, 20, 64), drawn(40, 64, bits, 32)
    clean = product(library, x, weight)
    x[7, 40] = value
    out = product(library, x, weight)
    assert bool(out[7].isnan().all())
    kept = torch.arange(20) != 7
    assert torch.equal(out[kept], clean[kept])


@pytest.mark.parametrize("bits", [4, 8])
def test_views_that_start_anywhere(library: Library, bits: int) -> None:
    x, weight = randn(library.dtype, 9, 96), drawn(40, 96, bits, 32)
    want = product(library, x, weight)
    shifted = replace(
        weight,
        integers=unaligned(weight.integers),
        scales=unaligned(weight.scales),
        offsets=unaligned(weight.offsets),
    )
    out = unaligned(torch.zeros_like(want))
    packed = library.pack_groups(shifted, None)
    assert torch.equal(library.linear(unaligned(x), packed, out), want)


def test_groups_of_zeros_and_groups_that_are_cut(library: Library, assert_close: Check) -> None:
    weight = randn(torch.float32, 33, 96, seed=6)
    weight[:, 48:] = 0
    x, found = randn(library.dtype, 3, 96), quantized(weight, 4, 48)
    assert library.pack_groups(found, None).arguments.group == 16
    assert_close(product(library, x, found), rounded(x, 16) @ found.dequantized().double().T)


@pytest.mark.parametrize("bits", [4, 8])
def test_offsets_that_are_no_zero_points_leave_rows_as_they_are(
    library: Library, assert_close: Check, bits: int
) -> None:
    x, weight = randn(library.dtype, 3, 64), drawn_groups((40, 64), bits, 32)
    packed = library.pack_groups(replace(weight, rounds_rows=True), None)
    assert not packed.arguments.rounds_inputs
    out = library.linear(x, packed, torch.empty((3, 40)))
    assert_close(out, x.double() @ weight.dequantized().double().T)
