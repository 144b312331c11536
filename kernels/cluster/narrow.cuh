// A linear layer whose weight has 4 or 8 bits, and tensor cores' products with what is stored.
#pragma once
#include "primitives.cuh"

// What bytes are: one of these is STORED.
#define FLOAT8 0
#define INT4 1
#define INT8 2
// What has a scale of its own, and integers an offset: one of these is SCALED.
#define BY_ROW 0      // all columns of an output
#define BY_SEGMENT 1  // groups of whole segments; they are scaled after the product
#define BY_LANE 2     // smaller groups, of at least 16 bytes; they are scaled before it

#define OUTPUTS 16  // that a warp multiplies at once
#define SEGMENT 64  // bytes of an output that it multiplies at once

struct Layer {
    const u16* x;
    const unsigned char* weight;  // [N, bytes]
    const float* scales;          // [N, groups]
    const float* offsets;         // [N, groups] of integers
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

// As whole numbers plus `ADDED`, which bfloat16 has all of: a nibble is the last bits of 128, a
// byte the last of 2^23 in float32.
template <int KIND>
constexpr float ADDED = KIND == INT4 ? 128.0f : 0.0f;
template <int KIND>
__device__ __forceinline__ void widen(u32 bytes, u32 (&pairs)[2]) {
    if (KIND == FLOAT8) widen_float8(bytes, pairs);
    if (KIND == INT4) {
        pairs[0] = choose_bytes(bytes, 0x43434343u, 0x4140);
        pairs[1] = choose_bytes(bytes, 0x43434343u, 0x4342);
    }
    if constexpr (KIND == INT8) {
        float wide[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            wide[i] = __uint_as_float(choose_bytes(bytes, 0x4b000000u, 0x7440 | i)) - 8388608.0f;
        pairs[0] = packed(wide[0], wide[1]), pairs[1] = packed(wide[2], wide[3]);
    }
}

// What they count as in their group: computed in float32, then rounded once.
template <int KIND>
__device__ __forceinline__ void widen_scaled(u32 bytes, float scale, float offset,
                                             u32 (&pairs)[2]) {
    widen<KIND>(bytes, pairs);
    offset -= ADDED<KIND> * scale;
#pragma unroll
    for (int i = 0; i < 2; i++)
        pairs[i] = packed(fmaf(low(pairs[i]), scale, offset), fmaf(high(pairs[i]), scale, offset));
}

// 16 columns of x.
struct Columns {
    u32 pairs[8];
};
__device__ __forceinline__ Columns load_columns(const u16* from) {
    const uint4 *at = (const uint4*)from, a = at[0], b = at[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// Adds the squares of 16 columns of each row, which are on the diagonal of the sums.
__device__ __forceinline__ void add_squares(float (&sums)[4], const Columns& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 a = x.pairs[2 * i], b = x.pairs[2 * i + 1];
        multiply16(sums, a, 0, b, 0, a, b);
    }
}

// Adds 16 columns of two outputs, times those of x. Nibbles are the lower halves of bytes, or the
// upper ones. By lane, `scales` has scale and offset of each output.
template <int KIND, int BY, int TILES>
__device__ __forceinline__ void add_columns(float (&sums)[TILES][4], const uint4& row,
                                            const uint4& row8, const float (&scales)[4], int half,
                                            const Columns (&x)[TILES]) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
    const u32 words8[4] = {row8.x, row8.y, row8.z, row8.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 a[2], b[2], from = words[i], from8 = words8[i];
        if (KIND == INT4)
            from = from >> (4 * half) & 0x0f0f0f0fu, from8 = from8 >> (4 * half) & 0x0f0f0f0fu;
        if (BY == BY_LANE) {
            widen_scaled<KIND>(from, scales[0], scales[1], a);
            widen_scaled<KIND>(from8, scales[2], scales[3], b);
        } else {
            widen<KIND>(from, a);
            widen<KIND>(from8, b);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply16(sums[tile], a[0], b[0], a[1], b[1], x[tile].pairs[2 * i],
                       x[tile].pairs[2 * i + 1]);
    }
}

// Sums of 16 columns of x, for all outputs alike.
template <int TILES>
__device__ __forceinline__ void add_sums(float (&sums)[TILES][4], const Columns (&x)[TILES]) {
    const u32 ones = 0x3f803f80u;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            multiply16(sums[tile], ones, ones, ones, ones, x[tile].pairs[2 * i],
                       x[tile].pairs[2 * i + 1]);
}

// A segment's products to all: by segment, groups are scaled now.
template <int KIND, int TILES>
__device__ __forceinline__ void add_scaled(float (&sums)[TILES][4], const float (&parts)[TILES][4],
                                           const float (&ones)[TILES][4], const float (&scales)[2],
                                           const float (&offsets)[2]) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float& sum = sums[tile][c];
            sum = fmaf(parts[tile][c], scales[c / 2], sum);
            if (KIND != FLOAT8)
                sum = fmaf(ones[tile][c], offsets[c / 2] - ADDED<KIND> * scales[c / 2], sum);
        }
}

// The first column of a lane in a segment. Of nibbles, a group's first half are the lower halves of
// its bytes.
template <int KIND>
__device__ __forceinline__ int first_column(int byte, int half, int group_bits) {
    if (KIND != INT4) return byte;
    const int half_group = 1 << group_bits >> 1;
    return 2 * byte - (byte & (half_group - 1)) + half * half_group;
}

// y times its scale, the norm's factor, plus its bias: as separate operations, so that all kernels
// round alike.
__device__ __forceinline__ float ended(float y, float scale, float factor, float bias) {
    return __fadd_rn(__fmul_rn(__fmul_rn(y, scale), factor), bias);
}
__device__ __forceinline__ float gated_by(float gate, float up) {
    return __fmul_rn(__fdividef(gate, 1.0f + __expf(-gate)), up);
}
