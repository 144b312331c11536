# mypy: disable-error-code="untyped-decorator"
"""Numbers of 4 bits in kernels: a code is a sign, two bits of exponent and one of mantissa.

As the high bits of a float16 a code is its number times 2^-14, also where it is not normal.
"""

import triton
import triton.language as tl


@triton.jit
def low_numbers(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Returns the numbers of the lower halves of bytes, with exponents of one shape; in float32."""
    bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * _powers(scales)


@triton.jit
def high_numbers(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Returns those of the upper halves."""
    return low_numbers(codes >> 4, scales)


@triton.jit
def first_columns(BLOCK_K: tl.constexpr) -> tl.tensor:
    """Returns the columns of the lower halves of a tile's bytes; of the upper ones 16 more."""
    byte = tl.arange(0, BLOCK_K // 2)
    return byte // 16 * 32 + byte % 16


@triton.jit
def _powers(scales: tl.tensor) -> tl.tensor:
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
