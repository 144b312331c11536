/* Inputs rounded to integers of 8 bits, so that products are those of integers.
 *
 * The inputs of a group become the nearest multiples of a 127th of the largest of them, so a row's
 * integers depend on nothing else. They are the same on every CPU, and are stored as it multiplies
 * them: as bytes, plus 128 where those are unsigned; as 16 bits; or as float32, which holds them
 * and all their sums exactly.
 */
#ifndef ROUNDING_H
#define ROUNDING_H

#include <math.h>
#include <stdbool.h>

#include "vectors.h"

#if defined(__AVX512VNNI__) || (defined(__ARM_FEATURE_DOTPROD) && !defined(PLAIN))
#define MULTIPLIES_QUADS
#endif
#if defined(__AVX2__) || defined(MULTIPLIES_QUADS)
#define MULTIPLIES_INTEGERS
#endif

enum {
    LARGEST_INTEGER = 127,
#if defined(__AVX512VNNI__)
    ADDED = 128, /* to what is stored, which is unsigned */
#else
    ADDED = 0,
#endif
};
#define LEAST_ROUNDED 0x1p-112f /* a group of smaller numbers is taken for zeros */

/* What multiplies the integers of a group, and their sum if nothing was added to them. */
typedef struct { float scale, total; } rounded_group;

/* Bytes of an integer, for weights of 4 or 8 bits. */
INLINED long integer_bytes(int bits) {
#if defined(MULTIPLIES_QUADS)
    (void)bits;
    return 1;
#elif defined(MULTIPLIES_INTEGERS)
    return bits == 4 ? 1 : 2;
#else
    (void)bits;
    return 4;
#endif
}

/* To nearest, ties to even; |x| below 2^22. */
INLINED ivec nearest(vec x) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__ARM_NEON) && !defined(PLAIN)
    return (ivec)vcvtnq_s32_f32((float32x4_t)x);
#else
    vec shift = (vec){} + 12582912.0f;
    return (ivec)(x + shift) - (ivec)shift;
#endif
}

INLINED void store_integers(char *to, ivec x, long size) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    typedef int16_t halves __attribute__((vector_size(2 * LANES)));
    if (size == 1) {
#if defined(__AVX512F__)
        bytes stored = (bytes)_mm512_cvtepi32_epi8((__m512i)x);
#else
        bytes stored = __builtin_convertvector(x, bytes);
#endif
        memcpy(to, &stored, sizeof stored);
    } else if (size == 2) {
        halves stored = __builtin_convertvector(x, halves);
        memcpy(to, &stored, sizeof stored);
    } else {
        store_float((float *)to, __builtin_convertvector(x, vec));
    }
}

INLINED ivec larger(ivec a, ivec b) { return (ivec)either(a > b, (vec)a, (vec)b); }

/* The largest lane, by halves. */
INLINED int32_t largest_integer_of(ivec x) {
    typedef int32_t v4 __attribute__((vector_size(16)));
#if LANES == 16
    typedef int32_t v8 __attribute__((vector_size(32)));
    v8 low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    v8 high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v8 is_low = low > high, eight = (low & is_low) | (high & ~is_low);
#elif LANES == 8
    ivec eight = x;
#endif
#if LANES >= 8
    v4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
    v4 rest = __builtin_shufflevector(eight, eight, 4, 5, 6, 7), is_four = four > rest;
    four = (four & is_four) | (rest & ~is_four);
#else
    v4 four = x;
#endif
    int32_t a = four[0] > four[1] ? four[0] : four[1], b = four[2] > four[3] ? four[2] : four[3];
    return a > b ? a : b;
}

/* Rounds `group` inputs, a multiple of 16; what is not finite makes its scale NaN. */
INLINED rounded_group round_group(const scalar *x, long group, long size, char *to) {
    ivec most = {};
    for (long k = 0; k < group; k += LANES)
        most = larger(most, (ivec)((uvec)load(x + k) & 0x7fffffff)); /* NaN is above infinity */
    int32_t bits = largest_integer_of(most);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    bool is_finite = bits < 0x7f800000;
    float inverse = is_finite && largest >= LEAST_ROUNDED ? LARGEST_INTEGER / largest : 0;
    ivec total = {};
    for (long k = 0; k < group; k += LANES) {
        ivec integers = is_finite ? nearest(load(x + k) * inverse) : (ivec){};
        store_integers(to + k * size, integers + ADDED, size);
        if (!ADDED) total += integers;
    }
    float scale = is_finite ? largest / LARGEST_INTEGER : (float)NAN;
    return (rounded_group){scale, total_of(__builtin_convertvector(total, vec))};
}

#endif
