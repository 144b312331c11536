# mypy: disable-error-code="untyped-decorator"
"""Numbers of 4 bits in kernels: a code is a sign, two bits of exponent and one of mantissa.

As the high bits of a float16 a code is its number times 2^-14, and as those of a bfloat16 times
2^-126, also where it is not normal. Compiled, four bytes are widened together, lane by lane: a
device has instructions for two numbers of 16 bits, and none for single bytes.

A tile has the shape [N, G, 16]: of N rows, G groups of columns with an exponent each, of which byte
j has the codes of columns j and 16 + j.
"""

import triton
import triton.language as tl

# Of bytes 0 and 1, and 2 and 3, of $4: the lower and the upper halves as float16 times 2^-14.
_HALVES = tl.constexpr("""{
    .reg .b32 t, u;
    prmt.b32 t, $4, 0, 0x4140;
    prmt.b32 u, $4, 0, 0x4342;
    .reg .b32 a, b;
    shl.b32 a, t, 9;  and.b32 a, a, 0x0E000E00;
    shl.b32 b, t, 12; and.b32 b, b, 0x80008000; or.b32 $0, a, b;
    shl.b32 a, u, 9;  and.b32 a, a, 0x0E000E00;
    shl.b32 b, u, 12; and.b32 b, b, 0x80008000; or.b32 $1, a, b;
    shl.b32 a, t, 5;  and.b32 a, a, 0x0E000E00;
    shl.b32 b, t, 8;  and.b32 b, b, 0x80008000; or.b32 $2, a, b;
    shl.b32 a, u, 5;  and.b32 a, a, 0x0E000E00;
    shl.b32 b, u, 8;  and.b32 b, b, 0x80008000; or.b32 $3, a, b;
}""")

# Of two bytes of $2, the lower and the upper halves as bfloat16 times 2^126 and the powers in $3.
_SCALED = tl.constexpr("""{
    .reg .b32 t, a, b, s;
    mov.b32 s, 0x7E807E80;
    prmt.b32 t, $2, 0, 0x4140;
    shl.b32 a, t, 6;  and.b32 a, a, 0x01C001C0;
    shl.b32 b, t, 12; and.b32 b, b, 0x80008000; or.b32 a, a, b;
    mul.rn.bf16x2 a, a, s; mul.rn.bf16x2 $0, a, $3;
    shl.b32 a, t, 2;  and.b32 a, a, 0x01C001C0;
    shl.b32 b, t, 8;  and.b32 b, b, 0x80008000; or.b32 a, a, b;
    mul.rn.bf16x2 a, a, s; mul.rn.bf16x2 $1, a, $3;
}""")


@triton.jit
def numbers(
    codes: tl.tensor, exponents: tl.tensor, DTYPE: tl.constexpr, IS_COMPILED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Numbers [N, 16 G] of the lower and of the upper halves of codes, of exponents [N, G].

    Codes are taken two bytes at a time, [N, G, 8] of int16: what tensor cores want in one register.
    """
    if IS_COMPILED and tl.bfloat16 == DTYPE:
        # 2^(e - 127) is e << 7 as a bfloat16, and 0x0040 where e is 0.
        power = tl.maximum(exponents.to(tl.int32) << 7, 0x0040)
        power |= power << 16
        low, high = tl.inline_asm_elementwise(
            _SCALED, "=r,=r,r,r",
            [codes.to(tl.int32), tl.broadcast_to(power[:, :, None], codes.shape)],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        low = tl.join(low.to(tl.int16), (low >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
        high = tl.join(high.to(tl.int16), (high >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        both = tl.join(codes & 0xFF, (codes >> 8) & 0xFF).to(tl.uint8)
        low, high = _halves(both, IS_COMPILED)
        power = _powers(exponents)[:, :, None, None]
        low = (low.to(tl.float32) * 16384.0 * power).to(DTYPE)
        high = (high.to(tl.float32) * 16384.0 * power).to(DTYPE)
    shape: tl.constexpr = [codes.shape[0], codes.shape[1] * 16]
    return tl.reshape(low, shape), tl.reshape(high, shape)


@triton.jit
def sums_of_groups(
    codes_ptr: tl.tensor, exponents_ptr: tl.tensor, low: tl.tensor, high: tl.tensor,
    inside: tl.tensor, IS_COMPILED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums [N, G] of codes at [N, G, 16], exponents at [N, G], times float32 columns [1, G, 16].

    `inside` [N, G] says where there are codes.
    """
    codes = tl.load(codes_ptr, mask=inside[:, :, None], other=0)
    exponents = tl.load(exponents_ptr, mask=inside, other=0)
    of_low, of_high = _halves(codes, IS_COMPILED)
    total = tl.sum(of_low.to(tl.float32) * low + of_high.to(tl.float32) * high, 2)
    return total * 16384.0 * _powers(exponents)


@triton.jit
def _halves(codes: tl.tensor, IS_COMPILED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The numbers of both halves of bytes times 2^-14, as float16."""
    if IS_COMPILED:
        low, high = tl.inline_asm_elementwise(
            _HALVES, "=r,=r,=r,=r,r", [codes],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = codes.to(tl.uint16)
        low = (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True)
        wide = wide >> 4
        high = (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _powers(exponents: tl.tensor) -> tl.tensor:
    # 2^(e - 127) is e << 23 as a float32, and 0x00400000 where e is 0.
    bits = tl.maximum(exponents.to(tl.int32) << 23, 0x00400000)
    return bits.to(tl.float32, bitcast=True)
