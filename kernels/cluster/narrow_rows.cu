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
#include "primitives.cuh"

// What bytes are: one of these is STORED. BY_GROUPS: each group of columns has a scale of its own,
// else a whole row has one.
#define FLOAT8 0
#define INT4 1
#define INT8 2

#ifndef WARPS
#define WARPS 8  // of a block
#endif
#define OUTPUTS 16  // of a block
#define SEGMENT 64  // bytes of a row that a warp takes at once

struct Layer {
    const u16* x;
    const unsigned char* weight;  // [N, bytes]
    const float* scales;          // [N, groups]
    const float* offsets;         // [N, groups] of integers
    const u16* norm;              // [K]
    const u16* bias;              // [N] or none
    const u16* residual;          // [M, N] or none
    u16* out;
    i64 x_stride;
    int num_rows, num_outputs, num_columns, num_bytes;  // outputs and bytes of a row of the weight
    int num_groups, group_bits;                         // a group has 1 << group_bits columns
    float eps;
};

__device__ __forceinline__ u32 multiplied(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Four e4m3 numbers: exponent and mantissa stand at the same places of a bfloat16 that counts
// 2^120 times less, also where they are subnormal.
__device__ __forceinline__ void widen_float8(u32 bytes, u32 (&pairs)[2]) {
    const u32 two_to_120 = 0x7b807b80u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 top = choose_bytes(bytes, 0, i ? 0x3424 : 0x1404);
        u32 small = (top & 0x80008000u) | (top >> 4 & 0x07f007f0u);
        pairs[i] = multiplied(small, two_to_120);
    }
}

// What four values of one group count as: computed in float32, then rounded once.
template <int KIND>
__device__ __forceinline__ void widen_scaled(u32 bytes, float scale, float offset,
                                             u32 (&pairs)[2]) {
    float wide[4];
    if (KIND == FLOAT8) {
        widen_float8(bytes, pairs);
        wide[0] = low(pairs[0]), wide[1] = high(pairs[0]);
        wide[2] = low(pairs[1]), wide[3] = high(pairs[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The byte as the last whole number of 128 or 2^23, plus it.
        if (KIND == INT4)
            wide[i] = __uint_as_float(choose_bytes(bytes, 0x43000000u, 0x7044 | i << 8)) - 128.0f;
        if (KIND == INT8)
            wide[i] = __uint_as_float(choose_bytes(bytes, 0x4b000000u, 0x7440 | i)) - 8388608.0f;
        wide[i] = KIND == FLOAT8 ? wide[i] * scale : fmaf(wide[i], scale, offset);
    }
    pairs[0] = packed(wide[0], wide[1]);
    pairs[1] = packed(wide[2], wide[3]);
}

__device__ __forceinline__ uint4 load_once(const unsigned char* from) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}

// 16 columns of x.
struct Columns {
    u32 pairs[8];
};
__device__ __forceinline__ Columns load_columns(const u16* from) {
    const uint4 *at = (const uint4*)from, a = at[0], b = at[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// 16 bytes of one output, with scale and offset of their group.
struct Piece {
    uint4 bytes;
    float scale, offset;
};

// Adds 16 columns of two outputs, times those of x, to the sums. Nibbles are the lower halves of
// bytes, or the upper ones.
template <int KIND, bool GROUPED, int TILES>
__device__ __forceinline__ void add_columns(float (&sums)[TILES][4], const Piece& row,
                                            const Piece& row8, int half,
                                            const Columns (&x)[TILES]) {
    const u32 words[4] = {row.bytes.x, row.bytes.y, row.bytes.z, row.bytes.w};
    const u32 words8[4] = {row8.bytes.x, row8.bytes.y, row8.bytes.z, row8.bytes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 a[2], b[2], from = words[i], from8 = words8[i];
        if (KIND == INT4)
            from = from >> (4 * half) & 0x0f0f0f0fu, from8 = from8 >> (4 * half) & 0x0f0f0f0fu;
        if (GROUPED) {
            widen_scaled<KIND>(from, row.scale, row.offset, a);
            widen_scaled<KIND>(from8, row8.scale, row8.offset, b);
        } else {
            widen_float8(from, a);
            widen_float8(from8, b);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply16(sums[tile], a[0], b[0], a[1], b[1], x[tile].pairs[2 * i],
                       x[tile].pairs[2 * i + 1]);
    }
}

template <int KIND, bool GROUPED, bool NORM, bool GATED, int TILES>
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
    const int per_warp = UP(UP(num_segments, AHEAD), WARPS) * AHEAD;
    const int begin = warp * per_warp, end = min(begin + per_warp, num_segments);

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
                    if (!GROUPED) continue;
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
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                // Of nibbles, a group's first columns are the lower halves of its bytes.
                const int byte = (at + s) * SEGMENT + t * 16;
                const int in_group = byte & ((1 << layer.group_bits) / 2 - 1);
                const int column =
                    HALVES == 1 ? byte : 2 * byte - in_group + half * ((1 << layer.group_bits) / 2);
                Columns x[TILES];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    x[tile] = load_columns(x_rows[tile] + column);
                if (NORM) {
                    const Columns norm = load_columns(layer.norm + column);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            u32 &a = x[tile].pairs[2 * i], &b = x[tile].pairs[2 * i + 1];
                            multiply16(squares[tile], a, 0, b, 0, a, b);  // on the diagonal
                            a = multiplied(a, norm.pairs[2 * i]);
                            b = multiplied(b, norm.pairs[2 * i + 1]);
                        }
                }
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    add_columns<KIND, GROUPED>(sums[part], now[s][2 * part], now[s][2 * part + 1],
                                               half, x);
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
        if (!GROUPED) {
            y[0] *= layer.scales[output];
            if (GATED) y[1] *= layer.scales[output + num_gated];
        }
        if (NORM) {
            const float factor = rsqrtf(square / layer.num_columns + layer.eps);
            y[0] *= factor, y[1] *= factor;
        }
        if (layer.bias) {
            y[0] += widened(layer.bias[output]);
            if (GATED) y[1] += widened(layer.bias[output + num_gated]);
        }
        float result = GATED ? y[0] / (1.0f + __expf(-y[0])) * y[1] : y[0];
        const i64 to = (i64)row * num_gated + output;
        if (layer.residual) result += widened(layer.residual[to]);
        layer.out[to] = narrowed(result);
    }
}

#define KERNEL(name, norm, gated, tiles)                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, tiles == 4 ? 1 : 2) \
        name##_##tiles(const __grid_constant__ Layer layer) {                    \
        run<STORED, BY_GROUPS, norm, gated, tiles>(layer);                       \
    }
#define KERNELS(name, norm, gated) \
    KERNEL(name, norm, gated, 1) KERNEL(name, norm, gated, 2) KERNEL(name, norm, gated, 4)
KERNELS(linear, false, false)
KERNELS(normed, true, false)
KERNELS(gated, true, true)
