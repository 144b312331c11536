/* The operations of a decoder layer on a CPU, for activations of one type: bfloat16 if BF16, else
 * float32. Everything is summed in float32 and rounded once, where it is stored.
 *
 * A layer's sizes, its weights and the rows of a step come from Python as plain structs; library.py
 * declares the same ones. Functions named *_part are one thread's share of an operation, and a
 * parallel region is a sequence of them with barriers between. An element is always computed in
 * the same order of operations, so a row's result depends neither on its neighbours nor on the
 * number of threads. Nothing here allocates, and NaN is carried through to the reader of a row.
 */
#include <math.h>
#include <omp.h>
#include <stddef.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "vectors.h"

/* Specialised for its constant arguments at every call. */
#define INLINED static inline __attribute__((always_inline))

enum {
    PANEL = 2 * LANES,  /* outputs of a product whose weights lie together */
    MAX_HEAD_DIM = 256,
    KEY_TILE = 32,      /* keys that a softmax takes at a time */
    TOGETHER = 4,       /* query heads that read a key together */
};

typedef struct { long index, size; } team;
typedef struct { long begin, end; } range;

static inline range share_of(long count, team me) {
    return (range){count * me.index / me.size, count * (me.index + 1) / me.size};
}

static inline team this_thread(void) { return (team){omp_get_thread_num(), omp_get_num_threads()}; }

/* ---- norm ------------------------------------------------------------------------------------ */

static inline float inverse_rms(const scalar *x, long size, float eps) {
    vec squares = {};
    for (long i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    return 1.0f / sqrtf(total_of(squares) / (float)size + eps);
}

static inline vec normed(const scalar *x, const scalar *weight, float scale) {
    return rounded(rounded(load(x) * scale) * load(weight));
}

static void add_rms_norm_part(const scalar *x, scalar *residual, const scalar *weight, scalar *out,
                              long rows, long size, float eps, team me) {
    range mine = share_of(rows, me);
    for (long row = mine.begin; row < mine.end; row++) {
        scalar *total = residual + row * size;
        if (x)
            for (long i = 0; i < size; i += LANES)
                store(total + i, load(total + i) + load(x + row * size + i));
        float scale = inverse_rms(total, size, eps);
        for (long i = 0; i < size; i += LANES)
            store(out + row * size + i, normed(total + i, weight + i, scale));
    }
}

/* ---- activation ------------------------------------------------------------------------------ */

static void silu_and_mul_part(const scalar *x, scalar *out, long rows, long size, team me) {
    range mine = share_of(rows * size / LANES, me);
    for (long at = mine.begin * LANES; at < mine.end * LANES; at += LANES) {
        const scalar *gate = x + at / size * 2 * size + at % size;
        vec g = load(gate), silu = rounded(g / (exponential(-g) + 1.0f));
        store(out + at, silu * load(gate + size));
    }
}

/* ---- products with weights ------------------------------------------------------------------- */

/* A weight [N, K] is packed as [N / PANEL][K / GROUP][PANEL][GROUP], the last panel filled up with
 * zeros: one pass over a panel reads memory straight through and yields PANEL outputs. */
typedef struct {
    const scalar *weight;
    const scalar *bias; /* [N] or NULL */
    long inputs, outputs;
} product;

#ifdef __AVX512F__
enum { MAX_TILE = 8 }; /* rows whose sums stay in registers */
#else
enum { MAX_TILE = 3 };
#endif

/* sum += the products of GROUP inputs with the weights of LANES outputs */
INLINED vec dot(vec sum, const scalar *w, const scalar *x) {
#if BF16 && defined(__AVX512BF16__)
    int pair;
    memcpy(&pair, x, sizeof pair);
    __m512i weights = _mm512_loadu_si512(w), inputs = _mm512_set1_epi32(pair);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)inputs);
#elif BF16
    uvec bits;
    memcpy(&bits, w, sizeof bits);
    sum += (vec)(bits << 16) * load(x[0]);
    return sum + (vec)(bits & 0xffff0000u) * load(x[1]);
#else
    vec weights;
    memcpy(&weights, w, sizeof weights);
    return sum + weights * x[0];
#endif
}

INLINED void tile(const int rows, const product *p, const scalar *w, const scalar *x,
                  float *sums) {
    vec sum[MAX_TILE][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
    for (long k = 0; k < p->inputs; k += GROUP, w += PANEL * GROUP) {
        __builtin_prefetch(w + 32 * PANEL * GROUP);
        __builtin_prefetch(w + 32 * PANEL * GROUP + LANES * GROUP);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r][0] = dot(sum[r][0], w, x + r * p->inputs + k);
            sum[r][1] = dot(sum[r][1], w + LANES * GROUP, x + r * p->inputs + k);
        }
    }
    for (int r = 0; r < rows; r++) memcpy(sums + r * PANEL, sum[r], sizeof sum[r]);
}

