/* Attention over the paged KV cache, for decode and for prompts.
 *
 * A single query reads values in place; the queries of a prompt's chunk read a copy, so that tiles of
 * queries and values form GEMMs. Keys are transposed for both (keys.h), and taken in tiles of KEY_TILE
 * from the start of the context. All sums add the same numbers in the same order: a row's bits depend
 * neither on other rows nor on how many queries its sequence has in this step.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <math.h>

#include "keys.h"
#include "norm.h"
#include "gemm.h"

enum {
    TOGETHER = 4,  /* query heads that share one read of a key */
    KEY_PART = 64, /* elements of the keys of a tile that a single query reads at once */
    QUERIES = 96,  /* queries per block of a prompt, over all heads of a KV head */
    CACHE_LINE = 64,              /* bytes */
    BYTES_LOADED_AHEAD = 1 << 18, /* of keys and values: less than a core's cache */
};

typedef struct {
    long num_heads, num_kv_heads, head_dim;
    long block_size, block_rows, table_width; /* tokens of a block; rows from one to the next */
    long window; /* keys that a query sees, its own included; 0: all up to its own */
    float scale, eps;
    float softcap; /* of scores; 0: they stay */
    const float *cos_sin;        /* [P, D]: D / 2 cosines, then D / 2 sines, per position */
    const int64_t *positions;    /* [T] */
    const int64_t *slots;        /* [T] row of each new token; negative: not stored */
    const int32_t *tables;       /* [B, table_width] */
    const int32_t *context_lens; /* [B], the new tokens included */
    const int32_t *starts;       /* [B + 1]: rows of sequence i are starts[i] to starts[i + 1] */
    long rows, sequences;
} attention;

/* What a layer's heads have of their own; NULL: nothing. */
typedef struct {
    const float *norms; /* [H + Hkv, D] of queries and keys */
    const float *sinks; /* [H] scores that take their share of the softmax and have no value */
} head_weights;

/* A layer of the cache. In FP8, `scales` [4, Hkv] are of keys, of values, and their inverses, and
 * keys are stored less `offsets` [Hkv, D], where there are some. */
typedef struct {
    cached *rows; /* [block_rows of each block, 2, Hkv, D] */
    const float *scales, *offsets;
} layer_cache;

enum scale_kind { OF_KEYS, OF_VALUES, INVERSE_OF_KEYS, INVERSE_OF_VALUES };

/* The first key that a query at this position sees. */
static inline long first_key(const attention *a, long position) {
    return a->window ? largest(position + 1 - a->window, 0) : 0;
}

static inline float scale_of(const attention *a, const layer_cache *c, enum scale_kind kind,
                             long kv_head) {
    return c->scales ? c->scales[kind * a->num_kv_heads + kv_head] : 1.0f;
}

/* One head's q or k: normed if the model has QK norm, rotated to its position, and zero-padded to a
 * multiple of PAIR. */
static void prepare_head(const attention *a, const scalar *x, const float *norm, long row,
                         float *restrict out) {
    long d = a->head_dim, half = d / 2;
    const float *cosines = a->cos_sin + a->positions[row] * d, *sines = cosines + half;
    float scale = norm ? inverse_rms(x, d, a->eps) : 1.0f, plain[MAX_HEAD_DIM + LANES];
    for (long i = 0; i < d; i += LANES) {
        vec value = load_some(x + i, d - i);
        store_float(plain + i, norm ? normed(value, load_some_floats(norm + i, d - i), scale) : value);
    }
    for (long i = 0; i < half; i++) {
        out[i] = plain[i] * cosines[i] - plain[i + half] * sines[i];
        out[i + half] = plain[i + half] * cosines[i] + plain[i] * sines[i];
    }
    for (long i = d; i % PAIR; i++) out[i] = 0;
}

static inline const scalar *row_of_head(const attention *a, const scalar *qkv, long row, long head) {
    return qkv + (row * (a->num_heads + 2 * a->num_kv_heads) + head) * a->head_dim;
}

static inline const float *norm_of_head(const attention *a, const head_weights *own, long head) {
    return own->norms ? own->norms + head * a->head_dim : NULL;
}

