// What it costs to wait for other thread blocks; each kernel repeats one kind of waiting.

typedef unsigned int u32;

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// All blocks count up and poll: one counter in memory, zero at the start.
extern "C" __global__ void grid_barriers(u32* counter, int repeats) {
    for (int i = 1; i <= repeats; i++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
            u32 seen = 0;
            while (seen < (u32)i * gridDim.x)
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        }
        __syncthreads();
    }
}

extern "C" __global__ void cluster_barriers(u32* out, int repeats) {
    for (int i = 0; i < repeats; i++) cluster_barrier();
    if (threadIdx.x == 0 && out == nullptr) *out = 0;
}

// A value to every block of the cluster, a barrier, and a read of what came.
extern "C" __global__ void cluster_exchanges(float* out, int repeats, int cluster) {
    __shared__ float box[2][32];
    const u32 rank = cluster_rank();
    float value = (float)rank;
    for (int i = 0; i < repeats; i++) {
        if (threadIdx.x < cluster) {
            u32 there;
            const u32 here = (u32)__cvta_generic_to_shared(&box[i & 1][rank]);
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"((u32)threadIdx.x));
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
        }
        cluster_barrier();
        value = box[i & 1][(rank + i) % cluster];
    }
    cluster_barrier();
    if (threadIdx.x == 0) out[blockIdx.x] = value;
}

// One of a chain of kernels that each wait for the one before.
extern "C" __global__ void chained(float* out) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) out[blockIdx.x] += 1.0f;
}
