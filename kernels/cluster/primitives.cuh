// What CUDA C has no words for: bfloat16 in halves of a word, tensor cores, clusters, launches that
// overlap, bulk copies. Knows nothing of layers.
#pragma once

typedef unsigned short u16;  // the bits of a bfloat16
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL 0xffffffffu
#define MINUS_INFINITY __int_as_float(0xff800000)
#define UP(a, b) (((a) + (b) - 1) / (b))

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widened(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u16 narrowed(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rounded(float x) { return widened(narrowed(x)); }

// The same number, of which the compiler knows nothing.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(FULL, x, i);
    return x;
}

__device__ __forceinline__ u32 packed(float x, float y) {
    return (u32)narrowed(x) | (u32)narrowed(y) << 16;
}

// Four of the bytes of a (0 to 3) and of b (4 to 7), the lowest first, by the nibbles of which.
__device__ __forceinline__ u32 choose_bytes(u32 a, u32 b, u32 which) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
    return r;
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const unsigned char* from) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}

// Tensor cores, sums += a b. Of 16 rows a lane has rows lane / 4 and that + 8; of 8 columns it has
// column lane / 4 of b, and columns 2 (lane % 4) and the next of the sums: [row, c], [row, c + 1],
// [row + 8, c], [row + 8, c + 1].
__device__ __forceinline__ void multiply16(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                           u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply8(float (&sums)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
// 16 rows by 32 columns. The order of columns within is free as long as both sides agree, so each
// lane takes 8 neighbouring ones, which is one load.
__device__ __forceinline__ void multiply_span(float (&sums)[4], uint4 row, uint4 row8, uint4 b) {
    multiply16(sums, row.x, row8.x, row.y, row8.y, b.x, b.y);
    multiply16(sums, row.z, row8.z, row.w, row8.w, b.z, b.w);
}

// A barrier of so many threads, by its number; 0 is that of all.
__device__ __forceinline__ void barrier_of_some(int number, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// ---- launches that overlap, clusters, and bulk copies ---------------------------------------

__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_the_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ u32 cluster_id() {
    u32 r;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}
// Writes x to the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ void send(u32 address, u32 rank, float x) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
__device__ __forceinline__ void send(u32 address, u32 rank, u16 x) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(there), "h"(x) : "memory");
}
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Phases are counted from 0, and a parity is that of their number.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity = 0) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}
// A lane's own copies, which others see after a barrier; a group of them ends with end_of_copies.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void copy8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void end_of_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until no more than so many groups, the newest, are under way.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void copy_ahead(void* to, const void* from, u32 num_bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(num_bytes), "r"(barrier)
        : "memory");
}
// A policy for what is read once: it leaves L2 before other lines.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// A tensor of four dimensions, as `tensor_map.py` describes it, of which a box is copied: from the
// first number of its first dimension, and from these of the others.
struct alignas(64) TensorMap {
    u64 words[16];
};
__device__ __forceinline__ void copy_ahead(void* to, const TensorMap& from, int second, int third,
                                           int fourth, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
        "l"(&from), "r"(0), "r"(second), "r"(third), "r"(fourth), "r"(barrier), "l"(policy)
        : "memory");
}
