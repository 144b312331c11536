/* Decoder operations on CPU, called from Python; library.py declares the same structs.
 *
 * Flags of the build define the storage type (BFLOAT16, FLOAT16, else float32), that of the KV cache
 * (KV_E4M3, KV_E5M2, else the storage type) and the instruction set; PLAIN disables intrinsics. Sums are float32 and rounded once, when stored. Functions named
 * *_part are one thread's share of an operation; a parallel region calls several of them with
 * barriers in between. Nothing here allocates memory or needs more alignment than an element, all
 * sizes are allowed, and NaN propagates to the output row.
 */
#include <omp.h>

#include "attention.h"
#include "norm.h"
#include "gemm.h"

enum { WORTH_THREADS = 32768 }; /* elements */

static inline team this_thread(void) { return (team){omp_get_thread_num(), omp_get_num_threads()}; }

long lanes(void) { return LANES; }

long packed_size(long outputs, long inputs) { return packed_elements(outputs, inputs); }

/* Bytes of a row's copy that the GEMM reads; 0 if it reads the row itself. */
long copy_size(long inputs) {
    return copies_inputs(inputs) ? input_stride(inputs) * (long)sizeof(input) : 0;
}

void pack(const scalar *weight, scalar *packed, long outputs, long inputs, int threads) {
#pragma omp parallel num_threads(threads)
    pack_part(weight, packed, outputs, inputs, this_thread());
}

/* `copy` has space for rows of copy_size(inputs) bytes, unless that is 0. */
void linear(const gemm *p, const scalar *x, input *copy, scalar *out, float *out_floats,
            long rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        if (copy) {
            copy_inputs_part(x, copy, rows, p->inputs, me);
#pragma omp barrier
        }
        linear_part(p, copy ? copy : (const input *)x, out, out_floats, rows, me);
    }
}

void add_rms_norm(const scalar *x, scalar *residual, const scalar *weight, scalar *out, long rows,
                  long size, float eps, int threads) {
#pragma omp parallel num_threads(threads) if (rows * size > WORTH_THREADS)
    add_rms_norm_part(x, residual, weight, out, NULL, rows, size, eps, this_thread());
}

void silu_and_mul(const scalar *x, scalar *out, long rows, long size, int threads) {
#pragma omp parallel num_threads(threads) if (rows * size > WORTH_THREADS)
    silu_and_mul_part(x, out, NULL, rows, size, this_thread());
}

void attend(const attention *a, const scalar *qkv, const scalar *qk_norm, cached *rows,
            const float *scales, scalar *out, int threads) {
    const layer_cache layer = {rows, scales}, *cache = &layer;
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        write_part(a, qkv, qk_norm, cache, out, me);
        /* A sequence may read a block that another sequence fills in the same step. */
#pragma omp barrier
        attend_singles_part(a, qkv, qk_norm, cache, out, me);
        attend_prompts_part(a, qkv, qk_norm, cache, out, me);
    }
}

/* Weights from one layer's attention to the next layer's: output projection, MLP, next QKV. */
typedef struct {
    gemm o, gate_up, down, next_qkv; /* next_qkv has no weight after the last layer */
    const scalar *post_norm, *next_norm;
    long hidden, inner;
    float eps;
} block;

typedef struct {
    const scalar *attended; /* [T, H D] */
    scalar *residual;       /* [T, hidden], updated in place */
    scalar *hidden, *added; /* [T, hidden] */
    scalar *gate_up;        /* [T, 2 I] */
    scalar *inner;          /* [T, I] */
    scalar *qkv;            /* [T, (H + 2 Hkv) D] */
    input *copy;            /* space for a copy of any GEMM's inputs */
    long rows;
} stream;

/* Destination of the copy of a GEMM's inputs; NULL if it reads the inputs themselves. */
static inline input *copy_for(const gemm *p, const stream *s) {
    return copies_inputs(p->inputs) ? s->copy : NULL;
}

static inline const input *inputs_of(const gemm *p, const stream *s, const scalar *x) {
    return copies_inputs(p->inputs) ? s->copy : (const input *)x;
}

void decoder_block(const block *b, const stream *s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        if (copies_inputs(b->o.inputs)) {
            copy_inputs_part(s->attended, s->copy, s->rows, b->o.inputs, me);
#pragma omp barrier
        }
        linear_part(&b->o, inputs_of(&b->o, s, s->attended), s->added, NULL, s->rows, me);
#pragma omp barrier
        add_rms_norm_part(s->added, s->residual, b->post_norm, s->hidden, copy_for(&b->gate_up, s),
                          s->rows, b->hidden, b->eps, me);
#pragma omp barrier
        linear_part(&b->gate_up, inputs_of(&b->gate_up, s, s->hidden), s->gate_up, NULL, s->rows,
                    me);
#pragma omp barrier
        silu_and_mul_part(s->gate_up, s->inner, copy_for(&b->down, s), s->rows, b->inner, me);
#pragma omp barrier
        linear_part(&b->down, inputs_of(&b->down, s, s->inner), s->added, NULL, s->rows, me);
#pragma omp barrier
        add_rms_norm_part(s->added, s->residual, b->next_norm, s->hidden, copy_for(&b->next_qkv, s),
                          s->rows, b->hidden, b->eps, me);
        if (b->next_qkv.weight) {
#pragma omp barrier
            linear_part(&b->next_qkv, inputs_of(&b->next_qkv, s, s->hidden), s->qkv, NULL, s->rows,
                        me);
        }
    }
}
