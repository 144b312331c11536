// One decoder layer for one token, in two launches: attention block and MLP block.
//
// A cluster of CLUSTER thread blocks shares a KV head, or a slice of the MLP's inner values; its
// blocks exchange values through distributed shared memory. Clusters exchange only sums: a block's
// output is one row of float32 per cluster (`partials`), and the next launch adds these to the
// residual in a fixed order, so results do not depend on timing. Weights keep the layout that the
// other kernels read.
//
// Programmatic dependent launch: a kernel asks for its weights, then waits for the one before it.
// All blocks reach the wait, so the end of a kernel implies the end of all before it. Lengths, block
// tables and older keys are read ahead of it: they are older than the step's first launch of these.

#include "attention.cuh"
#include "products.cuh"

// ---- the attention block --------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_block(const u16* qkv_weight, const u16* o_weight, const u16* norm, const u16* q_norm,
                const u16* k_norm, const u16* residual, u16* residual_out, const float* partials,
                int num_partials, float* partials_out, const float* cos_sin, const i64* position,
                const i64* slot, const int* table, const int* length, Cache cache, float eps,
                float scale_log2) {
    extern __shared__ __align__(128) unsigned char memory[];
    u16* weight = (u16*)memory;                       // [QKV_ROWS, ROW_STRIDE]
    float* scratch = (float*)memory;                  // the same, once it is used
    u16* xs = (u16*)(memory + SCRATCH_BYTES);         // [2, ROW_STRIDE]
    float* left = (float*)(xs + 2 * ROW_STRIDE);      // what Products leave
    __shared__ Heads heads;
    __shared__ u64 barrier_word;
    const u32 barrier = shared_address(&barrier_word);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = cluster_rank(), kv_head = cluster_id();

    if (threadIdx.x == 0) {
        barrier_init(barrier);
        barrier_expect(barrier, QKV_ROWS * HIDDEN * 2);
    }
    __syncthreads();
    cluster_arrive();
    launch_dependents();
    for (int i = threadIdx.x; i < QKV_ROWS; i += THREADS) {
        const u32 r = rank * QKV_ROWS + i;  // of the cluster's rows: q, then k, then v
        u32 row = kv_head * QUERY + r;
        if (r >= QUERY) row = HEADS * HEAD_DIM + kv_head * HEAD_DIM + r - QUERY;
        if (r >= QUERY + HEAD_DIM) row += (KV_HEADS - 1) * HEAD_DIM;
        copy_ahead(weight + i * ROW_STRIDE, qkv_weight + (u64)row * HIDDEN, HIDDEN * 2, barrier);
    }

    // This block's share of the context, in whole tiles; the newest token is the last of all.
    const int context = *length, newest = context - 1;
    const int each = UP(UP(context, CLUSTER), TOKENS) * TOKENS;
    const int begin = (int)rank * each, end = min(context, begin + each);
    const int old_end = min(end, newest);
    Attention attention;
    int first = begin + warp * TOKENS;
    attention.load_k(cache, table, kv_head, first, old_end);
    attention.load_v(cache, table, kv_head, first, old_end);
    Residual input;
    input.load_norm(norm);
    const i64 to = *slot;
    if (threadIdx.x < HEAD_DIM) {
        heads.cos_sin[threadIdx.x] = cos_sin[*position * HEAD_DIM + threadIdx.x];
        heads.q_norm[threadIdx.x] = widened(q_norm[threadIdx.x]);
        heads.k_norm[threadIdx.x] = widened(k_norm[threadIdx.x]);
    }
    const u16* o_part = o_weight + (u64)rank * OUTPUTS * (HEADS * HEAD_DIM) + kv_head * QUERY;
    prefetch_rows(o_part, HEADS * HEAD_DIM, OUTPUTS, QUERY * 2);

    wait_for_the_kernel_before();
    const float factor =
        input.read(residual, residual_out, partials, num_partials, eps, xs, heads.sums);
    barrier_wait(barrier);
    {
        QkvProducts products;
        const uint4 none[QkvProducts::SPANS][1][2] = {};
        products.add<QkvProducts::MINE, 1>(weight, none, xs);
        products.leave(left);
    }
    cluster_wait();  // all blocks of the cluster run
    for (int i = threadIdx.x; i < QKV_ROWS * CLUSTER; i += THREADS) {
        const int row = i / CLUSTER;
        send(shared_address(heads.qkv + rank * QKV_ROWS + row), i % CLUSTER,
             rounded(QkvProducts::total(left, row) * factor));
    }
    cluster_arrive();
    cluster_wait();

    if (warp < GROUP)
        norm_and_rotate(heads.qkv + warp * HEAD_DIM, heads.q_norm, heads.cos_sin, eps,
                        heads.q + warp * HEAD_DIM);
    else if (warp == GROUP)
        norm_and_rotate(heads.qkv + QUERY, heads.k_norm, heads.cos_sin, eps, heads.k);
    else if (warp == GROUP + 1)
        for (int i = lane; i < HEAD_DIM; i += 32)
            heads.v[i] = narrowed(heads.qkv[QUERY + HEAD_DIM + i]);
    __syncthreads();
    if (rank == 0 && to >= 0 && threadIdx.x < HEAD_DIM) {
        const i64 at = (to / cache.block_size) * cache.block_stride +
                       (to % cache.block_size) * cache.token_stride + kv_head * cache.head_stride;
        cache.k[at + threadIdx.x] = heads.k[threadIdx.x];
        cache.v[at + threadIdx.x] = heads.v[threadIdx.x];
    }

    attention.begin();
    uint4 q[HEAD_DIM / 32];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++)
        q[i] = lane / 4 < GROUP
                   ? *(const uint4*)(heads.q + lane / 4 * HEAD_DIM + lane % 4 * 8 + 32 * i)
                   : make_uint4(0, 0, 0, 0);
    for (; first < end; first += WARPS * TOKENS) {
        const int next = first + WARPS * TOKENS;
        attention.put_newest(heads, first, newest);
        float scores[2];
        attention.score(q, scale_log2, end - first, scores);
        if (next < end) attention.load_k(cache, table, kv_head, next, old_end);
        attention.add(scores);
        if (next < end) attention.load_v(cache, table, kv_head, next, old_end);
    }
    if (begin + warp * TOKENS < end) attention.leave(scratch + warp * GROUP * STATS);
    OutputSlice<QUERY> o;
    o.load(o_weight, rank * OUTPUTS, kv_head * QUERY, HEADS * HEAD_DIM, QUERY);
    __syncthreads();
    // Merge the warps, then the blocks, of which the first have tokens.
    if (begin < end) {
        const int num_warps = min(WARPS, UP(end - begin, TOKENS));
        for (int i = threadIdx.x; i < GROUP * STATS; i += THREADS) {
            const int g = i / STATS, d = i % STATS;
            float total = 0.0f;
            const float value = merged<WARPS>(scratch, num_warps, g, d, total);
#pragma unroll
            for (u32 p = 0; p < CLUSTER; p++)
                send(shared_address(&heads.parts[rank][g][d]), p, value);
        }
    }
    cluster_arrive();
    cluster_wait();
    const int num_blocks = each ? UP(context, each) : 0;
    for (int i = threadIdx.x; i < QUERY; i += THREADS) {
        float total = 0.0f;
        const float sum = merged<CLUSTER>(&heads.parts[0][0][0], num_blocks, i / HEAD_DIM,
                                          i % HEAD_DIM, total);
        heads.q[i] = context ? narrowed(sum / total) : 0;
    }
    __syncthreads();
    o.store(heads.q, QUERY, left, partials_out + kv_head * HIDDEN + rank * OUTPUTS);
}

