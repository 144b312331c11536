// Attention of a warp over tiles of 16 tokens of a paged cache in 8-bit floats: up to eight query
// heads that share a KV head.
//
// Registers hold a tile. Keys and values are widened to float16, which has every 8-bit float, and
// multiplied by tensor cores, tokens and then dims being the rows. The order of columns within a
// product is free as long as both sides agree, so a lane has 16 neighbouring bytes of a token.
#pragma once

#include "primitives.cuh"

#define DIMS 128
#define TILE 16            // tokens
#define HEADS 8            // of queries, at most
#define PAIRS (DIMS / 16)  // of dims that a lane has
#define HEADROOM 8.0f      // a weight is at most two to this

struct Float8Cache {
    unsigned char *keys, *values;
    const int *tables, *lengths;
    const float* scales;  // of keys and of values, then their inverses, one a KV head each
    i64 block_stride, table_stride;
    int token_stride, head_stride, num_kv_heads, group, block_bits;  // tokens of a block: 1 << bits
    float scale_log2;
};

// Two 8-bit floats, of the lower half of a word or of the upper one.
__device__ __forceinline__ u32 widened_pair(u32 word, int half) {
    u32 pair;
    u16 lower, upper;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(lower), "=h"(upper) : "r"(word));
#if IS_E5M2
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(half ? upper : lower));
#else
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(half ? upper : lower));
#endif
    return pair;
}
__device__ __forceinline__ u32 packed_halves(float x, float y) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
__device__ __forceinline__ void multiply_halves(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 8 by 8 halves, of which a lane has [lane / 4][2 (lane % 4)] and the next.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}
// Over the lanes with the same columns.
__device__ __forceinline__ float column_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL, x, 4));
    x = fmaxf(x, __shfl_xor_sync(FULL, x, 8));
    return fmaxf(x, __shfl_xor_sync(FULL, x, 16));
}
__device__ __forceinline__ float column_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 4);
    x += __shfl_xor_sync(FULL, x, 8);
    return x + __shfl_xor_sync(FULL, x, 16);
}
__device__ __forceinline__ u32 word_of(const uint4& from, int i) {
    return i == 0 ? from.x : i == 1 ? from.y : i == 2 ? from.z : from.w;
}

// Of 16 tokens, in an order that the kernel chooses.
struct Tile {
    uint4 keys[2][2];  // token g and that + 8; dims 16 t and those + 64
    uint4 values[4];   // tokens 2 t, 2 t + 1, and those + 8; dims 16 g
};

// Queries in float16, divided by the largest of their head, and what scores are multiplied by.
struct Queries {
    u32 q[2][4][2];   // of head g: dims 16 t and those + 64
    float scales[2];  // of heads 2 t and 2 t + 1
};

// What a warp attended to: dims 16 g + 2 pair and the next, by heads 2 t and 2 t + 1.
struct Attended {
    float peaks[2], totals[2], sums[PAIRS][4];

    __device__ __forceinline__ Attended()
        : peaks{MINUS_INFINITY, MINUS_INFINITY}, totals{}, sums{} {}

    // What came before is divided by what its peak rises by.
    __device__ __forceinline__ void raise_peaks(const float (&scores)[4]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = fmaxf(peaks[h], column_max(fmaxf(scores[h], scores[2 + h])));
            const float shrink = exp2_of(peaks[h] - top);
            peaks[h] = top;
            totals[h] *= shrink;
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++)
                sums[pair][h] *= shrink, sums[pair][2 + h] *= shrink;
        }
    }

    // A tile, of whose tokens a lane has the keys of two; whether these are inside the context.
    __device__ __forceinline__ void add(const Tile& now, const Queries& queries, bool inside,
                                        bool inside8) {
        float scores[4] = {}, others[4] = {};  // of those two tokens by heads, of half the dims each
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 word = word_of(now.keys[0][c], i), word8 = word_of(now.keys[1][c], i);
                multiply_halves(c ? others : scores, widened_pair(word, 0), widened_pair(word8, 0),
                                widened_pair(word, 1), widened_pair(word8, 1), queries.q[c][i][0],
                                queries.q[c][i][1]);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i] += others[i];
        bool is_higher = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float score = scores[i] * queries.scales[i % 2];
            scores[i] = (i < 2 ? inside : inside8) ? score : MINUS_INFINITY;
            is_higher |= scores[i] > peaks[i % 2] + HEADROOM;
        }
        if (__any_sync(FULL, is_higher)) raise_peaks(scores);
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i] = exp2_of(scores[i] - peaks[i % 2]);
        totals[0] += scores[0] + scores[2];
        totals[1] += scores[1] + scores[3];
        const u32 weights[2] = {transposed(packed_halves(scores[0], scores[1])),
                                transposed(packed_halves(scores[2], scores[3]))};
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            // Two dims of a word, each of two tokens.
            const int w = pair / 2;
            const u32 which = pair % 2 ? 0x7362 : 0x5140;
            const u32 even =
                choose_bytes(word_of(now.values[0], w), word_of(now.values[1], w), which);
            const u32 odd =
                choose_bytes(word_of(now.values[2], w), word_of(now.values[3], w), which);
            multiply_halves(sums[pair], widened_pair(even, 0), widened_pair(even, 1),
                            widened_pair(odd, 0), widened_pair(odd, 1), weights[0], weights[1]);
        }
    }
};
