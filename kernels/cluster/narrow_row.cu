// A linear layer for one row with a weight in 4 or 8 bits, which is read once.
//
//   x [K] bfloat16, weight [N, K] in few bits  ->  y = weight @ x  [N] bfloat16
//   NORM:      y = weight @ rms_norm(x)
//   GATED:     silu(gate) * up  [N / 2], where gate and up are the halves of y
//   bias, residual, where they are given: added
//
// A multiprocessor has two blocks, or three if a norm comes first. Their tiles are 16 outputs (and
// the 16 that they gate), and each warp has a slice of K, as in narrow_rows.cu, whose numbers these
// are bit for bit. A warp copies bytes of its slice some steps ahead into a ring in shared memory,
// also those of the next tiles, the first ones before the wait for the kernel that computes x. What
// is asked for after them comes after them, microseconds later; so all else that the block needs,
// for all of its tiles, is asked for at once: x, and what a tile ends with.
//
// `narrow_rows.py` gives what its launches follow from: WARPS and MOST_TILES of a block, STEP bytes
// of an output in a step, LINEAR_STEPS and GATED_STEPS of a ring with the one that is computed (with
// more, what is asked for later waits longer), and GROUPS that have scales of their own in a step of
// an output; 0: all columns have one.
#include "narrow.cuh"

#define THREADS (WARPS * 32)
#define PIECES (STEP / 16)
#define MOST_CHUNKS 8  // of 8 columns of x, that a thread brings; with a norm, half of them
#define SCALED (GROUPS == 0 ? BY_ROW : GROUPS <= 2 ? BY_SEGMENT : BY_LANE)

// What a tile's outputs end with.
struct Ending {
    float scales[2][OUTPUTS], biases[2][OUTPUTS], residuals[OUTPUTS];
};

template <int PARTS>
struct Shared {
    static constexpr int STEPS = PARTS == 2 ? GATED_STEPS : LINEAR_STEPS;
    // Half of odd outputs is exchanged, so that outputs g and g + 1 are in different banks.
    uint4 bytes[WARPS][STEPS][PARTS * OUTPUTS][PIECES];
    // Scales of 16 outputs, then their offsets.
    float scales[WARPS][STEPS][PARTS][2 * OUTPUTS][GROUPS ? GROUPS : 1];
    float sums[2][WARPS][PARTS][OUTPUTS];
    float squares[WARPS];
    Ending endings[MOST_TILES];
};
__device__ __forceinline__ int exchanged(int output, int piece) { return piece ^ output % 2 * 4; }

// Where a warp's copies are from, and which come next.
template <int KIND, int PARTS>
struct Copies {
    const Layer& layer;
    Shared<PARTS>& memory;
    int num_tiles, begin, end, tile, byte, slot;

    // Asks for the next step of the block's tiles, if there is one.
    __device__ __forceinline__ void ask() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (tile < num_tiles) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const i64 first = tile * OUTPUTS + part * (layer.num_outputs / 2);
                const unsigned char* from =
                    layer.weight + (first + lane / 8) * layer.num_bytes + byte + lane % 8 * 16;
#pragma unroll
                for (int i = 0; i < OUTPUTS / 4; i++) {
                    const int row = lane / 8 + 4 * i;
                    uint4* to = memory.bytes[warp][slot][part * OUTPUTS + row];
                    copy16(to + exchanged(row, lane % 8), from + (i64)(4 * i) * layer.num_bytes);
                }
                if (GROUPS == 0 || (KIND == FLOAT8 && lane >= OUTPUTS)) continue;
                const float* scales = lane < OUTPUTS ? layer.scales : layer.offsets;
                const int group = (KIND == INT4 ? 2 * byte : byte) >> layer.group_bits;
                scales += (first + lane % OUTPUTS) * layer.num_groups + group;
                float* to = memory.scales[warp][slot][part][lane];
                if (GROUPS == 1) copy4(to, scales);
                if (GROUPS == 2) copy8(to, scales);
#pragma unroll
                for (int i = 0; i < GROUPS / 4; i++) copy16(to + 4 * i, scales + 4 * i);
            }
            if ((byte += STEP) == end) byte = begin, tile += gridDim.x;
        }
        end_of_copies();
        slot = slot + 1 == Shared<PARTS>::STEPS ? 0 : slot + 1;
    }
};

