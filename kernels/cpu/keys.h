/* Keys of one KV head, read from the cache and transposed, so that a vector holds one element of
 * many keys.
 *
 * A score then adds its products in the order of the elements, in a lane of its own: its value does
 * not depend on how many queries, heads or keys are computed together.
 */
#ifndef KEYS_H
#define KEYS_H

#include "vectors.h"

enum {
    MAX_HEAD_DIM = 256,
    KEY_TILE = 32, /* keys per tile of the online softmax */
    WORD = sizeof(float) / sizeof(cached), /* elements in 32 bits of a key */
    PIECE = 4 * WORD,                      /* elements in 128 bits, read at once */
};

typedef uint32_t piece __attribute__((vector_size(16)));

INLINED piece load_piece(const cached *key, long count) { /* padded with zeros */
    piece value = {};
    memcpy(&value, key, (count < PIECE ? count : PIECE) * sizeof *key);
    return value;
}

/* The same piece of keys[0], keys[4] and so on. */
INLINED uvec load_pieces(const cached *const *keys, long at, long count) {
#if LANES == 4
    return load_piece(keys[0] + at, count);
#else
    typedef uint32_t half __attribute__((vector_size(32)));
    half low = __builtin_shufflevector(load_piece(keys[0] + at, count),
                                       load_piece(keys[4] + at, count), 0, 1, 2, 3, 4, 5, 6, 7);
#if LANES == 8
    return low;
#else
    half high = __builtin_shufflevector(load_piece(keys[8] + at, count),
                                        load_piece(keys[12] + at, count), 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
#endif
}

/* In all four lanes of 128 bits: the words (a0 b0 a1 b1), or (a2 b2 a3 b3). */
#if LANES == 16
#define MIXED(a, b, i, j) \
    __builtin_shufflevector(a, b, i, i + 16, j, j + 16, i + 4, i + 20, j + 4, j + 20, i + 8, \
                            i + 24, j + 8, j + 24, i + 12, i + 28, j + 12, j + 28)
#define PAIRED(a, b, i) \
    __builtin_shufflevector(a, b, i, i + 1, i + 16, i + 17, i + 4, i + 5, i + 20, i + 21, i + 8, \
                            i + 9, i + 24, i + 25, i + 12, i + 13, i + 28, i + 29)
#elif LANES == 8
#define MIXED(a, b, i, j) \
    __builtin_shufflevector(a, b, i, i + 8, j, j + 8, i + 4, i + 12, j + 4, j + 12)
#define PAIRED(a, b, i) \
    __builtin_shufflevector(a, b, i, i + 1, i + 8, i + 9, i + 4, i + 5, i + 12, i + 13)
#else
#define MIXED(a, b, i, j) __builtin_shufflevector(a, b, i, i + 4, j, j + 4)
#define PAIRED(a, b, i) __builtin_shufflevector(a, b, i, i + 1, i + 4, i + 5)
#endif

/* In each 128 bits, word j of x[i] becomes word i of x[j]. */
INLINED void transpose(uvec *x) {
    uvec a = MIXED(x[0], x[1], 0, 1), b = MIXED(x[2], x[3], 0, 1);
    uvec c = MIXED(x[0], x[1], 2, 3), d = MIXED(x[2], x[3], 2, 3);
    x[0] = PAIRED(a, b, 0), x[1] = PAIRED(a, b, 2);
    x[2] = PAIRED(c, d, 0), x[3] = PAIRED(c, d, 2);
}

/* to[i][j] = keys[j][i], for one piece of LANES keys. */
INLINED void transpose_piece(const cached *const *keys, long at, long count,
                             float (*restrict to)[KEY_TILE]) {
    uvec words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) words[i] = load_pieces(keys + i, at, count);
    transpose(words);
#pragma GCC unroll 16
    for (int i = 0; i < PIECE; i++)
        if (i < count) store_float(to[i], cached_of_word(words[i / WORD], i % WORD));
}

/* to[i - begin][j] = keys[j][i], for `count` keys, rounded up to LANES, and elements [begin, end),
 * which begin with a piece. */
static void transpose_keys(const cached *const *keys, long count, long begin, long end,
                           float (*restrict to)[KEY_TILE]) {
    for (long j = 0; j < count; j += LANES)
        for (long i = begin; i < end; i += PIECE) {
            float (*row)[KEY_TILE] = (float (*)[KEY_TILE])(to[i - begin] + j);
            if (__builtin_expect(end - i >= PIECE, 1))
                transpose_piece(keys + j, i, PIECE, row);
            else
                transpose_piece(keys + j, i, end - i, row);
        }
}

#endif
