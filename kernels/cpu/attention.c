/* Attention of a step, called from Python. What layer.c says of types and threads holds here, too.
 *
 * A file of its own, as it alone depends on the type of the KV cache (KV_E4M3, KV_E5M2, else the
 * storage type): another such type compiles a quarter of the whole.
 */
#include "attention.h"

void attend(const attention *a, const scalar *qkv, const float *qk_norm, const float *sinks,
            cached *rows, const float *scales, const float *offsets, scalar *out, int threads) {
    const head_weights weights = {qk_norm, sinks}, *own = &weights;
    const layer_cache layer = {rows, scales, offsets}, *cache = &layer;
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        write_part(a, qkv, own, cache, out, me);
        /* A sequence may read a block that another sequence fills in the same step. */
#pragma omp barrier
        attend_singles_part(a, qkv, own, cache, out, me);
        attend_prompts_part(a, qkv, own, cache, out, me);
    }
}
