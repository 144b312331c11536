// Experts in MXFP4 for few rows each, whose weights are read once and widened in registers.
//
//   gated:   x [T, K], gate_up [E, 2N, K]         ->  act(gate) * up of each pair  [T * PER_ROW, N]
//   linear:  x [T * PER_ROW, K], down [E, N, K]   ->  the product of each pair  [T * PER_ROW, N]
//   summed:  the same of one row                  ->  the weighted sum of its pairs, plus the residual
//
// A pair is a row and one of its experts. A byte has the codes of columns 32 i + j and 32 i + 16 + j,
// the first in its lower half; an exponent is of 32 columns.
//
// A block has 16 outputs (and the 16 that they gate) of an expert and up to 8 of its rows, and each
// of its warps a slice of K. A lane has 16 bytes of two outputs at a time: all codes of an exponent.
// Of columns that are multiplied at once each of four lanes has its own, so weights are scaled before
// they are multiplied: by 2^(e - 1), which is exact, since a code is a bfloat16 times 2^-126. Sums are
// float32, in an order that depends on shapes alone.
//
// Tried and dropped: blocks that take tile after tile and ask for the next one's weights before they
// end one (a gated product of 32 rows is 13 % quicker, the other one 37 % slower), and a tile for each
// warp, with a ring of weights in registers (9 and 15 % slower).
#include "primitives.cuh"

#define OUTPUTS 16
#define ROWS 8
#define SEGMENT 4  // groups of 32 columns that four lanes have at once
#define SEGMENTS UP(GROUPS, SEGMENT)
#define SLICES (PER_ROW < WARPS ? WARPS / PER_ROW : 1)  // of K, of a pair of one row

struct Product {
    const u16* x;
    const unsigned char* codes;
    const unsigned char* exponents;
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

// A lane's group of columns of an output.
struct Piece {
    uint4 codes;
    u32 factor;
};
__device__ __forceinline__ Piece load_piece(const Product& p, i64 output, int group) {
    Piece r = {make_uint4(0, 0, 0, 0), 0};
    if (group < GROUPS) {
        const i64 at = output * GROUPS + group;
        r.codes = load_once(p.codes + at * 16);
        r.factor = ((u32)__ldg(p.exponents + at) + 126) * 0x00800080;
    }
    return r;
}

// 8 columns of x in the order of codes: (0, 2), (1, 3), (4, 6), (5, 7).
__device__ __forceinline__ uint4 load_columns(const u16* x, int group, int eighth) {
    if (group >= GROUPS) return make_uint4(0, 0, 0, 0);
    const uint4 v = *reinterpret_cast<const uint4*>(x + group * 32 + eighth * 8);
    return make_uint4(choose_bytes(v.x, v.y, 0x5410), choose_bytes(v.x, v.y, 0x7632),
                      choose_bytes(v.z, v.w, 0x5410), choose_bytes(v.z, v.w, 0x7632));
}

// Adds the products of a group of 16 outputs, of which a lane has two.
__device__ __forceinline__ void add_group(float (&sums)[4], const Piece& row, const Piece& row8,
                                          const uint4 (&x)[4]) {
    const u32 words[4] = {row.codes.x, row.codes.y, row.codes.z, row.codes.w};
    const u32 words8[4] = {row8.codes.x, row8.codes.y, row8.codes.z, row8.codes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Numbers a = numbers(words[i], row.factor), b = numbers(words8[i], row8.factor);
        const uint4 low = x[i / 2], high = x[2 + i / 2];
        multiply16(sums, a.low02, b.low02, a.low13, b.low13, i % 2 ? low.z : low.x,
                   i % 2 ? low.w : low.y);
        multiply16(sums, a.high02, b.high02, a.high13, b.high13, i % 2 ? high.z : high.x,
                   i % 2 ? high.w : high.y);
    }
}

// COUNT segments of K from `begin`, of 16 outputs from `first` in each part.
template <int PARTS, int COUNT>
__device__ __forceinline__ void load_pieces(Piece (&pieces)[COUNT][2 * PARTS], const Product& p,
                                            i64 first, int begin, int end) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int s = 0; s < COUNT; s++)
#pragma unroll
        for (int r = 0; r < 2 * PARTS; r++) {
            const i64 output = first + g + r % 2 * 8 + r / 2 * (i64)p.num_outputs;
            pieces[s][r] = load_piece(p, output, begin + s < end ? (begin + s) * SEGMENT + t : GROUPS);
        }
}

