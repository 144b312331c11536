// Linear layers for up to 32 rows with a weight in 4 or 8 bits, which is read once.
//
//   x [M, K] bfloat16, weight [N, K] in few bits  ->  y = x @ weight.T  [M, N] bfloat16
//   NORM:      y = rms_norm(x) @ weight.T
//   GATED:     silu(gate) * up  [M, N / 2], where gate and up are the halves of y
//   bias, residual, where they are given: added
//
// A block has 16 outputs (and the 16 that they gate), and each of its warps a slice of K. A warp
// takes bytes of the weight from memory to registers, 64 of each row at a time, widens them there,
// and multiplies by tensor cores. The order of columns within is free, so a lane loads 16 bytes at
// once. The first bytes are asked for before the wait for the kernel that computes x. Sums are
// float32, in an order that depends on shapes alone.
#include "narrow.cuh"

// A lane's 16 bytes of a segment of one output. Of the segment's scales it has that of the word
// with its own number, so that the four lanes have all.
struct Piece {
    uint4 bytes;
    u32 scale, offset;
};
__device__ __forceinline__ u32 of_unit(u32 own, int unit) {
    if (UNITS == 1) return own;
    return __shfl_sync(FULL, own, (threadIdx.x % 32 & ~3) + unit * 4 / UNITS);
}
template <int KIND>
__device__ __forceinline__ Factors factors_of(const Piece& own, int unit) {
    const bool has_offset = KIND != FLOAT8 && !PAIRED;
    return factors_of<KIND>(of_unit(own.scale, unit), has_offset ? of_unit(own.offset, unit) : 0);
}

// Adds the products of a unit of two outputs.
template <int KIND, int TILES>
__device__ __forceinline__ void add_unit(float (&sums)[TILES][4], const Piece& row,
                                         const Piece& row8, const Columns<KIND> (&x)[TILES],
                                         const float (&ones)[TILES][4], int unit) {
    const u32 words[4] = {row.bytes.x, row.bytes.y, row.bytes.z, row.bytes.w};
    const u32 words8[4] = {row8.bytes.x, row8.bytes.y, row8.bytes.z, row8.bytes.w};
    float parts[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < 4 / UNITS; i++) {
        const int word = unit * 4 / UNITS + i;
        add_word<KIND>(WORDS ? parts : sums, words[word], words8[word], x, word);
    }
    if (!WORDS) return;
    const Factors by[2] = {factors_of<KIND>(row, unit), factors_of<KIND>(row8, unit)};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            sums[tile][c] = added<KIND>(sums[tile][c], parts[tile][c], ones[tile][c], by[c / 2]);
}

