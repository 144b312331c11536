# mypy: disable-error-code="untyped-decorator"
"""Numbers in kernels to the bytes of 8-bit floats, as `kernels.fp8` rounds them."""

import triton
import triton.language as tl


@triton.jit
def fp8_bytes(x: tl.tensor, inverse: tl.tensor, MANTISSA: tl.constexpr) -> tl.tensor:
    """`fp8.narrowed` as bytes, by integer operations: the same on every device."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    DROPPED: tl.constexpr = 23 - MANTISSA
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    # A float whose last bit is the unit of FP8's subnormal numbers.
    UNITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    wide = x.to(tl.float32)
    is_finite = (wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    bits = (wide * inverse).to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, (LARGEST << DROPPED) + REBIAS)
    half = (1 << (DROPPED - 1)) - 1 + ((size >> DROPPED) & 1)
    normal = (size - REBIAS + half) >> DROPPED
    units = tl.full(size.shape, UNITS, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (size.to(tl.float32, bitcast=True) + units).to(tl.int32, bitcast=True) - UNITS
    code = tl.where(size < REBIAS + (1 << 23), subnormal, normal)
    code = tl.where(is_finite, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)