/* Stores keys and values of the new tokens. Rows outside all sequences get an output of 0. */
static void write_part(const attention *a, const scalar *qkv, const head_weights *own,
                       const layer_cache *cache, scalar *out, team me) {
    long d = a->head_dim, num_heads = a->num_heads, num_kv = a->num_kv_heads;
    range mine = share_of(a->rows, me);
    for (long row = mine.begin; row < mine.end; row++) {
        if (row >= a->starts[a->sequences])
            memset(out + row * num_heads * d, 0, num_heads * d * sizeof *out);
        if (a->slots[row] < 0) continue;
        cached *slot = cache->rows + a->slots[row] * 2 * num_kv * d;
        for (long head = 0; head < num_kv; head++) {
            float turned[MAX_HEAD_DIM + PAIR];
            prepare_head(a, row_of_head(a, qkv, row, num_heads + head),
                         norm_of_head(a, own, num_heads + head), row, turned);
            const scalar *value = row_of_head(a, qkv, row, num_heads + num_kv + head);
            float k = scale_of(a, cache, INVERSE_OF_KEYS, head);
            float v = scale_of(a, cache, INVERSE_OF_VALUES, head), offset[MAX_HEAD_DIM + LANES] = {0};
            if (cache->offsets) memcpy(offset, cache->offsets + head * d, d * sizeof *offset);
            for (long i = 0; i < d; i += LANES) {
                vec key = rounded(load_float(turned + i)) - load_float(offset + i);
                store_some_cached(slot + head * d + i, key, k, d - i);
                store_some_cached(slot + (num_kv + head) * d + i, load_some(value + i, d - i), v,
                                  d - i);
            }
        }
    }
}

/* Pointers to one head's keys, for tokens [start, start + count) of a sequence; up to a multiple of
 * LANES, the last one again. No query sees the first `hidden` of them, which may be another
 * sequence's by now, even NaN, and a weight of 0 does not hide that: the next one stands for them. */
static void find_keys(const attention *a, const layer_cache *cache, long sequence, long kv_head,
                      long start, long hidden, long count, const cached **keys) {
    const int32_t *table = a->tables + sequence * a->table_width;
    long block_size = a->block_size, first = start + hidden;
    long at = first % block_size, block = first / block_size;
    for (long j = hidden; j < count; j++) {
        long slot = table[block] * a->block_rows + at;
        keys[j] = cache->rows + (slot * 2 * a->num_kv_heads + kv_head) * a->head_dim;
        if (++at == block_size) at = 0, block++;
    }
    for (long j = 0; j < hidden; j++) keys[j] = keys[hidden];
    for (long j = count; j % LANES; j++) keys[j] = keys[count - 1];
}

/* Loads keys and values of KV heads `heads`, for tokens [start, start + count) of a sequence, in the
 * order of their addresses. The CPU then recognizes a stream and fetches it at its full rate, which
 * neither one head's rows nor prefetch instructions achieve. */
static void load_rows(const attention *a, const layer_cache *cache, long sequence, range heads,
                      long start, long count) {
    if (heads.begin == heads.end) return;
    const cached *rows[KEY_TILE];
    long d = a->head_dim, line = CACHE_LINE / sizeof **rows;
    for (long first = start; first < start + count; first += KEY_TILE) {
        long num_rows = least(start + count - first, KEY_TILE);
        find_keys(a, cache, sequence, 0, first, 0, num_rows, rows);
        for (long j = 0; j < num_rows; j++)
            for (long of_values = 0; of_values < 2; of_values++) {
                const volatile cached *row = rows[j] + of_values * a->num_kv_heads * d;
                for (long i = heads.begin * d; i < heads.end * d; i += line) (void)row[i];
            }
    }
}

/* ---- online softmax --------------------------------------------------------------------------- */

/* The state before the first key: that of the head's sink, if it has one. */
static inline void begin_softmax(const head_weights *own, long head, float *largest, float *total) {
    *largest = own->sinks ? own->sinks[head] : -INFINITY;
    *total = own->sinks ? 1 : 0;
}

/* Turns scores [KEY_TILE] into weights relative to the largest score so far, zero before `hidden` and
 * from `count` on; returns the factor that rescales previous sums. */
