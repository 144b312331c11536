// Sizes of a layer and of its parts, from what the compiler's command line defines: HIDDEN, HEAD_DIM,
// GROUP (query heads of a KV head), KV_HEADS, INTERMEDIATE, MLP_CLUSTERS, CLUSTER, THREADS, QK_NORM (0
// or 1), SHARED_TILES (of the gate and up rows in shared memory; the rest is in registers),
// SCRATCH_BYTES, MIN_BLOCKS.
#pragma once

#include "primitives.cuh"

#define WARPS (THREADS / 32)
#define HEADS (GROUP * KV_HEADS)
#define QUERY (GROUP * HEAD_DIM)               // query values of a cluster
#define QKV (QUERY + 2 * HEAD_DIM)             // rows of the projection that a cluster computes
#define QKV_ROWS (QKV / CLUSTER)               // ... and a block
#define INNER_SPANS (INTERMEDIATE / SPAN)      // clusters of the MLP have equal shares, or one more
#define INNER (UP(INNER_SPANS, MLP_CLUSTERS) * SPAN)  // inner values of a cluster, at most
#define PAIRS (INNER / CLUSTER)                // gate rows of a block, and as many up rows, at most
#define OUTPUTS (HIDDEN / CLUSTER)             // outputs of a block
#define TILE 16                                // rows of a weight that tensor cores take at once
#define SPAN 32                                // columns that a warp takes at once
#define ROW_STRIDE (HIDDEN + 32)               // in shared memory: two rows differ by half the banks
#define TOKENS 8                               // keys that a warp attends to at once
#define STATS (HEAD_DIM + 2)                   // a head's sums, then maximum and total
