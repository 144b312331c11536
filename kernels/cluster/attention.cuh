// One query token over a block's share of the paged keys and values: heads of one KV head, a warp
// for each tile of tokens.
#pragma once

#include "rotary.cuh"
#include "sizes.cuh"

struct Cache {
    u16* k;
    u16* v;
    i64 block_stride, token_stride, head_stride;  // in elements
    int block_size;
};

// What an attention block needs of its token and its KV head, in shared memory.
struct Heads {
    float qkv[QKV];                        // as the cluster's blocks send them
    float parts[CLUSTER][GROUP][STATS];    // what each block attended to
    float cos_sin[HEAD_DIM];
    float q_norm[HEAD_DIM], k_norm[HEAD_DIM];
    float sums[WARPS];
    __align__(16) u16 q[QUERY];            // rotated; then what was attended to
    __align__(16) u16 k[HEAD_DIM], v[HEAD_DIM];
};

// Norms and rotates a head, [HEAD_DIM]; one warp.
__device__ __forceinline__ void norm_and_rotate(const float* head, const float* weight,
                                                const float* cos_sin, float eps, u16* out) {
    const int lane = threadIdx.x % 32;
    float x[HEAD_DIM / 32];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) x[i] = head[lane + 32 * i];
    norm_and_rotate<HEAD_DIM, QK_NORM>(x, weight, cos_sin, eps);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) out[lane + 32 * i] = narrowed(x[i]);
}

// The tokens that a warp attends to, TOKENS at a time. For the scores a lane has key lane / 4, and
// of each 32 dimensions 8; for the sums it has values 2 (lane % 4) and the next, and HEAD_DIM / 8
// dimensions from lane / 4 * (HEAD_DIM / 8) on.
struct Attention {
    uint4 k[HEAD_DIM / 32], v[2][HEAD_DIM / 64];
    float sums[HEAD_DIM / 16][4];  // [pair of dimensions][(dimension, head)]
    float peak, total;             // of head lane / 4; the total is of this lane's tokens

    // Older keys and values of the tokens from `first` on; zero for others.
    __device__ __forceinline__ void load_k(const Cache& cache, const int* table, u32 head,
                                           int first, int end) {
        const int lane = threadIdx.x % 32, token = first + lane / 4;
        const u16* at = nullptr;
        if (token < end)
            at = cache.k + place(cache, table, token, head) + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++)
            k[i] = token < end ? __ldcg((const uint4*)(at + 32 * i)) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load_v(const Cache& cache, const int* table, u32 head,
                                           int first, int end) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int token = first + lane % 4 * 2 + j;
            const u16* at = nullptr;
            if (token < end)
                at = cache.v + place(cache, table, token, head) + lane / 4 * (HEAD_DIM / 8);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 64; i++)
                v[j][i] = token < end ? __ldcg((const uint4*)(at + 8 * i)) : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ i64 place(const Cache& cache, const int* table, int token,
                                                u32 head) {
        return (i64)__ldg(table + token / cache.block_size) * cache.block_stride +
               (i64)(token % cache.block_size) * cache.token_stride + (i64)head * cache.head_stride;
    }

    // The newest token's, which the cache may not have yet.
    __device__ __forceinline__ void put_newest(const Heads& heads, int first, int newest) {
        const int lane = threadIdx.x % 32;
        if (first + lane / 4 == newest)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; i++)
                k[i] = *(const uint4*)(heads.k + lane % 4 * 8 + 32 * i);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (first + lane % 4 * 2 + j == newest)
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 64; i++)
                    v[j][i] = *(const uint4*)(heads.v + lane / 4 * (HEAD_DIM / 8) + 8 * i);
    }

    __device__ __forceinline__ void begin() {
        peak = MINUS_INFINITY;
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }

    // Scores of the loaded keys in units of log2, for head lane / 4: tokens 2 (lane % 4), the next.
    __device__ __forceinline__ void score(const uint4 (&q)[HEAD_DIM / 32], float scale_log2,
                                          int num_tokens, float (&scores)[2]) const {
        float s[2][4] = {};  // two sums, so that fewer multiplications wait for each other
        const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) multiply_span(s[i % 2], q[i], none, k[i]);
        const int token = threadIdx.x % 4 * 2;
        scores[0] = token < num_tokens ? (s[0][0] + s[1][0]) * scale_log2 : MINUS_INFINITY;
        scores[1] = token + 1 < num_tokens ? (s[0][1] + s[1][1]) * scale_log2 : MINUS_INFINITY;
    }

    // Adds the loaded values by these scores; at least one token is there.
    __device__ __forceinline__ void add(const float (&scores)[2]) {
        float top = fmaxf(scores[0], scores[1]);
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
        top = fmaxf(top, peak);
        const float shrink = exp2_of(peak - top);
        const float p0 = exp2_of(scores[0] - top), p1 = exp2_of(scores[1] - top);
        peak = top;
        total = total * shrink + p0 + p1;
        const u32 shares = packed(p0, p1);
        const int head = threadIdx.x % 4 * 2;  // of this lane's sums, and the next
        const float shrink0 = __shfl_sync(FULL, shrink, head * 4);
        const float shrink1 = __shfl_sync(FULL, shrink, head * 4 + 4);
        const u32* even = (const u32*)v[0];
        const u32* odd = (const u32*)v[1];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            sums[i][0] *= shrink0, sums[i][1] *= shrink1;
            sums[i][2] *= shrink0, sums[i][3] *= shrink1;
            multiply8(sums[i], __byte_perm(even[i], odd[i], 0x5410),
                      __byte_perm(even[i], odd[i], 0x7632), shares);
        }
    }

    // Leaves the warp's sums, maximum and total of each head in [GROUP, STATS].
    __device__ __forceinline__ void leave(float* to) {
        const int lane = threadIdx.x % 32, head = lane % 4 * 2;
        total += __shfl_xor_sync(FULL, total, 1);
        total += __shfl_xor_sync(FULL, total, 2);
        if (lane % 4 == 0 && lane / 4 < GROUP) {
            to[lane / 4 * STATS + HEAD_DIM] = peak;
            to[lane / 4 * STATS + HEAD_DIM + 1] = total;
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (head + h < GROUP)
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; i++)
                    *(float2*)(to + (head + h) * STATS + lane / 4 * (HEAD_DIM / 8) + 2 * i) =
                        make_float2(sums[i][h], sums[i][2 + h]);
    }
};

// Value d of head g, merged from the first `num` of MOST partial results, [MOST, GROUP, STATS]; of
// HEAD_DIM the maximum. Adds their totals, merged, to `total`.
template <int MOST>
__device__ __forceinline__ float merged(const float* parts, int num, int g, int d, float& total) {
    float share[MOST], top = MINUS_INFINITY, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < MOST; s++) {
        share[s] = s < num ? parts[(s * GROUP + g) * STATS + HEAD_DIM] : MINUS_INFINITY;
        top = fmaxf(top, share[s]);
    }
    if (d == HEAD_DIM) return top;
#pragma unroll
    for (int s = 0; s < MOST; s++)
        if (s < num) {
            const float* part = parts + (s * GROUP + g) * STATS;
            const float weight = exp2_of(share[s] - top);
            sum += part[d] * weight;
            total += part[HEAD_DIM + 1] * weight;
        }
    return sum;
}
