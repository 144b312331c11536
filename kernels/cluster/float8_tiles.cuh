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
    const u16 bytes = half ? word >> 16 : word & 0xffff;
#if IS_E5M2
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(bytes));
#else
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
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

struct Tile {
    uint4 keys[2][2];  // token g and that + 8; dims 16 t and those + 64
    uint4 values[4];   // tokens 2 t, 2 t + 1, and those + 8; dims 16 g
};

// A lane's part of the tiles of one sequence and KV head.
struct Places {
    int length;  // tokens of the sequence
    int t, key, eight, value, one;  // bytes; `eight` and `one`: that many tokens further

    __device__ __forceinline__ Places(const Float8Cache& cache, int head, int length)
        : length(length), t(threadIdx.x % 4) {
        const int g = threadIdx.x % 32 / 4, stride = cache.token_stride;
        const int start = head * cache.head_stride;
        key = start + g * stride + 16 * t;
        eight = 8 * stride;
        value = start + 2 * t * stride + 16 * g;
        one = stride;
    }
    // From L2: lines that were read before the newest tokens were stored may still be nearer.
    __device__ __forceinline__ Tile load(const Float8Cache& cache, int block, int tile) const {
        Tile found;
        const int first = tile * TILE, in_block = first & ((1 << cache.block_bits) - 1);
        const i64 start = block * cache.block_stride + in_block * one;
        const unsigned char* keys = cache.keys + start + key;
        const unsigned char* values = cache.values + start + value;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                found.keys[r][c] = __ldcg((const uint4*)(keys + (r ? eight : 0) + 64 * c));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int further = (i / 2 ? eight : 0) + (i % 2 ? one : 0);
            found.values[i] = __ldcg((const uint4*)(values + further));
            // What lies past the end may be no number, which no weight of 0 would remove.
            if (first + token(i) >= length) found.values[i] = make_uint4(0, 0, 0, 0);
        }
        return found;
    }
    // The token of a tile that values[i] are of.
    __device__ __forceinline__ int token(int i) const { return 2 * t + i % 2 + i / 2 * 8; }
};

// The blocks of a warp's tiles, each STEP tiles after the one before: of the next 32 tiles one a
// lane, and of 32 more. They are asked for long before their use, since where memory has much to do,
// whatever is waited for takes microseconds.
template <int STEP>
struct Blocks {
    const int* table;
    int next, more;

    __device__ __forceinline__ Blocks(const Float8Cache& cache, const int* table, int first)
        : table(table), next(load(cache, first)), more(load(cache, first + 32 * STEP)) {}
    __device__ __forceinline__ int load(const Float8Cache& cache, int first) const {
        const int block = (first + threadIdx.x % 32 * STEP) * TILE >> cache.block_bits;
        return block < cache.table_stride ? table[block] : 0;
    }
    __device__ __forceinline__ int first() const { return __shfl_sync(FULL, next, 0); }
    // That of the tile after this one, which is the warp's `round`-th, from 1 on.
    __device__ __forceinline__ int after(const Float8Cache& cache, int tile, int round) {
        if (round % 32 == 0) {
            next = more;
            more = load(cache, tile + 33 * STEP);
        }
        return __shfl_sync(FULL, next, round % 32);
    }
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
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float& score = scores[2 * r + h];
                score = (r ? inside8 : inside) ? score * queries.scales[h] : MINUS_INFINITY;
            }
            const float top = fmaxf(peaks[h], column_max(fmaxf(scores[h], scores[2 + h])));
            shrink[h] = exp2_of(peaks[h] - top);
            peaks[h] = top;
            scores[h] = exp2_of(scores[h] - top);
            scores[2 + h] = exp2_of(scores[2 + h] - top);
            totals[h] = totals[h] * shrink[h] + scores[h] + scores[2 + h];
        }
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
#pragma unroll
            for (int i = 0; i < 4; i++) sums[pair][i] *= shrink[i % 2];
            multiply_halves(sums[pair], widened_pair(even, 0), widened_pair(even, 1),
                            widened_pair(odd, 0), widened_pair(odd, 1), weights[0], weights[1]);
        }
    }
};

// What the warps of a block attended to, merged in their order; so many heads of a group at most.
template <int NUM, int MOST>
struct Merge {
    float peaks[NUM][MOST], totals[NUM][MOST];
    float sums[NUM][MOST][DIMS + 4];

    __device__ __forceinline__ void leave(Attended& of) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = column_sum(of.totals[h]);
            if (2 * t + h >= MOST) continue;
            if (g == 0) peaks[warp][2 * t + h] = of.peaks[h], totals[warp][2 * t + h] = total;
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    sums[warp][2 * t + h][16 * g + 2 * pair + i] = of.sums[pair][2 * i + h];
        }
    }
    // A dim of a head, of the first warps; with it the largest score and the sum of weights.
    __device__ __forceinline__ float merged(int num_warps, int head, int dim, float& peak,
                                            float& total) const {
        float sum = 0.0f;
        peak = MINUS_INFINITY, total = 0.0f;
#pragma unroll
        for (int w = 0; w < NUM; w++)
            if (w < num_warps) peak = fmaxf(peak, peaks[w][head]);
#pragma unroll
        for (int w = 0; w < NUM; w++) {
            if (w >= num_warps) break;
            const float share = exp2_of(peaks[w][head] - peak);
            sum += sums[w][head][dim] * share;
            total += totals[w][head] * share;
        }
        return sum;
    }
};
