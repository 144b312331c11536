/* GEMM with integer weights: an integer of 4 or 8 bits stands for scale * integer + offset, with
 * the scale and the offset of its output's group of inputs.
 *
 * A weight [N, K] is packed as [N / PANEL][K / group] blocks, read one after the other:
 *
 *     scales [PANEL], offsets [PANEL]      float16 or float32
 *     words [group / COLUMNS][PANEL]       32 bits: COLUMNS = 8 or 4 consecutive inputs of an output
 *
 * Inputs are float32, and integers enter a product as float32, exactly: shifted to the first bits
 * of the mantissa of 2^bits (the bias), an integer becomes bias + integer. A group's sum begins at
 * -bias * (sum of its inputs), and is multiplied by the scale when it is complete. So nothing is
 * rounded to the storage type but the result. Pairs of bfloat16 would not be faster: measured, one
 * multiplication of pairs takes as long as four of float32 on a CPU of 2023 (Sapphire Rapids).
 *
 * One row unpacks in registers, more rows unpack a block into the L1 cache: the sums are the same
 * ones in the same order, so a row's result does not depend on the number of rows.
 */
#ifndef GROUPED_H
#define GROUPED_H

#include "gemm.h"

enum {
    PANEL_VECS = PANEL / LANES,
    PAIR_VECS = 2,
    SMALLEST_GROUP = 16,
#if LANES == 16
    ABREAST = 2, /* groups of one row whose sums are in registers */
#else
    ABREAST = 1,
#endif
    BYTES_AHEAD = 8192, /* to fetch */
};

/* ---- blocks ----------------------------------------------------------------------------------- */

INLINED long columns_of(int bits) { return 32 / bits; }
INLINED long scale_bytes(const gemm *p) { return p->has_half_scales ? 2 : 4; }
INLINED long words_at(const gemm *p) { return 2 * PANEL * scale_bytes(p); }
INLINED long block_bytes(const gemm *p) { return words_at(p) + PANEL * p->group * p->bits / 8; }

INLINED long grouped_bytes(const gemm *p) {
    return ceil_div(p->outputs, PANEL) * (p->inputs / p->group) * block_bytes(p);
}

INLINED const char *panel_of(const gemm *p, long panel) {
    return (const char *)p->weight + panel * (p->inputs / p->group) * block_bytes(p);
}

INLINED vec load_scales(const gemm *p, const char *scales) {
    if (!p->has_half_scales) return load_float((const float *)scales);
    half_vec stored;
    memcpy(&stored, scales, sizeof stored);
    return from_float16(stored);
}

INLINED uvec load_words(const char *words, int vector) {
    uvec loaded;
    memcpy(&loaded, words + vector * sizeof loaded, sizeof loaded);
    return loaded;
}

static void pack_block(const gemm *p, const uint8_t *integers, const char *scales,
                       const char *offsets, long outputs, char *to) {
    long size = scale_bytes(p), groups = p->inputs / p->group, columns = columns_of(p->bits);
    memset(to, 0, block_bytes(p));
    for (long n = 0; n < outputs; n++) {
        memcpy(to + n * size, scales + n * groups * size, size);
        memcpy(to + (PANEL + n) * size, offsets + n * groups * size, size);
        for (long k = 0; k < p->group; k += columns) {
            uint32_t word = 0;
            for (long c = 0; c < columns; c++)
                word |= (uint32_t)integers[n * p->inputs + k + c] << (c * p->bits);
            memcpy(to + words_at(p) + (k / columns * PANEL + n) * sizeof word, &word, sizeof word);
        }
    }
}

static void pack_groups_part(const gemm *p, const uint8_t *integers, const char *scales,
                             const char *offsets, char *packed, team me) {
    long groups = p->inputs / p->group, size = scale_bytes(p);
    range mine = share_of(ceil_div(p->outputs, PANEL), me);
    for (long panel = mine.begin; panel < mine.end; panel++)
        for (long g = 0; g < groups; g++) {
            long first = panel * PANEL, scale = (first * groups + g) * size;
            pack_block(p, integers + first * p->inputs + g * p->group, scales + scale,
                       offsets + scale, least(PANEL, p->outputs - first),
                       packed + (panel * groups + g) * block_bytes(p));
        }
}

