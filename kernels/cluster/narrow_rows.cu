// Linear layers for up to 32 rows with a weight in 4 or 8 bits, which is read once.
//
//   x [M, K] bfloat16, weight [N, K] in few bits  ->  y = x @ weight.T  [M, N] bfloat16
//   NORM:      y = rms_norm(x) @ weight.T
//   GATED:     silu(gate) * up  [M, N / 2], where gate and up are the halves of y
//   bias, residual, where they are given: added
//
// A block has 16 outputs (and the 16 that they gate), and each of its warps a slice of K. A warp
// takes bytes of the weight from memory to registers, 64 of each row at a time, widens them there,
// and multiplies by tensor cores. The order of columns within is free, so a lane has neighbouring
// ones and loads 16 bytes at once. The first bytes are asked for before the wait for the kernel
// that computes x. Sums are float32, in an order that depends on shapes alone.
#include "narrow.cuh"

#ifndef WARPS
#define WARPS 8  // of a block
#endif

__device__ __forceinline__ uint4 load_once(const unsigned char* from) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}

// 16 bytes of one output, with scale and offset of their group.
struct Piece {
    uint4 bytes;
    float scale, offset;
};

template <int KIND, int BY, bool NORM, bool GATED, int TILES>
__device__ __forceinline__ void run(const Layer& layer) {
    constexpr int HALVES = KIND == INT4 ? 2 : 1;  // columns in a byte
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
                    if (BY == BY_ROW) continue;
                    const i64 group =
                        outputs[r] * layer.num_groups + (byte * HALVES >> layer.group_bits);
                    piece.scale = __ldg(layer.scales + group);
                    if (KIND != FLOAT8) piece.offset = __ldg(layer.offsets + group);
                }
    };
    load(begin);
    wait_for_the_kernel_before();

    const u16* x_rows[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)  // rows beyond the last repeat it and are not stored
        x_rows[tile] = layer.x + min(tile * 8 + g, layer.num_rows - 1) * layer.x_stride;

    float sums[PARTS][TILES][4] = {}, squares[NORM ? TILES : 1][4] = {};
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
            float parts[PARTS][TILES][4] = {}, ones[TILES][4] = {};
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const int byte = (at + s) * SEGMENT + t * 16;
                const int column = first_column<KIND>(byte, half, layer.group_bits);
                Columns x[TILES];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    x[tile] = load_columns(x_rows[tile] + column);
                if (NORM) {
                    const Columns norm = load_columns(layer.norm + column);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        add_squares(squares[tile], x[tile]);
#pragma unroll
                        for (int i = 0; i < 8; i++)
                            x[tile].pairs[i] = multiplied(x[tile].pairs[i], norm.pairs[i]);
                    }
                }
                if (BY == BY_SEGMENT && KIND != FLOAT8) add_sums(ones, x);
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const Piece &row = now[s][2 * part], &row8 = now[s][2 * part + 1];
                    add_columns<KIND, BY>(BY == BY_SEGMENT ? parts[part] : sums[part], row.bytes,
                                          row8.bytes,
                                          {row.scale, row.offset, row8.scale, row8.offset}, half,
                                          x);
                }
            }
            if constexpr (BY == BY_SEGMENT)
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const Piece &row = now[s][2 * part], &row8 = now[s][2 * part + 1];
                    add_scaled<KIND>(sums[part], parts[part], ones, {row.scale, row8.scale},
                                     {row.offset, row8.offset});
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
            y[part] = ended(y[part], BY == BY_ROW ? layer.scales[of] : 1.0f, factor,
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
        run<STORED, SCALED, norm, gated, tiles>(layer);                          \
    }
#define KERNELS(name, norm, gated) \
    KERNEL(name, norm, gated, 1) KERNEL(name, norm, gated, 2) KERNEL(name, norm, gated, 4)
KERNELS(linear, false, false)
KERNELS(normed, true, false)
KERNELS(gated, true, true)
