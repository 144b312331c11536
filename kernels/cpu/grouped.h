/* GEMM with integer weights: an integer of 4 or 8 bits stands for scale * integer + offset, with
 * the scale and the offset of its output's group of inputs.
 *
 * A weight [N, K] is packed as [N / PANEL][K / group] blocks, read one after the other:
 *
 *     scales [PANEL], offsets [PANEL]      float16 or float32
 *     words [group / COLUMNS][PANEL]       32 bits: COLUMNS = 8 or 4 consecutive inputs of an output
 *
 * Integers enter a product exactly, as float32, or as bfloat16 on CPUs that multiply pairs of it:
 * shifted to the first bits of a mantissa, an integer becomes bias + integer, and the bias is taken
 * from the offset. Inputs are those of gemm.h. A group's sum is multiplied by the scale when it is
 * complete, and the offset by the sum of the group's inputs, so that nothing is rounded to the
 * storage type but the result.
 *
 * Codes of MXFP4 are no integers, but stand for a few numbers, which bfloat16 and float32 have, too;
 * their offsets are 0.
 *
 * Weights are unpacked in registers, for each strip of rows anew: there is time for it while many
 * rows wait for the multipliers. With few registers, many rows unpack a block into the L1 cache
 * instead. The sums are the same ones in the same order: a row's result does not depend on the
 * number of rows.
 */
#ifndef GROUPED_H
#define GROUPED_H

#include "gemm.h"

enum {
    PANEL_VECS = PANEL / LANES,
    PAIR_VECS = 2,
    BYTES_AHEAD = 8192, /* to fetch */
    HAS_FEW_REGISTERS = LANES < 16,
};

/* What the bits of a weight stand for. */
typedef enum { INTEGERS_4, INTEGERS_8, CODES_4 } format;

INLINED format format_of(const gemm *p) {
    return p->bits == 8 ? INTEGERS_8 : p->is_mxfp4 ? CODES_4 : INTEGERS_4;
}

INLINED int bits_of(const format f) { return f == INTEGERS_8 ? 8 : 4; }

/* ---- blocks ----------------------------------------------------------------------------------- */

INLINED long columns_of(int bits) { return 32 / bits; }
INLINED long scale_bytes(const gemm *p) { return p->has_half_scales ? 2 : 4; }
INLINED long words_at(const gemm *p) { return 2 * PANEL * scale_bytes(p); }
INLINED long block_bytes(const gemm *p) { return words_at(p) + PANEL * p->group * p->bits / 8; }

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

/* ---- integers as factors ---------------------------------------------------------------------- */

INLINED uvec moved(uvec word, const int left) { return left >= 0 ? word << left : word >> -left; }

#if defined(MULTIPLIES_PAIRS)
typedef uvec factors; /* pairs of bfloat16 */
enum { STEP = 2 };    /* inputs multiplied at once */

/* What is added to an integer: 8 bits are as many as bfloat16 has, and are converted. */
INLINED float bias_of(const format f) { return f == INTEGERS_4 ? 16 : 0; }

/* The bits of a word where pack_block puts its `c`th integer: those of a pair are 16 bits apart. */
INLINED int place_of(int bits, long c) { return c / 2 * bits + c % 2 * 16; }

INLINED uvec float_bits(uvec integers) {
    return (uvec)_mm512_cvtepi32_ps((__m512i)integers);
}

/* The numbers of two codes, which are the low bits of each half of a word. */
INLINED factors pair_of_codes(uvec codes) {
    typedef uint16_t numbers __attribute__((vector_size(64)));
    const numbers table = {
        0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
        0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    };
    return (uvec)_mm512_permutexvar_epi16((__m512i)(codes & 0x000f000fu), (__m512i)table);
}

