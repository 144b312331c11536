// Experts in few bits for few rows each, whose weights are read once and widened in registers.
//
//   gated:   x [T, K], gate_up [E, 2N, K]         ->  act(gate) * up of each pair  [T * PER_ROW, N]
//   linear:  x [T * PER_ROW, K], down [E, N, K]   ->  the product of each pair  [T * PER_ROW, N]
//   summed:  the same of one row                  ->  the weighted sum of its pairs, plus the residual
//
// A pair is a row and one of its experts. Weights are MXFP4 (GROUP is 32) or e4m3 (GROUP columns share
// a scale; 0: all). A byte of MXFP4 has the codes of columns 32 i + j and 32 i + 16 + j, the first in
// its lower half.
//
// A block has 16 outputs of an expert (and the 16 that they gate, or the next ones) and up to 8 of its
// rows, and each of its warps a slice of K. A lane has 16 bytes of two outputs at a time. Of columns
// that are multiplied at once each of four lanes has its own, so an exponent of MXFP4 scales weights
// before they are multiplied: by 2^(e - 1), which is exact, since a code is a bfloat16 times 2^-126.
// Scales of e4m3 are of all four lanes, and multiply sums. Sums are float32, in an order that depends
// on shapes alone.
//
// Tried and dropped: blocks that take tile after tile and ask for the next one's weights before they
// end one (a gated product of 32 rows is 13 % quicker, the other one 37 % slower), and a tile for each
// warp, with a ring of weights in registers (9 and 15 % slower).
#include "primitives.cuh"

#define OUTPUTS 16
#define ROWS 8
#if IS_MXFP4
#define LOADS 1
#define OF_LOAD 32  // columns of 16 bytes
#else
#define LOADS (GROUP && GROUP % 128 == 0 ? 2 : 1)  // of an output's columns with one scale
#define OF_LOAD 16
#endif
// Columns that four lanes have at once, of each load a lane's next to another's.
#define SEGMENT (4 * OF_LOAD * LOADS)
#define SEGMENTS UP(COLUMNS, SEGMENT)

struct Product {
    const u16* x;
    const unsigned char* values;
    const void* scales;
    const u16* bias;
    const int* experts;
    const float* shares;
    const int* counts;
    const int* pairs;
    const u16* residual;
    u16* out;
    i64 x_stride;
    int num_rows, num_outputs, rows_of_a_token;
    float limit, alpha;
};

__device__ __forceinline__ u32 scaled(u32 pair, u32 factor) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(factor));
    return r;
}

__device__ __forceinline__ u32 word(uint4 of, int i) {
    return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
}

// The first column of a lane's load in a segment.
__device__ __forceinline__ int column_of(int segment, int load) {
    return segment * SEGMENT + (load * 4 + threadIdx.x % 4) * OF_LOAD;
}

// A lane's columns of x, eight at a time in the order of weights: (0, 2), (1, 3), (4, 6), (5, 7).
struct Columns {
    uint4 of[LOADS * OF_LOAD / 8];
};
__device__ __forceinline__ Columns load_columns(const u16* x, int segment) {
    Columns r;
#pragma unroll
    for (int i = 0; i < LOADS * OF_LOAD / 8; i++) {
        const int column = column_of(segment, i / (OF_LOAD / 8)) + i % (OF_LOAD / 8) * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (column < COLUMNS) v = *reinterpret_cast<const uint4*>(x + column);
        r.of[i] = make_uint4(choose_bytes(v.x, v.y, 0x5410), choose_bytes(v.x, v.y, 0x7632),
                             choose_bytes(v.z, v.w, 0x5410), choose_bytes(v.z, v.w, 0x7632));
    }
    return r;
}

#if IS_MXFP4
// The numbers of a word's eight codes: of columns (0, 2), (1, 3), (16, 18) and (17, 19) after its own.
struct Numbers {
    u32 low02, low13, high02, high13;
};
__device__ __forceinline__ Numbers numbers(u32 w, u32 factor) {
    const u32 size = 0x01C001C0, sign = 0x80008000;
    return {scaled(w << 6 & size | w << 12 & sign, factor),
            scaled(w >> 2 & size | w << 4 & sign, factor),
            scaled(w << 2 & size | w << 8 & sign, factor),
            scaled(w >> 6 & size | w & sign, factor)};
}

