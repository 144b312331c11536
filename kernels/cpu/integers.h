/* GEMM of integers: weights in 4 or 8 bits, and inputs that are rounded to 8 bits (rounding.h).
 *
 * A weight stands for scale * (integer - zero), with the scale and the zero of its output's group
 * of inputs: 128 with 8 bits, with 4 a multiple of an eighth below 16. It is packed as
 * [N / PANEL][K / group] blocks, read one after the other:
 *
 *     scales [PANEL]                       float16 or float32
 *     sums [PANEL]                         16 bits, where inputs are stored with an addend
 *     zeros [PANEL]                        bytes, eighths; only with 4 bits
 *     words [group / COLUMNS][PANEL]       32 bits, as integer_sums.h multiplies them
 *
 * A group's products are summed exactly and then scaled, groups are added in order in float32: a
 * row's result does not depend on the number of rows. Whatever the instruction set, the numbers
 * that are scaled are the same.
 */
#ifndef INTEGERS_H
#define INTEGERS_H

#include "integer_sums.h"

/* ---- blocks ----------------------------------------------------------------------------------- */

INLINED long sums_at(const gemm *p) { return PANEL * scale_bytes(p); }
INLINED long zeros_at(const gemm *p) { return sums_at(p) + (ADDED ? 2 * PANEL : 0); }
INLINED long integers_at(const gemm *p) { return zeros_at(p) + (p->bits == 4 ? PANEL : 0); }

INLINED long integer_block_bytes(const gemm *p) {
    return integers_at(p) + PANEL * p->group * p->bits / 8;
}

/* Sum of a group's weights as they are multiplied by quads. */
INLINED int16_t sum_of_group(const gemm *p, const uint8_t *integers, int zero) {
    long sum = 0;
    for (long k = 0; k < p->group; k++)
        sum += p->bits == 4 ? EIGHTHS * integers[k] - zero : integers[k] - MIDDLE;
    return sum;
}

static void pack_integer_block(const gemm *p, const uint8_t *integers, const char *scales,
                               const char *zero_points, long outputs, char *to) {
    const uint8_t *zeros = (const uint8_t *)zero_points;
    long size = scale_bytes(p), groups = p->inputs / p->group, columns = columns_of(p->bits);
    memset(to, 0, integer_block_bytes(p));
    for (long n = 0; n < outputs; n++, integers += p->inputs) {
        int16_t sum = sum_of_group(p, integers, zeros[n * groups]);
        memcpy(to + n * size, scales + n * groups * size, size);
        if (ADDED) memcpy(to + sums_at(p) + n * sizeof sum, &sum, sizeof sum);
        if (p->bits == 4) to[zeros_at(p) + n] = zeros[n * groups];
        for (long k = 0; k < p->group; k += columns) {
            uint32_t word = word_of(p->bits, integers + k);
            memcpy(to + integers_at(p) + (k / columns * PANEL + n) * sizeof word, &word,
                   sizeof word);
        }
    }
}

/* ---- zero points and sums ---------------------------------------------------------------------- */

INLINED uvec load_zeros(const char *zeros) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes stored;
    memcpy(&stored, zeros, sizeof stored);
#if LANES == 8 /* which GCC makes of several instructions */
    return (uvec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)stored));
#else
    return __builtin_convertvector(stored, uvec);
#endif
}

/* Each output's zero in all bytes of its lane. */
INLINED uvec repeated_zeros(const char *zeros) {
    uvec wide = load_zeros(zeros);
    wide |= wide << 8;
    return wide | wide << 16;
}

/* What each number of a group's sum is too large by, for each input. */
#if !defined(MULTIPLIES_QUADS)
INLINED vec excess_of(const int bits, const char *zeros) {
    vec bias = (vec){} + bias_of_integers(bits);
    if (bits == 8) return bias;
    return bias + __builtin_convertvector((ivec)load_zeros(zeros), vec) / EIGHTHS;
}
#endif

/* Where the sum of a group begins: less the addend of inputs. */
INLINED sum_vec start_of(const char *sums) {
#if defined(__AVX512VNNI__)
    __m256i stored;
    memcpy(&stored, sums, sizeof stored);
    return (sum_vec)_mm512_cvtepi16_epi32(stored) * -ADDED;
#else
    (void)sums;
    return (sum_vec){};
#endif
}

/* ---- tiles ------------------------------------------------------------------------------------ */

/* Rows of x times vectors of a panel's outputs. */
typedef struct {
    const gemm *p;
    const char *block;           /* of the first group */
    long first, groups;          /* output of the panel; groups of all inputs */
    const char *x;               /* [rows, K] integers */
    const rounded_group *scales; /* [rows, groups] */
    float *sums;                 /* [rows, PANEL] */
    long ahead;                  /* bytes from a block to that which this tile fetches, */
    range fetched;               /* and which of its bytes */
} integer_tile;

