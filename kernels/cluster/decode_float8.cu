// Decode attention over a paged cache in 8-bit floats, for many rows.
//
//   q [B, H, 128] bfloat16, keys and values [num_blocks, block_size, KV heads, 128]
//     ->  out [B, H, 128]
//
// The contexts of all sequences, one after the other, are cut into as many equal ranges as blocks
// run: whatever the lengths, all have as much to read. One warp of a block copies its range through
// a ring in shared memory and runs ahead of the others, from sequence to sequence, so that memory is
// never idle; old tokens are asked for before the kernel before has ended. A step of the ring is
// SPANS tiles of 16 tokens of KV_HEADS heads, and each other warp attends to one head of one tile.
//
// What a warp attended to is the result if it had the whole sequence. Where ranges meet within a
// sequence, or a step has several tiles, warps leave parts, and one merges them in order.
//
// `decode_float8.py` gives KV_HEADS, SPANS, STAGES of the ring, IS_E5M2, and NEWEST: so many tokens
// of a sequence, at most, are written by this step of the model.
#include "float8_tiles.cuh"
#include "shared_work.cuh"

#define WARPS (KV_HEADS * SPANS)       // that attend
#define THREADS (32 * (WARPS + 1))
#define STEP (TILE * SPANS)            // tokens
#define TOKEN_BYTES (KV_HEADS * DIMS)  // of keys, and as many of values
#define PITCH (8 * TOKEN_BYTES + 32)   // of four tokens' keys and values: see `token_of`
#define TILE_BYTES (TILE / 4 * PITCH)
#define STAGE_BYTES (SPANS * TILE_BYTES)

struct Attention {
    const u16* q;
    u16* out;
    float4* parts;  // [blocks, 2, KV_HEADS] of Part
    int* arrived;   // [B, KV heads], 0 between launches
    i64 q_stride;
    int num_rows;
    Float8Cache cache;
};

// The token of a tile that is row `row` (0 to 7) of the products with keys; row + 8 has the token
// two further. Every four tokens are followed by 32 bytes of nothing. With this order the eight lanes
// that read at once meet no bank twice, neither where two of them have a token's keys each nor where
// four have a token's values each.
__device__ __forceinline__ int token_of(int row) {
    return (row / 2 + row % 2 * 2) % 4 * 4 + row % 2;
}
__device__ __forceinline__ int place_of(int token) {
    return token / 4 * PITCH + token % 4 * 2 * TOKEN_BYTES;
}

// ---- the warp that copies ---------------------------------------------------------------------

// What a lane knows of one step.
struct Step {
    int blocks[SPANS];  // of the cache, one a tile; negative: past the end
    int first;          // token
    int heads;          // the first KV head
    bool is_old;        // none of its tokens is written by this step of the model
};

__device__ __forceinline__ Step step_at(const Float8Cache& cache, const Work& work, int step,
                                        int end) {
    Step found = {};
#pragma unroll
    for (int i = 0; i < SPANS; i++) found.blocks[i] = -1;
    if (step >= end) return found;
    const int unit = work.unit_of(step), length = work.lengths[unit];
    const i64 sequence = unit / work.units_of_row;
    found.first = (step - work.starts[unit]) * STEP;
    found.heads = unit % work.units_of_row * KV_HEADS;
    found.is_old = found.first + STEP + NEWEST <= length;
#pragma unroll
    for (int i = 0; i < SPANS; i++) {
        const int token = found.first + i * TILE;
        if (token < length)
            found.blocks[i] = cache.tables[sequence * cache.table_stride +
                                           (token >> cache.block_bits)];
    }
    return found;
}

