// Decode attention over a paged cache in 8-bit floats, for many rows.
//
//   q [B, H, 128] bfloat16, keys and values [num_blocks, block_size, KV heads, 128]
//     ->  out [B, H, 128]
//
// A block has one KV head of one sequence with the query heads that share it, up to eight, and its
// warps take tiles of 16 tokens in turn, which their registers hold. Keys and values are widened to
// float16, which has every 8-bit float, and multiplied by tensor cores, tokens and then dims being
// the rows. The order of columns within a product is free as long as both sides agree, so a lane
// has 16 neighbouring bytes of a token. Each warp keeps its own largest scores; they are merged at
// the end.
#include "primitives.cuh"

#ifndef WARPS
#define WARPS 3  // of a block
#endif
#define DIMS 128
#define TILE 16            // tokens
#define HEADS 8            // of queries, at most
#define PAIRS (DIMS / 16)  // of dims that a lane has

struct Attention {
    const u16* q;
    const unsigned char *keys, *values;
    const int *tables, *lengths;
    const float* scales;  // of keys, then of values, one a KV head
    u16* out;
    i64 q_stride, block_stride, table_stride;
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

struct Tile {
    uint4 keys[2][2];  // token g and that + 8; dims 16 t and those + 64
    uint4 values[4];   // tokens 2 t, 2 t + 1, and those + 8; dims 16 g
};

// Where a lane's parts of a tile are, from the tile's first token on.
struct Places {
    int key, eight, value, one;  // bytes; `eight` and `one`: that many tokens further
};

// The blocks of the next 32 tiles of a warp, one a lane. They are asked for long before their use,
// since where memory has much to do, whatever is waited for takes microseconds.
__device__ __forceinline__ int load_blocks(const Attention& given, const int* table, int first) {
    const int block = (first + threadIdx.x % 32 * WARPS) * TILE >> given.block_bits;
    return block < given.table_stride ? table[block] : 0;
}

__device__ __forceinline__ Tile load_tile(const Attention& given, int block, int tile, int length,
                                          int t, const Places& at) {
    Tile found;
    const int first = tile * TILE, in_block = first & ((1 << given.block_bits) - 1);
    const i64 start = block * given.block_stride + in_block * at.one;
    const unsigned char* key = given.keys + start + at.key;
    const unsigned char* value = given.values + start + at.value;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            found.keys[r][c] = *(const uint4*)(key + (r ? at.eight : 0) + 64 * c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        found.values[i] = *(const uint4*)(value + (i / 2 ? at.eight : 0) + (i % 2 ? at.one : 0));
        // What lies past the end may be no number, which no weight of 0 would remove.
        if (first + 2 * t + i % 2 + i / 2 * 8 >= length) found.values[i] = make_uint4(0, 0, 0, 0);
    }
    return found;
}

__device__ __forceinline__ u32 word_of(const uint4& from, int i) {
    return i == 0 ? from.x : i == 1 ? from.y : i == 2 ? from.z : from.w;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attend(const __grid_constant__ Attention given) {
    launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int head = blockIdx.x % given.num_kv_heads;
    const i64 sequence = blockIdx.x / given.num_kv_heads;
    const int* table = given.tables + sequence * given.table_stride;
    // Tables and lengths are written before a step's embedding, which has ended.
    int blocks = load_blocks(given, table, warp);
    int more_blocks = load_blocks(given, table, warp + 32 * WARPS);
    const int length = given.lengths[sequence];
    const int num_tiles = UP(length, TILE);
    const int stride = given.token_stride, start = head * given.head_stride;
    const Places at = {start + g * stride + 16 * t, 8 * stride, start + 2 * t * stride + 16 * g,
                       stride};
    wait_for_the_kernel_before();

    const u16* row = given.q + sequence * given.q_stride + (head * given.group + g) * DIMS + 16 * t;
    uint4 queries[4] = {};
    if (g < given.group)
#pragma unroll
        for (int i = 0; i < 4; i++) queries[i] = *(const uint4*)(row + 64 * (i / 2) + 8 * (i % 2));
    Tile next;
    if (warp < num_tiles)
        next = load_tile(given, __shfl_sync(FULL, blocks, 0), warp, length, t, at);

    // Queries as float16: the largest value of a head becomes 1.
    u32 q[2][4][2];
    float largest = 0.0f, wide[2][16];
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 pair = word_of(queries[2 * c + i / 4], i % 4);
            wide[c][2 * i] = low(pair), wide[c][2 * i + 1] = high(pair);
            largest = fmaxf(largest, fmaxf(fabsf(low(pair)), fabsf(high(pair))));
        }
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
    if (!(largest > 0.0f)) largest = 1.0f;
    const float smaller = 1.0f / largest;
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            q[c][i / 2][i % 2] =
                packed_halves(wide[c][2 * i] * smaller, wide[c][2 * i + 1] * smaller);
    const float scale = given.scale_log2 * given.scales[head];
    float scales[2], peaks[2], totals[2] = {};  // of heads 2 t and 2 t + 1
#pragma unroll
    for (int h = 0; h < 2; h++) {
        scales[h] = scale * __shfl_sync(FULL, largest, 4 * (2 * t + h));
        peaks[h] = MINUS_INFINITY;
    }

    float sums[PAIRS][4] = {};  // of dims 16 g + 2 pair and the next, by these heads
    for (int tile = warp, round = 1; tile < num_tiles; tile += WARPS, round++) {
        const Tile now = next;
        if (round % 32 == 0) {
            blocks = more_blocks;
            more_blocks = load_blocks(given, table, tile + 33 * WARPS);
        }
        const int block = __shfl_sync(FULL, blocks, round % 32);
        if (tile + WARPS < num_tiles) next = load_tile(given, block, tile + WARPS, length, t, at);
        float scores[4] = {};  // of tokens g and g + 8 by heads
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 word = word_of(now.keys[0][c], i), word8 = word_of(now.keys[1][c], i);
                multiply_halves(scores, widened_pair(word, 0), widened_pair(word8, 0),
                                widened_pair(word, 1), widened_pair(word8, 1), q[c][i][0],
                                q[c][i][1]);
            }
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float& score = scores[2 * r + h];
                score = tile * TILE + g + 8 * r < length ? score * scales[h] : MINUS_INFINITY;
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
            const u32 first =
                choose_bytes(word_of(now.values[0], w), word_of(now.values[1], w), which);
            const u32 second =
                choose_bytes(word_of(now.values[2], w), word_of(now.values[3], w), which);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[pair][i] *= shrink[i % 2];
            multiply_halves(sums[pair], widened_pair(first, 0), widened_pair(first, 1),
                            widened_pair(second, 0), widened_pair(second, 1), weights[0],
                            weights[1]);
        }
    }

    // Warps are merged in their order.
    __shared__ float all_peaks[WARPS][HEADS], all_totals[WARPS][HEADS];
    __shared__ float shared[WARPS][HEADS][DIMS + 4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        totals[h] = column_sum(totals[h]);
        if (g == 0) all_peaks[warp][2 * t + h] = peaks[h], all_totals[warp][2 * t + h] = totals[h];
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                shared[warp][2 * t + h][16 * g + 2 * pair + i] = sums[pair][2 * i + h];
    }
    __syncthreads();
    const float value_scale = given.scales[given.num_kv_heads + head];
    for (int i = threadIdx.x; i < given.group * DIMS; i += WARPS * 32) {
        const int row = i / DIMS;
        float sum = 0.0f, weight = 0.0f, highest = MINUS_INFINITY;
#pragma unroll
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, all_peaks[w][row]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w >= num_tiles) break;
            const float share = exp2_of(all_peaks[w][row] - highest);
            sum += shared[w][row][i % DIMS] * share;
            weight += all_totals[w][row] * share;
        }
        const i64 to =
            (sequence * given.num_kv_heads * given.group + head * given.group) * DIMS + i;
        given.out[to] = narrowed(length > 0 ? sum / weight * value_scale : 0.0f);
    }
}
