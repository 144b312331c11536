"""Integer weights in groups: the values they stand for survive every change of form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.quantized.grouped import GroupedWeight


def drawn(num_outputs: int, num_groups: int, group: int, bits: int, seed: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(
        0, 2**bits, (num_outputs, num_groups * group), generator=generator, dtype=torch.uint8
    )
    scales = torch.randn((num_outputs, num_groups), generator=generator)
    return GroupedWeight(integers, scales, torch.randn(scales.shape, generator=generator), bits)


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from((16, 32, 128)))


@given(SIZES, st.sampled_from((4, 8)), st.integers(0, 99))
def test_a_value_is_scale_times_integer_plus_offset(
    sizes: tuple[int, int, int], bits: int, seed: int
) -> None:
    weight = drawn(*sizes, bits, seed)
    found = weight.dequantized()
    for row, column in ((0, 0), (sizes[0] - 1, weight.shape[1] - 1)):
        at = column // weight.group
        want = weight.scales[row, at] * int(weight.integers[row, column]) + weight.offsets[row, at]
        torch.testing.assert_close(found[row, column], want)


@given(SIZES, SIZES, st.integers(0, 99))
def test_parts_of_two_formats_become_one(
    first: tuple[int, int, int], second: tuple[int, int, int], seed: int
) -> None:
    one = drawn(first[0], 4 * first[1], first[2], 4, seed)
    num_groups, group = one.shape[1] // second[2], second[2]
    if not num_groups or one.shape[1] % group:
        num_groups, group = one.shape[1] // 16, 16
    other = drawn(second[0], num_groups, group, 8, seed + 1)
    both = GroupedWeight.concatenated((one, other))
    want = torch.cat([one.dequantized(), other.dequantized()])
    assert torch.equal(both.dequantized(), want) and both.bits == 8
    assert torch.equal(both.rows(0, len(one.integers)).dequantized(), one.dequantized())


def test_columns_are_cut_at_groups() -> None:
    weight = drawn(3, 4, 32, 4, 7)
    assert torch.equal(weight.columns(32, 96).dequantized(), weight.dequantized()[:, 32:96])
    with pytest.raises(ValueError, match="cut groups of 32"):
        weight.columns(16, 96)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("bits", 5, "bits: 5"),
        ("integers", torch.zeros((2, 32)), "integers: torch.float32"),
        ("scales", torch.zeros((3, 1)), "scales: torch.float32"),
        ("offsets", torch.zeros((2, 2)), "do not divide|1 and 2 groups"),
    ],
)
def test_what_does_not_fit_is_named(field: str, value: object, named: str) -> None:
    fields = {
        "integers": torch.zeros((2, 32), dtype=torch.uint8),
        "scales": torch.zeros((2, 1)),
        "offsets": torch.zeros((2, 1)),
        "bits": 4,
    }
    with pytest.raises(ValueError, match=named):
        GroupedWeight(**{**fields, field: value})
