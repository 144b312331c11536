/* Exact sums of products of integers: a group of weights in 4 or 8 bits times rounded inputs.
 *
 * What the CPU multiplies decides how a word holds its integers, and what is added to them:
 *
 *     quads   four signed bytes of weights by four bytes of inputs, in one instruction
 *     pairs   of 16 bits; 4 bits as unsigned bytes by signed ones, whose sums fit 16 bits for a while
 *     floats  float32, which holds all these sums exactly
 */
#ifndef INTEGER_SUMS_H
#define INTEGER_SUMS_H

#include "grouped.h"

enum {
#if defined(MULTIPLIES_INTEGERS)
    INTEGER_STRIP = LANES == 16 ? 8 : LANES == 8 ? 4 : STRIP, /* rows whose sums are in registers */
#else
    INTEGER_STRIP = STRIP,
#endif
    EIGHTHS = 8,      /* of a step: the unit of the zero point of 4 bits */
    MIDDLE = 128,     /* the zero point of 8 bits */
    INPUTS_IN_16_BITS = 32, /* 16 sums of two products of at most 15 * 127 */
};

#if defined(MULTIPLIES_INTEGERS)
typedef ivec sum_vec;
INLINED vec floats_of(sum_vec x) { return __builtin_convertvector(x, vec); }
#else
typedef vec sum_vec;
INLINED vec floats_of(sum_vec x) { return x; }
#endif

/* The 32 bits at `at`, in every lane. */
INLINED ivec repeated(const char *at) {
    int32_t bits;
    memcpy(&bits, at, sizeof bits);
    return (ivec){} + bits;
}

INLINED void load_all(const int vecs, const char *words, uvec *to) {
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) to[v] = load_words(words, v);
}

#if defined(MULTIPLIES_QUADS)
/* With 4 bits, eighths of a step above the zero point. */
INLINED int divisor_of(const int bits) { return bits == 4 ? EIGHTHS : 1; }
INLINED bool has_excess(const int bits) { return (void)bits, false; }

INLINED uint32_t word_of(int bits, const uint8_t *integers) {
    uint32_t word = 0;
    for (int c = 0; c < 32 / bits; c++)
        word |= bits == 4 ? (uint32_t)integers[c] << (c % 4 * 8 + c / 4 * 4)
                          : (uint32_t)(uint8_t)(integers[c] - MIDDLE) << 8 * c;
    return word;
}

/* The `half`th four integers of a word, as signed bytes; zeros are eighths, in each byte. */
INLINED ivec quad_of(uvec word, const int half, const int bits, uvec zeros) {
    typedef int8_t bytes __attribute__((vector_size(4 * LANES)));
    if (bits == 8) return (ivec)word;
    uvec eighths = (half ? word >> 1 : word << 3) & 0x78787878u;
    return (ivec)((bytes)eighths - (bytes)zeros);
}

INLINED ivec add_quads(ivec sum, ivec weights, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
#else
    return (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)x);
#endif
}

/* part += x times a group. */
INLINED void add_integers(const int rows, const int vecs, const int bits, const gemm *p,
                          const char *words, const uvec *zeros, const char *x,
                          sum_vec (*part)[4]) {
    const int columns = 32 / bits;
    for (const char *end = x + p->group; x < end; x += columns, words += 4 * PANEL) {
        uvec word[4];
        load_all(vecs, words, word);
#pragma GCC unroll 2
        for (int half = 0; half < columns / 4; half++) {
            ivec weights[4];
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) weights[v] = quad_of(word[v], half, bits, zeros[v]);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                ivec four = repeated(x + r * p->inputs + 4 * half);
#pragma GCC unroll 4
                for (int v = 0; v < vecs; v++)
                    part[r][v] = add_quads(part[r][v], weights[v], four);
            }
        }
    }
}

#elif defined(MULTIPLIES_INTEGERS)
INLINED int divisor_of(const int bits) { return (void)bits, 1; }
INLINED bool has_excess(const int bits) { return bits == 4; }
INLINED float bias_of_integers(const int bits) { return (void)bits, 0; }