// A step of a tile: two segments.
template <int KIND, int PARTS>
__device__ __forceinline__ void add_step(float (&sums)[PARTS][1][4], const Shared<PARTS>& memory,
                                         int slot, const u16* x, int first_byte, int group_bits) {
    constexpr int HALVES = KIND == INT4 ? 2 : 1;  // columns in a byte
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int segment = 0; segment < STEP / SEGMENT; segment++) {
        const int byte = first_byte + segment * SEGMENT + t * 16;
        float parts[PARTS][1][4] = {}, ones[1][4] = {};
        uint4 bytes[2 * PARTS];  // of outputs g and g + 8
#pragma unroll
        for (int p = 0; p < 2 * PARTS; p++)
            bytes[p] = memory.bytes[warp][slot][p * 8 + g][exchanged(g, segment * 4 + t)];
        // scale of output g, its offset, and those of output g + 8
        float scales[PARTS][4] = {};
        if (GROUPS) {
            const int group = segment * GROUPS / 2 + (GROUPS > 2 ? t * GROUPS / 8 : 0);
#pragma unroll
            for (int i = 0; i < 4 * PARTS; i++) {
                const int of = g + i % 4 / 2 * 8 + i % 2 * OUTPUTS;
                if (KIND != FLOAT8 || i % 2 == 0)
                    scales[i / 4][i % 4] = memory.scales[warp][slot][i / 4][of][group];
            }
        }
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int column = first_column<KIND>(byte, half, group_bits);
            Columns columns[1] = {};  // the other seven rows of tensor cores are 0
            if (g == 0) columns[0] = load_columns(x + column);
            if (SCALED == BY_SEGMENT && KIND != FLOAT8) add_sums(ones, columns);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                add_columns<KIND, SCALED>(SCALED == BY_SEGMENT ? parts[part] : sums[part],
                                          bytes[2 * part], bytes[2 * part + 1], scales[part], half,
                                          columns);
        }
        if constexpr (SCALED == BY_SEGMENT)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                add_scaled<KIND>(sums[part], parts[part], ones, {scales[part][0], scales[part][2]},
                                 {scales[part][1], scales[part][3]});
    }
}

// The sum of a slice's squares, in the order in which narrow_rows.cu adds them.
template <int KIND>
__device__ __forceinline__ float squares_of(const u16* slice, int num_bytes, int group_bits) {
    const int lane = threadIdx.x % 32;
    float squares[4] = {};
    for (int segment = 0; segment < num_bytes; segment += SEGMENT)
#pragma unroll
        for (int half = 0; half < (KIND == INT4 ? 2 : 1); half++) {
            const int column = first_column<KIND>(segment + lane * 16, half, group_bits);
            Columns plain = {};
            if (lane < 4) plain = load_columns(slice + column);
            add_squares(squares, plain);
        }
    return squares[0];
}

// Brings x, times the norm if there is one, and what all tiles of the block end with. Without it, x
// is for a while where the ring's last step will be.
template <bool NORM, int PARTS>
__device__ __forceinline__ void bring(Shared<PARTS>& memory, const Layer& layer, u16* x,
                                      int num_tiles) {
    const int num_chunks = layer.num_columns / 8, width = layer.num_outputs / PARTS;
    const int tile = blockIdx.x + threadIdx.x / OUTPUTS * gridDim.x;
    const int output = tile * OUTPUTS + threadIdx.x % OUTPUTS;
    float scales[2] = {1.0f, 1.0f}, biases[2] = {}, residual = 0.0f;
    constexpr int CHUNKS = NORM ? MOST_CHUNKS / 2 : MOST_CHUNKS;
    uint4 columns[CHUNKS], norms[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (chunk >= num_chunks) continue;
        columns[i] = *(const uint4*)(layer.x + 8 * chunk);
        if (NORM) norms[i] = *(const uint4*)(layer.norm + 8 * chunk);
    }
    if (tile < num_tiles && threadIdx.x < MOST_TILES * OUTPUTS) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (GROUPS == 0) scales[part] = layer.scales[output + part * width];
            if (layer.bias) biases[part] = widened(layer.bias[output + part * width]);
        }
        if (layer.residual) residual = widened(layer.residual[output]);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (chunk >= num_chunks) continue;
        uint4 y = columns[i];
        if (NORM) {
            const int in_slice = num_chunks / WARPS;
            uint4* slice = memory.bytes[chunk / in_slice][Shared<PARTS>::STEPS - 1][0];
            slice[chunk % in_slice] = y;
            const uint4& norm = norms[i];
            y = make_uint4(multiplied(y.x, norm.x), multiplied(y.y, norm.y),
                           multiplied(y.z, norm.z), multiplied(y.w, norm.w));
        }
        *(uint4*)(x + 8 * chunk) = y;
    }
    if (threadIdx.x >= MOST_TILES * OUTPUTS) return;
    Ending& ending = memory.endings[threadIdx.x / OUTPUTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        ending.scales[part][threadIdx.x % OUTPUTS] = scales[part];
        ending.biases[part][threadIdx.x % OUTPUTS] = biases[part];
    }
    ending.residuals[threadIdx.x % OUTPUTS] = residual;
}