/* bias + the `step`th pair of integers of a word. */
INLINED factors unpacked(uvec word, const int step, const format f) {
    if (f == CODES_4) return pair_of_codes(moved(word, -4 * step));
    if (f == INTEGERS_4) return (moved(word, 3 - 4 * step) & 0x00780078u) | 0x41804180u;
    uvec even = float_bits(moved(word, -8 * step) & 0xff);
    uvec odd = float_bits(moved(word, -16 - 8 * step) & 0xff);
    return odd | even >> 16;
}

INLINED void multiply_add_factors(const int rows, const int vecs, vec (*sum)[4],
                                  const factors *weights, const input *x, long stride) {
    multiply_add_pairs(rows, vecs, sum, weights, x, stride);
}
#else
typedef vec factors;
enum { STEP = 1 };

INLINED float bias_of(const format f) { return f == CODES_4 ? 0 : 1 << bits_of(f); }

INLINED int place_of(int bits, long c) { return c * bits; }

/* The numbers of the `step`th codes: two bits of exponent and one of mantissa, below a sign. */
INLINED vec numbers_of_codes(uvec word, const int step) {
#if defined(__AVX512F__)
    const vec table = {
        0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
    };
    return (vec)_mm512_permutexvar_ps((__m512i)moved(word, -4 * step), (__m512)table);
#else
    uvec sign = moved(word, 28 - 4 * step) & 0x80000000u;
#if defined(__AVX2__)
    const vec table = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    vec size = (vec)_mm256_permutevar8x32_ps((__m256)table, (__m256i)moved(word, -4 * step));
#else
    uvec bits = moved(word, -4 * step) & 7;
    vec normal = (vec)((bits << 22) + (126u << 23));
    vec size = either((ivec)(bits < 2), 2.0f * (normal - 0.5f), normal);
#endif
    return (vec)((uvec)size | sign);
#endif
}

/* bias + the `step`th integer of a word, which is shifted to the first bits of the bias's mantissa. */
INLINED factors unpacked(uvec word, const int step, const format f) {
    if (f == CODES_4) return numbers_of_codes(word, step);
    const int bits = bits_of(f);
    uint32_t ones = (1u << bits) - 1, exponent = 127 + bits;
    uvec integer = moved(word, 23 - bits - bits * step) & (ones << (23 - bits));
    return (vec)(integer | exponent << 23);
}

INLINED void multiply_add_factors(const int rows, const int vecs, vec (*sum)[4],
                                  const factors *weights, const input *x, long stride) {
    multiply_add(rows, vecs, sum, weights, x, stride);
}
#endif

/* ---- packing ---------------------------------------------------------------------------------- */

INLINED uint32_t word_in_places(int bits, const uint8_t *integers) {
    uint32_t word = 0;
    for (int c = 0; c < 32 / bits; c++) word |= (uint32_t)integers[c] << place_of(bits, c);
    return word;
}

static void pack_block(const gemm *p, const uint8_t *integers, const char *scales,
                       const char *offsets, long outputs, char *to) {
    long size = scale_bytes(p), groups = p->inputs / p->group, columns = columns_of(p->bits);
    memset(to, 0, block_bytes(p));
    for (long n = 0; n < outputs; n++) {
        memcpy(to + n * size, scales + n * groups * size, size);
        memcpy(to + (PANEL + n) * size, offsets + n * groups * size, size);
        for (long k = 0; k < p->group; k += columns) {
            uint32_t word = word_in_places(p->bits, integers + n * p->inputs + k);
            memcpy(to + words_at(p) + (k / columns * PANEL + n) * sizeof word, &word, sizeof word);
        }
    }
}

/* ---- tiles ------------------------------------------------------------------------------------ */

/* Up to LARGEST_GROUP inputs of PAIR outputs, unpacked. */
typedef struct {
    factors weights[LARGEST_GROUP / STEP][PAIR_VECS];
} unpacked_block;

/* Rows of x times vectors of a panel's outputs. */
typedef struct {
    const gemm *p;
    const char *block;              /* of the first group */
    const unpacked_block *unpacked; /* the same, or NULL */
    long first;                     /* output of the panel */
    long count, groups;             /* groups of this tile, and of all inputs */
    const input *x;                 /* [rows, K] */
    const float *totals;            /* [rows, K / group] */
    float *sums;                    /* [rows, PANEL] */
} grouped_tile;

