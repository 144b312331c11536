/* Runs the C kernels on a machine that is only emulated: operands from a file, results to another.
 *
 * The file is: operation, rows, a, b, window as longs and a softcap as float, then the operands one after the other. Linked with
 * layer.c and attention.c, and compiled with their definitions. */
#include <stdio.h>
#include <stdlib.h>

#include "attention.c"
#include "layer.c"

static void *take(FILE *from, long count, size_t size) {
    void *values = malloc(count * size + 1);
    if (!values || fread(values, size, count, from) != (size_t)count) exit(2);
    return values;
}

static void give(const char *path, const void *values, long count, size_t size) {
    FILE *to = fopen(path, "wb");
    if (!to || fwrite(values, size, count, to) != (size_t)count || fclose(to)) exit(3);
}

/* A weight [outputs, inputs] of the file, packed. */
static gemm packed_of(FILE *from, long outputs, long inputs) {
    scalar *weight = take(from, outputs * inputs, sizeof *weight);
    scalar *packed = malloc(packed_size(outputs, inputs) * sizeof *packed);
    pack(weight, packed, outputs, inputs, 1);
    return (gemm){.weight = packed, .inputs = inputs, .outputs = outputs};
}

int main(int argc, char **argv) {
    if (argc != 3) return 1;
    FILE *from = fopen(argv[1], "rb");
    if (!from) return 1;
    long *head = take(from, 5, sizeof(long)), rows = head[1], a = head[2], b = head[3];
    float *softcap = take(from, 1, sizeof *softcap);
    if (head[0] == 0) { /* linear: x [rows, a], weight [b, a] */
        scalar *x = take(from, rows * a, sizeof *x), *weight = take(from, a * b, sizeof *weight);
        scalar *packed = malloc(packed_size(b, a) * sizeof *packed), *out = malloc(rows * b * sizeof *out);
        gemm p = {packed, NULL, a, b};
        pack(weight, packed, b, a, 1);
        linear(&p, x, malloc(rows * copy_size(&p) + 1), NULL, out, NULL, rows, 1);
        give(argv[2], out, rows * b, sizeof *out);
    } else if (head[0] == 1) { /* add_rms_norm: x, residual [rows, a], weight [a] */
        scalar *x = take(from, rows * a, sizeof *x), *residual = take(from, rows * a, sizeof *x);
        float *weight = take(from, a, sizeof *weight);
        scalar *out = malloc(rows * a * sizeof *out);
        add_rms_norm(x, residual, weight, out, rows, a, 1e-5f, 1);
        give(argv[2], out, rows * a, sizeof *out);
    } else if (head[0] == 2) { /* silu_and_mul: x [rows, 2 a] */
        scalar *x = take(from, rows * 2 * a, sizeof *x), *out = malloc(rows * a * sizeof *out);
        silu_and_mul(x, out, rows, a, 1);
        give(argv[2], out, rows * a, sizeof *out);
    } else if (head[0] == 9) { /* feed_experts: x [rows, a], the weights and the indices of two of four
                                  experts [rows, 2], weights [4, 2 b, a] and [4, a, b]; clamped */
        scalar *x = take(from, rows * a, sizeof *x), *out = malloc(rows * a * sizeof *out);
        float *weights = take(from, 2 * rows, sizeof *weights);
        int64_t *chosen = take(from, 2 * rows, sizeof *chosen);
        gemm gate_up[4], down[4];
        for (long n = 0; n < 4; n++) gate_up[n] = packed_of(from, 2 * b, a);
        for (long n = 0; n < 4; n++) down[n] = packed_of(from, a, b);
        long size = copy_size(gate_up) + copy_size(down) + 1;
        experts e = {
            .gate_up = gate_up, .down = down, .num_experts = 4, .top_k = 2,
            .chosen = chosen, .weights = weights, .limit = 0.7f, .alpha = 1.702f,
            .starts = malloc(5 * sizeof *e.starts), .places = malloc(2 * rows * sizeof *e.places),
            .gathered = malloc(2 * rows * a * sizeof *x),
            .gate_ups = malloc(4 * rows * b * sizeof *x), .inner = malloc(2 * rows * b * sizeof *x),
            .outputs = malloc(2 * rows * a * sizeof *e.outputs), .copy = malloc(2 * rows * size),
        };
        feed_experts(&e, x, out, rows, 1);
        give(argv[2], out, rows * a, sizeof *out);
    } else if (head[0] >= 4) { /* linear of integers: 4 bits with float16 scales, or 8 with float32; 6 and
                                  7 with rounded inputs, and zeros in place of offsets; 8: MXFP4 */
        gemm p = {.inputs = a, .outputs = b, .group = 16, .is_mxfp4 = head[0] == 8};
        p.rounds_inputs = head[0] == 6 || head[0] == 7;
        p.has_half_scales = head[0] % 2 == 0, p.bits = p.has_half_scales ? 4 : 8;
        scalar *x = take(from, rows * a, sizeof *x), *out = malloc(rows * b * sizeof *out);
        uint8_t *integers = take(from, a * b, 1);
        void *scales = take(from, a / 16 * b, scale_bytes(&p));
        void *offsets = take(from, a / 16 * b, p.rounds_inputs ? 1 : scale_bytes(&p));
        void *packed = malloc(packed_groups_size(&p));
        pack_groups(&p, integers, scales, offsets, packed, 1);
        p.weight = packed;
        float *totals = malloc(rows * a / 16 * 2 * sizeof *totals);
        linear(&p, x, malloc(rows * copy_size(&p) + 1), totals, out, NULL, rows, 1);
        give(argv[2], out, rows * b, sizeof *out);
    } else { /* attend: one sequence of `rows` new tokens without earlier ones, 3 a heads of b, a of KV,
                each of which has a sink;
                each query sees `window` keys, or all up to its own if that is 0 */
        long blocks = (rows + 15) / 16 + 1;
        scalar *qkv = take(from, rows * 5 * a * b, sizeof *qkv);
        float *cos_sin = take(from, rows * b, sizeof *cos_sin);
        float *sinks = take(from, 3 * a, sizeof *sinks);
        scalar *cache = calloc(blocks * 16 * 2 * a * b, sizeof *cache);
        scalar *out = malloc(rows * 3 * a * b * sizeof *out);
        int64_t *positions = malloc(rows * sizeof *positions), *slots = malloc(rows * sizeof *slots);
        int32_t *table = malloc(blocks * sizeof *table), starts[2] = {0, rows}, context = rows;
        for (long i = 0; i < rows; i++) positions[i] = i, slots[i] = i + 16;
        for (long i = 0; i < blocks; i++) table[i] = i + 1;
        attention at = {
            .num_heads = 3 * a, .num_kv_heads = a, .head_dim = b,
            .block_size = 16, .block_rows = 16, .table_width = blocks, .window = head[4],
            .scale = 1.0f / sqrtf(b), .eps = 1e-5f, .softcap = *softcap, .cos_sin = cos_sin,
            .positions = positions, .slots = slots, .tables = table,
            .context_lens = &context, .starts = starts, .rows = rows, .sequences = 1,
        };
        attend(&at, qkv, NULL, sinks, cache, NULL, NULL, out, 1);
        give(argv[2], out, rows * 3 * a * b, sizeof *out);
    }
    return 0;
}
