/* RMS norm of rows, and the gated activation of the MLP. */
#ifndef NORM_H
#define NORM_H

#include <math.h>

#include "gemm.h"

static inline float inverse_rms(const scalar *x, long size, float eps) {
    vec squares = {};
    for (long i = 0; i < size; i += LANES) {
        vec value = load_some(x + i, size - i);
        squares += value * value;
    }
    return 1.0f / sqrtf(total_of(squares) / (float)size + eps);
}

/* Weights of norms are float32 whatever the storage type is. */
INLINED vec normed(vec x, vec weight, float scale) { return rounded(rounded(x * scale) * weight); }

/* residual += x, unless x is NULL; out = its norm, prepared for the GEMM that reads it. */
static void add_rms_norm_part(const scalar *x, scalar *residual, const float *weight, scalar *out,
                              const prepared *reader, long rows, long size, float eps, team me) {
    range mine = share_of(rows, me);
    for (long row = mine.begin; row < mine.end; row++) {
        scalar *total = residual + row * size, *to = out + row * size;
        if (x)
            for (long i = 0; i < size; i += LANES) {
                vec added = load_some(x + row * size + i, size - i);
                store_some(total + i, load_some(total + i, size - i) + added, size - i);
            }
        float scale = inverse_rms(total, size, eps);
        for (long i = 0; i < size; i += LANES) {
            vec value = load_some(total + i, size - i);
            store_some(to + i, normed(value, load_some_floats(weight + i, size - i), scale), size - i);
        }
        prepare(out, reader, row, 0, size);
    }
}

/* x = its norm */
static void rms_norm_part(scalar *x, const float *weight, long rows, long size, float eps, team me) {
    range mine = share_of(rows, me);
    for (long row = mine.begin; row < mine.end; row++) {
        scalar *to = x + row * size;
        float scale = inverse_rms(to, size, eps);
        for (long i = 0; i < size; i += LANES) {
            vec weights = load_some_floats(weight + i, size - i);
            store_some(to + i, normed(load_some(to + i, size - i), weights, scale), size - i);
        }
    }
}

/* The number whose sigmoid an activation multiplies its input by; GELU is approximated by tanh. */
INLINED vec steepness(vec gate, bool gelu) {
    return gelu ? gate * (gate * gate * 0.044715f + 1.0f) * 1.5957691216057308f : gate;
}

/* x [rows, 2 size] -> out [rows, size], prepared for the GEMM that reads it. */
INLINED void act_and_mul_part(const scalar *x, scalar *out, const prepared *reader, long rows,
                              long size, const bool gelu, team me) {
    long parts = ceil_div(size, LARGEST_GROUP);
    range mine = share_of(rows * parts, me);
    for (long at = mine.begin; at < mine.end; at++) {
        long row = at / parts, begin = at % parts * LARGEST_GROUP;
        long end = least(begin + LARGEST_GROUP, size);
        for (long i = begin; i < end; i += LANES) {
            const scalar *gate = x + row * 2 * size + i;
            vec g = load_some(gate, size - i);
            vec acted = rounded(g / (exponential(-steepness(g, gelu)) + 1.0f));
            store_some(out + row * size + i, acted * load_some(gate + size, size - i), size - i);
        }
        prepare(out, reader, row, begin, end);
    }
}

static void silu_and_mul_part(const scalar *x, scalar *out, const prepared *reader, long rows,
                              long size, team me) {
    act_and_mul_part(x, out, reader, rows, size, false, me);
}

static void gelu_and_mul_part(const scalar *x, scalar *out, const prepared *reader, long rows,
                              long size, team me) {
    act_and_mul_part(x, out, reader, rows, size, true, me);
}

#endif
