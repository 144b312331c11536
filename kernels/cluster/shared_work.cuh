// Which steps of which sequences a block has, if all blocks share all steps evenly.
#pragma once

#include "primitives.cuh"

// A unit is a sequence with some of its KV heads; starts[u] is its first step among those of all.
// Both arrays are in shared memory.
struct Work {
    int *lengths, *starts;
    int num_units, units_of_row;
    int total, blocks;  // steps of all units; blocks that have any

    __device__ __forceinline__ Work(int* memory, int num_rows, int units_of_row)
        : lengths(memory), starts(memory + num_rows * units_of_row),
          num_units(num_rows * units_of_row), units_of_row(units_of_row) {}
    // After find_starts and a barrier.
    __device__ __forceinline__ void share_out() {
        total = starts[num_units];
        blocks = min((int)gridDim.x, total);
    }
    __device__ __forceinline__ int begin(int block) const {
        return min((int)((i64)block * total / blocks), total);
    }
    // The block that has a step.
    __device__ __forceinline__ int block_of(int step) const {
        return (int)((((i64)step + 1) * blocks - 1) / total);
    }
    __device__ __forceinline__ int unit_of(int step) const {
        int low = 0, high = num_units;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (starts[middle] <= step)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
};

// All of so many warps: each row has units, in steps of STEP tokens, one at least.
template <int STEP, int WARPS>
__device__ __forceinline__ void find_starts(const Work& work, const int* lengths) {
    __shared__ int totals[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    for (int from = 0; from < work.num_units; from += 32 * WARPS) {
        const int unit = from + threadIdx.x;
        const bool is_one = unit < work.num_units;
        const int length = is_one ? lengths[unit / work.units_of_row] : 0;
        int sum = is_one ? max(1, UP(length, STEP)) : 0;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_up_sync(FULL, sum, i);
            if (lane >= i) sum += other;
        }
        if (lane == 31) totals[warp] = sum;
        __syncthreads();
        sum += before;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) sum += totals[w];
            before += totals[w];
        }
        if (is_one) work.lengths[unit] = length, work.starts[unit + 1] = sum;
        __syncthreads();
    }
    if (threadIdx.x == 0) work.starts[0] = 0;
}