INLINED uint32_t word_of(int bits, const uint8_t *integers) {
    uint32_t word = 0;
    for (int c = 0; c < 32 / bits; c++)
        word |= bits == 4 ? (uint32_t)integers[c] << (c % 4 * 8 + c / 4 * 4)
                          : (uint32_t)(uint8_t)(integers[c] - MIDDLE) << (c / 2 * 8 + c % 2 * 16);
    return word;
}

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

#if LANES == 16
INLINED shorts products_of_bytes(uvec weights, ivec x) {
    return (shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
}
INLINED ivec products_of_pairs(shorts a, shorts b) {
    return (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#else
INLINED shorts products_of_bytes(uvec weights, ivec x) {
    return (shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
}
INLINED ivec products_of_pairs(shorts a, shorts b) {
    return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#endif

/* sum += x times words of 4 bits, in 16 bits; words of at most INPUTS_IN_16_BITS. */
INLINED void add_nibbles(const int rows, const int vecs, const char *words, const char *x,
                         long inputs, long stride, shorts (*sum)[4]) {
    for (const char *end = x + inputs; x < end; x += 8, words += 4 * PANEL) {
        uvec word[4];
        load_all(vecs, words, word);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            uvec weights[4];
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) weights[v] = word[v] >> (4 * half) & 0x0f0f0f0fu;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                ivec four = repeated(x + r * stride + 4 * half);
#pragma GCC unroll 4
                for (int v = 0; v < vecs; v++) sum[r][v] += products_of_bytes(weights[v], four);
            }
        }
    }
}

/* part += x times words of 8 bits, by pairs of 16. */
INLINED void add_pairs(const int rows, const int vecs, const gemm *p, const char *words,
                       const char *x, sum_vec (*part)[4]) {
    for (const char *end = x + 2 * p->group; x < end; x += 8, words += 4 * PANEL) {
        uvec word[4];
        load_all(vecs, words, word);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            shorts weights[4];
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++)
                weights[v] = (half ? (shorts)word[v] : (shorts)word[v] << 8) >> 8;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                shorts pair = (shorts)repeated(x + 2 * r * p->inputs + 4 * half);
#pragma GCC unroll 4
                for (int v = 0; v < vecs; v++)
                    part[r][v] += products_of_pairs(weights[v], pair);
            }
        }
    }
}

/* part += x times a group. */
INLINED void add_integers(const int rows, const int vecs, const int bits, const gemm *p,
                          const char *words, const uvec *zeros, const char *x,
                          sum_vec (*part)[4]) {
    (void)zeros;
    if (bits == 8) {
        add_pairs(rows, vecs, p, words, x, part);
        return;
    }
    long inputs = least(p->group, INPUTS_IN_16_BITS);
    for (long k = 0; k < p->group; k += inputs, x += inputs, words += inputs / 8 * 4 * PANEL) {
        shorts sum[INTEGER_STRIP][4];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[r][v] = (shorts){};
        add_nibbles(rows, vecs, words, x, inputs, p->inputs, sum);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++)
                part[r][v] += products_of_pairs(sum[r][v], (shorts){} + 1);
    }
}

#else
INLINED int divisor_of(const int bits) { return (void)bits, 1; }
INLINED bool has_excess(const int bits) { return (void)bits, true; }
INLINED format integers_of_bits(const int bits) { return bits == 8 ? INTEGERS_8 : INTEGERS_4; }

INLINED float bias_of_integers(const int bits) {
    return bias_of(integers_of_bits(bits)) + (bits == 8 ? MIDDLE : 0);
}

INLINED uint32_t word_of(int bits, const uint8_t *integers) {
    return word_in_places(bits, integers);
}

/* part += x times a group. */
INLINED void add_integers(const int rows, const int vecs, const int bits, const gemm *p,
                          const char *words, const uvec *zeros, const char *x,
                          sum_vec (*part)[4]) {
    (void)zeros;
    add_words(rows, vecs, integers_of_bits(bits), p, words, (const input *)x, part);
}
#endif

#endif
