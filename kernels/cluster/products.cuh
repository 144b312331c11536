// Products of one row with a block's slice of a weight: the norm before the first, tiles in shared
// memory or registers, and sums of slices.
#pragma once

#include "sizes.cuh"

// The normed residual in shared memory, [2, ROW_STRIDE]: the upper 8 bits of each mantissa, and the
// next 8, since tensor cores take no more at once.
__device__ __forceinline__ void leave_split(u16* xs, int c, float x0, float x1) {
    const u32 upper = packed(x0, x1);
    *(u32*)(xs + c) = upper;
    *(u32*)(xs + ROW_STRIDE + c) = packed(x0 - low(upper), x1 - high(upper));
}

// The residual: what it was, and what the clusters of the launch before add to it. Fills xs with
// the residual times the norm's weight; returns 1 / rms. The first cluster stores the residual for
// the next launch, each of its blocks a part.
struct Residual {
    u32 norm[UP(HIDDEN, 2 * THREADS)];

    __device__ __forceinline__ void load_norm(const u16* weight) {
#pragma unroll
        for (int i = 0; i < UP(HIDDEN, 2 * THREADS); i++) {
            const int c = 2 * (threadIdx.x + i * THREADS);
            norm[i] = c < HIDDEN ? *(const u32*)(weight + c) : 0;
        }
    }

    __device__ __forceinline__ float read(const u16* residual, u16* residual_out,
                                          const float* partials, int num_partials, float eps,
                                          u16* xs, float* sums) const {
        float square = 0.0f;
        const u32 first = cluster_rank() * OUTPUTS;
#pragma unroll
        for (int j = 0; j < UP(HIDDEN, 2 * THREADS); j++) {
            const int c = 2 * (threadIdx.x + j * THREADS);
            if (c >= HIDDEN) continue;
            const u32 old = __ldcg((const u32*)(residual + c));
            float x0 = 0.0f, x1 = 0.0f;
            for (int p = 0; p < num_partials; p += 8) {
                float2 part[8];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    part[i] = p + i < num_partials
                                  ? __ldcg((const float2*)(partials + (p + i) * HIDDEN + c))
                                  : make_float2(0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    x0 += part[i].x;
                    x1 += part[i].y;
                }
            }
            const u32 now = packed(x0 + low(old), x1 + high(old));
            if (cluster_id() == 0 && c >= first && c < first + OUTPUTS)
                *(u32*)(residual_out + c) = now;
            x0 = low(now);
            x1 = high(now);
            square += x0 * x0 + x1 * x1;
            leave_split(xs, c, x0 * low(norm[j]), x1 * high(norm[j]));
        }
        square = warp_sum(square);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += sums[i];
        return rsqrtf(total / HIDDEN + eps);
    }
};

// How warps share tiles of 16 rows: as many groups of warps as divide the tiles, and within a group
// each warp has a slice of the columns.
template <int NUM_TILES, int NUM_GROUPS>
struct Products {
    static constexpr int TILES = NUM_TILES, GROUPS = NUM_GROUPS;
    static constexpr int MINE = TILES / GROUPS, SLICES = WARPS / GROUPS;
    float sums[MINE][4];

