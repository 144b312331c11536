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
// for all of its tiles, is asked for at once: x, and what a tile ends with. One row has one of the
// eight columns of tensor cores' products; sums of x itself are taken from eight places at once.
//
// `narrow_rows.py` gives what its launches follow from: WARPS and MOST_TILES of a block, STEP bytes
// of an output in a step, LINEAR_STEPS and GATED_STEPS of a ring with the one that is computed (with
// more, what is asked for later waits longer), and GROUPS that have scales of their own in a step of
// an output; 0: all columns have one.
#include "narrow.cuh"

#define THREADS (WARPS * 32)
#define PIECES (STEP / 16)
#define MOST_CHUNKS 8  // of 8 columns of x, that a lane brings; with a norm, half of them
#define COLUMNS_OF_BYTE HALVES<STORED>
#define HAS_ZEROS (GROUPS && STORED != FLOAT8)
#define HAS_OFFSETS (HAS_ZEROS && !PAIRED)

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
    u32 scales[WARPS][STEPS][PARTS][(HAS_OFFSETS ? 2 : 1) * OUTPUTS][GROUPS ? GROUPS : 1];
    float sums[2][WARPS][PARTS][OUTPUTS];
    float squares[WARPS];
    u64 arrived[WARPS];
    Ending endings[MOST_TILES];
};
__device__ __forceinline__ int exchanged(int output, int piece) { return piece ^ output % 2 * 4; }
// Neighbouring loads of x are exchanged in odd segments for the same reason.
__device__ __forceinline__ int exchanged(int chunk) {
    constexpr int CHUNKS = SEGMENT * COLUMNS_OF_BYTE / 8;  // of a segment
    constexpr int LOAD = STORED == INT4 ? 4 : STORED == INT8 ? 2 : 1;  // chunks from one to the next
    return chunk ^ chunk / CHUNKS % 2 * LOAD;
}

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
                if (GROUPS == 0 || (!HAS_OFFSETS && lane >= OUTPUTS)) continue;
                const u32* scales = lane < OUTPUTS ? layer.scales : layer.offsets;
                const int group = (KIND == INT4 ? 2 * byte : byte) >> layer.group_bits;
                scales += (first + lane % OUTPUTS) * layer.num_groups + group;
                u32* to = memory.scales[warp][slot][part][lane];
                if (GROUPS == 1) copy4(to, scales);
                if (GROUPS == 2) copy8(to, scales);
                if constexpr (GROUPS > 2)
#pragma unroll
                    for (int i = 0; i < GROUPS / 4; i++) copy16(to + 4 * i, scales + 4 * i);
            }
            if ((byte += STEP) == end) byte = begin, tile += gridDim.x;
        }
        end_of_copies();
        slot = slot + 1 == Shared<PARTS>::STEPS ? 0 : slot + 1;
    }
};

// A unit's scales of output g and g + 8, from those of the step.
template <int KIND>
__device__ __forceinline__ Factors factors_at(const u32 (*scales)[GROUPS ? GROUPS : 1], int output,
                                              int group) {
    u32 offset = 0;
    if constexpr (HAS_OFFSETS) offset = scales[output + OUTPUTS][group];
    return factors_of<KIND>(scales[output][group], offset);
}

// A step of a tile: two segments. x and sums are from the step's first column and unit.
template <int KIND, int PARTS>
__device__ __forceinline__ void add_step(float (&sums)[PARTS][1][4], const Shared<PARTS>& memory,
                                         int slot, const u16* x, const float* sums_of_x) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int segment = 0; segment < STEP / SEGMENT; segment++) {
        u32 words[2 * PARTS][4];  // of outputs g and g + 8
#pragma unroll
        for (int p = 0; p < 2 * PARTS; p++)
            *(uint4*)words[p] =
                memory.bytes[warp][slot][p * 8 + g][exchanged(g, segment * 4 + t)];
        const Columns<KIND> columns[1] = {  // the same eight times
            load_columns<KIND>(x + segment * SEGMENT * COLUMNS_OF_BYTE, t, segment % 2)};
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            const int group = (segment * UNITS + unit) * GROUPS / (2 * UNITS);
            const float of_x = HAS_ZEROS ? sums_of_x[segment * UNITS + unit] : 0.0f;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float parts[1][4] = {};
#pragma unroll
                for (int i = 0; i < 4 / UNITS; i++) {
                    const int word = unit * 4 / UNITS + i;
                    add_word<KIND>(WORDS ? parts : sums[part], words[2 * part][word],
                                   words[2 * part + 1][word], columns, word);
                }
                if constexpr (WORDS != 0)
#pragma unroll
                    for (int c = 0; c < 4; c += 2) {
                        const Factors by = factors_at<KIND>(memory.scales[warp][slot][part],
                                                            g + c / 2 * 8, group);
                        sums[part][0][c] = added<KIND>(sums[part][0][c], parts[0][c], of_x, by);
                    }
            }
        }
    }
}

