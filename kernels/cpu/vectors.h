/* Vectors of floats, and how a vector of the stored type, bfloat16 if BF16 else float32, is read
 * and written. Needs GCC's vectors and no particular instruction set. */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#if BF16
typedef uint16_t scalar;
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES)));
enum { GROUP = 2 }; /* consecutive k of one output that lie side by side in a packed weight */

static inline vec load(const scalar *x) {
    half_vec stored;
    memcpy(&stored, x, sizeof stored);
    return (vec)(__builtin_convertvector(stored, uvec) << 16);
}

static inline void store(scalar *to, vec value) { /* to nearest, ties to even; NaN stays NaN */
    uvec bits = (uvec)value;
    uvec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, is_nan = (uvec)(value != value);
    half_vec stored = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), half_vec);
    memcpy(to, &stored, sizeof stored);
}

static inline vec rounded(vec value) { /* to the nearest value that can be stored */
    scalar stored[LANES];
    store(stored, value);
    return load(stored);
}
#else
typedef float scalar;
enum { GROUP = 1 };

static inline vec load(const scalar *x) {
    vec value;
    memcpy(&value, x, sizeof value);
    return value;
}

static inline void store(scalar *to, vec value) { memcpy(to, &value, sizeof value); }
static inline vec rounded(vec value) { return value; }
#endif

static inline vec load_float(const float *x) {
    vec value;
    memcpy(&value, x, sizeof value);
    return value;
}

static inline void store_float(float *to, vec value) { memcpy(to, &value, sizeof value); }

static inline vec either(ivec condition, vec yes, vec no) {
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

/* The sum of all lanes, by halves. */
static inline float total_of(vec x) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
              __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return four[0] + four[1];
}

/* e^x to 2 ulp, for x between the logarithms of the least and the largest float; x is held there.
 * Adding 1.5 * 2^23 leaves the nearest integer in the low bits. */
static inline vec exponential(vec x) {
    const float shift = 12582912.0f;
    vec least = (vec){} - 87.0f, most = (vec){} + 88.0f;
    x = either(x < least, least, either(x > most, most, x));
    vec shifted = x * 1.44269504f + shift, whole = shifted - shift;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = (ivec)shifted - (ivec)((vec){} + shift);
    return p * (vec)((exponent + 127) << 23);
}

#endif