// ---- the MLP block --------------------------------------------------------------------------

// A cluster's share of the inner values, and a block's rows of the gate and up projections, whose
// row i is a gate row, or an up row from `pairs` on.
struct Share {
    int first, num, pairs;

    __device__ __forceinline__ Share() {
        const int part = cluster_id(), least = INNER_SPANS / MLP_CLUSTERS;
        const int longer = INNER_SPANS % MLP_CLUSTERS;  // clusters that have one span more
        first = (part * least + min(part, longer)) * SPAN;
        num = (least + (part < longer)) * SPAN;
        pairs = num / CLUSTER;
    }
    __device__ __forceinline__ u64 row(int i) const {
        const int mine = first + (int)cluster_rank() * pairs;
        return i < pairs ? mine + i : INTERMEDIATE + mine + i - pairs;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
mlp_block(const u16* gate_up_weight, const u16* down_weight, const u16* norm, const u16* residual,
          u16* residual_out, const float* partials, int num_partials, float* partials_out,
          float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    u16* weight = (u16*)memory;                           // [SHARED_TILES * 16, ROW_STRIDE]
    u16* xs = weight + SHARED_TILES * TILE * ROW_STRIDE;  // [2, ROW_STRIDE]
    float* left = (float*)(xs + 2 * ROW_STRIDE);
    __shared__ __align__(16) u16 inner[INNER];
    __shared__ float sums[WARPS];
    __shared__ u64 barrier_word;
    const u32 barrier = shared_address(&barrier_word);
    const Share share;
    const int num_shared = min(2 * share.pairs, SHARED_TILES * TILE);

    if (threadIdx.x == 0) {
        barrier_init(barrier);
        barrier_expect(barrier, num_shared * HIDDEN * 2);
    }
    __syncthreads();
    cluster_arrive();
    launch_dependents();
    for (int i = threadIdx.x; i < num_shared; i += THREADS)
        copy_ahead(weight + i * ROW_STRIDE, gate_up_weight + share.row(i) * HIDDEN, HIDDEN * 2,
                   barrier);
    constexpr int HELD = GATE_UP_TILES - SHARED_TILES;
    uint4 held[GateUpProducts::SPANS][HELD ? HELD : 1][2];
#pragma unroll
    for (int i = 0; i < GateUpProducts::SPANS; i++)
#pragma unroll
        for (int m = 0; m < HELD; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = GateUpProducts::row(SHARED_TILES + m) + 8 * half;
                const int c = GateUpProducts::column(i);
                const bool is_there = row < 2 * share.pairs && c < HIDDEN;
                held[i][m][half] =
                    is_there ? __ldg((const uint4*)(gate_up_weight + share.row(row) * HIDDEN + c))
                             : make_uint4(0, 0, 0, 0);
            }
    Residual input;
    input.load_norm(norm);
    const u32 first_output = cluster_rank() * OUTPUTS;
    prefetch_rows(down_weight + (u64)first_output * INTERMEDIATE + share.first, INTERMEDIATE,
                  OUTPUTS, share.num * 2);

    wait_for_the_kernel_before();
    const float factor = input.read(residual, residual_out, partials, num_partials, eps, xs, sums);
    barrier_wait(barrier);
    {
        GateUpProducts products;
        products.add<SHARED_TILES, HELD ? HELD : 1>(weight, held, xs);
        products.leave(left);
    }
    OutputSlice<INNER> down;  // from L2: the registers were not free before
    down.load(down_weight, first_output, share.first, INTERMEDIATE, share.num);
    cluster_wait();  // all blocks of the cluster run
    for (int i = threadIdx.x; i < share.pairs * CLUSTER; i += THREADS) {
        const int pair = i / CLUSTER;
        const float gate = GateUpProducts::total(left, pair) * factor;
        const float up = GateUpProducts::total(left, share.pairs + pair) * factor;
        send(shared_address(inner + cluster_rank() * share.pairs + pair), i % CLUSTER,
             narrowed(gate / (1.0f + __expf(-gate)) * up));
    }
    cluster_arrive();
    cluster_wait();
    down.store(inner, share.num, left, partials_out + cluster_id() * HIDDEN + first_output);
}

// ---- after the last layer -------------------------------------------------------------------

// The residual with its last additions, normed; one block.
extern "C" __global__ void __launch_bounds__(THREADS)
final_norm(const u16* norm, const u16* residual, const float* partials, int num_partials, u16* out,
           float eps) {
    __shared__ float xs[HIDDEN];
    __shared__ float sums[WARPS];
    launch_dependents();
    wait_for_the_kernel_before();
    float square = 0.0f;
    for (int c = threadIdx.x; c < HIDDEN; c += THREADS) {
        float x = 0.0f;
        for (int p = 0; p < num_partials; p++) x += __ldcg(partials + p * HIDDEN + c);
        x = rounded(x + widened(residual[c]));
        square += x * x;
        xs[c] = x;
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < WARPS; i++) total += sums[i];
    const float factor = rsqrtf(total / HIDDEN + eps);
    for (int c = threadIdx.x; c < HIDDEN; c += THREADS)
        out[c] = narrowed(rounded(xs[c] * factor) * widened(norm[c]));
}
