// A linear layer whose weight has 4 or 8 bits, and tensor cores' products with what is stored.
#pragma once
#include "primitives.cuh"

// What bytes are: one of these is STORED.
#define FLOAT8 0
#define INT4 1
#define INT8 2

#define OUTPUTS 16  // that a warp multiplies at once
#define SEGMENT 64  // bytes of an output that it multiplies at once, four words a lane

// A program is given WORDS, so many words of a lane have one scale, and integers one zero point: 4
// where a group has a segment or more, 2 or 1; 0: all columns of an output have one scale. Words of
// integers are a group's in all lanes, so groups are scaled after the product. And PAIRED: whether
// scales are float16 with the zero points, or float32 with offsets.
#if WORDS
#define UNITS (4 / WORDS)  // of a segment, that are scaled by themselves
#else
#define UNITS 1
#endif

struct Layer {
    const u16* x;
    const unsigned char* weight;  // [N, bytes]
    const u32* scales;            // [N, groups] float32, or pairs of float16
    const u32* offsets;           // [N, groups] float32 of integers, or none
    const u16* norm;              // [K]
    const u16* bias;              // [N] or none
    const u16* residual;          // [M, N] or none
    u16* out;
    i64 x_stride;
    int num_rows, num_outputs, num_columns, num_bytes;  // outputs and bytes of a row of the weight
    int num_groups, group_bits;                         // a group has 1 << group_bits columns
    float eps;
};

__device__ __forceinline__ u32 multiplied(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 multiplied_added(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// ---- four numbers of a word as two pairs -------------------------------------------------------

// Exponent and mantissa of e4m3 stand at the same places of a bfloat16 that counts 2^120 times
// less, also where they are subnormal.
__device__ __forceinline__ void widen_float8(u32 bytes, u32 (&pairs)[2]) {
    const u32 two_to_120 = 0x7b807b80u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 top = choose_bytes(bytes, 0, i ? 0x3424 : 0x1404);
        u32 small = (top & 0x80008000u) | (top >> 4 & 0x07f007f0u);
        pairs[i] = multiplied(small, two_to_120);
    }
}

// Integers become (integer + ADDED<KIND>) / COUNTED<KIND>. The last four bits of 32 count a quarter.
// Of a bfloat16 that is small enough all eight last bits count 2^-133, also the one that is its
// exponent's, so what stands there is widened by one operation for two.
template <int KIND>
constexpr float COUNTED = KIND == INT4 ? 4.0f : KIND == INT8 ? 64.0f : 1.0f;
template <int KIND>
constexpr float ADDED = KIND == INT4 ? 128.0f : 0.0f;
template <int KIND>
__device__ __forceinline__ void widen(u32 word, int half, u32 (&pairs)[2]) {
    // An operation takes one constant; the other is made to be in a register.
    const u32 two_to_127 = 0x7f007f00u, of_32 = 0x42004200u * gridDim.y;
    if (KIND == FLOAT8) widen_float8(word, pairs);
    if (KIND == INT4) {
        const u32 integers = half ? word >> 8 : word;
        pairs[0] = integers & 0x000f000fu | of_32;
        pairs[1] = multiplied_added(integers & 0x00f000f0u, two_to_127, of_32);
    }
    if (KIND == INT8) {
        pairs[0] = multiplied(word & 0x00ff00ffu, two_to_127);
        pairs[1] = multiplied(word >> 8 & 0x00ff00ffu, two_to_127);
    }
}

// Columns of x that a lane multiplies with a segment, word by word, four at a time.
template <int KIND>
constexpr int HALVES = KIND == INT4 ? 2 : 1;  // of a word; columns in a byte
struct Half {
    u32 words[4][2];
};
template <int KIND>
struct Columns {
    Half halves[HALVES<KIND>];
};

// Those of one lane of four, from the segment's first. Its words of integers are 4 columns of each
// quarter of the segment, or two times 4; its 8-bit floats lie together. `flip` exchanges
// neighbouring loads.
template <int KIND>
__device__ __forceinline__ Half load_half(const u16* first, int t, int half, int flip) {
    Half x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int quarter = SEGMENT / 4 * HALVES<KIND> * (i ^ flip);
        const int column = KIND == FLOAT8 ? 16 * t + 8 * (i / 2 ^ flip) + i % 2 * 4
                                          : quarter + HALVES<KIND> * 4 * t + 4 * half;
        const uint2 a = *(const uint2*)(first + column);
        x.words[i][0] = a.x, x.words[i][1] = a.y;
    }
    return x;
}
template <int KIND>
__device__ __forceinline__ Columns<KIND> load_columns(const u16* first, int t, int flip = 0) {
    Columns<KIND> x;
    if constexpr (KIND == INT4)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 a = *(const uint4*)(first + 32 * (i ^ flip) + 8 * t);
            x.halves[0].words[i][0] = a.x, x.halves[0].words[i][1] = a.y;
            x.halves[1].words[i][0] = a.z, x.halves[1].words[i][1] = a.w;
        }
    if constexpr (KIND == INT8) x.halves[0] = load_half<KIND>(first, t, 0, flip);
    if constexpr (KIND == FLOAT8)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint4 a = *(const uint4*)(first + 16 * t + 8 * (i / 2 ^ flip));
            x.halves[0].words[i][0] = a.x, x.halves[0].words[i][1] = a.y;
            x.halves[0].words[i + 1][0] = a.z, x.halves[0].words[i + 1][1] = a.w;
        }
    return x;
}
template <int KIND>
__device__ __forceinline__ void multiply_by(Columns<KIND>& x, const Columns<KIND>& norm) {
#pragma unroll
    for (int half = 0; half < HALVES<KIND>; half++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32& pair = x.halves[half].words[i / 2][i % 2];
            pair = multiplied(pair, norm.halves[half].words[i / 2][i % 2]);
        }
}