static void tile_of(long rows, const product *p, const scalar *w, const scalar *x, float *sums) {
    switch (rows) {
    case 1: tile(1, p, w, x, sums); break;
    case 2: tile(2, p, w, x, sums); break;
    case 3: tile(3, p, w, x, sums); break;
#ifdef __AVX512F__
    case 4: tile(4, p, w, x, sums); break;
    case 5: tile(5, p, w, x, sums); break;
    case 6: tile(6, p, w, x, sums); break;
    case 7: tile(7, p, w, x, sums); break;
    case 8: tile(8, p, w, x, sums); break;
#endif
    }
}

/* Exactly one of out and out_f32 [rows, N] is given; N is a multiple of LANES. */
static void linear_part(const product *p, const scalar *x, scalar *out, float *out_f32, long rows,
                        team me) {
    long num_tiles = (rows + MAX_TILE - 1) / MAX_TILE, n = p->outputs;
    range panels = share_of((n + PANEL - 1) / PANEL, me);
    float sums[MAX_TILE * PANEL];
    for (long first = panels.begin * PANEL; first < panels.end * PANEL; first += PANEL) {
        long width = n - first < PANEL ? n - first : PANEL;
        for (long t = 0; t < num_tiles; t++) {
            range mine = share_of(rows, (team){t, num_tiles});
            tile_of(mine.end - mine.begin, p, p->weight + first * p->inputs,
                    x + mine.begin * p->inputs, sums);
            for (long row = mine.begin; row < mine.end; row++)
                for (long i = 0; i < width; i += LANES) {
                    vec sum = load_float(sums + (row - mine.begin) * PANEL + i);
                    if (p->bias) sum += load(p->bias + first + i);
                    if (out_f32)
                        store_float(out_f32 + row * n + first + i, sum);
                    else
                        store(out + row * n + first + i, sum);
                }
        }
    }
}

void pack(const scalar *weight, scalar *packed, long outputs, long inputs) {
    for (long n = 0; n < (outputs + PANEL - 1) / PANEL * PANEL; n++)
        for (long k = 0; k < inputs; k++) {
            long group = n / PANEL * inputs + k / GROUP * GROUP;
            packed[group * PANEL + n % PANEL * GROUP + k % GROUP] = n < outputs ? weight[n * inputs + k] : 0;
        }
}

/* ---- attention of one query a sequence ------------------------------------------------------- */

typedef struct {
    long num_heads, num_kv_heads, head_dim;
    long block_size, table_width;
    float scale, eps;
    const float *cos_sin;       /* [P, D]: a position's D / 2 cosines, then its sines */
    const int64_t *positions;   /* [B] */
    const int64_t *slots;       /* [B] where each new token goes; negative: nowhere */
    const int32_t *tables;      /* [B, table_width] */
    const int32_t *context_lens; /* [B], the new token included */
    long rows;
} attention;

/* One head's q or k, normed if the model norms them, rotated to its position. */
static inline void prepare_head(const attention *a, const scalar *x, const scalar *norm, long row,
                                float *restrict out) {
    long half = a->head_dim / 2;
    const float *cosines = a->cos_sin + a->positions[row] * a->head_dim, *sines = cosines + half;
    float scale = norm ? inverse_rms(x, a->head_dim, a->eps) : 1.0f, plain[MAX_HEAD_DIM];
    for (long i = 0; i < a->head_dim; i += LANES)
        store_float(plain + i, norm ? normed(x + i, norm + i, scale) : load(x + i));
    for (long i = 0; i < half; i++) {
        out[i] = plain[i] * cosines[i] - plain[i + half] * sines[i];
        out[i + half] = plain[i + half] * cosines[i] + plain[i] * sines[i];
    }
}

