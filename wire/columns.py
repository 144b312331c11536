"""Columns: arrays as little-endian bytes, the wire format of token ids and rows."""

import numpy as np
from numpy.typing import NDArray

INT32 = np.dtype("<i4")
UINT32 = np.dtype("<u4")
UINT64 = np.dtype("<u8")
UINT8 = np.dtype("u1")


class BadColumn(ValueError):
    """Raised when a column's bytes are not a whole number of elements."""


def pack(values: NDArray[np.integer] | list[int], dtype: np.dtype[np.integer] = INT32) -> bytes:
    """The bytes of a column of integers."""
    return np.asarray(values, dtype=dtype).tobytes()


def unpack(
    column: bytes, dtype: np.dtype[np.integer] = INT32, *, name: str = "column"
) -> NDArray[np.integer]:
    """A read-only array over the bytes of a column. Raises BadColumn, naming the column."""
    if len(column) % dtype.itemsize:
        raise BadColumn(f"{name}: {len(column)} bytes are not a multiple of {dtype.itemsize}")
    return np.frombuffer(column, dtype=dtype)
