// Decode attention over a paged cache in 8-bit floats, for few rows, and all between it and the
// projection of queries, keys and values.
//
//   qkv [B, (H + 2 KV heads) 128] bfloat16, keys and values [num_blocks, block_size, KV heads, 128]
//     ->  out [B, H, 128], and the keys and values of each row in place
//
// A cluster of CLUSTER blocks has one KV head of one row: its warps share the context in tiles of
// 16 tokens, and its blocks merge what they attended to through distributed shared memory. Older
// tokens are asked for before the wait for the projection. Each block norms and rotates all queries
// of the KV head; the one that attends to the newest token also its key, and stores both.
//
// `decode_float8_rows.py` gives CLUSTER, WARPS of a block, GROUP (query heads of a KV head), IS_E5M2
// and QK_NORM (0 or 1). A multiprocessor can hold two blocks, or clusters of 16 would not all run at
// once.
#include "float8_tiles.cuh"
#include "rotary.cuh"

#define THREADS (WARPS * 32)
#define STEP (CLUSTER * WARPS)  // tiles of a cluster that are under way at once
#define OUTPUTS (GROUP * DIMS / CLUSTER)  // of a block
#define LANE_DIMS (DIMS / 32)

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

struct Rows {
    const u16 *qkv, *q_norm, *k_norm;
    const float *cos_sin, *key_offsets;  // null: none
    const i64 *positions, *slots;
    u16* out;
    i64 qkv_stride;
    Float8Cache cache;
    float eps;
};

struct Shared {
    float cos_sin[DIMS], norms[2][DIMS];  // of queries, of keys
    float largest[GROUP];
    __align__(16) u16 q[GROUP][DIMS];  // float16, divided by the largest of each head
    __align__(16) unsigned char newest[2][DIMS];  // its key and its value, as they are stored
    Merge<WARPS, GROUP> merge;
    float peaks[CLUSTER][GROUP], totals[CLUSTER][GROUP];  // of the cluster's blocks
    float sums[CLUSTER][OUTPUTS];  // of those outputs that this block merges
};

// As `kernels.fp8.narrowed` rounds: saturated, and what is not finite is no number.
__device__ __forceinline__ unsigned char stored_byte(float x, float inverse) {
    u16 pair;
    const float scaled = x * inverse;
#if IS_E5M2
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(scaled));
#else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(scaled));
#endif
    return fabsf(x) < -MINUS_INFINITY ? (unsigned char)pair : 0x7f;
}

// One warp: a query head, rotated, into shared memory.
__device__ __forceinline__ void leave_query(Shared& memory, const Rows& given, const u16* row,
                                            int h) {
    const int lane = threadIdx.x % 32;
    float x[LANE_DIMS], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) x[i] = widened(row[lane + 32 * i]);
    norm_and_rotate<DIMS, QK_NORM>(x, memory.norms[0], memory.cos_sin, given.eps);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, i));
    if (!(largest > 0.0f)) largest = 1.0f;
    const float smaller = 1.0f / largest;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
        memory.q[h][lane + 32 * i] = (u16)packed_halves(x[i] * smaller, 0.0f);
    if (lane == 0) memory.largest[h] = largest;
}

// One warp: the newest key or value, into shared memory and, unless it is padding, into the cache.
__device__ __forceinline__ void leave_newest(Shared& memory, const Rows& given, const u16* row,
                                             int head, bool is_value, i64 slot) {
    const Float8Cache& cache = given.cache;
    const int lane = threadIdx.x % 32;
    const float inverse = cache.scales[(2 + is_value) * cache.num_kv_heads + head];
    float x[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) x[i] = widened(row[lane + 32 * i]);
    if (!is_value) norm_and_rotate<DIMS, QK_NORM>(x, memory.norms[1], memory.cos_sin, given.eps);
    unsigned char* caches = is_value ? cache.values : cache.keys;
    const i64 to = (slot >> cache.block_bits) * cache.block_stride +
                   (slot & ((1 << cache.block_bits) - 1)) * cache.token_stride +
                   head * cache.head_stride;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int dim = lane + 32 * i;
        if (!is_value && given.key_offsets) x[i] -= given.key_offsets[head * DIMS + dim];
        const unsigned char byte = stored_byte(x[i], inverse);
        memory.newest[is_value][dim] = byte;
        if (slot >= 0) caches[to + dim] = byte;
    }
}

__device__ __forceinline__ Queries queries_of(const Shared& memory, const Float8Cache& cache,
                                              int head) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float scale = cache.scale_log2 * cache.scales[head];
    Queries found = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (g < GROUP) {
            const uint4 words = *(const uint4*)&memory.q[g][16 * t + 64 * (i / 2) + 8 * (i % 2)];
            u32(&to)[4][2] = found.q[i / 2];
            to[i % 2 * 2][0] = words.x, to[i % 2 * 2][1] = words.y;
            to[i % 2 * 2 + 1][0] = words.z, to[i % 2 * 2 + 1][1] = words.w;
        }
