// Decode attention over a paged cache in 8-bit floats, for many rows.
//
//   q [B, H, 128] bfloat16, keys and values [num_blocks, block_size, KV heads, 128]
//     ->  out [B, H, 128]
//
// A block has one KV head of one sequence with the query heads that share it, up to eight, and its
// warps take tiles of 16 tokens in turn. Each warp keeps its own largest scores; they are merged at
// the end.
#include "float8_tiles.cuh"

struct Attention {
    const u16* q;
    u16* out;
    i64 q_stride;
    Float8Cache cache;
};

// Of a lane's heads, which are contiguous; zeros for heads that the group lacks.
__device__ __forceinline__ Queries queries_of(const Attention& given, i64 sequence, int head) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = given.cache.group;
    const u16* row = given.q + sequence * given.q_stride + (head * group + g) * DIMS + 16 * t;
    uint4 queries[4] = {};
    if (g < group)
#pragma unroll
        for (int i = 0; i < 4; i++) queries[i] = *(const uint4*)(row + 64 * (i / 2) + 8 * (i % 2));
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
    Queries found;
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            found.q[c][i / 2][i % 2] =
                packed_halves(wide[c][2 * i] * smaller, wide[c][2 * i + 1] * smaller);
    const float scale = given.cache.scale_log2 * given.cache.scales[head];
#pragma unroll
    for (int h = 0; h < 2; h++)
        found.scales[h] = scale * __shfl_sync(FULL, largest, 4 * (2 * t + h));
    return found;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attend(const __grid_constant__ Attention given) {
    const Float8Cache& cache = given.cache;
    launch_dependents();
    const int warp = threadIdx.x / 32, head = blockIdx.x % cache.num_kv_heads;
    const i64 sequence = blockIdx.x / cache.num_kv_heads;
    const int* table = cache.tables + sequence * cache.table_stride;
    // Tables and lengths are written before a step's embedding, which has ended.
    Blocks<WARPS> blocks(cache, table, warp);
    const int length = cache.lengths[sequence];
    const int num_tiles = UP(length, TILE);
    const Places at(cache, head, length);
    wait_for_the_kernel_before();

    Tile next;
    if (warp < num_tiles) next = at.load(cache, blocks.first(), warp);
    const Queries queries = queries_of(given, sequence, head);
    Attended attended;
    for (int tile = warp, round = 1; tile < num_tiles; tile += WARPS, round++) {
        const Tile now = next;
        const int block = blocks.after(cache, tile, round);
        if (tile + WARPS < num_tiles) next = at.load(cache, block, tile + WARPS);
        attended.add(now, queries, tile * TILE, length);
    }

    __shared__ Merge<WARPS, HEADS> merge;
    merge.leave(attended);
    __syncthreads();
    const float value_scale = cache.scales[cache.num_kv_heads + head];
    u16* out = given.out + (sequence * cache.num_kv_heads + head) * cache.group * DIMS;
    for (int i = threadIdx.x; i < cache.group * DIMS; i += WARPS * 32) {
        float peak, total;
        const float sum = merge.merged(min(num_tiles, WARPS), i / DIMS, i % DIMS, peak, total);
        out[i] = narrowed(length > 0 ? sum / total * value_scale : 0.0f);
    }
}