// An output of a tile, from the sums of all warps in their order.
template <bool NORM, int PARTS>
__device__ __forceinline__ void finish(const Shared<PARTS>& memory, const Layer& layer, int tile,
                                       int index) {
    const int output = threadIdx.x % OUTPUTS;
    const Ending& ending = memory.endings[index];
    float y[2] = {}, square = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) y[part] += memory.sums[index % 2][w][part][output];
        if (NORM) square += memory.squares[w];
    }
    const float factor = NORM ? rsqrtf(square / layer.num_columns + layer.eps) : 1.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        y[part] = ended(y[part], ending.scales[part][output], factor, ending.biases[part][output]);
    const float result = PARTS == 2 ? gated_by(y[0], y[1]) : y[0];
    layer.out[tile * OUTPUTS + output] = narrowed(__fadd_rn(result, ending.residuals[output]));
}

template <int KIND, bool NORM, bool GATED>
__device__ __forceinline__ void run(const Layer& layer) {
    constexpr int PARTS = GATED ? 2 : 1;
    extern __shared__ uint4 dynamic[];
    Shared<PARTS>& memory = *(Shared<PARTS>*)dynamic;
    u16* x = (u16*)(&memory + 1);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_tiles = layer.num_outputs / (OUTPUTS * PARTS);
    const int slice_bytes = layer.num_bytes / WARPS;
    const int begin = warp * slice_bytes, end = begin + slice_bytes;

    Copies<KIND, PARTS> copies = {layer, memory, num_tiles, begin, end, (int)blockIdx.x, begin, 0};
#pragma unroll
    for (int i = 0; i < Shared<PARTS>::STEPS - 1; i++) copies.ask();
    wait_for_the_kernel_before();
    bring<NORM>(memory, layer, x, num_tiles);
    __syncthreads();
    launch_dependents();  // not before: what they ask for would come before x
    if (NORM) {
        const u16* slice = (const u16*)memory.bytes[warp][Shared<PARTS>::STEPS - 1];
        const float square = squares_of<KIND>(slice, slice_bytes, layer.group_bits);
        if (lane == 0) memory.squares[warp] = square;
    }

    int slot = 0, index = 0;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, index++) {
        float sums[PARTS][1][4] = {};
        for (int byte = begin; byte < end; byte += STEP) {
            wait_for_copies<Shared<PARTS>::STEPS - 2>();
            __syncwarp();  // also: all have taken what is overwritten now
            copies.ask();
            add_step<KIND>(sums, memory, slot, x, byte, layer.group_bits);
            slot = slot + 1 == Shared<PARTS>::STEPS ? 0 : slot + 1;
        }
        if (lane % 4 == 0)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                memory.sums[index % 2][warp][part][lane / 4] = sums[part][0][0];
                memory.sums[index % 2][warp][part][lane / 4 + 8] = sums[part][0][2];
            }
        __syncthreads();
        if (warp == index % WARPS && lane < OUTPUTS) finish<NORM>(memory, layer, tile, index);
    }
}

// The blocks that a multiprocessor can hold, which their launches may use.
#define KERNEL(name, norm, gated, num_blocks)                          \
    extern "C" __global__ void __launch_bounds__(THREADS, num_blocks)  \
        name(const __grid_constant__ Layer layer) {                    \
        run<STORED, norm, gated>(layer);                               \
    }
KERNEL(linear, false, false, 2)
KERNEL(normed, true, false, 3)
KERNEL(gated, true, true, 2)