// The sum of a slice's squares, in the order in which narrow_rows.cu adds them, and the sums of its
// units: each of the eight columns of tensor cores has a half of a segment. `plain` is without the
// norm.
template <int KIND, bool NORM>
__device__ __forceinline__ float sum_slice(float* units, const u16* slice, const u16* plain,
                                           int num_segments) {
    constexpr int SEGMENTS = 8 / HALVES<KIND>;  // at once
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, half = g % HALVES<KIND>;
    float square = 0.0f;
#pragma unroll 1
    for (int first = 0; first < num_segments; first += SEGMENTS) {
        const int last = num_segments - 1 - first;  // those after it repeat it
        const int segment = first + min(g / HALVES<KIND>, last);
        const int column = segment * SEGMENT * HALVES<KIND>;
        float squares[4] = {}, sums[UNITS][4] = {};
        if (NORM) add_squares(squares, load_half<KIND>(plain + column, t, half, 0));
        if (HAS_ZEROS) {
            const Half x = load_half<KIND>(slice + column, t, half, segment % 2);
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++) add_sums(sums[unit], x, unit);
        }
        if (NORM)
#pragma unroll
            for (int i = 0; i < SEGMENTS; i++) {
                float one = 0.0f;
#pragma unroll
                for (int column = i * HALVES<KIND>; column < (i + 1) * HALVES<KIND>; column++)
                    one += __shfl_sync(FULL, squares[column % 2], 4 * column + column / 2);
                square += i <= last ? one : 0.0f;
            }
        // A lane has columns 2 t and 2 t + 1 of the sums: two halves, or two segments.
        const int of = HALVES<KIND> == 2 ? t : 2 * t + g;
        if (HAS_ZEROS && g < 2 / HALVES<KIND> && of <= last)
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++)
                units[(first + of) * UNITS + unit] =
                    HALVES<KIND> == 2 ? sums[unit][0] + sums[unit][1]
                    : g              ? sums[unit][1]
                                     : sums[unit][0];
    }
    if (HAS_ZEROS) __syncwarp();
    return square;
}

// A warp's slice of x. Where it is multiplied by a norm it comes in bulk: a lane's own load would be
// answered after all that its multiprocessor has asked for before. Long slices are sooner there by
// loads.
template <bool NORM, int PARTS>
struct Slice {
    static constexpr int CHUNKS = NORM ? MOST_CHUNKS / 2 : MOST_CHUNKS;
    Shared<PARTS>& memory;
    const Layer& layer;
    const int lane, warp, num_chunks;
    u16* const x;
    uint4 loaded[CHUNKS];  // of x, or of the norm

