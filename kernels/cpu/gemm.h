/* GEMM with a model's packed weights, for any number of rows.
 *
 * A weight [N, K] is packed as [N / PANEL][K / GROUP][PANEL][GROUP], zero-padded in both sizes, so
 * that a pass over a panel reads memory sequentially. A tile keeps in registers the sums of a few
 * rows and two vectors of outputs, or with very few rows those of the whole panel.
 *
 * Inputs are float32, so that they are multiplied without conversion, except on CPUs that multiply
 * pairs of bfloat16. Every sum adds its inputs one by one in order (pairs in order, in that case)
 * in all tile sizes: a row's result depends neither on other rows nor on the number of threads.
 */
#ifndef GEMM_H
#define GEMM_H

#include <omp.h>
#include <stdbool.h>
#include <stddef.h>

#include "rounding.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define MULTIPLIES_PAIRS
typedef scalar input;
#else
typedef float input;
#endif

enum {
#if defined(BFLOAT16)
    GROUP = 2, /* consecutive inputs of one output */
#else
    GROUP = 1,
#endif
#if LANES == 16
    PANEL = 2 * LANES, /* outputs packed together */
    STRIP = 8,         /* rows with sums of two vectors in registers */
    FEW = STRIP,       /* rows with sums of a panel in registers */
#else
    PANEL = 4 * LANES,
    STRIP = 6,
    FEW = 3,
#endif
    PAIR = 2 * LANES,
    BLOCK_ROWS = 96,    /* rows per pass over a panel */
    BLOCK_INPUTS = 256, /* inputs per block of weights in the L1 cache */
    FETCH_AHEAD = 32,   /* groups */
    LARGEST_GROUP = 128, /* inputs that share a scale; a multiple of all other such groups */
};

typedef struct { long index, size; } team;
typedef struct { long begin, end; } range;

static inline team this_thread(void) { return (team){omp_get_thread_num(), omp_get_num_threads()}; }

INLINED range share_of(long count, team me) {
    return (range){count * me.index / me.size, count * (me.index + 1) / me.size};
}

INLINED long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINED long least(long a, long b) { return a < b ? a : b; }
INLINED long largest(long a, long b) { return a > b ? a : b; }

typedef struct {
    const void *weight; /* panels of float numbers, or of integers: grouped.h */
    const scalar *bias; /* [N] or NULL */
    long inputs, outputs;
    long group;         /* inputs that share a scale and an offset; 0: float numbers */
    int bits;           /* of an integer: 4 or 8 */
    int has_half_scales; /* scales and offsets are float16, else float32 */
    int rounds_inputs;   /* group by group: rounding.h */
    int is_mxfp4;        /* the integers of 4 bits are codes: grouped.h */
} gemm;

/* ---- inputs ----------------------------------------------------------------------------------- */

INLINED long input_stride(const gemm *p) { return ceil_div(p->inputs, GROUP) * GROUP; }

/* Bytes of a row's copy that the GEMM reads; 0 if it reads the row itself. */
INLINED long copy_bytes(const gemm *p) {
    if (p->rounds_inputs) return p->inputs * integer_bytes(p->bits);
    bool is_copied = sizeof(input) != sizeof(scalar) || input_stride(p) != p->inputs;
    return is_copied ? input_stride(p) * sizeof(input) : 0;
}

/* Writes elements [begin, end) of a row's copy, and zeros after the last one. */
static void copy_inputs(const scalar *x, input *to, long begin, long end, long size, long stride) {
#if defined(MULTIPLIES_PAIRS)
    memcpy(to + begin, x + begin, (end - begin) * sizeof *x);
#else
    for (long i = begin; i < end; i += LANES)
        store_some_floats(to + i, load_some(x + i, end - i), end - i);
#endif
    if (end == size)
        for (long i = size; i < stride; i++) to[i] = 0;
}

/* What a GEMM reads in addition to its inputs [rows, K], or in place of them. */
typedef struct {
    const gemm *p; /* NULL: nothing */
    void *copy;    /* [rows, input_stride], if copy_bytes */
    float *totals; /* [rows, K / group], sums over the inputs of a group, if there are groups;
                      rounded_group for each, if inputs are rounded */
} prepared;

/* Rounds elements [begin, end) of a row, which begin with a group. */
static void prepare_rounded(const scalar *x, const prepared *to, long row, long begin, long end) {
    const gemm *p = to->p;
    long size = integer_bytes(p->bits);
    rounded_group *groups = (rounded_group *)to->totals + row * p->inputs / p->group;
    char *integers = (char *)to->copy + row * p->inputs * size;
    for (long i = begin; i < end; i += p->group)
        groups[i / p->group] = round_group(x + i, p->group, size, integers + i * size);
}