static float weigh(const attention *a, float *restrict scores, long hidden, long count,
                   float *largest, float *total) {
    if (a->softcap)
        for (long j = 0; j < KEY_TILE; j += LANES) {
            vec capped = hyperbolic_tangent(load_float(scores + j) / a->softcap) * a->softcap;
            store_float(scores + j, capped);
        }
    for (long j = 0; j < hidden; j++) scores[j] = -INFINITY;
    for (long j = count; j < KEY_TILE; j++) scores[j] = -INFINITY;
    float past = *largest;
    vec mosts = (vec){} + past, sum = {};
    for (long j = 0; j < KEY_TILE; j += LANES) {
        vec score = load_float(scores + j);
        mosts = either(score > mosts, score, mosts);
    }
    float most = largest_of(mosts);
    for (long j = 0; j < KEY_TILE; j += LANES) {
        vec relative = load_float(scores + j) - most, weights = exponential(relative);
        weights = either(relative < -87.0f, (vec){}, weights);
        store_float(scores + j, weights);
        sum += weights;
    }
    float kept = past == most ? 1.0f : exponential((vec){} + (past - most))[0];
    *largest = most;
    *total = *total * kept + total_of(sum);
    return kept;
}

/* ---- one query per sequence ------------------------------------------------------------------- */

typedef struct {
    float largest[TOGETHER], total[TOGETHER];
    float sum[TOGETHER][MAX_HEAD_DIM + PAIR];
    float keys[KEY_PART][KEY_TILE]; /* transposed */
} running;

/* scores[h][j] = q[h] . keys[j]; `part` is space for keys. Scores past the last key are of what it
 * held before, and mean nothing. */
INLINED void score_tile(const cached *const *keys, long count, long d, const int heads,
                        float (*restrict q)[MAX_HEAD_DIM + PAIR], float (*restrict part)[KEY_TILE],
                        float (*restrict scores)[KEY_TILE]) {
    memset(scores, 0, heads * sizeof *scores);
    for (long begin = 0; begin < d; begin += KEY_PART) {
        long end = least(begin + KEY_PART, d);
        transpose_keys(keys, count, begin, end, part);
        for (long j = 0; j < count; j += PAIR) {
            tile t = {part[0] + j, KEY_TILE, q[0] + begin, MAX_HEAD_DIM + PAIR, end - begin,
                      scores[0] + j, KEY_TILE};
            run_tile(heads, 2, false, &t);
        }
    }
}

/* sum[h] = sum[h] * kept[h] + weights[h] @ values */
INLINED void add_tile(const cached *const *values, long count, long d, const int heads,
                      const float *kept, float (*restrict weights)[KEY_TILE],
                      float (*restrict sum)[MAX_HEAD_DIM + PAIR]) {
    for (long i = 0; i < d; i += LANES) {
        vec total[TOGETHER];
        for (int h = 0; h < heads; h++) total[h] = load_float(sum[h] + i) * kept[h];
        for (long j = 0; j < count; j++) {
            vec value = load_some_cached(values[j] + i, d - i);
            for (int h = 0; h < heads; h++) total[h] += weights[h][j] * value;
        }
        for (int h = 0; h < heads; h++) store_float(sum[h] + i, total[h]);
    }
}

INLINED void attend_tile(const attention *a, const cached *const *keys,
                         const cached *const *values, long hidden, long count, const int heads,
                         float (*restrict q)[MAX_HEAD_DIM + PAIR], running *state) {
    long d = a->head_dim;
    float scores[TOGETHER][KEY_TILE], kept[TOGETHER];
    score_tile(keys, count, d, heads, q, state->keys, scores);
    for (int h = 0; h < heads; h++)
        kept[h] = weigh(a, scores[h], hidden, count, &state->largest[h], &state->total[h]);
    add_tile(values, count, d, heads, kept, scores, state->sum);
}

/* Attention of `heads` query heads of one KV head, which share each read of keys and values; loads
 * those of the `unread` KV heads, too. */