    __device__ __forceinline__ Slice(Shared<PARTS>& memory, const Layer& layer, u16* all)
        : memory(memory), layer(layer), lane(threadIdx.x % 32), warp(threadIdx.x / 32),
          num_chunks(layer.num_columns / 8 / WARPS), x(all + 8 * num_chunks * warp) {
        if (!NORM) return;
        if (lane == 0) barrier_init(shared_address(&memory.arrived[warp]));
        __syncwarp();
        load(layer.norm);
    }
    __device__ __forceinline__ void load(const u16* all) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int chunk = lane + 32 * i;
            if (chunk < num_chunks) loaded[i] = ((const uint4*)all)[warp * num_chunks + chunk];
        }
    }
    // Without the norm, it is for a while where the ring's last step will be.
    __device__ __forceinline__ u16* plain() const {
        return (u16*)memory.bytes[warp][Shared<PARTS>::STEPS - 1];
    }
    __device__ __forceinline__ void ask() {
        if (!NORM) load(layer.x);
        if (!NORM || lane > 0) return;
        const u32 barrier = shared_address(&memory.arrived[warp]);
        barrier_expect(barrier, 16 * num_chunks);
        copy_ahead(plain(), layer.x + 8 * num_chunks * warp, 16 * num_chunks, barrier);
    }
    // Until it is there, times the norm.
    __device__ __forceinline__ void wait() {
        if (NORM) barrier_wait(shared_address(&memory.arrived[warp]));
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int chunk = lane + 32 * i;
            if (chunk >= num_chunks) continue;
            uint4 y = loaded[i];
            if (NORM) {
                const uint4 columns = ((const uint4*)plain())[chunk];
                y = make_uint4(multiplied(columns.x, y.x), multiplied(columns.y, y.y),
                               multiplied(columns.z, y.z), multiplied(columns.w, y.w));
            }
            *(uint4*)(x + 8 * exchanged(chunk)) = y;
        }
        __syncwarp();
    }
};

// What the block's tiles end with, of one output a thread.
template <int PARTS>
struct Own {
    float scales[2] = {COUNTED<STORED>, COUNTED<STORED>}, biases[2] = {}, residual = 0.0f;

    __device__ __forceinline__ Own(const Layer& layer, int num_tiles) {
        const int tile = blockIdx.x + threadIdx.x / OUTPUTS * gridDim.x;
        const int output = tile * OUTPUTS + threadIdx.x % OUTPUTS;
        const int width = layer.num_outputs / PARTS;
        if (tile >= num_tiles || threadIdx.x >= MOST_TILES * OUTPUTS) return;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (!GROUPS) scales[part] = __uint_as_float(layer.scales[output + part * width]);
            if (layer.bias) biases[part] = widened(layer.bias[output + part * width]);
        }
        if (layer.residual) residual = widened(layer.residual[output]);
    }
    __device__ __forceinline__ void leave(Shared<PARTS>& memory) const {
        if (threadIdx.x >= MOST_TILES * OUTPUTS) return;
        Ending& ending = memory.endings[threadIdx.x / OUTPUTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            ending.scales[part][threadIdx.x % OUTPUTS] = scales[part];
            ending.biases[part][threadIdx.x % OUTPUTS] = biases[part];
        }
        ending.residuals[threadIdx.x % OUTPUTS] = residual;
    }
};

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
    Slice<NORM, PARTS> slice(memory, layer, x);
#pragma unroll
    for (int i = 0; i < Shared<PARTS>::STEPS - 1; i++) copies.ask();
    wait_for_the_kernel_before();
    slice.ask();
    const Own<PARTS> own(layer, num_tiles);
    slice.wait();
    launch_dependents();  // not before: what they ask for would come before x
    const int num_segments = slice_bytes / SEGMENT;
    float* sums_of_x = (float*)(x + layer.num_columns) + begin / SEGMENT * UNITS;
    if constexpr (NORM || HAS_ZEROS) {
        const float square = sum_slice<KIND, NORM>(sums_of_x, slice.x, slice.plain(), num_segments);
        if (lane == 0) memory.squares[warp] = square;
    }

    int slot = 0, index = 0;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, index++) {
        float sums[PARTS][1][4] = {};
        for (int byte = begin; byte < end; byte += STEP) {
            wait_for_copies<Shared<PARTS>::STEPS - 2>();
            __syncwarp();  // also: all have taken what is overwritten now
            copies.ask();
            const int done = byte - begin;
            add_step<KIND>(sums, memory, slot, slice.x + done * COLUMNS_OF_BYTE,
                           sums_of_x + done / SEGMENT * UNITS);
            slot = slot + 1 == Shared<PARTS>::STEPS ? 0 : slot + 1;
        }
        if (index == 0) own.leave(memory);
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