    __device__ __forceinline__ Products() {
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    static __device__ __forceinline__ int slice() { return threadIdx.x / 32 / GROUPS; }
    static __device__ __forceinline__ int row(int i) {
        return (threadIdx.x / 32 % GROUPS * MINE + i) * TILE + threadIdx.x % 32 / 4;
    }

    // The warp's i-th span of columns, and where this lane reads it.
    static constexpr int SPANS = UP(HIDDEN / SPAN, SLICES);
    static __device__ __forceinline__ int column(int i) {
        return (slice() + i * SLICES) * SPAN + threadIdx.x % 4 * 8;
    }

    // The first SHARED of this warp's tiles of a weight in shared memory, [rows, ROW_STRIDE], and
    // the others, which it holds, times xs.
    template <int SHARED, int HELD>
    __device__ __forceinline__ void add(const u16* weight, const uint4 (&held)[SPANS][HELD][2],
                                        const u16* xs) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < SPANS; i++) {
            const int c = column(i);
            if (c >= HIDDEN) break;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (g < 2) x = *(const uint4*)(xs + g * ROW_STRIDE + c);
#pragma unroll
            for (int m = 0; m < SHARED; m++) {
                const u16* at = weight + row(m) * ROW_STRIDE + c;
                multiply_span(sums[m], *(const uint4*)at, *(const uint4*)(at + 8 * ROW_STRIDE), x);
            }
#pragma unroll
            for (int m = SHARED; m < MINE; m++)
                multiply_span(sums[m], held[i][m - SHARED][0], held[i][m - SHARED][1], x);
        }
    }

    // Leaves the slices' sums, [SLICES, TILES * 16], and waits for all.
    __device__ __forceinline__ void leave(float* to) const {
        if (threadIdx.x % 4 == 0)
#pragma unroll
            for (int m = 0; m < MINE; m++) {
                float* at = to + slice() * (TILES * TILE) + row(m);
                at[0] = sums[m][0] + sums[m][1];
                at[8] = sums[m][2] + sums[m][3];
            }
        __syncthreads();
    }
    static __device__ __forceinline__ float total(const float* left, int row) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SLICES; i++) sum += left[i * (TILES * TILE) + row];
        return sum;
    }
};

#define EVEN(tiles) ((tiles) % 2 ? 1 : 2)
typedef Products<UP(QKV_ROWS, TILE), EVEN(UP(QKV_ROWS, TILE))> QkvProducts;
#define GATE_UP_TILES UP(2 * PAIRS, TILE)
typedef Products<GATE_UP_TILES, 1> GateUpProducts;
#define OUT_TILES UP(OUTPUTS, TILE)
typedef Products<OUT_TILES, WARPS % OUT_TILES ? 1 : OUT_TILES> OutProducts;

// A block's slice of an output projection, in registers: OUTPUTS rows and WIDTH columns.
template <int WIDTH>
struct OutputSlice {
    static constexpr int SPANS = UP(WIDTH / SPAN, OutProducts::SLICES);
    uint4 w[SPANS][OutProducts::MINE][2];

    // Of a weight [HIDDEN, width]; the slice has num_columns.
    __device__ __forceinline__ void load(const u16* weight, u32 first_row, u32 first_column,
                                         u32 width, int num_columns) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            const int span = OutProducts::slice() + s * OutProducts::SLICES;
#pragma unroll
            for (int m = 0; m < OutProducts::MINE; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = OutProducts::row(m) + 8 * half;
                    const bool is_there = row < OUTPUTS && span * SPAN < num_columns;
                    const u16* at = weight + (u64)(first_row + row) * width + first_column +
                                    span * SPAN + t * 8;
                    w[s][m][half] = is_there ? __ldg((const uint4*)at) : make_uint4(0, 0, 0, 0);
                }
        }
    }

    // Stores the block's outputs for x [num_columns], bfloat16 in shared memory.
    __device__ __forceinline__ void store(const u16* x, int num_columns, float* left,
                                          float* outputs) const {
        const int lane = threadIdx.x % 32;
        OutProducts products;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            const int span = OutProducts::slice() + s * OutProducts::SLICES;
            uint4 b = make_uint4(0, 0, 0, 0);
            if (lane < 4 && span * SPAN < num_columns) b = *(const uint4*)(x + span * SPAN + lane * 8);
#pragma unroll
            for (int m = 0; m < OutProducts::MINE; m++)
                multiply_span(products.sums[m], w[s][m][0], w[s][m][1], b);
        }
        products.leave(left);
        for (int i = threadIdx.x; i < OUTPUTS; i += THREADS)
            outputs[i] = OutProducts::total(left, i);
    }
};

// Asks L2 for `num_rows` rows of `num_bytes` each, a multiple of 16.
__device__ __forceinline__ void prefetch_rows(const u16* from, u32 stride, int num_rows,
                                              int num_bytes) {
    for (int i = threadIdx.x; i < num_rows; i += THREADS)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + (u64)i * stride),
                     "r"(num_bytes)
                     : "memory");
}