/* Prepares elements [begin, end) of a row, which begin with a group. */
static void prepare(const scalar *x, const prepared *to, long row, long begin, long end) {
    const gemm *p = to->p;
    if (!p) return;
    long size = p->inputs, stride = input_stride(p), group = p->group;
    x += row * size;
    if (p->rounds_inputs) {
        prepare_rounded(x, to, row, begin, end);
        return;
    }
    if (copy_bytes(p)) copy_inputs(x, (input *)to->copy + row * stride, begin, end, size, stride);
    for (long i = begin; group && i < end; i += group) {
        vec total = {};
        for (long k = 0; k < group; k += LANES) total += load(x + i + k);
        to->totals[(row * size + i) / group] = total_of(total);
    }
}

static void prepare_part(const scalar *x, const prepared *to, long rows, team me) {
    range mine = share_of(rows, me);
    for (long row = mine.begin; row < mine.end; row++) prepare(x, to, row, 0, to->p->inputs);
}

/* ---- tiles ------------------------------------------------------------------------------------ */

/* sums [rows, PANEL or PAIR] += x @ weights, over `groups` groups of inputs. */
typedef struct {
    const void *weights;
    long weight_step; /* elements from one group to the next */
    const void *x;
    long x_stride;
    long groups;
    float *sums;
    long sums_stride;
} tile;

/* sum[r][v] += weights[v] * x[r]; keeps in registers the smaller of the two operands. */
INLINED void multiply_add(const int rows, const int vecs, vec (*sum)[4], const vec *weights,
                          const float *x, long stride) {
    if (vecs > rows) {
        vec inputs[STRIP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) inputs[r] = (vec){} + x[r * stride];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sum[r][v] += weights[v] * inputs[r];
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[r][v] += weights[v] * x[r * stride];
    }
}

INLINED void add_floats(const int rows, const int vecs, vec (*sum)[4], const float *w,
                        const float *x, long stride) {
    vec weights[4];
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) weights[v] = load_float(w + v * LANES);
    multiply_add(rows, vecs, sum, weights, x, stride);
}

#if defined(MULTIPLIES_PAIRS)
/* sum[r][v] += weights[v] * x[r], by pairs. */
INLINED void multiply_add_pairs(const int rows, const int vecs, vec (*sum)[4], const uvec *weights,
                                const input *x, long stride) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int pair;
        memcpy(&pair, x + r * stride, sizeof pair);
        __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[r][v] = (vec)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)weights[v], inputs);
    }
}

INLINED void add_packed(const int rows, const int vecs, vec (*sum)[4], const scalar *w,
                        const input *x, long stride) {
    uvec weights[4];
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++)
        memcpy(&weights[v], w + v * LANES * GROUP, sizeof weights[v]);
    multiply_add_pairs(rows, vecs, sum, weights, x, stride);
}
#else
/* The `which`th input of a group with LANES outputs. */
INLINED vec load_weights(const scalar *w, const int which) {
#if defined(BFLOAT16)
    uvec bits;
    memcpy(&bits, w, sizeof bits);
    return which ? (vec)(bits & 0xffff0000u) : (vec)(bits << 16);
#else
    (void)which;
    return load(w);
#endif
}

INLINED void add_packed(const int rows, const int vecs, vec (*sum)[4], const scalar *w,
                        const input *x, long stride) {
#pragma GCC unroll 2
    for (int which = 0; which < GROUP; which++) {
        vec weights[4];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) weights[v] = load_weights(w + v * LANES * GROUP, which);
        multiply_add(rows, vecs, sum, weights, x + which, stride);
    }
}
#endif

