"""Weights out of GGUF's blocks: integers, and a scale and an offset for each group of columns.

Every integer type that is read is `scales * integers + offsets`, and in float32 these products and
sums are exact or rounded once, so that the values are those of the format; a zero may have another
sign.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pagewire.gguf.head_tiles import HeadTiles
from pagewire.gguf.header import BadGguf, GgufTensor
from pagewire.gguf.types import BF16, F16, F32, TENSOR_TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

ONE, THREE, FOUR, LOW_HALF = np.uint8(1), np.uint8(3), np.uint8(4), np.uint8(15)

BY_NAME = {each.name: each for each in TENSOR_TYPES.values()}
MXFP4 = "MXFP4"
FOUR_BITS = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "TQ2_0")
EIGHT_BITS = ("IQ4_NL", "IQ4_XS", MXFP4, "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
LARGEST_EXPONENT = 252  # of MXFP4; a larger one has no offset in float32
BITS = dict.fromkeys(FOUR_BITS, 4) | dict.fromkeys(EIGHT_BITS, 8)
GROUPS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}  # columns; all others have 32
ELEMENTS_AT_ONCE = 1 << 22  # that are widened together; a whole head would take gigabytes


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows [N, K] of a weight as integers."""

    integers: Bytes  # [N, K], each below 2**bits
    scales: Floats  # [N, K / group]
    offsets: Floats  # [N, K / group]
    bits: int  # 4 or 8

    def dequantized(self) -> Floats:
        """The rows [N, K] in float32."""
        rows, num_groups = self.scales.shape
        values = self.integers.reshape(rows, num_groups, -1).astype(np.float32)
        values *= self.scales[:, :, None]
        values += self.offsets[:, :, None]
        return values.reshape(self.integers.shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file, read a part at a time."""

    path: Path
    tensor: GgufTensor
    num_swapped_heads: int | None = None  # see `row_order`
    added: float = 0.0  # to each number that is stored
    tiles: HeadTiles | None = None
    is_decay: bool = False  # minus the exponentials of the tensor are stored

    @property
    def bits(self) -> int | None:
        """Bits of its integers; None: it is stored in float numbers."""
        return BITS.get(self.tensor.type_name)

    @property
    def group(self) -> int:
        """Columns that share a scale and an offset, of a tensor of integers."""
        return GROUPS.get(self.tensor.type_name, 32)

    def groups(self) -> GroupedRows:
        """All rows of a tensor of integers."""
        shape = self.tensor.shape
        integers = np.empty((self._num_rows, shape[-1]), np.uint8)
        parts = []
        for begin, end in self._chunks(0, len(integers)):
            part = self._groups(begin, end)
            integers[begin:end] = part.integers
            parts.append((part.scales, part.offsets))
        scales, offsets = (np.concatenate(each) for each in zip(*parts, strict=True))
        return GroupedRows(integers, scales, offsets, BITS[self.tensor.type_name])

    @property
    def is_mxfp4(self) -> bool:
        """True for codes of 4 bits and exponents."""
        return self.tensor.type_name == MXFP4

    def codes(self) -> tuple[Bytes, Bytes]:
        """Codes [N, K / 2] and exponents [N, K / 32] of a matrix in MXFP4.

        A byte has the codes of columns 32 i + j and 32 i + 16 + j, the first in its lower half.
        Raises BadGguf for an exponent that `rows` refuses.
        """
        num_rows = self._num_rows
        blocks = self._raw(0, num_rows).reshape(num_rows, -1, BY_NAME[MXFP4].block_bytes)
        exponents = np.ascontiguousarray(blocks[:, :, 0])
        if exponents.max() > LARGEST_EXPONENT:
            self._refuse_scale()
        return np.ascontiguousarray(blocks[:, :, 1:]).reshape(num_rows, -1), exponents

    def rows(self, begin: int, end: int) -> Iterator[Floats]:
        """Rows [begin, end) in float32, some at a time; a vector of numbers is a column."""
        for first, last in self._chunks(begin, end):
            if self.bits is None:
                values = self._columns(read_floats(self._raw(first, last), self.tensor.type_name))
                values = self._logarithms(values) if self.is_decay else values
                yield values + np.float32(self.added) if self.added else values
            else:
                yield self._groups(first, last).dequantized()

    def dense(self) -> Floats:
        """The whole tensor in float32."""
        rows = self.rows(0, self._num_rows)
        return np.concatenate(list(rows)).reshape(self.tensor.shape)

    @property
    def _num_rows(self) -> int:
        shape = self.tensor.shape
        if len(shape) == 1:
            return shape[0] if self.bits is None else 1
        return prod(shape[:-1])

    def _chunks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        step = max(1, ELEMENTS_AT_ONCE * self._num_rows // prod(self.tensor.shape))
        for first in range(begin, end, step):
            yield first, min(first + step, end)

    def _groups(self, begin: int, end: int) -> GroupedRows:
        groups = read_groups(self._raw(begin, end), self.tensor.type_name)
        if not (np.isfinite(groups.scales).all() and np.isfinite(groups.offsets).all()):
            self._refuse_scale()
        if self.tiles is not None and self.tiles.of_columns:
            groups = self._of_columns(groups, self.tiles)
        if not self.added:  # which would turn -0.0 to 0.0
            return groups
        return replace(groups, offsets=groups.offsets + np.float32(self.added))

    def _columns(self, values: Floats) -> Floats:
        """Float numbers [N, K] in the order of Hugging Face."""
        if self.tiles is None or not self.tiles.of_columns:
            return values
        return values[:, self.tiles.order()]

    def _of_columns(self, groups: GroupedRows, tiles: HeadTiles) -> GroupedRows:
        """Integers in the order of Hugging Face, with the scales of their groups."""
        if tiles.size % self.group:
            self._refuse(f"heads of {tiles.size} columns cut groups of {self.group}")
        of_groups = tiles.order(self.group)
        scales, offsets = groups.scales[:, of_groups], groups.offsets[:, of_groups]
        integers = groups.integers[:, tiles.order()]
        return replace(groups, integers=integers, scales=scales, offsets=offsets)

    def _logarithms(self, values: Floats) -> Floats:
        if not (values < 0).all() or not np.isfinite(values).all():
            self._refuse("a rate is no finite number below 0")
        return np.log(-values)

    def _refuse_scale(self) -> NoReturn:
        self._refuse("a scale is not finite")

    def _refuse(self, problem: str) -> NoReturn:
        raise BadGguf(f"{self.path.name}: tensor {self.tensor.name}: {problem}")

    def _raw(self, begin: int, end: int) -> Bytes:
        """The bytes [end - begin, row] of rows in the order of Hugging Face."""
        num_rows = self._num_rows
        shape = (num_rows, self.tensor.num_bytes // num_rows)
        stored: Bytes = np.memmap(self.path, np.uint8, "r", self.tensor.offset, shape)
        if self.num_swapped_heads is not None:
            return stored[row_order(num_rows, self.num_swapped_heads)[begin:end]]
        if self.tiles is not None and not self.tiles.of_columns:
            return stored[self.tiles.order()[begin:end]]
        return stored[begin:end]


def row_order(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """The stored row of queries or keys for each row of a Hugging Face folder, [num_rows].

    GGUF pairs neighbouring rows, (0, 1), (2, 3), ...; Hugging Face rotates row i of a head with row
    i + head_dim / 2.
    """
    pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)  # [H, D/2, 2]
    return pairs.swapaxes(1, 2).reshape(-1)


def read_floats(raw: Bytes, type_name: str) -> Floats:
    """Rows [N, bytes] of a tensor of float numbers, [N, K]."""
    raw = np.ascontiguousarray(raw)
    if type_name == F32:
        return raw.view("<f4").astype(np.float32)
    if type_name == F16:
        return raw.view("<f2").astype(np.float32)
    assert type_name == BF16
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def read_groups(raw: Bytes, type_name: str) -> GroupedRows:
    """Rows [N, bytes] of a tensor of integers."""
    blocks = np.ascontiguousarray(raw).reshape(-1, BY_NAME[type_name].block_bytes)
    integers, scales, offsets = READERS[type_name](blocks)
    rows = len(raw)
    return GroupedRows(
        integers.reshape(rows, -1),
        np.ascontiguousarray(scales.reshape(rows, -1), np.float32),
        np.ascontiguousarray(offsets.reshape(rows, -1), np.float32),
        BITS[type_name],
    )


# Of blocks [B, bytes]: integers [B, elements], scales and offsets [B, groups].
Read = tuple[Bytes, Floats, Floats]


def _q4_0(blocks: Bytes) -> Read:
    scales = _halves(blocks, 0, 1)
    return _nibbles(blocks[:, 2:]), scales, scales * -8


def _q4_1(blocks: Bytes) -> Read:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0, 1), _halves(blocks, 1, 1)


def _q5_0(blocks: Bytes) -> Read:
    scales = _halves(blocks, 0, 1)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, scales * -16


def _q5_1(blocks: Bytes) -> Read:
    integers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return integers, _halves(blocks, 0, 1), _halves(blocks, 1, 1)


def _q8_0(blocks: Bytes) -> Read:
    scales = _halves(blocks, 0, 1)
    return blocks[:, 2:] ^ np.uint8(0x80), scales, scales * -128  # signed bytes, moved by 128


def _q4_k(blocks: Bytes) -> Read:
    scales, offsets = _k_scales(blocks)
    return _eighths(blocks[:, 16:]), scales, offsets


def _q5_k(blocks: Bytes) -> Read:
    scales, offsets = _k_scales(blocks)
    return _eighths(blocks[:, 48:]) | (_bits(blocks[:, 16:48]) << FOUR), scales, offsets


def _q6_k(blocks: Bytes) -> Read:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)  # of two halves of 128 elements
    nibbles = (low >> np.array([[0], [4]], np.uint8)) & LOW_HALF  # [B, 2, 2, 64]
    integers = nibbles.reshape(-1, 256) | (_pairs(blocks[:, 128:192]) << FOUR)
    scales = _halves(blocks, 104, 1) * blocks[:, 192:208].view(np.int8)  # [B, 16]
    return integers, scales, scales * -32


def _q2_k(blocks: Bytes) -> Read:
    scales = (blocks[:, :16] & LOW_HALF) * _halves(blocks, 40, 1)
    return _pairs(blocks[:, 16:80]), scales, (blocks[:, :16] >> FOUR) * -_halves(blocks, 41, 1)


def _q3_k(blocks: Bytes) -> Read:
    integers = _pairs(blocks[:, 32:96]) | (_bits(blocks[:, :32]) << np.uint8(2))
    low, high = blocks[:, 96:104], blocks[:, None, 104:108]
    nibbles = np.concatenate((low & LOW_HALF, low >> FOUR), axis=1)  # [B, 16]
    pairs = (high >> np.array([[0], [2], [4], [6]], np.uint8)) & THREE  # [B, 4, 4]
    numbers = (nibbles | (pairs.reshape(-1, 16) << FOUR)).astype(np.float32) - 32
    scales = numbers * _halves(blocks, 54, 1)
    return integers, scales, scales * -4


def _tq2_0(blocks: Bytes) -> Read:
    scales = _halves(blocks, 32, 1).repeat(8, axis=1)
    return _pairs(blocks[:, :64]), scales, -scales


# Of the types whose 4 bits choose among 16 numbers: these, moved above 0.
IQ4_MOVED, FP4_MOVED = 127, 12
IQ4 = np.array([0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240], np.uint8)
FP4 = np.array([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], np.uint8)  # of halves


def _iq4_nl(blocks: Bytes) -> Read:
    scales = _halves(blocks, 0, 1)
    return IQ4[_nibbles(blocks[:, 2:])], scales, scales * -IQ4_MOVED


def _iq4_xs(blocks: Bytes) -> Read:
    eight = np.arange(8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> (2 * eight).astype(np.uint16)
    low = (blocks[:, 4 + eight // 2] >> (4 * (eight % 2)).astype(np.uint8)) & LOW_HALF  # [B, 8]
    numbers = (low | (high & np.uint16(3)) << np.uint16(4)).astype(np.float32) - 32
    scales = numbers * _halves(blocks, 0, 1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return IQ4[codes], scales, scales * -IQ4_MOVED


def _mxfp4(blocks: Bytes) -> Read:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    with np.errstate(over="ignore"):  # which is refused where it is read
        return FP4[_nibbles(blocks[:, 1:])], scales, scales * -FP4_MOVED


def _halves(blocks: Bytes, begin: int, count: int) -> Floats:
    """float16 numbers [B, count] as float32; `begin` counts in numbers."""
    stored = np.ascontiguousarray(blocks[:, 2 * begin : 2 * (begin + count)])
    return stored.view("<f2").astype(np.float32)


def _nibbles(stored: Bytes) -> Bytes:
    """Bytes [B, 16] -> integers [B, 32]: the low halves of all, then the high ones."""
    return np.concatenate((stored & LOW_HALF, stored >> FOUR), axis=1)


def _fifth_bits(stored: Bytes) -> Bytes:
    """Bytes [B, 4], a bit an element -> 0 or 16 for each, [B, 32]."""
    return np.unpackbits(stored, axis=1, bitorder="little") << FOUR


def _eighths(stored: Bytes) -> Bytes:
    """Bytes [B, 128] -> integers [B, 256]: of each 32 bytes the low halves, then the high ones."""
    return _nibbles(stored.reshape(-1, 32)).reshape(-1, 256)


def _bits(stored: Bytes) -> Bytes:
    """Bytes [B, 32] -> bits [B, 256]: the lowest of all bytes, then the next ones, ..."""
    return ((stored[:, None] >> np.arange(8, dtype=np.uint8)[:, None]) & ONE).reshape(-1, 256)


def _pairs(stored: Bytes) -> Bytes:
    """Bytes [B, 64] -> integers [B, 256]: of each 32 bytes bits 0 and 1, then bits 2 and 3, ..."""
    halves = stored.reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    return (halves & THREE).reshape(-1, 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets [B, 8] of Q4_K and Q5_K: 6 bits each, in 12 bytes."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (mixed & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (mixed >> 4) | (second >> 6 << 4)), axis=1)
    return scales * _halves(blocks, 0, 1), minima * -_halves(blocks, 1, 1)


READERS: dict[str, Callable[[Bytes], Read]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "TQ2_0": _tq2_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    MXFP4: _mxfp4,
}
