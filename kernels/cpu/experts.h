/* Experts: MLPs, of which a router chooses some for each row.
 *
 * Each choice of a row is a row of its own here. These are sorted by expert, so that an expert's
 * weights are read once for all its rows. A row's outputs are added in the order of its choices: its
 * bits depend neither on other rows nor on the number of threads.
 */
#ifndef EXPERTS_H
#define EXPERTS_H

#include "linear.h"
#include "norm.h"

typedef struct {
    const gemm *gate_up, *down; /* [E] each, alike but for their weights and biases */
    long num_experts, top_k;    /* top_k: choices of a row */
    const int64_t *chosen;      /* [T, top_k] */
    const float *weights;       /* [T, top_k] */
    float limit, alpha;         /* of the clamped activation; limit 0: silu(gate) * up */
    /* Space, for N = T top_k rows: */
    int64_t *starts;   /* [E + 1]: rows of expert e are starts[e] to starts[e + 1] */
    int64_t *places;   /* [N]: the row of each choice */
    scalar *gathered;  /* [N, hidden] */
    scalar *gate_ups;  /* [N, 2 I] */
    scalar *inner;     /* [N, I] */
    float *outputs;    /* [N, hidden] */
    void *copy;        /* of the inputs of either GEMM */
    float *totals;
} experts;

/* ---- the router ------------------------------------------------------------------------------- */

/* out [rows, count] = x [rows, size] times weight [count, size], in float32. */
static void route_part(const scalar *x, const float *weight, float *out, long rows, long size,
                       long count, team me) {
    range mine = share_of(rows * count, me);
    for (long at = mine.begin; at < mine.end; at++) {
        const scalar *from = x + at / count * size;
        const float *by = weight + at % count * size;
        vec even = {}, odd = {};
        for (long i = 0; i < size; i += 2 * LANES) {
            even += load_some(from + i, size - i) * load_some_floats(by + i, size - i);
            if (i + LANES < size)
                odd += load_some(from + i + LANES, size - i - LANES) *
                       load_some_floats(by + i + LANES, size - i - LANES);
        }
        out[at] = total_of(even + odd);
    }
}

/* ---- rows by expert --------------------------------------------------------------------------- */

/* Sorts the choices by expert; those of one expert stay in order. */
static void sort_choices(const experts *e, long rows) {
    long count = rows * e->top_k;
    memset(e->starts, 0, (e->num_experts + 1) * sizeof *e->starts);
    for (long i = 0; i < count; i++) e->starts[e->chosen[i] + 1]++;
    for (long n = 0; n < e->num_experts; n++) e->starts[n + 1] += e->starts[n];
    for (long i = 0; i < count; i++) e->places[i] = e->starts[e->chosen[i]]++;
    for (long n = e->num_experts; n > 0; n--) e->starts[n] = e->starts[n - 1];
    e->starts[0] = 0;
}

/* Copies each row to the places of its choices, prepared for the GEMM that reads them. */
static void gather_part(const experts *e, const scalar *x, const prepared *reader, long rows,
                        team me) {
    long size = e->gate_up->inputs;
    range mine = share_of(rows * e->top_k, me);
    for (long i = mine.begin; i < mine.end; i++) {
        long place = e->places[i];
        memcpy(e->gathered + place * size, x + i / e->top_k * size, size * sizeof *x);
        prepare(e->gathered, reader, place, 0, size);
    }
}

/* One of the two products of all experts with their rows; `layers` are [E]. */
static void multiply_experts_part(const experts *e, const gemm *layers, const scalar *x,
                                  scalar *out, float *out_floats, team me) {
    for (long n = 0; n < e->num_experts; n++) {
        const gemm *p = layers + n;
        long first = e->starts[n], rows = e->starts[n + 1] - first;
        if (!rows) continue;
        long totals = p->group ? p->inputs / p->group * (p->rounds_inputs ? 2 : 1) : 0;
        prepared to = {p, (char *)e->copy + first * copy_bytes(p), e->totals + first * totals};
        linear_part(&to, x + first * p->inputs, out ? out + first * p->outputs : NULL,
                    out_floats ? out_floats + first * p->outputs : NULL, rows, me);
    }
}

/* (clamped up + 1) * gate * sigmoid(alpha * gate), of the clamped gate; prepared for its reader. */
static void clamp_and_mul_part(const experts *e, const prepared *reader, long rows, team me) {
    long size = e->down->inputs;
    vec most = (vec){} + e->limit, least_up = (vec){} - e->limit;
    range mine = share_of(rows, me);
    for (long row = mine.begin; row < mine.end; row++) {
        const scalar *gate = e->gate_ups + row * 2 * size;
        for (long i = 0; i < size; i += LANES) {
            vec g = load_some(gate + i, size - i), up = load_some(gate + size + i, size - i);
            g = either(g > most, most, g);
            up = either(up > most, most, either(up < least_up, least_up, up));
            vec acted = g / (exponential(g * -e->alpha) + 1.0f);
            store_some(e->inner + row * size + i, (up + 1.0f) * acted, size - i);
        }
        prepare(e->inner, reader, row, 0, size);
    }
}

/* out [rows, hidden] = the weighted sums of the outputs of each row's choices. */
static void combine_part(const experts *e, scalar *out, long rows, team me) {
    long size = e->down->outputs;
    range mine = share_of(rows, me);
    for (long row = mine.begin; row < mine.end; row++)
        for (long i = 0; i < size; i += LANES) {
            vec sum = {};
            for (long j = row * e->top_k; j < (row + 1) * e->top_k; j++)
                sum += e->weights[j] * load_some_floats(e->outputs + e->places[j] * size + i, size - i);
            store_some(out + row * size + i, sum, size - i);
        }
}

#endif