/* sum += part, the sums of group `g`, times its scales. */
INLINED void add_scaled(const int rows, const int vecs, const int bits, const integer_tile *t,
                        const char *block, long g, sum_vec (*part)[4], vec (*sum)[4]) {
    const gemm *p = t->p;
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) {
        long n = t->first + v * LANES;
        vec scale = load_scales(p, block + n * scale_bytes(p)) * (1.0f / divisor_of(bits));
#if !defined(MULTIPLIES_QUADS)
        vec excess = excess_of(bits, block + zeros_at(p) + n);
#endif
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const rounded_group *group = &t->scales[r * t->groups + g];
            vec whole = floats_of(part[r][v]);
#if !defined(MULTIPLIES_QUADS)
            if (has_excess(bits)) whole -= excess * group->total;
#endif
            sum[r][v] += whole * scale * group->scale;
        }
    }
}

/* sum += x times group `g`. */
INLINED void add_integer_group(const int rows, const int vecs, const int bits,
                               const integer_tile *t, long g, vec (*sum)[4]) {
    const gemm *p = t->p;
    const char *block = t->block + g * integer_block_bytes(p);
    sum_vec part[INTEGER_STRIP][4];
    uvec zeros[4];
    for (long at = t->fetched.begin; at < t->fetched.end; at += 64)
        __builtin_prefetch(block + t->ahead + at, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) {
        long n = t->first + v * LANES;
        sum_vec start = start_of(block + sums_at(p) + 2 * n);
        zeros[v] = !has_excess(bits) && bits == 4 ? repeated_zeros(block + zeros_at(p) + n) : (uvec){};
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) part[r][v] = start;
    }
    add_integers(rows, vecs, bits, p, block + integers_at(p) + t->first * 4, zeros,
                 t->x + g * p->group * integer_bytes(bits), part);
    add_scaled(rows, vecs, bits, t, block, g, part, sum);
}

INLINED void run_integer_tile(const int rows, const int vecs, const int bits,
                              const integer_tile *t) {
    vec sum[INTEGER_STRIP][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sum[r][v] = (vec){};
    for (long g = 0; g < t->groups; g++) add_integer_group(rows, vecs, bits, t, g, sum);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            store_float(t->sums + r * PANEL + t->first + v * LANES, sum[r][v]);
}

/* All outputs of the panel, for up to INTEGER_STRIP rows. */
INLINED void run_integer_strip(const int rows, const int bits, const integer_tile *t) {
    const int vecs = rows == 1 ? PANEL_VECS : PAIR_VECS;
    integer_tile part = *t;
    for (part.first = 0; part.first < PANEL; part.first += vecs * LANES)
        run_integer_tile(rows, vecs, bits, &part);
}

#define INTEGER_CASE(rows) case rows: run_integer_strip(rows, bits, t); break;
INLINED void integer_strip(long rows, const int bits, const integer_tile *t) {
    switch (rows) {
        INTEGER_CASE(1) INTEGER_CASE(2) INTEGER_CASE(3) INTEGER_CASE(4)
#if LANES != 8
        INTEGER_CASE(5) INTEGER_CASE(6)
#endif
#if LANES == 16
        INTEGER_CASE(7) INTEGER_CASE(8)
#endif
    }
}

static void integers_4(long rows, const integer_tile *t) { integer_strip(rows, 4, t); }
static void integers_8(long rows, const integer_tile *t) { integer_strip(rows, 8, t); }

/* sums = rows of x times a panel. */
static void multiply_integer_panel(const gemm *p, long panel, const char *x,
                                   const rounded_group *scales, long rows,
                                   float (*sums)[PANEL]) {
    long groups = p->inputs / p->group, row_bytes = p->inputs * integer_bytes(p->bits);
    long strips = ceil_div(rows, INTEGER_STRIP), block_bytes = integer_block_bytes(p);
    for (long s = 0; s < strips; s++) {
        range strip = share_of(rows, (team){s, strips});
        integer_tile t = {
            .p = p, .groups = groups,
            .block = (const char *)p->weight + panel * groups * block_bytes,
            .x = x + strip.begin * row_bytes, .scales = scales + strip.begin * groups,
            .sums = sums[strip.begin],
            .ahead = strips == 1 ? BYTES_AHEAD : groups * block_bytes,
            .fetched = share_of(block_bytes, (team){s, strips}),
        };
        (p->bits == 4 ? integers_4 : integers_8)(strip.end - strip.begin, &t);
    }
}

#endif
