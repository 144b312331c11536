/* Float vectors of the instruction set's width, with loads and stores of the storage type:
 * bfloat16, float16 or, without either definition, float32.
 *
 * GCC lowers its vector types to the instruction set given by the flags; intrinsics are used only
 * for conversions that it does not find itself. Nothing is aligned to more than an element.
 */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && !defined(PLAIN)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

/* Specialized at every call for constant arguments. */
#define INLINED static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES)));

INLINED vec load_float(const float *x) {
    vec value;
    memcpy(&value, x, sizeof value);
    return value;
}

INLINED void store_float(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINED vec either(ivec condition, vec yes, vec no) {
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

/* ---- float16, whatever the storage type ------------------------------------------------------- */

#if defined(__AVX512F__)
INLINED vec from_float16(half_vec stored) { return (vec)_mm512_cvtph_ps((__m256i)stored); }
#elif defined(__F16C__)
INLINED vec from_float16(half_vec stored) { return (vec)_mm256_cvtph_ps((__m128i)stored); }
#elif defined(__ARM_NEON) && !defined(PLAIN)
INLINED vec from_float16(half_vec stored) { return (vec)vcvt_f32_f16((float16x4_t)stored); }
#else
/* The exponent bias differs by 112; multiplying by 2^112 is right for subnormal numbers too. */
INLINED vec from_float16(half_vec stored) {
    uvec bits = __builtin_convertvector(stored, uvec), size = bits & 0x7fff;
    uvec finite = (uvec)((vec)(size << 13) * 0x1p112f), is_large = (uvec)(size >= 0x7c00);
    return (vec)(finite | (is_large & 0x7f800000) | (bits & 0x8000) << 16);
}
#endif

/* ---- integers of 16 bits ---------------------------------------------------------------------- */

/* GCC makes these of several instructions where x86 has one. */
#if defined(__AVX512F__)
INLINED uvec integers_of(half_vec x) { return (uvec)_mm512_cvtepu16_epi32((__m256i)x); }
INLINED half_vec low_halves(uvec x) { return (half_vec)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
INLINED uvec integers_of(half_vec x) { return (uvec)_mm256_cvtepu16_epi32((__m128i)x); }
INLINED half_vec low_halves(uvec x) { return __builtin_convertvector(x, half_vec); }
#else
INLINED uvec integers_of(half_vec x) { return __builtin_convertvector(x, uvec); }
INLINED half_vec low_halves(uvec x) { return __builtin_convertvector(x, half_vec); }
#endif

/* ---- storage type: rounds to nearest even; NaN stays NaN -------------------------------------- */

#if defined(BFLOAT16)
typedef uint16_t scalar;

INLINED vec widened(half_vec stored) { return (vec)(integers_of(stored) << 16); }

INLINED uvec nearest_bits(vec value) { /* result in the low half of each lane */
    uvec bits = (uvec)value, is_nan = (uvec)(value != value);
    uvec nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (nearest & ~is_nan) | (is_nan & 0x7fc0);
}

INLINED half_vec narrowed(vec value) { return low_halves(nearest_bits(value)); }

INLINED vec rounded(vec value) { return (vec)(nearest_bits(value) << 16); }

#elif defined(FLOAT16)
typedef uint16_t scalar;

INLINED vec widened(half_vec stored) { return from_float16(stored); }

#if defined(__AVX512F__)
INLINED half_vec narrowed(vec value) { return (half_vec)_mm512_cvtps_ph((__m512)value, 0); }
#elif defined(__F16C__)
INLINED half_vec narrowed(vec value) { return (half_vec)_mm256_cvtps_ph((__m256)value, 0); }
#elif defined(__ARM_NEON) && !defined(PLAIN)
INLINED half_vec narrowed(vec value) { return (half_vec)vcvt_f16_f32((float32x4_t)value); }
#else
/* Below the least normal number, adding 0.5 puts the nearest multiple of 2^-24 in the low bits. */
INLINED half_vec narrowed(vec value) {
    uvec bits = (uvec)value, sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    uvec normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uvec subnormal = (uvec)((vec)size + 0.5f) - 0x3f000000;
    uvec is_small = (uvec)(size < 0x38800000), is_large = (uvec)(size >= 0x47800000);
    uvec is_nan = (uvec)(value != value);
    uvec nearest = (is_small & subnormal) | (~is_small & normal);
    nearest = (nearest & ~is_large) | (is_large & 0x7c00) | (is_nan & 0x0200);
    return __builtin_convertvector(nearest | sign, half_vec);
}
#endif

INLINED vec rounded(vec value) { return widened(narrowed(value)); }

#else
typedef float scalar;

INLINED vec rounded(vec value) { return value; }
#endif

#if defined(BFLOAT16) || defined(FLOAT16)
INLINED vec load(const scalar *x) {
    half_vec stored;
    memcpy(&stored, x, sizeof stored);
    return widened(stored);
}

INLINED void store(scalar *to, vec value) {
    half_vec stored = narrowed(value);
    memcpy(to, &stored, sizeof stored);
}
#else
INLINED vec load(const scalar *x) { return load_float(x); }
INLINED void store(scalar *to, vec value) { store_float(to, value); }
#endif

/* ---- end of a row, with `count` elements left ------------------------------------------------- */

INLINED vec load_some(const scalar *x, long count) { /* padded with zeros */
    if (__builtin_expect(count >= LANES, 1)) return load(x);
    scalar last[LANES] = {0};
    memcpy(last, x, count * sizeof *x);
    return load(last);
}

INLINED vec load_some_floats(const float *x, long count) { /* padded with zeros */
    if (__builtin_expect(count >= LANES, 1)) return load_float(x);
    float last[LANES] = {0};
    memcpy(last, x, count * sizeof *x);
    return load_float(last);
}

INLINED void store_some(scalar *to, vec value, long count) {
    if (__builtin_expect(count >= LANES, 1)) {
        store(to, value);
        return;
    }
    scalar last[LANES];
    store(last, value);
    memcpy(to, last, count * sizeof *to);
}

INLINED void store_some_floats(float *to, vec value, long count) {
    memcpy(to, &value, (count < LANES ? count : LANES) * sizeof *to);
}

/* ---- keys and values in the cache: of the storage type, or FP8 -------------------------------- */

/* FP8 saturates at the largest finite number; what is not finite is stored as NaN, 0x7f. A float
 * with this exponent and mantissa has the stored number's normal value; below the least of these,
 * where the exponent is 0, that value is 2^-BIAS plus half of the subnormal number. */
#if defined(KV_E4M3) || defined(KV_E5M2)
typedef uint8_t cached;
typedef uint8_t byte_vec __attribute__((vector_size(LANES)));
#if defined(KV_E4M3)
enum { KV_MANTISSA = 3, KV_BIAS = 7, KV_LARGEST = 0x7e };
#define KV_UNITS 0x1p14f /* its last bit is the unit of subnormal numbers, 2^-9 */
#else
enum { KV_MANTISSA = 2, KV_BIAS = 15, KV_LARGEST = 0x7b };
#define KV_UNITS 0x1p7f /* 2^-16 */
#endif
enum { KV_DROPPED = 23 - KV_MANTISSA, KV_REBIAS = 127 - KV_BIAS };

INLINED vec from_fp8(uvec bits) { /* below 256 */
    uvec size = bits & 0x7f;
    vec normal = (vec)((size << KV_DROPPED) + ((uint32_t)KV_REBIAS << 23));
    vec least = (vec)((uvec){} + ((uint32_t)KV_REBIAS << 23));
    vec value = either((ivec)(size < (1u << KV_MANTISSA)), 2.0f * (normal - least), normal);
    uvec is_not_finite = (uvec)(size > KV_LARGEST);
    return (vec)((uvec)value | (is_not_finite & 0x7fc00000) | (bits & 0x80) << 24);
}

INLINED vec load_cached(const cached *x) {
    byte_vec stored;
    memcpy(&stored, x, sizeof stored);
    return from_fp8(__builtin_convertvector(stored, uvec));
}

INLINED void store_cached(cached *to, vec value, float inverse) {
    uint32_t largest = ((uint32_t)KV_LARGEST << KV_DROPPED) + ((uint32_t)KV_REBIAS << 23);
    vec most = (vec)((uvec){} + largest);
    uvec is_finite = (uvec)(((uvec)value & 0x7fffffff) < 0x7f800000);
    uvec bits = (uvec)(value * inverse), size = bits & 0x7fffffff;
    size = (uvec)either((ivec)(size > (uvec)most), most, (vec)size);
    uvec normal = size - ((uint32_t)KV_REBIAS << 23) + (1u << (KV_DROPPED - 1)) - 1;
    normal = (normal + (size >> KV_DROPPED & 1)) >> KV_DROPPED;
    uvec small = (uvec)((vec)size + KV_UNITS) - (uvec)((vec){} + KV_UNITS);
    uvec is_small = (uvec)(size < ((uint32_t)KV_REBIAS + 1) << 23);
    uvec code = (is_small & small) | (~is_small & normal);
    code = (is_finite & code) | (~is_finite & 0x7f) | (bits >> 24 & 0x80);
    byte_vec stored = __builtin_convertvector(code, byte_vec);
    memcpy(to, &stored, sizeof stored);
}
#else
typedef scalar cached;

INLINED vec load_cached(const cached *x) { return load(x); }
INLINED void store_cached(cached *to, vec value, float inverse) { store(to, value); }
#endif

/* The `which`th of the numbers in each word. */
INLINED vec cached_of_word(uvec word, const int which) {
#if defined(KV_E4M3) || defined(KV_E5M2)
    return from_fp8(word >> (8 * which) & 0xff);
#elif defined(BFLOAT16)
    return which ? (vec)(word & 0xffff0000u) : (vec)(word << 16);
#elif defined(FLOAT16)
    return widened(low_halves(which ? word >> 16 : word & 0xffff));
#else
    return (void)which, (vec)word;
#endif
}

INLINED vec load_some_cached(const cached *x, long count) { /* padded with zeros */
    if (__builtin_expect(count >= LANES, 1)) return load_cached(x);
    cached last[LANES] = {0};
    memcpy(last, x, count * sizeof *x);
    return load_cached(last);
}

INLINED void store_some_cached(cached *to, vec value, float inverse, long count) {
    cached last[LANES];
    store_cached(count >= LANES ? to : last, value, inverse);
    if (count < LANES) memcpy(to, last, count * sizeof *to);
}

/* ---- functions over all lanes ----------------------------------------------------------------- */

/* Sum over all lanes, by halves. */
INLINED float total_of(vec x) {
    typedef float v4 __attribute__((vector_size(16)));
#if LANES >= 8
    typedef float v8 __attribute__((vector_size(32)));
#if LANES == 16
    v8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    v8 eight = x;
#endif
    v4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
              __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
    v4 four = x;
#endif
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return four[0] + four[1];
}

/* The largest lane, by halves. */
INLINED float largest_of(vec x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

/* e^x to 2 ulp; x is clamped to the logarithms of the least and the largest float. Adding
 * 1.5 * 2^23 puts the nearest integer in the low bits. */
INLINED vec exponential(vec x) {
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

/* tanh(x) to a few ulp: a polynomial of Cephes near 0, where the other formula would cancel. */
INLINED vec hyperbolic_tangent(vec x) {
    vec z = x * x;
    vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vec near = p * z * x + x, far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return either(z < 0.625f * 0.625f, near, far);
}

#endif