static void attend_heads(const attention *a, const scalar *qkv, const head_weights *own,
                         const layer_cache *cache, scalar *out, long sequence, range unread,
                         long first, int heads) {
    long d = a->head_dim, context = a->context_lens[sequence], row = a->starts[sequence];
    long kv_head = first / (a->num_heads / a->num_kv_heads);
    float scale = a->scale * scale_of(a, cache, OF_KEYS, kv_head);
    float value_scale = scale_of(a, cache, OF_VALUES, kv_head), q[TOGETHER][MAX_HEAD_DIM + PAIR];
    running state;
    memset(state.keys, 0, sizeof state.keys);
    for (int h = 0; h < heads; h++) {
        prepare_head(a, row_of_head(a, qkv, row, first + h), norm_of_head(a, own, first + h),
                     row, q[h]);
        for (long i = 0; i < d; i++) q[h][i] *= scale;
        begin_softmax(own, first + h, &state.largest[h], &state.total[h]);
        memset(state.sum[h], 0, sizeof state.sum[h]);
    }
    const cached *keys[KEY_TILE], *values[KEY_TILE];
    long row_bytes = 2 * a->num_kv_heads * d * sizeof(cached);
    long ahead = ceil_div(BYTES_LOADED_AHEAD, row_bytes * KEY_TILE) * KEY_TILE;
    long first_seen = first_key(a, context - 1), begin = first_seen / KEY_TILE * KEY_TILE;
    for (long start = begin; start < context; start += KEY_TILE) {
        long count = least(context - start, KEY_TILE), hidden = largest(first_seen - start, 0);
        if (start == begin || start % ahead == 0)
            load_rows(a, cache, sequence, unread, start,
                      least(context - start, ahead - start % ahead));
        find_keys(a, cache, sequence, kv_head, start, hidden, count, keys);
        for (long j = 0; j < count; j++) values[j] = keys[j] + a->num_kv_heads * d;
        switch (heads) {
        case 1: attend_tile(a, keys, values, hidden, count, 1, q, &state); break;
        case 2: attend_tile(a, keys, values, hidden, count, 2, q, &state); break;
        case 3: attend_tile(a, keys, values, hidden, count, 3, q, &state); break;
        case 4: attend_tile(a, keys, values, hidden, count, 4, q, &state); break;
        }
    }
    for (int h = 0; h < heads; h++)
        for (long i = 0; i < d; i += LANES) {
            vec value = context > 0 ? load_float(state.sum[h] + i) / state.total[h] : (vec){};
            value *= value_scale;
            store_some(out + (row * a->num_heads + first + h) * d + i, value, d - i);
        }
}

/* ---- a block of queries of a prompt ----------------------------------------------------------- */

/* Consecutive queries with `heads` heads each that attend to the same KV head. */
typedef struct {
    long sequence, kv_head, first_row, num_queries, heads;
} query_block;

typedef struct {
    float q[QUERIES][MAX_HEAD_DIM + PAIR];
    float sum[QUERIES][MAX_HEAD_DIM + PAIR];
    float largest[QUERIES], total[QUERIES];
    float keys[MAX_HEAD_DIM][KEY_TILE]; /* transposed */
    float values[KEY_TILE * (MAX_HEAD_DIM + PAIR)];
} block_state;

static void copy_keys(const attention *a, const layer_cache *cache, const query_block *b, long start,
                      long hidden, long count, block_state *s) {
    long d = a->head_dim, width = ceil_div(d, PAIR) * PAIR;
    const cached *keys[KEY_TILE];
    find_keys(a, cache, b->sequence, b->kv_head, start, hidden, count, keys);
    transpose_keys(keys, count, 0, d, s->keys);
    memset(s->values, 0, KEY_TILE * width * sizeof s->values[0]);
    for (long j = 0; j < count; j++) {
        const cached *value = keys[j] + a->num_kv_heads * d;
        for (long i = 0; i < d; i += LANES)
            store_float(s->values + j * width + i, load_some_cached(value + i, d - i));
    }
}

/* Attention of queries [at, at + count) of the block to keys [start, start + num_keys). */
static void attend_strip(const attention *a, const query_block *b, long at, long count, long start,
                         long num_keys, long first_position, block_state *s) {
    long d = a->head_dim, width = ceil_div(d, PAIR) * PAIR, stride = MAX_HEAD_DIM + PAIR;
    float scores[STRIP][KEY_TILE] = {};
    for (long j = 0; j < KEY_TILE; j += PAIR) {
        tile t = {s->keys[0] + j, KEY_TILE, s->q[at], stride, d, scores[0] + j, KEY_TILE};
        float_tile(count, &t);
    }
    for (long r = 0; r < count; r++) {
        long position = first_position + (at + r) / b->heads;
        long hidden = largest(first_key(a, position) - start, 0);
        long seen = least(position + 1 - start, num_keys);
        if (seen <= hidden) {
            memset(scores[r], 0, sizeof scores[r]);
            continue;
        }
        float kept = weigh(a, scores[r], hidden, seen, &s->largest[at + r], &s->total[at + r]);
        if (kept != 1.0f)
            for (long i = 0; i < width; i += LANES)
                store_float(s->sum[at + r] + i, load_float(s->sum[at + r] + i) * kept);
    }
    for (long i = 0; i < width; i += PAIR) {
        tile t = {s->values + i, width, scores, KEY_TILE, num_keys, s->sum[at] + i, stride};
        float_tile(count, &t);
    }
}