#pragma unroll
    for (int h = 0; h < 2; h++)
        found.scales[h] = 2 * t + h < GROUP ? scale * memory.largest[2 * t + h] : 0.0f;
    return found;
}

// The newest token's key and value in their tile, which the cache may not have yet.
__device__ __forceinline__ void put_newest(Tile& tile, const Shared& memory, const Places& at,
                                           int first) {
    const int g = threadIdx.x % 32 / 4, newest = at.length - 1 - first;  // in the tile
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (g + 8 * r == newest)
#pragma unroll
            for (int c = 0; c < 2; c++)
                tile.keys[r][c] = *(const uint4*)&memory.newest[0][16 * at.t + 64 * c];
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (at.token(i) == newest) tile.values[i] = *(const uint4*)&memory.newest[1][16 * g];
}

// What this block attended to, to the blocks that merge its outputs.
__device__ __forceinline__ void send_merged(Shared& memory, int num_warps, u32 rank) {
    for (int i = threadIdx.x; i < GROUP * DIMS; i += THREADS) {
        float peak, total;
        const float sum = memory.merge.merged(num_warps, i / DIMS, i % DIMS, peak, total);
        send(shared_address(&memory.sums[rank][i % OUTPUTS]), i / OUTPUTS, sum);
        if (i % DIMS >= CLUSTER) continue;
        send(shared_address(&memory.peaks[rank][i / DIMS]), i % DIMS, peak);
        send(shared_address(&memory.totals[rank][i / DIMS]), i % DIMS, total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS)
    attend(const __grid_constant__ Rows given) {
    __shared__ Shared memory;
    const Float8Cache& cache = given.cache;
    const int warp = threadIdx.x / 32;
    const u32 rank = cluster_rank();
    const int head = cluster_id() % cache.num_kv_heads;
    const i64 sequence = cluster_id() / cache.num_kv_heads;
    cluster_arrive();
    // What follows is older than a step's embedding, which has ended; but not the newest token.
    const int* table = cache.tables + sequence * cache.table_stride;
    const int mine = warp * CLUSTER + (int)rank;  // the first tile of this warp
    Blocks blocks(cache, table, mine);
    const int length = cache.lengths[sequence];
    const i64 slot = given.slots[sequence], position = given.positions[sequence];
    const int num_tiles = UP(length, TILE);
    const Places at(cache, head, length);
    Tile next;
    if (mine < num_tiles) next = at.load(cache, blocks.first(), mine);
    for (int i = threadIdx.x; i < DIMS; i += THREADS) {
        memory.cos_sin[i] = given.cos_sin[position * DIMS + i];
        if (QK_NORM) {
            memory.norms[0][i] = widened(given.q_norm[i]);
            memory.norms[1][i] = widened(given.k_norm[i]);
        }
    }
    __syncthreads();
    wait_for_the_kernel_before();

    const bool has_newest = length > 0 && (num_tiles - 1) % CLUSTER == rank;
    const u16* row = given.qkv + sequence * given.qkv_stride;
    for (int h = warp; h < GROUP + 2 * has_newest; h += WARPS) {
        const int heads = GROUP * cache.num_kv_heads, part = h - GROUP;  // 0: key, 1: value
        if (part < 0)
            leave_query(memory, given, row + (head * GROUP + h) * DIMS, h);
        else
            leave_newest(memory, given, row + (heads + part * cache.num_kv_heads + head) * DIMS,
                         head, part, slot);
    }
    __syncthreads();
    launch_dependents();

    const Queries queries = queries_of(memory, cache, head);
    Attended attended;
    for (int tile = mine, round = 1; tile < num_tiles; tile += STEP, round++) {
        Tile now = next;
        if (tile == num_tiles - 1) put_newest(now, memory, at, tile * TILE);
        const int block = blocks.after(cache, tile, round);
        if (tile + STEP < num_tiles) next = at.load(cache, block, tile + STEP);
        const int left = length - tile * TILE - threadIdx.x % 32 / 4;
        attended.add(now, queries, left > 0, left > 8);
    }
    memory.merge.leave(attended);
    __syncthreads();
    cluster_wait();  // all blocks of the cluster run
    const int num_warps = min(WARPS, UP(num_tiles - (int)rank, CLUSTER));
    if (num_warps > 0) send_merged(memory, num_warps, rank);
    cluster_arrive();
    cluster_wait();

    const int num_blocks = min(num_tiles, CLUSTER);
    const float value_scale = cache.scales[cache.num_kv_heads + head];
    u16* out = given.out + cluster_id() * (i64)(GROUP * DIMS) + rank * OUTPUTS;
    for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
        const int h = (rank * OUTPUTS + i) / DIMS;
        float sum = 0.0f, total = 0.0f, peak = MINUS_INFINITY;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++)
            if (b < num_blocks) peak = fmaxf(peak, memory.peaks[b][h]);
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            if (b >= num_blocks) break;
            const float share = exp2_of(memory.peaks[b][h] - peak);
            sum += memory.sums[b][i] * share;
            total += memory.totals[b][h] * share;
        }
        out[i] = narrowed(length > 0 ? sum / total * value_scale : 0.0f);
    }
}