/* ---- integers as vecs --------------------------------------------------------------------- */

INLINED uvec moved(uvec word, const int left) { return left >= 0 ? word << left : word >> -left; }

INLINED float bias_of(const int bits) { return 1 << bits; }

/* BIAS + the `which`th integer of a word. */
INLINED vec unpacked(uvec word, const int which, const int bits) {
    uint32_t ones = (1u << bits) - 1, exponent = 127 + bits;
    uvec integer = moved(word, 23 - bits - bits * which) & (ones << (23 - bits));
    return (vec)(integer | exponent << 23);
}

/* ---- one row ---------------------------------------------------------------------------------- */

/* sum [PANEL] += x times `abreast` groups. Their sums are independent, so that as many
 * multiplications are under way at once as the CPU can have. */
INLINED void add_groups(const int abreast, const int bits, const gemm *p, const char *block,
                        const float *x, const float *totals, vec *sum) {
    const int columns = 32 / bits;
    long size = block_bytes(p);
    vec part[ABREAST][PANEL_VECS];
#pragma GCC unroll 2
    for (int g = 0; g < abreast; g++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECS; v++) part[g][v] = (vec){} - bias_of(bits) * totals[g];
    const char *words = block + words_at(p), *end = block + size;
    for (; words < end; words += 4 * PANEL, x += columns) {
        uvec word[ABREAST][PANEL_VECS];
#pragma GCC unroll 2
        for (int g = 0; g < abreast; g++) {
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECS; v++) word[g][v] = load_words(words + g * size, v);
#pragma GCC unroll 2
            for (int line = 0; line < 4 * PANEL; line += 64)
                __builtin_prefetch(words + g * size + BYTES_AHEAD + line);
        }
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
#pragma GCC unroll 2
            for (int g = 0; g < abreast; g++)
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECS; v++)
                    part[g][v] += unpacked(word[g][v], c, bits) * x[g * p->group + c];
    }
#pragma GCC unroll 2
    for (int g = 0; g < abreast; g++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECS; v++) {
            const char *scales = block + g * size + v * LANES * scale_bytes(p);
            sum[v] += load_scales(p, scales) * part[g][v];
            sum[v] += load_scales(p, scales + PANEL * scale_bytes(p)) * totals[g];
        }
}

/* sums [PANEL] = x [K] times a panel. */
INLINED void multiply_one(const int bits, const gemm *p, const char *block, const float *x,
                          const float *totals, float *sums) {
    vec sum[PANEL_VECS] = {};
    long groups = p->inputs / p->group, size = block_bytes(p), g = 0;
    for (; g + ABREAST <= groups; g += ABREAST)
        add_groups(ABREAST, bits, p, block + g * size, x + g * p->group, totals + g, sum);
    for (; g < groups; g++)
        add_groups(1, bits, p, block + g * size, x + g * p->group, totals + g, sum);
    memcpy(sums, sum, sizeof sum);
}

/* ---- many rows -------------------------------------------------------------------------------- */

/* Up to LARGEST_GROUP inputs of PAIR outputs, unpacked. */
typedef struct {
    vec weights[LARGEST_GROUP][PAIR_VECS];
    vec scales[LARGEST_GROUP / SMALLEST_GROUP][PAIR_VECS];
    vec offsets[LARGEST_GROUP / SMALLEST_GROUP][PAIR_VECS];
} unpacked_block;

/* `count` groups of outputs [first, first + PAIR) of a panel. */
INLINED void unpack(const int bits, const gemm *p, const char *block, long first, long count,
                    unpacked_block *to) {
    const int columns = 32 / bits;
    long size = block_bytes(p);
    vec(*weights)[PAIR_VECS] = to->weights;
    for (long g = 0; g < count; g++, block += size) {
        const char *words = block + words_at(p) + first * 4, *end = block + size;
#pragma GCC unroll 2
        for (int v = 0; v < PAIR_VECS; v++) {
            const char *scales = block + (first + v * LANES) * scale_bytes(p);
            to->scales[g][v] = load_scales(p, scales);
            to->offsets[g][v] = load_scales(p, scales + PANEL * scale_bytes(p));
        }
        for (; words < end; words += 4 * PANEL, weights += columns)
#pragma GCC unroll 2
            for (int v = 0; v < PAIR_VECS; v++) {
                uvec word = load_words(words, v);
                __builtin_prefetch(words + BYTES_AHEAD + v * sizeof word);
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++) weights[c][v] = unpacked(word, c, bits);
            }
    }
}