/* part += x times the words of a group. */
INLINED void add_words(const int rows, const int vecs, const format f, const gemm *p,
                       const char *words, const input *x, vec (*part)[4]) {
    const int columns = 32 / bits_of(f);
    const input *end = x + p->group;
    for (; x < end; x += columns, words += 4 * PANEL) {
        uvec word[4];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            word[v] = load_words(words, v);
            __builtin_prefetch(words + BYTES_AHEAD + v * sizeof(uvec));
        }
#pragma GCC unroll 8
        for (int step = 0; step < columns / STEP; step++) {
            factors weights[4];
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) weights[v] = unpacked(word[v], step, f);
            multiply_add_factors(rows, vecs, part, weights, x + step * STEP, p->inputs);
        }
    }
}

/* part += x times unpacked weights. */
INLINED void add_unpacked(const int rows, const gemm *p, const factors (*weights)[PAIR_VECS],
                          const input *x, vec (*part)[4]) {
    for (const input *end = x + p->group; x < end; x += STEP, weights++)
        multiply_add_factors(rows, PAIR_VECS, part, *weights, x, p->inputs);
}

/* sum += x times group `g` of the tile. */
INLINED void add_group(const int rows, const int vecs, const format f, const bool is_unpacked,
                       const grouped_tile *t, long g, vec (*sum)[4]) {
    const gemm *p = t->p;
    const char *block = t->block + g * block_bytes(p);
    const input *x = t->x + g * p->group;
    vec part[STRIP][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) part[r][v] = (vec){};
    if (is_unpacked)
        add_unpacked(rows, p, t->unpacked->weights + g * p->group / STEP, x, part);
    else
        add_words(rows, vecs, f, p, block + words_at(p) + t->first * 4, x, part);
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) {
        const char *at = block + (t->first + v * LANES) * scale_bytes(p);
        vec scale = load_scales(p, at);
        vec offset = load_scales(p, at + PANEL * scale_bytes(p)) - bias_of(f) * scale;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r][v] += scale * part[r][v];
            sum[r][v] += offset * t->totals[r * t->groups + g];
        }
    }
}