// A lane copies the keys or the values of a token of each tile. Where keys, values and tokens are
// neighbours a few lanes copy four tokens each: such instructions are issued lane by lane.
__device__ __forceinline__ void copy_steps(const Float8Cache& cache, const Work& work, int begin,
                                           int end, unsigned char* ring, u32 full, u32 empty) {
    const bool by_four = cache.values == cache.keys + TOKEN_BYTES &&
                         cache.token_stride == 2 * TOKEN_BYTES;
    const int lane = threadIdx.x % 32, token = lane % TILE;
    const bool is_value = lane >= TILE, copies = !by_four || (token % 4 == 0 && !is_value);
    const u32 num_bytes = by_four ? 8 * TOKEN_BYTES : TOKEN_BYTES;
    const unsigned char* from = is_value ? cache.values : cache.keys;
    ring += place_of(token) + is_value * TOKEN_BYTES;
    Step next = step_at(cache, work, begin + lane, end), more;
    const u64 policy = read_once();
    bool has_waited = false;
    for (int step = begin; step < end; step++) {
        const int round = step - begin, stage = round % STAGES;
        if (round % 32 == 16) more = step_at(cache, work, step + 16 + lane, end);
        if (round && round % 32 == 0) next = more;
        const int first = __shfl_sync(FULL, next.first, round % 32);
        const int heads = __shfl_sync(FULL, next.heads, round % 32);
        const bool is_old = __shfl_sync(FULL, next.is_old, round % 32);
        int blocks[SPANS], num = 0;
#pragma unroll
        for (int i = 0; i < SPANS; i++) {
            blocks[i] = __shfl_sync(FULL, next.blocks[i], round % 32);
            num += blocks[i] >= 0;
        }
        if (!is_old && !has_waited) wait_for_the_kernel_before(), has_waited = true;
        if (round >= STAGES) barrier_wait(empty + 8 * stage, (round / STAGES - 1) & 1);
        if (lane == 0) barrier_expect(full + 8 * stage, num * 2 * TILE * TOKEN_BYTES);
        __syncwarp();
        if (!copies) continue;
#pragma unroll
        for (int i = 0; i < SPANS; i++) {
            if (blocks[i] < 0) continue;
            const int in_block = (first + i * TILE) & ((1 << cache.block_bits) - 1);
            copy_ahead(ring + stage * STAGE_BYTES + i * TILE_BYTES,
                       from + blocks[i] * cache.block_stride +
                           (in_block + token) * (i64)cache.token_stride + heads * DIMS,
                       num_bytes, full + 8 * stage, policy);
        }
    }
}

// ---- the warps that attend --------------------------------------------------------------------

// Queries of a unit and a head as they are, of a lane's heads; zeros for heads that the group lacks.
struct Asked {
    uint4 words[4];
    float key_scale, value_scale;

    // Long before their use: whatever is waited for keeps the ring from turning.
    __device__ __forceinline__ Asked(const Attention& given, const Work& work, int unit) : words{} {
        const Float8Cache& cache = given.cache;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const i64 sequence = unit / work.units_of_row;
        const int head = unit % work.units_of_row * KV_HEADS + threadIdx.x / 32 % KV_HEADS;
        const u16* row = given.q + sequence * given.q_stride;
        row += (head * cache.group + g) * DIMS + 16 * t;
        if (g < cache.group)
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = *(const uint4*)(row + 64 * (i / 2) + 8 * (i % 2));
        key_scale = cache.scales[head] * cache.scale_log2;
        value_scale = cache.scales[cache.num_kv_heads + head];
    }
    __device__ __forceinline__ Queries queries() const {
        const int t = threadIdx.x % 4;
        float largest = 0.0f, wide[2][16];
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const u32 pair = word_of(words[2 * c + i / 4], i % 4);
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
#pragma unroll
        for (int h = 0; h < 2; h++)
            found.scales[h] = key_scale * __shfl_sync(FULL, largest, 4 * (2 * t + h));
        return found;
    }
};

// A tile of one head out of the ring.
__device__ __forceinline__ Tile tile_of(const unsigned char* keys, int first, int length) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned char* values = keys + TOKEN_BYTES + 16 * g;
    keys += place_of(token_of(g)) + 16 * t;
    Tile found;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            found.keys[r][c] = *(const uint4*)(keys + 4 * r * TOKEN_BYTES + 64 * c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = token_of(2 * t + i % 2) + i / 2 * 2;
        found.values[i] = *(const uint4*)(values + place_of(token));
        // What lies past the end may be no number, which no weight of 0 would remove.
        if (first + token >= length) found.values[i] = make_uint4(0, 0, 0, 0);
    }
    return found;
}

