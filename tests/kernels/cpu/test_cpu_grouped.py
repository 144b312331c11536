"""Products with integer weights against float64, for each instruction set and dtype."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import Library, largest_group
from kernels.quantized.grouped import GroupedWeight
from tests.kernels.cpu.cpu_cases import COMBINATIONS, drawn_groups, randn, require, unaligned

Check = Callable[[Tensor, Tensor], None]


class Case(NamedTuple):
    """Sizes and format of a product."""

    rows: int
    outputs: int
    bits: int
    group: int
    num_groups: int
    has_half_scales: bool
    has_bias: bool


CASES = (
    Case(1, 1, 4, 16, 1, True, False),
    Case(1, 77, 8, 32, 7, False, True),
    Case(1, 130, 4, 128, 3, False, False),
    Case(2, 15, 4, 16, 9, True, True),
    Case(3, 32, 8, 64, 3, True, False),
    Case(16, 77, 4, 32, 5, False, True),
    Case(33, 130, 8, 128, 2, True, False),
)


@pytest.fixture(params=COMBINATIONS)
def library(request: pytest.FixtureRequest) -> Library:
    return require(*request.param)


def expected(x: Tensor, weight: GroupedWeight) -> Tensor:
    """The product in float64."""
    integers = weight.integers.double().view(*weight.scales.shape, weight.group)
    values = integers * weight.scales.double()[..., None] + weight.offsets.double()[..., None]
    return x.double() @ values.view(weight.shape).T


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_of_integers(library: Library, assert_close: Check, case: Case) -> None:
    x = randn(library.dtype, case.rows, case.num_groups * case.group)
    weight = drawn_groups(
        (case.outputs, x.shape[1]), case.bits, case.group, has_half_scales=case.has_half_scales
    )
    bias = randn(library.dtype, case.outputs, seed=2) if case.has_bias else None
    packed = library.pack_groups(weight, bias)
    assert packed.arguments.has_half_scales == case.has_half_scales
    wanted = expected(x, weight) + (0 if bias is None else bias.double())
    assert_close(library.linear(x, packed, torch.empty((case.rows, case.outputs))), wanted)
    assert_close(library.linear(x, packed, x.new_empty((case.rows, case.outputs))), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours(library: Library, bits: int) -> None:
    x, weight = randn(library.dtype, 210, 320), drawn_groups((48, 320), bits, 32)
    packed = library.pack_groups(weight, None)
    together = library.linear(x, packed, torch.empty((210, 48)))
    for begin, count in ((0, 1), (1, 2), (7, 9), (36, 70), (209, 1)):
        some = library.linear(x[begin : begin + count], packed, torch.empty((count, 48)))
        assert torch.equal(some, together[begin : begin + count])


def test_a_product_of_4096_rows(library: Library, assert_close: Check) -> None:
    x, weight = randn(library.dtype, 4096, 32), drawn_groups((33, 32), 4, 16)
    out = library.linear(x, library.pack_groups(weight, None), torch.empty((4096, 33)))
    assert_close(out, expected(x, weight))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_least_and_the_largest_integers(
    library: Library, assert_close: Check, bits: int
) -> None:
    """Every integer in every place of a word, one at a time: the inputs are a unit matrix."""
    weight = drawn_groups((2**bits, 64), bits, 64)
    weight.integers.copy_(torch.arange(2**bits)[:, None].expand(-1, 64))
    x = torch.eye(64, dtype=library.dtype)
    packed = library.pack_groups(weight, None)
    wanted = weight.dequantized().T.contiguous()
    assert_close(library.linear(x, packed, torch.empty((64, 2**bits))), wanted)
    for column in (0, 63):
        one = library.linear(x[column : column + 1], packed, torch.empty((1, 2**bits)))
        assert_close(one, wanted[column : column + 1])


def test_weights_of_zero_scale_are_their_offsets(library: Library, assert_close: Check) -> None:
    weight = drawn_groups((40, 64), 4, 32)
    weight.scales.zero_()
    x = randn(library.dtype, 3, 64)
    out = library.linear(x, library.pack_groups(weight, None), torch.empty((3, 40)))
    assert_close(out, expected(x, weight))


def test_nan_stays_in_its_row(library: Library) -> None:
    x, weight = randn(library.dtype, 20, 64), drawn_groups((40, 64), 4, 32)
    x[7, 40] = torch.nan
    out = library.linear(x, library.pack_groups(weight, None), torch.empty((20, 40)))
    assert out.isnan().all(1).nonzero().tolist() == [[7]]
    assert out.isnan().any(1).nonzero().tolist() == [[7]]


def test_views_that_start_anywhere(library: Library) -> None:
    x, weight = randn(library.dtype, 9, 96), drawn_groups((40, 96), 4, 32)
    want = library.linear(x, library.pack_groups(weight, None), x.new_empty((9, 40)))
    shifted = GroupedWeight(
        unaligned(weight.integers), unaligned(weight.scales), unaligned(weight.offsets), 4
    )
    packed = library.pack_groups(shifted, None)
    out = unaligned(torch.zeros_like(want))
    assert torch.equal(library.linear(unaligned(x), packed, out), want)


@pytest.mark.parametrize(("group", "largest"), [(48, 16), (256, 128)])
def test_larger_groups_are_cut(
    library: Library, assert_close: Check, group: int, largest: int
) -> None:
    assert largest_group(group) == largest
    x, weight = randn(library.dtype, 3, 2 * group), drawn_groups((33, 2 * group), 8, group)
    packed = library.pack_groups(weight, None)
    assert packed.arguments.group == largest
    assert_close(library.linear(x, packed, torch.empty((3, 33))), expected(x, weight))


def test_what_cannot_be_packed_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="groups of 24 inputs: no multiple of 16"):
        library.pack_groups(drawn_groups((8, 48), 4, 24), None)
    with pytest.raises(ValueError, match=r"\[7\]: not \[8\]"):
        library.pack_groups(drawn_groups((8, 32), 4, 32), randn(library.dtype, 7))
    packed = library.pack_groups(drawn_groups((8, 32), 4, 32), None)
    with pytest.raises(ValueError, match=r"\[2, 31\]: not \[2, 32\]"):
        library.linear(randn(library.dtype, 2, 31), packed, torch.empty((2, 8)))