INLINED void run_grouped_tile(const int rows, const int vecs, const format f,
                              const bool is_unpacked, const grouped_tile *t) {
    vec sum[STRIP][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[r][v] = load_float(t->sums + r * PANEL + t->first + v * LANES);
    for (long g = 0; g < t->count; g++) add_group(rows, vecs, f, is_unpacked, t, g, sum);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            store_float(t->sums + r * PANEL + t->first + v * LANES, sum[r][v]);
}

/* Up to STRIP rows: a tile if it is unpacked, else all outputs of the panel. */
INLINED void run_grouped_strip(const int rows, const format f, const bool is_unpacked,
                               const grouped_tile *t) {
    if (is_unpacked) {
        run_grouped_tile(rows, PAIR_VECS, f, true, t);
        return;
    }
    const int vecs = rows == 1 ? PANEL_VECS : PAIR_VECS;
    grouped_tile part = *t;
    for (part.first = 0; part.first < PANEL; part.first += vecs * LANES)
        run_grouped_tile(rows, vecs, f, false, &part);
}

#define GROUPED_CASE(rows) case rows: run_grouped_strip(rows, f, is_unpacked, t); break;
INLINED void strip_of(long rows, const format f, const bool is_unpacked, const grouped_tile *t) {
    switch (rows) {
        GROUPED_CASE(1) GROUPED_CASE(2) GROUPED_CASE(3) GROUPED_CASE(4) GROUPED_CASE(5)
        GROUPED_CASE(6)
#if LANES == 16
        GROUPED_CASE(7) GROUPED_CASE(8)
#endif
    }
}

typedef void grouped_strip(long rows, const grouped_tile *t);
static void packed_4(long rows, const grouped_tile *t) { strip_of(rows, INTEGERS_4, false, t); }
static void packed_8(long rows, const grouped_tile *t) { strip_of(rows, INTEGERS_8, false, t); }
static void packed_codes(long rows, const grouped_tile *t) { strip_of(rows, CODES_4, false, t); }
static void unpacked_4(long rows, const grouped_tile *t) { strip_of(rows, INTEGERS_4, true, t); }
static void unpacked_8(long rows, const grouped_tile *t) { strip_of(rows, INTEGERS_8, true, t); }
static void unpacked_codes(long rows, const grouped_tile *t) { strip_of(rows, CODES_4, true, t); }

static grouped_strip *const OF_PACKED[] = {packed_4, packed_8, packed_codes};
static grouped_strip *const OF_UNPACKED[] = {unpacked_4, unpacked_8, unpacked_codes};

/* ---- a panel ---------------------------------------------------------------------------------- */

INLINED void unpack(const format f, const grouped_tile *t, unpacked_block *to) {
    const gemm *p = t->p;
    const int steps = 32 / bits_of(f) / STEP;
    const char *block = t->block;
    factors(*weights)[PAIR_VECS] = to->weights;
    for (long g = 0; g < t->count; g++, block += block_bytes(p)) {
        const char *words = block + words_at(p) + t->first * 4, *end = block + block_bytes(p);
        for (; words < end; words += 4 * PANEL, weights += steps)
#pragma GCC unroll 2
            for (int v = 0; v < PAIR_VECS; v++) {
                uvec word = load_words(words, v);
                __builtin_prefetch(words + BYTES_AHEAD + v * sizeof word);
#pragma GCC unroll 8
                for (int step = 0; step < steps; step++)
                    weights[step][v] = unpacked(word, step, f);
            }
    }
}

/* sums += rows of x times a tile, or times all outputs of a panel, strip by strip. */
static void multiply_strips(const grouped_tile *t, long rows, grouped_strip *multiply) {
    long strips = ceil_div(rows, STRIP);
    for (long s = 0; s < strips; s++) {
        range strip = share_of(rows, (team){s, strips});
        grouped_tile part = *t;
        part.x += strip.begin * t->p->inputs;
        part.totals += strip.begin * t->groups;
        part.sums += strip.begin * PANEL;
        multiply(strip.end - strip.begin, &part);
    }
}

/* Unpacks a block once for all strips. */
static void multiply_unpacked(const grouped_tile *all, long rows) {
    unpacked_block weights;
    const gemm *p = all->p;
    long at_once = LARGEST_GROUP / p->group;
    for (long first = 0; first < PANEL; first += PAIR)
        for (long g = 0; g < all->groups; g += at_once) {
            grouped_tile t = *all;
            t.unpacked = &weights, t.first = first, t.count = least(at_once, all->groups - g);
            t.block += g * block_bytes(p), t.x += g * p->group, t.totals += g;
            switch (format_of(p)) {
            case INTEGERS_4: unpack(INTEGERS_4, &t, &weights); break;
            case INTEGERS_8: unpack(INTEGERS_8, &t, &weights); break;
            case CODES_4: unpack(CODES_4, &t, &weights); break;
            }
            multiply_strips(&t, rows, OF_UNPACKED[format_of(p)]);
        }
}

/* sums = rows of x [rows, K] times a panel; totals [rows, K / group]. */
static void multiply_grouped_panel(const gemm *p, long panel, const input *x, const float *totals,
                                   long rows, float (*sums)[PANEL]) {
    long groups = p->inputs / p->group;
    grouped_tile t = {
        .p = p, .block = panel_of(p, panel), .count = groups, .groups = groups,
        .x = x, .totals = totals, .sums = sums[0],
    };
    memset(sums, 0, rows * sizeof *sums);
    if (HAS_FEW_REGISTERS && rows > 2 * STRIP)
        multiply_unpacked(&t, rows);
    else
        multiply_strips(&t, rows, OF_PACKED[format_of(p)]);
}

#endif
