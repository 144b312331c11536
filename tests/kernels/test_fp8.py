"""FP8 keys and values by the reference: golden bytes, ties, saturation, NaN, error bounds."""

import math

import pytest
import torch
from torch import Tensor

from kernels import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(1)


def stored_bytes(values: list[float], dtype: torch.dtype, inverse: Tensor = ONE) -> list[int]:
    x = torch.tensor(values).view(-1, 1, 1)
    return fp8.narrowed(x, inverse, dtype).view(torch.uint8).flatten().tolist()


def test_golden_bytes_of_e4m3() -> None:
    values = [1.0, -1.0, 448.0, 2.0**-6, 2.0**-9, 0.0]
    assert stored_bytes(values, E4M3) == [0x38, 0xB8, 0x7E, 0x08, 0x01, 0x00]


def test_golden_bytes_of_e5m2() -> None:
    values = [1.0, -1.0, 57344.0, 2.0**-14, 2.0**-16, 0.0]
    assert stored_bytes(values, E5M2) == [0x3C, 0xBC, 0x7B, 0x04, 0x01, 0x00]


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 0x7E), (E5M2, 0x7B)])
def test_what_is_beyond_the_largest_number_becomes_that_number(dtype, largest) -> None:
    most = fp8.LARGEST[dtype]
    values = [most, most * 1.0001, most * 1.04, most * 1.1, most * 100, 3.4e38]
    assert stored_bytes(values, dtype) == [largest] * 6
    assert stored_bytes([-v for v in values], dtype) == [largest | 0x80] * 6
    # Although the quotient leaves float32.
    assert stored_bytes([3.4e38], dtype, torch.tensor([2.0**96])) == [largest]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_becomes_nan(dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf]).view(-1, 1, 1)
    stored = fp8.narrowed(x, ONE, dtype)
    assert stored.float().isnan().all()
    assert fp8.widened(stored, ONE, torch.bfloat16).isnan().all()


def test_ties_go_to_the_even_number_and_tiny_values_to_zero_or_the_least() -> None:
    assert stored_bytes([1.0625, 1.1875, 2.0**-10, 1.5 * 2.0**-9], E4M3) == [0x38, 0x3A, 0, 2]
    assert stored_bytes([1.125, 1.375, 2.0**-17, 1.5 * 2.0**-16], E5M2) == [0x3C, 0x3E, 0, 2]
    assert stored_bytes([1.001 * 2.0**-10, 1e-38], E4M3) == [1, 0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20, 1e4])
def test_the_relative_error_of_normal_values_is_at_most_half_a_last_digit(dtype, scale) -> None:
    least = 2.0 ** (-6 if dtype == E4M3 else -14)
    exponents = torch.linspace(math.log2(least), math.log2(fp8.LARGEST[dtype]), 4000)
    x = (torch.exp2(exponents) * scale).view(-1, 1, 1)
    k = torch.tensor([scale])
    table = fp8.scale_table(k, k)
    back = fp8.widened(fp8.narrowed(x, table[2], dtype), table[0], torch.float32)
    bound = 2.0 ** -(fp8.MANTISSA_BITS[dtype] + 1)
    assert ((back - x).abs() / x).max() <= bound * (1 + 1e-5)


def test_a_table_has_both_scales_and_their_inverses() -> None:
    table = fp8.scale_table(torch.tensor([2.0, 4.0]), torch.tensor([0.5, 8.0]))
    assert table.tolist() == [[2.0, 4.0], [0.5, 8.0], [0.5, 0.25], [2.0, 0.125]]


def test_a_cache_and_its_scales_must_suit_each_other() -> None:
    table = fp8.scale_table(torch.ones(2), torch.ones(2))
    fp8.check_scales(table, E4M3, 2)
    fp8.check_scales(None, torch.bfloat16, 2)
    with pytest.raises(TypeError, match="float8_e4m3fn has no scales"):
        fp8.check_scales(None, E4M3, 2)
    with pytest.raises(TypeError, match="bfloat16 has scales"):
        fp8.check_scales(table, torch.bfloat16, 2)
    with pytest.raises(ValueError, match=r"float32 \[4, 3\]"):
        fp8.check_scales(table, E4M3, 3)
