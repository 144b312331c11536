/* Decoder operations on CPU, called from Python; library.py declares the same structs. Attention is
 * in attention.c.
 *
 * Flags of the build define the storage type (BFLOAT16, FLOAT16, else float32) and the instruction
 * set; PLAIN disables intrinsics. Sums are float32 and rounded once, when stored. Functions named *_part are one
 * thread's share of an operation; a parallel region calls several of them with barriers in between.
 * Nothing here allocates memory or needs more alignment than an element, all sizes are allowed, and
 * NaN propagates to the output row.
 */
#include "experts.h"
#include "linear.h"
#include "norm.h"

enum { WORTH_THREADS = 32768 }; /* elements */

long lanes(void) { return LANES; }

/* Elements of packed float numbers. */
long packed_size(long outputs, long inputs) { return packed_elements(outputs, inputs); }

/* Bytes of packed integers; `p` has sizes and a format, but no weight yet. */
long packed_groups_size(const gemm *p) { return packed_bytes(p); }

/* Bytes of a row's copy that the GEMM reads; 0 if it reads the row itself. */
long copy_size(const gemm *p) { return copy_bytes(p); }

void pack(const scalar *weight, scalar *packed, long outputs, long inputs, int threads) {
#pragma omp parallel num_threads(threads)
    pack_part(weight, packed, outputs, inputs, this_thread());
}

/* integers [N, K]; scales and offsets [N, K / group] of the type that `p` names, or zero points in
 * bytes in place of offsets if inputs are rounded. */
void pack_groups(const gemm *p, const uint8_t *integers, const void *scales, const void *offsets,
                 void *packed, int threads) {
#pragma omp parallel num_threads(threads)
    pack_groups_part(p, integers, scales, offsets, packed, this_thread());
}

static inline bool is_prepared(const gemm *p) { return p->group || copy_bytes(p); }

/* `copy` has space for rows of copy_size bytes; `totals` for rows of K / group numbers if the weight
 * has groups, twice as many if inputs are rounded. */
void linear(const gemm *p, const scalar *x, void *copy, float *totals, scalar *out,
            float *out_floats, long rows, int threads) {
    prepared to = {p, copy, totals};
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        if (is_prepared(p)) {
            prepare_part(x, &to, rows, me);
#pragma omp barrier
        }
        linear_part(&to, x, out, out_floats, rows, me);
    }
}

void add_rms_norm(const scalar *x, scalar *residual, const float *weight, scalar *out, long rows,
                  long size, float eps, int threads) {
    prepared none = {0};
#pragma omp parallel num_threads(threads) if (rows * size > WORTH_THREADS)
    add_rms_norm_part(x, residual, weight, out, &none, rows, size, eps, this_thread());
}

void silu_and_mul(const scalar *x, scalar *out, long rows, long size, int threads) {
    prepared none = {0};
#pragma omp parallel num_threads(threads) if (rows * size > WORTH_THREADS)
    silu_and_mul_part(x, out, &none, rows, size, this_thread());
}

void gelu_and_mul(const scalar *x, scalar *out, long rows, long size, int threads) {
    prepared none = {0};
#pragma omp parallel num_threads(threads) if (rows * size > WORTH_THREADS)
    gelu_and_mul_part(x, out, &none, rows, size, this_thread());
}

/* Weights from one layer's attention to the next layer's: output projection, MLP, next QKV. */
typedef struct {
    gemm o, gate_up, down, next_qkv; /* next_qkv has no weight after the last layer */
    const float *post_norm, *next_norm;
    const float *attention_output_norm, *mlp_output_norm; /* NULL: outputs are added as they are */
    long hidden, inner;
    float eps;
    int gelu; /* 0: the gate's activation is SiLU */
} block;

typedef struct {
    const scalar *attended; /* [T, H D] */
    scalar *residual;       /* [T, hidden], updated in place */
    scalar *hidden, *added; /* [T, hidden] */
    scalar *gate_up;        /* [T, 2 I] */
    scalar *inner;          /* [T, I] */
    scalar *qkv;            /* [T, (H + 2 Hkv) D] */
    void *copy;             /* space for a copy of any GEMM's inputs */
    float *totals;          /* space for the totals of any GEMM's inputs */
    long rows;
} stream;

