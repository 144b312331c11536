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


# Of two e4m3 in the lower half of $1, bfloat16. With its sign apart a byte is the high bits of a
# bfloat16 times 2^-120, also where it is not normal. What is not a number becomes 480.
_WIDENED = tl.constexpr("""{
    .reg .b32 t, a, s;
    mov.b32 s, 0x7B807B80;
    prmt.b32 t, $1, 0, 0x1404;
    shr.b32 a, t, 4;
    and.b32 a, a, 0x07F007F0;
    and.b32 t, t, 0x80008000;
    or.b32 a, a, t;
    mul.rn.bf16x2 $0, a, s;
}""")


@triton.jit
def widened_pairs(pairs: tl.tensor) -> tl.tensor:
    """Two e4m3 each of int16 [N, K] as bfloat16 [N, 2 K], where kernels are compiled.

    A device converts to float16 alone, and from there one number at a time: that takes longer than
    to read them.
    """
    wide = tl.inline_asm_elementwise(
        _WIDENED, "=r,r", [pairs.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
    )
    both = tl.join(wide.to(tl.int16), (wide >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    return tl.reshape(both, [pairs.shape[0], 2 * pairs.shape[1]])