// A lane's columns of an output: those of an exponent.
struct Piece {
    uint4 values;
    u32 factor;
};
__device__ __forceinline__ Piece load_piece(const Product& p, i64 output, int segment) {
    Piece r = {};
    const int column = column_of(segment, 0);
    if (column < COLUMNS) {
        const i64 at = (output * COLUMNS + column) / GROUP;
        r.values = load_once(p.values + at * 16);
        r.factor = ((u32)__ldg((const unsigned char*)p.scales + at) + 126) * 0x00800080;
    }
    return r;
}

// Adds the products of 16 outputs, of which a lane has two.
__device__ __forceinline__ void add_piece(float (&sums)[4], const Piece& row, const Piece& row8,
                                          const Columns& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Numbers a = numbers(word(row.values, i), row.factor);
        const Numbers b = numbers(word(row8.values, i), row8.factor);
        const uint4 low = x.of[i / 2], high = x.of[2 + i / 2];
        multiply16(sums, a.low02, b.low02, a.low13, b.low13, i % 2 ? low.z : low.x,
                   i % 2 ? low.w : low.y);
        multiply16(sums, a.high02, b.high02, a.high13, b.high13, i % 2 ? high.z : high.x,
                   i % 2 ? high.w : high.y);
    }
}

__device__ __forceinline__ void rescale(float (&)[4], const Product&, i64) {}
#else
// The numbers of a word's four bytes: of columns (0, 2) and (1, 3).
struct Numbers {
    u32 of02, of13;
};
__device__ __forceinline__ Numbers numbers(u32 w) {
    const u32 size = 0x07F007F0, sign = 0x80008000, factor = 0x7B807B80;  // 2^120
    return {scaled(w << 4 & size | w << 8 & sign, factor), scaled(w >> 4 & size | w & sign, factor)};
}

// A lane's columns of an output, and the scale of their group.
struct Piece {
    uint4 values[LOADS];
#if GROUP
    float scale;
#endif
};
__device__ __forceinline__ Piece load_piece(const Product& p, i64 output, int segment) {
    Piece r = {};
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int column = column_of(segment, i);
        if (column < COLUMNS) r.values[i] = load_once(p.values + output * COLUMNS + column);
    }
#if GROUP
    const int group = segment * SEGMENT / GROUP;
    if (segment < SEGMENTS) r.scale = __ldg((const float*)p.scales + output * UP(COLUMNS, GROUP) + group);
#endif
    return r;
}

__device__ __forceinline__ void add_piece(float (&sums)[4], const Piece& row, const Piece& row8,
                                          const Columns& x) {
#if GROUP
    float part[4] = {};
#else
    float(&part)[4] = sums;
#endif
#pragma unroll
    for (int i = 0; i < 4 * LOADS; i++) {
        const Numbers a = numbers(word(row.values[i / 4], i % 4));
        const Numbers b = numbers(word(row8.values[i / 4], i % 4));
        const uint4 columns = x.of[i / 2];
        multiply16(part, a.of02, b.of02, a.of13, b.of13, i % 2 ? columns.z : columns.x,
                   i % 2 ? columns.w : columns.y);
    }
#if GROUP
#pragma unroll
    for (int c = 0; c < 4; c++) sums[c] += part[c] * (c < 2 ? row.scale : row8.scale);
#endif
}

// Multiplies sums of all columns by the scales of this lane's outputs after `first`.
__device__ __forceinline__ void rescale(float (&sums)[4], const Product& p, i64 first) {
#if !GROUP
    const float* scales = (const float*)p.scales + first + threadIdx.x % 32 / 4;
#pragma unroll
    for (int c = 0; c < 4; c++) sums[c] *= __ldg(scales + c / 2 * 8);
#endif
}
#endif

// COUNT segments of K from `begin`, of 16 outputs from `first` and every `stride` after it.
template <int PARTS, int COUNT>
__device__ __forceinline__ void load_pieces(Piece (&pieces)[COUNT][2 * PARTS], const Product& p,
                                            i64 first, i64 stride, int begin, int end) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int s = 0; s < COUNT; s++)
#pragma unroll
        for (int r = 0; r < 2 * PARTS; r++) {
            const i64 output = first + g + r % 2 * 8 + r / 2 * stride;
            pieces[s][r] = load_piece(p, output, begin + s < end ? begin + s : SEGMENTS);
        }
}

