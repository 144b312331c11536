// A head of queries or keys, normed and rotated (halves, not pairs) by one warp.
#pragma once

#include "primitives.cuh"

// A lane has values lane, lane + 32 and so on; weight [DIM] and cos_sin [DIM] are in shared memory.
template <int DIM, bool NORM>
__device__ __forceinline__ void norm_and_rotate(float (&x)[DIM / 32], const float* weight,
                                                const float* cos_sin, float eps) {
    const int lane = threadIdx.x % 32;
    if (NORM) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) square += x[i] * x[i];
        const float factor = rsqrtf(warp_sum(square) / DIM + eps);
#pragma unroll
        for (int i = 0; i < DIM / 32; i++)
            x[i] = rounded(rounded(x[i] * factor) * weight[lane + 32 * i]);
    }
#pragma unroll
    for (int i = 0; i < DIM / 64; i++) {
        const int at = lane + 32 * i, other = i + DIM / 64;
        const float cosine = cos_sin[at], sine = cos_sin[DIM / 2 + at];
        const float low = x[i], high = x[other];
        x[i] = rounded(low * cosine - high * sine);
        x[other] = rounded(high * cosine + low * sine);
    }
}