/* Output projection, and the norm after attention. */
static void after_attention_part(const block *b, const stream *s, const prepared *reader, team me) {
    prepared o = {&b->o, s->copy, s->totals};
    long rows = s->rows;
    if (is_prepared(o.p)) {
        prepare_part(s->attended, &o, rows, me);
#pragma omp barrier
    }
    linear_part(&o, s->attended, s->added, NULL, rows, me);
#pragma omp barrier
    if (b->attention_output_norm) {
        rms_norm_part(s->added, b->attention_output_norm, rows, b->hidden, b->eps, me);
#pragma omp barrier
    }
    add_rms_norm_part(s->added, s->residual, b->post_norm, s->hidden, reader, rows, b->hidden,
                      b->eps, me);
}

/* The next layer's norm and QKV, of what the MLP or the experts have added. */
static void before_attention_part(const block *b, const stream *s, team me) {
    prepared qkv = {NULL, s->copy, s->totals};
    if (b->next_qkv.weight) qkv.p = &b->next_qkv;
    long rows = s->rows;
    if (b->mlp_output_norm) {
        rms_norm_part(s->added, b->mlp_output_norm, rows, b->hidden, b->eps, me);
#pragma omp barrier
    }
    add_rms_norm_part(s->added, s->residual, b->next_norm, s->hidden, &qkv, rows, b->hidden,
                      b->eps, me);
    if (qkv.p) {
#pragma omp barrier
        linear_part(&qkv, s->hidden, s->qkv, NULL, rows, me);
    }
}

void decoder_block(const block *b, const stream *s, int threads) {
    prepared gate_up = {&b->gate_up, s->copy, s->totals}, down = {&b->down, s->copy, s->totals};
    long rows = s->rows;
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        after_attention_part(b, s, &gate_up, me);
#pragma omp barrier
        linear_part(&gate_up, s->hidden, s->gate_up, NULL, rows, me);
#pragma omp barrier
        if (b->gelu)
            gelu_and_mul_part(s->gate_up, s->inner, &down, rows, b->inner, me);
        else
            silu_and_mul_part(s->gate_up, s->inner, &down, rows, b->inner, me);
#pragma omp barrier
        linear_part(&down, s->inner, s->added, NULL, rows, me);
#pragma omp barrier
        before_attention_part(b, s, me);
    }
}

/* The part of a block before its MLP, which experts stand for: hidden is their input. */
void begin_block(const block *b, const stream *s, int threads) {
    prepared none = {0};
#pragma omp parallel num_threads(threads)
    after_attention_part(b, s, &none, this_thread());
}

/* The part after it: added is their output. */
void finish_block(const block *b, const stream *s, int threads) {
#pragma omp parallel num_threads(threads)
    before_attention_part(b, s, this_thread());
}

/* Logits [rows, count] of a router [count, size]. */
void route(const scalar *x, const float *weight, float *out, long rows, long size, long count,
           int threads) {
#pragma omp parallel num_threads(threads) if (rows * size * count > WORTH_THREADS)
    route_part(x, weight, out, rows, size, count, this_thread());
}

/* x [rows, hidden] -> out, the weighted sum of the outputs of each row's experts. */
void feed_experts(const experts *e, const scalar *x, scalar *out, long rows, int threads) {
    prepared gate_up = {e->gate_up, e->copy, e->totals}, down = {e->down, e->copy, e->totals};
    long count = rows * e->top_k;
    sort_choices(e, rows);
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        gather_part(e, x, &gate_up, rows, me);
#pragma omp barrier
        multiply_experts_part(e, e->gate_up, e->gathered, e->gate_ups, NULL, me);
#pragma omp barrier
        if (e->limit)
            clamp_and_mul_part(e, &down, count, me);
        else
            silu_and_mul_part(e->gate_ups, e->inner, &down, count, e->down->inputs, me);
#pragma omp barrier
        multiply_experts_part(e, e->down, e->inner, NULL, e->outputs, me);
#pragma omp barrier
        combine_part(e, out, rows, me);
    }
}