// Adds them, multiplied by a row x.
template <int PARTS, int COUNT>
__device__ __forceinline__ void add_pieces(float (&sums)[PARTS][4],
                                           const Piece (&pieces)[COUNT][2 * PARTS], int begin, int end,
                                           const u16* x) {
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
        if (begin + s >= end) break;
        const Columns columns = load_columns(x, begin + s);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            add_piece(sums[part], pieces[s][2 * part], pieces[s][2 * part + 1], columns);
    }
}

__device__ __forceinline__ float activated(float gate, float up, const Product& p) {
    if (p.limit > 0.0f) {
        gate = fminf(gate, p.limit);
        up = fminf(fmaxf(up, -p.limit), p.limit) + 1.0f;
        return gate / (1.0f + __expf(-p.alpha * gate)) * up;
    }
    return gate / (1.0f + __expf(-gate)) * up;
}

// Up to ROWS rows of an expert.
struct RowsOfExpert {
    int expert, first, count;  // count: of all of the expert's rows
};
// How many rows each expert has, 32 of them in the lanes of a warp.
struct Counts {
    int of[UP(EXPERTS, 32)];
};
__device__ __forceinline__ Counts load_counts(const Product& p) {
    Counts r;
#pragma unroll
    for (int i = 0; i < UP(EXPERTS, 32); i++) {
        const int expert = i * 32 + threadIdx.x % 32;
        r.of[i] = expert < EXPERTS ? p.counts[expert] : 0;
    }
    return r;
}
// The number of all RowsOfExpert; `found` is the one with this index.
__device__ __forceinline__ int find_rows(const Counts& counts, int index, RowsOfExpert& found) {
    const int lane = threadIdx.x % 32;
    int before = 0;
#pragma unroll
    for (int i = 0; i < UP(EXPERTS, 32); i++) {
        const int own = UP(counts.of[i], ROWS);
        int end = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL, end, step);
            if (lane >= step) end += other;
        }
        const int total = __shfl_sync(FULL, end, 31);
        if (before <= index && index < before + total) {
            const int it = __ffs(__ballot_sync(FULL, before + end > index)) - 1;
            const int begin = before + __shfl_sync(FULL, end - own, it);
            found = {i * 32 + it, (index - begin) * ROWS, __shfl_sync(FULL, counts.of[i], it)};
        }
        before += total;
    }
    return before;
}

// Segments of 16 outputs that a lane asks for at once.
constexpr int ahead(int segments, int loads) {
    const int most = loads / LOADS > 1 ? loads / LOADS : 1;
    return segments < most ? segments : most;
}

// GATES: of two parts the first gates the second; else they are neighbours.
template <int WARPS, int PARTS, int LOADS_AHEAD, bool GATES, bool IS_ROW>
__device__ __forceinline__ void run(const Product& p) {
    constexpr int PER_WARP = UP(SEGMENTS, WARPS), OF_BLOCK = GATES ? OUTPUTS : OUTPUTS * PARTS;
    constexpr int AHEAD = ahead(PER_WARP, LOADS_AHEAD / PARTS);
    launch_dependents();
    wait_for_the_kernel_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int slabs = p.num_outputs / OF_BLOCK;
    const int tile = blockIdx.x / slabs, slab = blockIdx.x % slabs * OF_BLOCK;
    RowsOfExpert rows = {0, 0, 1};
    if (IS_ROW) rows.expert = p.experts[tile];
    else if (tile >= find_rows(load_counts(p), tile, rows)) return;

    const i64 stride = GATES ? p.num_outputs : OUTPUTS;
    const i64 output = (i64)rows.expert * (GATES ? 2 : 1) * p.num_outputs + slab;
    const int begin = min(warp * PER_WARP, SEGMENTS), end = min(begin + PER_WARP, SEGMENTS);
    Piece pieces[AHEAD][2 * PARTS];
    load_pieces<PARTS>(pieces, p, output, stride, begin, end);
    // Rows beyond the last repeat it and are not stored.
    const int row = min(rows.first + g, rows.count - 1);
    const int pair = IS_ROW ? tile : p.pairs[(i64)rows.expert * p.num_rows + row];
    const u16* x = p.x + pair / p.rows_of_a_token * p.x_stride;
    float sums[PARTS][4] = {};
    add_pieces<PARTS>(sums, pieces, begin, end, x);
#pragma unroll
    for (int from = AHEAD; from < PER_WARP; from += AHEAD) {
        load_pieces<PARTS>(pieces, p, output, stride, begin + from, end);
        add_pieces<PARTS>(sums, pieces, begin + from, end, x);
    }

    __shared__ float shared[WARPS][PARTS][ROWS][OUTPUTS];
    __shared__ int pairs[ROWS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        rescale(sums[part], p, output + part * stride);
#pragma unroll
        for (int c = 0; c < 4; c++)
            shared[warp][part][2 * t + c % 2][g + c / 2 * 8] = sums[part][c];
    }
    if (warp == 0 && t == 0) pairs[g] = pair;
    __syncthreads();
    constexpr int SUMS = GATES ? 1 : PARTS;  // of a row and an output
    const int num_rows = min(ROWS, rows.count - rows.first);
    for (int i = threadIdx.x; i < num_rows * SUMS * OUTPUTS; i += WARPS * 32) {
        const int of = i / (SUMS * OUTPUTS), part = i / OUTPUTS % SUMS, column = i % OUTPUTS;
        float y = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            y += shared[w][part][of][column];
            if (GATES) up += shared[w][PARTS - 1][of][column];
        }
        const i64 at = output + part * OUTPUTS + column;
        if (p.bias) {
            y += widened(p.bias[at]);
            if (GATES) up += widened(p.bias[at + stride]);
        }
        p.out[(i64)pairs[of] * p.num_outputs + slab + part * OUTPUTS + column] =
            narrowed(GATES ? activated(y, up, p) : y);
    }
}