// Adds a segment's squares of each row, which are on the diagonal of the sums.
__device__ __forceinline__ void add_squares(float (&sums)[4], const Half& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 a = x.words[i][0], b = x.words[i][1];
        multiply16(sums, a, 0, b, 0, a, b);
    }
}
// Adds the columns of a unit, for all outputs alike.
__device__ __forceinline__ void add_sums(float (&sums)[4], const Half& x, int unit) {
    const u32 ones = 0x3f803f80u;
#pragma unroll
    for (int i = 0; i < 4 / UNITS; i++) {
        const u32* b = x.words[unit * 4 / UNITS + i];
        multiply16(sums, ones, ones, ones, ones, b[0], b[1]);
    }
}

// Adds a word of two outputs, times its columns of x.
template <int KIND, int TILES>
__device__ __forceinline__ void add_word(float (&sums)[TILES][4], u32 word, u32 word8,
                                         const Columns<KIND> (&x)[TILES], int i) {
#pragma unroll
    for (int half = 0; half < HALVES<KIND>; half++) {
        u32 a[2], b[2];
        widen<KIND>(word, half, a);
        widen<KIND>(word8, half, b);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const u32* columns = x[tile].halves[half].words[i];
            multiply16(sums[tile], a[0], b[0], a[1], b[1], columns[0], columns[1]);
        }
    }
}

// What the sum of a group's products is multiplied by, and what the sum of its columns of x. An
// output is multiplied by COUNTED<KIND> at its end, which is a power of two and rounds nothing.
struct Factors {
    float of_product, of_columns;
};
template <int KIND>
__device__ __forceinline__ Factors factors_of(u32 scale, u32 offset) {
    if (PAIRED) {
        float factor, zero;
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
            : "=f"(factor), "=f"(zero)
            : "r"(scale));
        return {factor, fmaf(zero, -1.0f / COUNTED<KIND>, -ADDED<KIND> / COUNTED<KIND>)};
    }
    const float factor = __uint_as_float(scale);
    if (KIND == FLOAT8) return {factor, 0.0f};
    const float counted = __uint_as_float(offset) / COUNTED<KIND>;
    return {factor, fmaf(factor, -ADDED<KIND> / COUNTED<KIND>, counted)};
}
// Adds a group: a pair's zero point counts before the scale, an offset after it.
template <int KIND>
__device__ __forceinline__ float added(float sum, float product, float columns, Factors by) {
    if (PAIRED) return fmaf(by.of_product, fmaf(by.of_columns, columns, product), sum);
    sum = fmaf(product, by.of_product, sum);
    return KIND == FLOAT8 ? sum : fmaf(columns, by.of_columns, sum);
}

// y times its scale, the norm's factor, plus its bias: as separate operations, so that all kernels
// round alike.
__device__ __forceinline__ float ended(float y, float scale, float factor, float bias) {
    return __fadd_rn(__fmul_rn(__fmul_rn(y, scale), factor), bias);
}
__device__ __forceinline__ float gated_by(float gate, float up) {
    return __fmul_rn(__fdividef(gate, 1.0f + __expf(-gate)), up);
}