static void write_part(const attention *a, const scalar *qkv, const scalar *qk_norm, scalar *cache,
                       team me) {
    long d = a->head_dim, num_heads = a->num_heads, num_kv = a->num_kv_heads;
    range mine = share_of(a->rows, me);
    for (long row = mine.begin; row < mine.end; row++) {
        if (a->slots[row] < 0) continue;
        const scalar *k = qkv + (row * (num_heads + 2 * num_kv) + num_heads) * d;
        scalar *slot = cache + a->slots[row] * 2 * num_kv * d;
        for (long head = 0; head < num_kv; head++) {
            float turned[MAX_HEAD_DIM];
            prepare_head(a, k + head * d, qk_norm ? qk_norm + (num_heads + head) * d : NULL, row,
                         turned);
            for (long i = 0; i < d; i += LANES)
                store(slot + head * d + i, load_float(turned + i));
        }
        memcpy(slot + num_kv * d, k + num_kv * d, num_kv * d * sizeof(scalar));
    }
}

/* A softmax taken tile by tile: what it has seen so far, relative to the largest score. */
typedef struct {
    float largest[TOGETHER], total[TOGETHER];
    float sum[TOGETHER][MAX_HEAD_DIM];
} running;

/* scores[h][j] = q[h] . keys[j] */
INLINED void score_tile(const scalar *const *keys, long count, long d, const int heads,
                        float (*restrict q)[MAX_HEAD_DIM], float (*restrict scores)[KEY_TILE]) {
    for (long j = 0; j < count; j++) {
        vec products[TOGETHER] = {};
        for (long i = 0; i < d; i += LANES) {
            vec key = load(keys[j] + i);
            for (int h = 0; h < heads; h++) products[h] += load_float(q[h] + i) * key;
        }
        for (int h = 0; h < heads; h++) scores[h][j] = total_of(products[h]);
    }
}

/* Scores to weights relative to the largest score so far; returns what the past is worth now. */
static float weigh(float *restrict scores, long count, float *largest, float *total) {
    float past = *largest;
    for (long j = 0; j < count; j++) *largest = scores[j] > *largest ? scores[j] : *largest;
    for (long j = count; j < KEY_TILE; j++) scores[j] = -INFINITY;
    vec sum = {};
    for (long j = 0; j < KEY_TILE; j += LANES) {
        vec relative = load_float(scores + j) - *largest, weights = exponential(relative);
        weights = either(relative < -87.0f, (vec){}, weights);
        store_float(scores + j, weights);
        sum += weights;
    }
    float kept = exponential((vec){} + (past - *largest))[0];
    *total = *total * kept + total_of(sum);
    return kept;
}

/* sum[h] = sum[h] * kept[h] + the weighted values */
INLINED void add_tile(const scalar *const *values, long count, long d, const int heads,
                      const float *kept, float (*restrict weights)[KEY_TILE],
                      float (*restrict sum)[MAX_HEAD_DIM]) {
    for (long i = 0; i < d; i += LANES) {
        vec total[TOGETHER];
        for (int h = 0; h < heads; h++) total[h] = load_float(sum[h] + i) * kept[h];
        for (long j = 0; j < count; j++) {
            vec value = load(values[j] + i);
            for (int h = 0; h < heads; h++) total[h] += weights[h][j] * value;
        }
        for (int h = 0; h < heads; h++) store_float(sum[h] + i, total[h]);
    }
}

INLINED void attend_tile(const scalar *const *keys, const scalar *const *values, long count, long d,
                         const int heads, float (*restrict q)[MAX_HEAD_DIM], running *state) {
    float scores[TOGETHER][KEY_TILE], kept[TOGETHER];
    score_tile(keys, count, d, heads, q, scores);
    for (int h = 0; h < heads; h++)
        kept[h] = weigh(scores[h], count, &state->largest[h], &state->total[h]);
    add_tile(values, count, d, heads, kept, scores, state->sum);
}

/* `heads` query heads of one KV head; together they read its keys and values once. */
static void attend_heads(const attention *a, const scalar *qkv, const scalar *qk_norm,
                         const scalar *cache, scalar *out, long row, long first, int heads) {
    long d = a->head_dim, context = a->context_lens[row], num_kv = a->num_kv_heads;
    long kv_head = first / (a->num_heads / num_kv);
    const scalar *query = qkv + (row * (a->num_heads + 2 * num_kv) + first) * d;
    float q[TOGETHER][MAX_HEAD_DIM];
    running state = {.total = {0}};
    for (int h = 0; h < heads; h++) {
        prepare_head(a, query + h * d, qk_norm ? qk_norm + (first + h) * d : NULL, row, q[h]);
        for (long i = 0; i < d; i++) q[h][i] *= a->scale;
        state.largest[h] = -INFINITY;
        memset(state.sum[h], 0, d * sizeof(float));
    }
    const int32_t *table = a->tables + row * a->table_width;
    const scalar *keys[KEY_TILE], *values[KEY_TILE];
    for (long start = 0; start < context; start += KEY_TILE) {
        long count = context - start < KEY_TILE ? context - start : KEY_TILE;
        for (long j = 0; j < count; j++) {
            long block = table[(start + j) / a->block_size], in_block = (start + j) % a->block_size;
            keys[j] = cache + ((block * a->block_size + in_block) * 2 * num_kv + kv_head) * d;
            values[j] = keys[j] + num_kv * d;
        }
        switch (heads) {
        case 1: attend_tile(keys, values, count, d, 1, q, &state); break;
        case 2: attend_tile(keys, values, count, d, 2, q, &state); break;
        case 3: attend_tile(keys, values, count, d, 3, q, &state); break;
        case 4: attend_tile(keys, values, count, d, 4, q, &state); break;
        }
    }
    for (int h = 0; h < heads; h++)
        for (long i = 0; i < d; i += LANES) {
            vec value = context > 0 ? load_float(state.sum[h] + i) / state.total[h] : (vec){};
            store(out + (row * a->num_heads + first + h) * d + i, value);
        }
}