// What a warp leaves for another, as its lanes have it.
struct Part {
    static constexpr int SIZE = 32 * (1 + PAIRS);

    __device__ __forceinline__ static void leave(float4* part, const Attended& from) {
        part += threadIdx.x % 32;
        part[0] = make_float4(from.peaks[0], from.peaks[1], from.totals[0], from.totals[1]);
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            part[32 * (1 + i)] =
                make_float4(from.sums[i][0], from.sums[i][1], from.sums[i][2], from.sums[i][3]);
    }
    // Volatile: no cache of a multiprocessor may have it from before.
    __device__ __forceinline__ static float4 read(const float4* part) {
        float4 r;
        asm volatile("ld.volatile.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                     : "l"(part)
                     : "memory");
        return r;
    }
    __device__ __forceinline__ static void merge(Attended& into, const float4* part) {
        part += threadIdx.x % 32;
        const float4 known = read(part);
        const float peaks[2] = {known.x, known.y}, totals[2] = {known.z, known.w};
        float mine[2], other[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = fmaxf(into.peaks[h], peaks[h]);
            const float finite = top > MINUS_INFINITY ? top : 0.0f;  // both may be without tokens
            mine[h] = exp2_of(into.peaks[h] - finite);
            other[h] = exp2_of(peaks[h] - finite);
            into.peaks[h] = top;
            into.totals[h] = into.totals[h] * mine[h] + totals[h] * other[h];
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const float4 sums = read(part + 32 * (1 + i));
            into.sums[i][0] = into.sums[i][0] * mine[0] + sums.x * other[0];
            into.sums[i][1] = into.sums[i][1] * mine[1] + sums.y * other[1];
            into.sums[i][2] = into.sums[i][2] * mine[0] + sums.z * other[0];
            into.sums[i][3] = into.sums[i][3] * mine[1] + sums.w * other[1];
        }
    }
};

// The warps of one head of a step, which have several tiles. True for the first of them, which has
// merged all.
__device__ __forceinline__ bool merged_spans(float4* parts, Attended& mine) {
    if (SPANS == 1) return true;
    const int warp = threadIdx.x / 32, head = warp % KV_HEADS;
    if (warp >= KV_HEADS) Part::leave(parts + (warp - KV_HEADS) * Part::SIZE, mine);
    barrier_of_some(1 + head, 32 * SPANS);
    if (warp < KV_HEADS)
#pragma unroll
        for (int i = 0; i < SPANS - 1; i++)
            Part::merge(mine, parts + (i * KV_HEADS + head) * Part::SIZE);
    barrier_of_some(1 + head, 32 * SPANS);
    return warp < KV_HEADS;
}