INLINED void run_tile(const int rows, const int vecs, const bool is_packed, const tile *t) {
    vec sum[STRIP][4];
    long groups = t->groups, step = t->weight_step, x_stride = t->x_stride;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[r][v] = load_float(t->sums + r * t->sums_stride + v * LANES);
    if (is_packed) {
        const scalar *w = t->weights;
        const input *x = t->x;
        for (long g = 0; g < groups; g++, w += step, x += GROUP) {
#pragma GCC unroll 4
            for (int line = 0; line < PANEL * GROUP * (int)sizeof *w; line += 64)
                __builtin_prefetch((const char *)(w + FETCH_AHEAD * step) + line);
            add_packed(rows, vecs, sum, w, x, x_stride);
        }
    } else {
        const float *w = t->weights, *x = t->x;
        for (long g = 0; g < groups; g++, w += step, x++)
            add_floats(rows, vecs, sum, w, x, x_stride);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            store_float(t->sums + r * t->sums_stride + v * LANES, sum[r][v]);
}

#if LANES == 16
#define MORE_CASES(vecs, is_packed, t) \
    case 7: run_tile(7, vecs, is_packed, t); break; \
    case 8: run_tile(8, vecs, is_packed, t); break;
#else
#define MORE_CASES(vecs, is_packed, t)
#endif
#define FEW_CASES(vecs, is_packed, t) \
    case 1: run_tile(1, vecs, is_packed, t); break; \
    case 2: run_tile(2, vecs, is_packed, t); break; \
    case 3: run_tile(3, vecs, is_packed, t); break;
#define CASES(vecs, is_packed, t) \
    FEW_CASES(vecs, is_packed, t) \
    case 4: run_tile(4, vecs, is_packed, t); break; \
    case 5: run_tile(5, vecs, is_packed, t); break; \
    case 6: run_tile(6, vecs, is_packed, t); break; \
    MORE_CASES(vecs, is_packed, t)

/* Weights and inputs in float32, PAIR outputs. */
static void float_tile(long rows, const tile *t) {
    switch (rows) { CASES(2, false, t) }
}

/* Packed weights, PAIR outputs. */
static void packed_tile(long rows, const tile *t) {
    switch (rows) { CASES(2, true, t) }
}

/* Packed weights, PANEL outputs, FEW rows. */
static void panel_tile(long rows, const tile *t) {
#if LANES == 16
    packed_tile(rows, t);
#else
    switch (rows) { FEW_CASES(PANEL / LANES, true, t) }
#endif
}

/* ---- a panel ---------------------------------------------------------------------------------- */

#if !defined(MULTIPLIES_PAIRS)
/* Converts `groups` groups of PAIR outputs to float32, to be read by many strips of rows. */
static void widen_weights(const scalar *w, long groups, float *to) {
    for (long g = 0; g < groups; g++, w += PANEL * GROUP, to += GROUP * PAIR)
        for (int v = 0; v < PAIR; v += LANES) {
            __builtin_prefetch(w + FETCH_AHEAD * PANEL * GROUP + v * GROUP);
#pragma GCC unroll 2
            for (int which = 0; which < GROUP; which++)
                store_float(to + which * PAIR + v, load_weights(w + v * GROUP, which));
        }
}
#endif

/* sums += x @ weights for `groups` groups of inputs and PAIR outputs, strip by strip. */
static void multiply_block(const scalar *w, const input *x, long stride, long groups, long rows,
                           float (*sums)[PANEL]) {
    long strips = ceil_div(rows, STRIP);
    tile t = {w, PANEL * GROUP, x, stride, groups, sums[0], PANEL};
    bool is_wide = false;
#if !defined(MULTIPLIES_PAIRS)
    float wide[BLOCK_INPUTS * PAIR] __attribute__((aligned(64)));
    is_wide = strips > 2;
    if (is_wide) {
        widen_weights(w, groups, wide);
        t.weights = wide, t.weight_step = PAIR, t.groups = groups * GROUP;
    }
#endif
    for (long s = 0; s < strips; s++) {
        range strip = share_of(rows, (team){s, strips});
        t.x = x + strip.begin * stride;
        t.sums = sums[strip.begin];
        (is_wide ? float_tile : packed_tile)(strip.end - strip.begin, &t);
    }
}

/* sums = rows of x [rows, stride] times one panel's weights. */
static void multiply_panel(const scalar *panel, const input *x, long stride, long rows,
                           float (*sums)[PANEL]) {
    long groups = stride / GROUP, in_block = BLOCK_INPUTS / GROUP;
    memset(sums, 0, rows * sizeof *sums);
    if (rows <= FEW) {
        tile t = {panel, PANEL * GROUP, x, stride, groups, sums[0], PANEL};
        panel_tile(rows, &t);
        return;
    }
    for (long first = 0; first < PANEL; first += PAIR)
        for (long g = 0; g < groups; g += in_block)
            multiply_block(panel + (g * PANEL + first) * GROUP, x + g * GROUP, stride,
                           least(in_block, groups - g), rows,
                           (float (*)[PANEL])(sums[0] + first));
}

INLINED long packed_elements(long outputs, long inputs) {
    return ceil_div(outputs, PANEL) * PANEL * ceil_div(inputs, GROUP) * GROUP;
}

static void pack_part(const scalar *weight, scalar *packed, long outputs, long inputs, team me) {
    long stride = ceil_div(inputs, GROUP) * GROUP;
    range mine = share_of(ceil_div(outputs, PANEL), me);
    for (long n = mine.begin * PANEL; n < mine.end * PANEL; n++) {
        scalar *to = packed + n / PANEL * PANEL * stride + n % PANEL * GROUP;
        for (long k = 0; k < stride; k++)
            to[k / GROUP * PANEL * GROUP + k % GROUP] =
                n < outputs && k < inputs ? weight[n * inputs + k] : 0;
    }
}

#endif