// Adds them; columns(segment, eighth) are 8 columns of this lane's group.
template <int PARTS, int COUNT, typename C>
__device__ __forceinline__ void add_pieces(float (&sums)[PARTS][4],
                                           const Piece (&pieces)[COUNT][2 * PARTS], int begin, int end,
                                           const C& columns) {
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
        if (begin + s >= end) break;
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = columns(begin + s, i);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            add_group(sums[part], pieces[s][2 * part], pieces[s][2 * part + 1], x);
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

template <int PARTS, bool IS_ROW>
__device__ __forceinline__ void run(const Product& p) {
    constexpr int PER_WARP = UP(SEGMENTS, WARPS);
    constexpr int AHEAD = PER_WARP < 6 / PARTS ? PER_WARP : 6 / PARTS;
    launch_dependents();
    wait_for_the_kernel_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int slabs = p.num_outputs / OUTPUTS;
    const int tile = blockIdx.x / slabs, slab = blockIdx.x % slabs * OUTPUTS;
    RowsOfExpert rows = {0, 0, 1};
    if (IS_ROW) rows.expert = p.experts[tile];
    else if (tile >= find_rows(load_counts(p), tile, rows)) return;

    const i64 output = (i64)rows.expert * PARTS * p.num_outputs + slab;
    const int begin = min(warp * PER_WARP, SEGMENTS), end = min(begin + PER_WARP, SEGMENTS);
    Piece pieces[AHEAD][2 * PARTS];
    load_pieces<PARTS>(pieces, p, output, begin, end);
    // Rows beyond the last repeat it and are not stored.
    const int row = min(rows.first + g, rows.count - 1);
    const int pair = IS_ROW ? tile : p.pairs[(i64)rows.expert * p.num_rows + row];
    const u16* x = p.x + pair / p.rows_of_a_token * p.x_stride;
    auto columns = [&](int segment, int eighth) {
        return load_columns(x, segment * SEGMENT + t, eighth);
    };
    float sums[PARTS][4] = {};
    add_pieces<PARTS>(sums, pieces, begin, end, columns);
#pragma unroll
    for (int from = AHEAD; from < PER_WARP; from += AHEAD) {
        load_pieces<PARTS>(pieces, p, output, begin + from, end);
        add_pieces<PARTS>(sums, pieces, begin + from, end, columns);
    }

    __shared__ float shared[WARPS][PARTS][ROWS][OUTPUTS];
    __shared__ int pairs[ROWS];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            shared[warp][part][2 * t + c % 2][g + c / 2 * 8] = sums[part][c];
    if (warp == 0 && t == 0) pairs[g] = pair;
    __syncthreads();
    const int of = threadIdx.x / OUTPUTS, column = threadIdx.x % OUTPUTS;
    if (of >= min(ROWS, rows.count - rows.first)) return;
    float y[PARTS] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) y[part] += shared[w][part][of][column];
        if (p.bias) y[part] += widened(p.bias[output + column + part * (i64)p.num_outputs]);
    }
    const float result = PARTS == 2 ? activated(y[0], y[PARTS - 1], p) : y[0];
    p.out[(i64)pairs[of] * p.num_outputs + slab + column] = narrowed(result);
}

__device__ __forceinline__ void run_summed(const Product& p) {
    launch_dependents();
    wait_for_the_kernel_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * OUTPUTS;
    constexpr int OF_SLICE = UP(SEGMENTS, SLICES), AHEAD = OF_SLICE < 6 ? OF_SLICE : 6;
    float total[4] = {};
    for (int item = warp; item < PER_ROW * SLICES; item += WARPS) {
        const int place = item / SLICES, begin = item % SLICES * OF_SLICE;
        const int end = min(begin + OF_SLICE, SEGMENTS);
        const i64 output = (i64)p.experts[place] * p.num_outputs + first;
        const u16* x = p.x + place * p.x_stride;
        auto columns = [&](int segment, int eighth) {
            return load_columns(x, segment * SEGMENT + lane % 4, eighth);
        };
        float sums[1][4] = {};
#pragma unroll
        for (int from = 0; from < OF_SLICE; from += AHEAD) {
            Piece pieces[AHEAD][2];
            load_pieces<1>(pieces, p, output, begin + from, end);
            add_pieces<1>(sums, pieces, begin + from, end, columns);
        }
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

#define KERNEL(name, body)                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) name( \
        const __grid_constant__ Product p) {                          \
        body;                                                         \
    }
KERNEL(gated_row, (run<2, true>(p)))
KERNEL(gated_rows, (run<2, false>(p)))
KERNEL(linear_rows, (run<1, false>(p)))
KERNEL(summed_row, run_summed(p))
