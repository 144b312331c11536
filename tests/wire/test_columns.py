"""Columns: unpacking inverts packing, little-endian, and incomplete elements are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.columns import INT32, UINT8, UINT32, BadColumn, pack, unpack


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
def test_a_column_survives_the_round_trip(values: list[int]) -> None:
    assert unpack(pack(values)).tolist() == values


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, -2], INT32, b"\x01\0\0\0\xfe\xff\xff\xff"),
        ([0xFFFFFFFE], UINT32, b"\xfe\xff\xff\xff"),
        ([1, 255], UINT8, b"\x01\xff"),
        ([], INT32, b""),
    ],
)
def test_elements_are_little_endian(
    values: list[int], dtype: np.dtype[np.integer], expected: bytes
) -> None:
    assert pack(values, dtype) == expected
    assert pack(np.array(values, dtype=np.int64), dtype) == expected


def test_arrays_of_the_other_byte_order_are_turned() -> None:
    assert pack(np.array([1], dtype=">i4")) == b"\x01\0\0\0"


def test_a_missing_byte_is_refused_by_the_columns_name() -> None:
    with pytest.raises(BadColumn, match="freed_slots: 7 bytes are not a multiple of 4"):
        unpack(b"1234567", name="freed_slots")


def test_an_unpacked_column_is_a_view_that_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        unpack(pack([1, 2]))[0] = 5