template <int WARPS, int LOADS_AHEAD>
__device__ __forceinline__ void run_summed(const Product& p) {
    constexpr int SLICES = PER_ROW < WARPS ? WARPS / PER_ROW : 1;  // of K, of a pair
    constexpr int OF_SLICE = UP(SEGMENTS, SLICES), AHEAD = ahead(OF_SLICE, LOADS_AHEAD);
    launch_dependents();
    wait_for_the_kernel_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * OUTPUTS;
    float total[4] = {};
    for (int item = warp; item < PER_ROW * SLICES; item += WARPS) {
        const int place = item / SLICES, begin = item % SLICES * OF_SLICE;
        const int end = min(begin + OF_SLICE, SEGMENTS);
        const i64 output = (i64)p.experts[place] * p.num_outputs + first;
        const u16* x = p.x + place * p.x_stride;
        float sums[1][4] = {};
#pragma unroll
        for (int from = 0; from < OF_SLICE; from += AHEAD) {
            Piece pieces[AHEAD][2];
            load_pieces<1>(pieces, p, output, 0, begin + from, end);
            add_pieces<1>(sums, pieces, begin + from, end, x);
        }
        rescale(sums[0], p, output);
#pragma unroll
        for (int c = 0; c < 4; c++) total[c] += p.shares[place] * sums[0][c];
    }
    __shared__ float shared[WARPS][OUTPUTS];
    if (lane % 4 == 0) {  // all columns are the same row
        shared[warp][lane / 4] = total[0];
        shared[warp][lane / 4 + 8] = total[2];
    }
    __syncthreads();
    if (threadIdx.x >= OUTPUTS) return;
    const int output = first + threadIdx.x;
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) y += shared[w][threadIdx.x];
    if (p.bias)
        for (int place = 0; place < PER_ROW; place++)
            y += p.shares[place] * widened(p.bias[(i64)p.experts[place] * p.num_outputs + output]);
    if (p.residual) y += widened(p.residual[output]);
    p.out[output] = narrowed(y);
}

#define KERNEL(name, tiling, ...)                                   \
    extern "C" __global__ void                                       \
    __launch_bounds__(tiling##_WARPS * 32, tiling##_BLOCKS)          \
        name(const __grid_constant__ Product p) {                    \
        __VA_ARGS__;                                                 \
    }
#if IS_GATED
KERNEL(gated_row, GATED_ROW, run<GATED_ROW_WARPS, 2, GATED_ROW_AHEAD, true, true>(p))
KERNEL(gated_rows, GATED_ROWS, run<GATED_ROWS_WARPS, 2, GATED_ROWS_AHEAD, true, false>(p))
#else
KERNEL(summed_row, SUMMED_ROW, run_summed<SUMMED_ROW_WARPS, SUMMED_ROW_AHEAD>(p))
KERNEL(linear_rows, LINEAR_ROWS,
       run<LINEAR_ROWS_WARPS, LINEAR_PARTS, LINEAR_ROWS_AHEAD, false, false>(p))
#endif