__device__ __forceinline__ void write(const Attention& given, const Work& work, int unit,
                                      float value_scale, const Attended& from) {
    const int head = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int group = given.cache.group;
    u16* out = given.out + ((i64)unit * KV_HEADS + head) * group * DIMS + 16 * g;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float total = column_sum(from.totals[h]);
        const float factor = work.lengths[unit] > 0 ? value_scale / total : 0.0f;
        if (2 * t + h >= group) continue;
        u32 words[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            words[i] = packed(from.sums[i][h] * factor, from.sums[i][2 + h] * factor);
        uint4* to = (uint4*)(out + (2 * t + h) * DIMS);
        to[0] = make_uint4(words[0], words[1], words[2], words[3]);
        to[1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
}

// The units of a head that a block shares with others: at most the first and the last of its range.
// The block with a unit's first steps comes to them last, when the others have left their parts long
// ago, and merges these with its own. If they have not, the last of all to come merges. Parts are
// merged in the order of their tokens either way.
struct SharedUnits {
    const Attention& given;
    const Work& work;
    int head;

    __device__ __forceinline__ int first_block(int unit) const {
        return work.block_of(work.starts[unit]);
    }
    __device__ __forceinline__ int last_block(int unit) const {
        return work.block_of(work.starts[unit + 1] - 1);
    }
    __device__ __forceinline__ int* arrived(int unit) const {
        return given.arrived + unit * KV_HEADS + head;
    }
    __device__ __forceinline__ float4* part_of(int block, bool is_later) const {
        return given.parts + ((block * 2 + is_later) * KV_HEADS + head) * Part::SIZE;
    }
    __device__ __forceinline__ void merge(int unit, int first, int last, Attended& from) const {
        if (threadIdx.x % 32 == 0) *arrived(unit) = 0;
#pragma unroll 2
        for (int i = first + 1; i <= last; i++) Part::merge(from, part_of(i, true));
        const int at = unit % work.units_of_row * KV_HEADS + head;
        write(given, work, unit, given.cache.scales[given.cache.num_kv_heads + at], from);
    }
    // What this block attended to of a unit; with the parts of all others, it is written.
    __device__ __forceinline__ void leave(int unit, bool is_later, Attended& mine) const {
        const int first = first_block(unit), last = last_block(unit), lane = threadIdx.x % 32;
        // Each lane acquires, and all decide alike.
        if (!is_later && __all_sync(FULL, num_arrived(unit) == last - first)) {
            merge(unit, first, last, mine);
            return;
        }
        Part::leave(part_of(blockIdx.x, is_later), mine);
        __threadfence();
        __syncwarp();
        int before = lane == 0 ? atomicAdd(arrived(unit), 1) : 0;
        before = __shfl_sync(FULL, before, 0);
        if (before < last - first) return;
        __threadfence();
        Attended all;
        Part::merge(all, part_of(first, false));
        merge(unit, first, last, all);
    }
    __device__ __forceinline__ int num_arrived(int unit) const {
        int number;
        asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(number) : "l"(arrived(unit)) : "memory");
        return number;
    }
};

__device__ __forceinline__ void attend_steps(const Attention& given, const Work& work, int begin,
                                             int end, const unsigned char* ring, float4* parts,
                                             u32 full, u32 empty) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, span = warp / KV_HEADS;
    const unsigned char* mine = ring + span * TILE_BYTES + warp % KV_HEADS * DIMS;
    int step = begin, unit = work.unit_of(begin);
    Asked asked(given, work, unit);
    for (; step < end; unit++) {
        const int start = work.starts[unit], after = work.starts[unit + 1];
        const int length = work.lengths[unit], until = min(end, after);
        int first = (step - start) * STEP + span * TILE;
        const Queries queries = asked.queries();
        const float value_scale = asked.value_scale;
        if (after < end) asked = Asked(given, work, unit + 1);
        Attended attended;
        for (; step < until; step++, first += STEP) {
            const int round = step - begin, stage = round % STAGES;
            barrier_wait(full + 8 * stage, round / STAGES & 1);
            if (first < length) {
                const Tile tile = tile_of(mine + stage * STAGE_BYTES, first, length);
                const int left = length - first - token_of(lane / 4);
                attended.add(tile, queries, left > 0, left > 2);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
        if (!merged_spans(parts, attended)) continue;
        if (begin <= start && after <= end)
            write(given, work, unit, value_scale, attended);
        else
            SharedUnits{given, work, warp}.leave(unit, start < begin, attended);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const __grid_constant__ Attention given) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ u64 barriers[2][STAGES];
    float4* parts = (float4*)(ring + STAGES * STAGE_BYTES);
    int* memory = (int*)(parts + (WARPS - KV_HEADS) * Part::SIZE);
    const u32 full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
    launch_dependents();
    if (threadIdx.x < STAGES) {
        barrier_init(full + 8 * threadIdx.x, 1);
        barrier_init(empty + 8 * threadIdx.x, WARPS);
    }
    // Tables, lengths and old tokens are written before a step's embedding, which has ended.
    Work work(memory, given.num_rows, given.cache.num_kv_heads / KV_HEADS);
    find_starts<STEP, WARPS + 1>(work, given.cache.lengths);
    __syncthreads();
    work.share_out();
    const int begin = work.begin(blockIdx.x), end = work.begin(blockIdx.x + 1);
    const bool copies = threadIdx.x / 32 == WARPS;
    if (copies) copy_steps(given.cache, work, begin, end, ring, full, empty);
    wait_for_the_kernel_before();
    if (!copies && begin < end) attend_steps(given, work, begin, end, ring, parts, full, empty);
}
