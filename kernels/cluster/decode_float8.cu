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
#define HEAD_BYTES (TILE * DIMS)       // of a tile's keys
#define TILE_BYTES (2 * KV_HEADS * HEAD_BYTES)
#define STAGE_BYTES (SPANS * TILE_BYTES)

struct Attention {
    TensorMap keys, values;
    const u16* q;
    u16* out;
    float4* parts;  // [blocks, 2, KV_HEADS] of Part
    int* arrived;   // [B, KV heads], 0 between launches
    i64 q_stride;
    int num_rows;
    Float8Cache cache;
};

// The token of a tile that is row `row` (0 to 7) of the products with keys; eight further, row and
// token are alike. Copies leave a token's 16-byte pieces in an order that depends on the token. With
// both, the eight lanes that read at once meet no bank twice, neither where two of them have a
// token's keys each nor where four have a token's values each.
__device__ __forceinline__ int token_of(int row) {
    return (row / 2 + row % 2 * 2) % 4 * 2 + row % 2;
}
__device__ __forceinline__ int place_of(int token, int piece) {
    return token * DIMS + (piece ^ token % 8) * 16;
}

// ---- the warp that copies ---------------------------------------------------------------------

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

// Boxes that start at multiples of 1,024 bytes of shared memory; elsewhere than at a multiple of 128
// they would come a sixth slower.
__device__ __forceinline__ void copy_step(const Attention& given, const Step& from,
                                          unsigned char* to, u32 full, u64 policy) {
    int num = 0;
#pragma unroll
    for (int i = 0; i < SPANS; i++) num += from.blocks[i] >= 0;
    barrier_expect(full, num * TILE_BYTES);
#pragma unroll
    for (int i = 0; i < SPANS; i++) {
        const int block = from.blocks[i], token = from.first + i * TILE;
        if (block < 0) continue;
        const int in_block = token & ((1 << given.cache.block_bits) - 1);
        unsigned char* there = to + i * TILE_BYTES;
        copy_ahead(there, given.keys, in_block, from.heads, block, full, policy);
        copy_ahead(there + TILE_BYTES / 2, given.values, in_block, from.heads, block, full, policy);
    }
}

// Each lane knows one step of 32 and starts its copies when its turn has come.
__device__ __forceinline__ void copy_steps(const Attention& given, const Work& work, int begin,
                                           int end, unsigned char* ring, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32;
    Step mine = step_at(given.cache, work, begin + lane, end), next;
    const u64 policy = read_once();
    for (int step = begin; step < end; step++) {
        const int round = step - begin, stage = round % STAGES;
        if (round % 32 == 16) next = step_at(given.cache, work, step + 16 + lane, end);
        if (round && round % 32 == 0) mine = next;
        if (lane == round % 32) {
            if (!mine.is_old) wait_for_the_kernel_before();
            if (round >= STAGES) barrier_wait(empty + 8 * stage, (round / STAGES - 1) & 1);
            copy_step(given, mine, ring + stage * STAGE_BYTES, full + 8 * stage, policy);
        }
        __syncwarp();
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

// What a lane has of a tile of one head, and where. Known to nobody else, or the compiler would find
// these offsets anew for each tile.
struct Places {
    int token, keys, values[2];

    __device__ __forceinline__ Places() {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        token = opaque(token_of(g));
        keys = opaque(place_of(token, t));
#pragma unroll
        for (int i = 0; i < 2; i++)
            values[i] = opaque(place_of(token_of(2 * t + i), g) + TILE_BYTES / 2);
    }
    __device__ __forceinline__ Tile of(const unsigned char* tile, int first, int length) const {
        Tile found;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                found.keys[r][c] = *(const uint4*)(tile + (keys ^ 64 * c) + 8 * r * DIMS);
#pragma unroll
        for (int i = 0; i < 4; i++)
            found.values[i] = *(const uint4*)(tile + values[i % 2] + i / 2 * 8 * DIMS);
        // What lies past the end may be no number, which no weight of 0 would remove.
        if (first + TILE > length) {
            const int t = threadIdx.x % 4;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (first + token_of(2 * t + i % 2) + i / 2 * 8 >= length)
                    found.values[i] = make_uint4(0, 0, 0, 0);
        }
        return found;
    }
};

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
    const int token = span * TILE;
    const Places places;
    ring += span * TILE_BYTES + warp % KV_HEADS * HEAD_BYTES;
    int step = begin, unit = work.unit_of(begin), stage = 0, parity = 0;
    Asked asked(given, work, unit);
    for (; step < end; unit++) {
        const int start = work.starts[unit], after = work.starts[unit + 1];
        const int length = work.lengths[unit], until = min(end, after);
        int first = (step - start) * STEP + token;
        const Queries queries = asked.queries();
        const float value_scale = asked.value_scale;
        if (after < end) asked = Asked(given, work, unit + 1);
        Attended attended;
        for (; step < until; step++, first += STEP) {
            barrier_wait(full + 8 * stage, parity);
            if (first < length) {
                const Tile tile = places.of(ring + stage * STAGE_BYTES, first, length);
                const int left = length - first - places.token;
                attended.add(tile, queries, left > 0, left > 8);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
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
    extern __shared__ __align__(1024) unsigned char ring[];
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
    if (copies) copy_steps(given, work, begin, end, ring, full, empty);
    wait_for_the_kernel_before();
    if (!copies && begin < end) attend_steps(given, work, begin, end, ring, parts, full, empty);
}
