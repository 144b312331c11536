/* The operations of a decoder layer on a CPU, as Python calls them; library.py declares the same
 * structs.
 *
 * The build names the stored type (BFLOAT16, FLOAT16, else float32) and, by its flags, the
 * instruction set; PLAIN asks for no instruction by name. Everything is summed in float32 and
 * rounded once, where it is stored. Functions named *_part are one thread's share of an operation,
 * and a parallel region is a sequence of them with barriers between. Nothing here allocates, nothing
 * needs more alignment than an element has, sizes may be any, and NaN is carried through to the
 * reader of a row.
 */
#include <omp.h>

#include "attention.h"
#include "norm.h"
#include "product.h"

enum { WORTH_THREADS = 32768 }; /* elements */

static inline team this_thread(void) { return (team){omp_get_thread_num(), omp_get_num_threads()}; }

long lanes(void) { return LANES; }

long packed_size(long outputs, long inputs) { return packed_elements(outputs, inputs); }

/* Bytes of the copy of a row that a product reads; 0: it reads the row itself. */
long copy_size(long inputs) {
    return copies_inputs(inputs) ? input_stride(inputs) * (long)sizeof(input) : 0;
}

void pack(const scalar *weight, scalar *packed, long outputs, long inputs, int threads) {
#pragma omp parallel num_threads(threads)
    pack_part(weight, packed, outputs, inputs, this_thread());
}

/* `copy` has room for rows of copy_size(inputs), if that is not 0. */
void linear(const product *p, const scalar *x, input *copy, scalar *out, float *out_floats,
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

void attend(const attention *a, const scalar *qkv, const scalar *qk_norm, scalar *cache,
            scalar *out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        write_part(a, qkv, qk_norm, cache, out, me);
        /* A sequence may read a block that another one fills in this very step. */
#pragma omp barrier
        attend_singles_part(a, qkv, qk_norm, cache, out, me);
        attend_prompts_part(a, qkv, qk_norm, cache, out, me);
    }
}

/* The way from one layer's attention to the next one's: output product, MLP, next projections. */
typedef struct {
    product o, gate_up, down, next_qkv; /* next_qkv without a weight: this was the last layer */
    const scalar *post_norm, *next_norm;
    long hidden, inner;
    float eps;
} block;

typedef struct {
    const scalar *attended; /* [T, H D] */
    scalar *residual;       /* [T, hidden], added to */
    scalar *hidden, *added; /* [T, hidden] */
    scalar *gate_up;        /* [T, 2 I] */
    scalar *inner;          /* [T, I] */
    scalar *qkv;            /* [T, (H + 2 Hkv) D] */
    input *copy;            /* room for the copy of any product's inputs */
    long rows;
} stream;

/* Where the copy of a product's inputs goes; NULL: it reads them themselves. */
static inline input *copy_for(const product *p, const stream *s) {
    return copies_inputs(p->inputs) ? s->copy : NULL;
}

static inline const input *inputs_of(const product *p, const stream *s, const scalar *x) {
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