static void attend_block(const attention *a, const scalar *qkv, const head_weights *own,
                         const layer_cache *cache, scalar *out, const query_block *b) {
    block_state s;
    float scale = a->scale * scale_of(a, cache, OF_KEYS, b->kv_head);
    float value_scale = scale_of(a, cache, OF_VALUES, b->kv_head);
    long d = a->head_dim, count = b->num_queries * b->heads;
    long first_head = b->kv_head * b->heads, context = a->context_lens[b->sequence];
    long first_position = context - (a->starts[b->sequence + 1] - b->first_row);
    memset(s.keys, 0, d * sizeof s.keys[0]);
    for (long r = 0; r < count; r++) {
        long row = b->first_row + r / b->heads, head = first_head + r % b->heads;
        prepare_head(a, row_of_head(a, qkv, row, head), norm_of_head(a, own, head), row, s.q[r]);
        for (long i = 0; i < d; i++) s.q[r][i] *= scale;
        begin_softmax(own, head, &s.largest[r], &s.total[r]);
        memset(s.sum[r], 0, sizeof s.sum[r]);
    }
    long end = least(first_position + b->num_queries, context), strips = ceil_div(count, STRIP);
    long first_seen = first_key(a, first_position), begin = first_seen / KEY_TILE * KEY_TILE;
    for (long start = begin; start < end; start += KEY_TILE) {
        long num_keys = least(end - start, KEY_TILE);
        copy_keys(a, cache, b, start, largest(first_seen - start, 0), num_keys, &s);
        for (long i = 0; i < strips; i++) {
            range strip = share_of(count, (team){i, strips});
            if (first_position + (strip.end - 1) / b->heads >= start)
                attend_strip(a, b, strip.begin, strip.end - strip.begin, start, num_keys,
                             first_position, &s);
        }
    }
    for (long r = 0; r < count; r++) {
        long row = b->first_row + r / b->heads, head = first_head + r % b->heads;
        for (long i = 0; i < d; i += LANES) {
            vec value = end > 0 ? load_float(s.sum[r] + i) / s.total[r] : (vec){};
            value *= value_scale;
            store_some(out + (row * a->num_heads + head) * d + i, value, d - i);
        }
    }
}

/* ---- a step ----------------------------------------------------------------------------------- */

static void attend_singles_part(const attention *a, const scalar *qkv, const head_weights *own,
                                const layer_cache *cache, scalar *out, team me) {
    long num_kv = a->num_kv_heads, share = a->num_heads / num_kv, singles = 0, seen = 0;
    for (long s = 0; s < a->sequences; s++) singles += a->starts[s + 1] - a->starts[s] == 1;
    range mine = share_of(singles * num_kv, me);
    for (long s = 0; s < a->sequences; s++) {
        if (a->starts[s + 1] - a->starts[s] != 1) continue;
        range heads = {largest(mine.begin - seen, 0), least(mine.end - seen, num_kv)};
        range unread = heads;
        seen += num_kv;
        for (long kv_head = heads.begin; kv_head < heads.end; kv_head++)
            for (long h = 0; h < share; h += TOGETHER) {
                attend_heads(a, qkv, own, cache, out, s, unread, kv_head * share + h,
                             least(share - h, TOGETHER));
                unread = (range){0, 0};
            }
    }
}

/* Blocks are dealt to threads in turn, since later blocks of a prompt have more keys. */
static void attend_prompts_part(const attention *a, const scalar *qkv, const head_weights *own,
                                const layer_cache *cache, scalar *out, team me) {
    long share = a->num_heads / a->num_kv_heads, most = QUERIES / share, seen = 0;
    for (long s = 0; s < a->sequences; s++) {
        long begin = a->starts[s], count = a->starts[s + 1] - begin, blocks = ceil_div(count, most);
        if (count < 2) continue;
        for (long i = 0; i < blocks; i++) {
            range rows = share_of(count, (team){i, blocks});
            for (long kv_head = 0; kv_head < a->num_kv_heads; kv_head++) {
                query_block b = {s, kv_head, begin + rows.begin, rows.end - rows.begin, share};
                if (seen++ % me.size == me.index)
                    attend_block(a, qkv, own, cache, out, &b);
            }
        }
    }
}

#endif