template <int KIND, bool NORM, bool GATED, int TILES>
__device__ __forceinline__ void run(const Layer& layer) {
    constexpr int PARTS = GATED ? 2 : 1;
    // Loads that a lane has under way, as many as its registers have room for; then segments.
    constexpr int LOADS = KIND == INT4 || TILES == 4 ? 4 : 8;
    constexpr int AHEAD = LOADS / (2 * PARTS);

    launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * OUTPUTS;
    const int num_gated = GATED ? layer.num_outputs / 2 : layer.num_outputs;
    const int num_segments = layer.num_bytes / SEGMENT;
    const int per_warp = UP(num_segments, WARPS);
    const int begin = min(warp * per_warp, num_segments);
    const int end = min(begin + per_warp, num_segments);

    i64 outputs[2 * PARTS];
#pragma unroll
    for (int r = 0; r < 2 * PARTS; r++) outputs[r] = first + g + r % 2 * 8 + r / 2 * num_gated;
    Piece pieces[AHEAD][2 * PARTS];
    auto load = [&](int from) {
#pragma unroll
        for (int s = 0; s < AHEAD; s++)
            if (from + s < end)
#pragma unroll
                for (int r = 0; r < 2 * PARTS; r++) {
                    const int byte = (from + s) * SEGMENT + t * 16;
                    Piece& piece = pieces[s][r];
                    piece.bytes = load_once(layer.weight + outputs[r] * layer.num_bytes + byte);
                    if (!WORDS) continue;
                    const i64 group =
                        outputs[r] * layer.num_groups + (byte * HALVES<KIND> >> layer.group_bits);
                    piece.scale = __ldg(layer.scales + group);
                    if (KIND != FLOAT8 && !PAIRED) piece.offset = __ldg(layer.offsets + group);
                }
    };
    load(begin);
    wait_for_the_kernel_before();

    const u16* x_rows[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)  // rows beyond the last repeat it and are not stored
        x_rows[tile] = layer.x + min(tile * 8 + g, layer.num_rows - 1) * layer.x_stride;

    float sums[PARTS][TILES][4] = {}, squares[NORM ? TILES : 1][2] = {};
    for (int at = begin; at < end; at += AHEAD) {
        Piece now[AHEAD][2 * PARTS];
#pragma unroll
        for (int s = 0; s < AHEAD; s++)
#pragma unroll
            for (int r = 0; r < 2 * PARTS; r++) now[s][r] = pieces[s][r];
        load(at + AHEAD);
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            if (at + s >= end) break;
            const int column = (at + s) * SEGMENT * HALVES<KIND>;
            Columns<KIND> x[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                x[tile] = load_columns<KIND>(x_rows[tile] + column, t);
            if (NORM) {
                const Columns<KIND> norm = load_columns<KIND>(layer.norm + column, t);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    float found[2][4] = {};  // of halves
#pragma unroll
                    for (int half = 0; half < HALVES<KIND>; half++)
                        add_squares(found[half], x[tile].halves[half]);
#pragma unroll
                    for (int c = 0; c < 2; c++) squares[tile][c] += found[0][c] + found[1][c];
                    multiply_by(x[tile], norm);
                }
            }
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++) {
                float ones[TILES][4] = {};
                if (WORDS && KIND != FLOAT8)
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        float found[2][4] = {};
#pragma unroll
                        for (int half = 0; half < HALVES<KIND>; half++)
                            add_sums(found[half], x[tile].halves[half], unit);
#pragma unroll
                        for (int c = 0; c < 4; c++) ones[tile][c] = found[0][c] + found[1][c];
                    }
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    add_unit<KIND>(sums[part], now[s][2 * part], now[s][2 * part + 1], x, ones,
                                   unit);
            }
        }
    }

    // Sums of all warps, added in their order.
    __shared__ float shared[WARPS][PARTS][TILES * 8][OUTPUTS];
    __shared__ float shared_squares[WARPS][TILES * 8];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                shared[warp][part][tile * 8 + 2 * t + c % 2][g + c / 2 * 8] = sums[part][tile][c];
        if (NORM && t == g / 2) shared_squares[warp][tile * 8 + g] = squares[tile][g % 2];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * TILES * 8; i += WARPS * 32) {
        const int output = first + i % OUTPUTS, row = i / OUTPUTS;
        if (row >= layer.num_rows) break;
        float y[2] = {}, square = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) y[part] += shared[w][part][row][i % OUTPUTS];
            if (NORM) square += shared_squares[w][row];
        }
        const float factor = NORM ? rsqrtf(square / layer.num_columns + layer.eps) : 1.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int of = output + part * num_gated;
            y[part] = ended(y[part], WORDS ? COUNTED<KIND> : __uint_as_float(layer.scales[of]), factor,
                            layer.bias ? widened(layer.bias[of]) : 0.0f);
        }
        float result = GATED ? gated_by(y[0], y[1]) : y[0];
        const i64 to = (i64)row * num_gated + output;
        if (layer.residual) result = __fadd_rn(result, widened(layer.residual[to]));
        layer.out[to] = narrowed(result);
    }
}

#define KERNEL(name, norm, gated, tiles)                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, tiles == 4 ? 1 : 2) \
        name##_##tiles(const __grid_constant__ Layer layer) {                    \
        run<STORED, norm, gated, tiles>(layer);                          \
    }
#define KERNELS(name, norm, gated) \
    KERNEL(name, norm, gated, 1) KERNEL(name, norm, gated, 2) KERNEL(name, norm, gated, 4)
KERNELS(linear, false, false)
KERNELS(normed, true, false)
KERNELS(gated, true, true)