typedef struct {
    const unpacked_block *weights;
    long count, group; /* groups and their size */
    const float *x;
    long x_stride;
    const float *totals; /* of the first group */
    long totals_stride;
    float bias;
    float *sums; /* [rows, PANEL] */
} grouped_tile;

INLINED void run_grouped_tile(const int rows, const grouped_tile *t) {
    const vec(*w)[PAIR_VECS] = t->weights->weights;
    const float *x = t->x;
    for (long g = 0; g < t->count; g++) {
        vec part[STRIP][4];
        const float *totals = t->totals + g;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PAIR_VECS; v++)
                part[r][v] = (vec){} - t->bias * totals[r * t->totals_stride];
        for (long k = 0; k < t->group; k++, w++, x++)
            add_floats(rows, PAIR_VECS, part, (const float *)w, x, t->x_stride);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PAIR_VECS; v++) {
                float *to = t->sums + r * PANEL + v * LANES;
                vec sum = load_float(to);
                sum += t->weights->scales[g][v] * part[r][v];
                sum += t->weights->offsets[g][v] * totals[r * t->totals_stride];
                store_float(to, sum);
            }
    }
}

#define GROUPED_CASE(rows) case rows: run_grouped_tile(rows, t); break;
static void grouped_tile_of(long rows, const grouped_tile *t) {
    switch (rows) {
        GROUPED_CASE(1) GROUPED_CASE(2) GROUPED_CASE(3) GROUPED_CASE(4) GROUPED_CASE(5)
        GROUPED_CASE(6)
#if LANES == 16
        GROUPED_CASE(7) GROUPED_CASE(8)
#endif
    }
}

/* sums [rows, PANEL], of which PAIR outputs from `first` on, += x times a block of inputs. */
static void multiply_unpacked(const gemm *p, const unpacked_block *weights, long begin, long count,
                              const float *x, const float *totals, long rows, float *sums) {
    long groups = p->inputs / p->group, strips = ceil_div(rows, STRIP);
    grouped_tile t = {
        .weights = weights, .count = count, .group = p->group, .x_stride = p->inputs,
        .totals_stride = groups, .bias = p->bits == 4 ? bias_of(4) : bias_of(8),
    };
    for (long s = 0; s < strips; s++) {
        range strip = share_of(rows, (team){s, strips});
        t.x = x + strip.begin * p->inputs + begin * p->group;
        t.totals = totals + strip.begin * groups + begin;
        t.sums = sums + strip.begin * PANEL;
        grouped_tile_of(strip.end - strip.begin, &t);
    }
}

static void multiply_many(const gemm *p, const char *block, const float *x, const float *totals,
                          long rows, float (*sums)[PANEL]) {
    unpacked_block weights;
    long groups = p->inputs / p->group, at_once = LARGEST_GROUP / p->group;
    memset(sums, 0, rows * sizeof *sums);
    for (long first = 0; first < PANEL; first += PAIR)
        for (long g = 0; g < groups; g += at_once) {
            long count = least(at_once, groups - g);
            if (p->bits == 4)
                unpack(4, p, block + g * block_bytes(p), first, count, &weights);
            else
                unpack(8, p, block + g * block_bytes(p), first, count, &weights);
            multiply_unpacked(p, &weights, g, count, x, totals, rows, sums[0] + first);
        }
}

/* sums = rows of x [rows, K] times a panel; totals [rows, K / group]. */
static void multiply_grouped_panel(const gemm *p, long panel, const float *x, const float *totals,
                                   long rows, float (*sums)[PANEL]) {
    const char *block = panel_of(p, panel);
    if (rows > 1)
        multiply_many(p, block, x, totals, rows, sums);
    else if (p->bits == 4)
        multiply_one(4, p, block, x, totals, sums[0]);
    else
        multiply_one(8, p, block, x, totals, sums[0]);
}

#endif