static void attend_part(const attention *a, const scalar *qkv, const scalar *qk_norm,
                        const scalar *cache, scalar *out, team me) {
    range mine = share_of(a->rows * a->num_kv_heads, me);
    long share = a->num_heads / a->num_kv_heads;
    for (long item = mine.begin; item < mine.end; item++) {
        long row = item / a->num_kv_heads, first = item % a->num_kv_heads * share;
        for (long h = 0; h < share; h += TOGETHER)
            attend_heads(a, qkv, qk_norm, cache, out, row, first + h,
                         share - h < TOGETHER ? share - h : TOGETHER);
    }
}

/* ---- what Python calls ----------------------------------------------------------------------- */

void linear(const product *p, const scalar *x, scalar *out, float *out_f32, long rows,
            int threads) {
#pragma omp parallel num_threads(threads)
    linear_part(p, x, out, out_f32, rows, this_thread());
}

void add_rms_norm(const scalar *x, scalar *residual, const scalar *weight, scalar *out, long rows,
                  long size, float eps, int threads) {
#pragma omp parallel num_threads(threads) if (rows * size > 32768)
    add_rms_norm_part(x, residual, weight, out, rows, size, eps, this_thread());
}

void silu_and_mul(const scalar *x, scalar *out, long rows, long size, int threads) {
#pragma omp parallel num_threads(threads) if (rows * size > 32768)
    silu_and_mul_part(x, out, rows, size, this_thread());
}

void decode_attention(const attention *a, const scalar *qkv, const scalar *qk_norm, scalar *cache,
                      scalar *out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        write_part(a, qkv, qk_norm, cache, this_thread());
        /* A sequence may read a block that another one fills in this very step. */
#pragma omp barrier
        attend_part(a, qkv, qk_norm, cache, out, this_thread());
    }
}

/* The way from one layer's attention to the next one's: output product, MLP, next projections. */
typedef struct {
    product o, gate_up, down, next_qkv; /* next_qkv without a weight: this was the last layer */
    const scalar *post_norm, *next_norm;
    long hidden, inner;
    float eps;
} block;

typedef struct {
    const scalar *attended; /* [T, H D] */
    scalar *residual;       /* [T, hidden], added to */
    scalar *hidden, *added; /* [T, hidden] */
    scalar *gate_up;        /* [T, 2 I] */
    scalar *inner;          /* [T, I] */
    scalar *qkv;            /* [T, (H + 2 Hkv) D] */
    long rows;
} stream;

void decoder_block(const block *b, const stream *s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        team me = this_thread();
        linear_part(&b->o, s->attended, s->added, NULL, s->rows, me);
#pragma omp barrier
        add_rms_norm_part(s->added, s->residual, b->post_norm, s->hidden, s->rows, b->hidden,
                          b->eps, me);
#pragma omp barrier
        linear_part(&b->gate_up, s->hidden, s->gate_up, NULL, s->rows, me);
#pragma omp barrier
        silu_and_mul_part(s->gate_up, s->inner, s->rows, b->inner, me);
#pragma omp barrier
        linear_part(&b->down, s->inner, s->added, NULL, s->rows, me);
#pragma omp barrier
        add_rms_norm_part(s->added, s->residual, b->next_norm, s->hidden, s->rows, b->hidden,
                          b->eps, me);
        if (b->next_qkv.weight) {
#pragma omp barrier
            linear_part(&b->next_qkv, s->hidden, s->qkv, NULL, s->rows, me);
        }
    }
}
