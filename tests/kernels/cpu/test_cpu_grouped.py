"""Products with integer weights against float64, for each instruction set and dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import GROUPS, Library, largest_group
from kernels.quantized.grouped import GroupedWeight
from tests.kernels.cpu.cpu_cases import COMBINATIONS, drawn_groups, randn, require, unaligned

ROWS = [1, 2, 3, 16, 33]
OUTPUTS = [1, 15, 32, 77, 130]
Check = Callable[[Tensor, Tensor], None]


@pytest.fixture(params=COMBINATIONS)
def library(request: pytest.FixtureRequest) -> Library:
    return require(*request.param)


def expected(x: Tensor, weight: GroupedWeight) -> Tensor:
    """The product in float64."""
    integers = weight.integers.double().view(*weight.scales.shape, weight.group)
    values = integers * weight.scales.double()[..., None] + weight.offsets.double()[..., None]
    return x.double() @ values.view(weight.shape).T


@pytest.mark.parametrize("has_half_scales", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", range(5))
def test_products_of_integers(
    library: Library, assert_close: Check, case: int, bits: int, has_half_scales: bool
) -> None:
    rows, outputs, group = ROWS[case], OUTPUTS[case], (*GROUPS, 16)[case]
    num_groups = 9 if group == 16 else case + 1  # an odd number, more than a block, and few
    x = randn(library.dtype, rows, num_groups * group)
    shape = (outputs, num_groups * group)
    weight = drawn_groups(shape, bits, group, has_half_scales=has_half_scales)
    bias = randn(library.dtype, outputs, seed=2) if case % 2 else None
    packed = library.pack_groups(weight, bias)
    assert packed.arguments.has_half_scales == has_half_scales
    wanted = expected(x, weight) + (0 if bias is None else bias.double())
    assert_close(library.linear(x, packed, torch.empty((rows, outputs))), wanted)
    assert_close(library.linear(x, packed, x.new_empty((rows, outputs))), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours(library: Library, bits: int) -> None:
    x, weight = randn(library.dtype, 210, 320), drawn_groups((48, 320), bits, 32)
    packed = library.pack_groups(weight, None)
    together = library.linear(x, packed, torch.empty((210, 48)))
    for begin, count in ((0, 1), (1, 2), (3, 4), (7, 9), (16, 20), (36, 70), (209, 1)):
        some = library.linear(x[begin : begin + count], packed, torch.empty((count, 48)))
        assert torch.equal(some, together[begin : begin + count])


def test_a_product_of_4096_rows(library: Library, assert_close: Check) -> None:
    x, weight = randn(library.dtype, 4096, 48), drawn_groups((35, 48), 4, 16)
    out = library.linear(x, library.pack_groups(weight, None), torch.empty((4096, 35)))
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
    for column in (0, 31, 63):
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


@pytest.mark.parametrize(("group", "largest"), [(16, 16), (48, 16), (96, 32), (256, 128)])
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
