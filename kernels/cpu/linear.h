/* A linear layer: a GEMM with weights of any format, its bias, and one thread's share of it. */
#ifndef LINEAR_H
#define LINEAR_H

#include "gemm.h"
#include "grouped.h"
#include "integers.h"

INLINED long packed_block_bytes(const gemm *p) {
    return p->rounds_inputs ? integer_block_bytes(p) : block_bytes(p);
}

INLINED long packed_bytes(const gemm *p) {
    return ceil_div(p->outputs, PANEL) * (p->inputs / p->group) * packed_block_bytes(p);
}

/* `offsets` are zero points, a byte each, if inputs are rounded. */
static void pack_groups_part(const gemm *p, const uint8_t *integers, const char *scales,
                             const char *offsets, char *packed, team me) {
    long groups = p->inputs / p->group, size = scale_bytes(p);
    long offset_size = p->rounds_inputs ? 1 : size;
    range mine = share_of(ceil_div(p->outputs, PANEL), me);
    for (long panel = mine.begin; panel < mine.end; panel++)
        for (long g = 0; g < groups; g++) {
            long first = panel * PANEL, group = first * groups + g;
            (p->rounds_inputs ? pack_integer_block : pack_block)(
                p, integers + first * p->inputs + g * p->group, scales + group * size,
                offsets + group * offset_size, least(PANEL, p->outputs - first),
                packed + (panel * groups + g) * packed_block_bytes(p));
        }
}

/* sums = `count` rows of x, from `begin` on, times the panel of outputs from `first` on. */
static void multiply_rows(const gemm *p, const void *x, const float *totals, long begin,
                          long count, long first, float (*sums)[PANEL]) {
    long stride = input_stride(p);
    if (p->rounds_inputs)
        multiply_integer_panel(p, first / PANEL, (const char *)x + begin * copy_bytes(p),
                               (const rounded_group *)totals + begin * (stride / p->group), count,
                               sums);
    else if (p->group)
        multiply_grouped_panel(p, first / PANEL, (const input *)x + begin * stride,
                               totals + begin * (stride / p->group), count, sums);
    else
        multiply_panel((const scalar *)p->weight + first * stride,
                       (const input *)x + begin * stride, stride, count, sums);
}

/* x [rows, K], `to` as prepared; exactly one of out and out_floats [rows, N] is given. */
static void linear_part(const prepared *to, const scalar *x, scalar *out, float *out_floats,
                        long rows, team me) {
    const gemm *p = to->p;
    const void *from = copy_bytes(p) ? to->copy : x;
    long n = p->outputs;
    long panels = ceil_div(n, PANEL), blocks = ceil_div(rows, BLOCK_ROWS);
    range mine = share_of(panels * blocks, me);
    float sums[BLOCK_ROWS][PANEL] __attribute__((aligned(64)));
    for (long item = mine.begin; item < mine.end; item++) {
        range block = share_of(rows, (team){item / panels, blocks});
        long first = item % panels * PANEL, width = least(PANEL, n - first);
        multiply_rows(p, from, to->totals, block.begin, block.end - block.begin, first, sums);
        for (long row = block.begin; row < block.end; row++)
            for (long i = 0; i < width; i += LANES) {
                vec sum = load_float(sums[row - block.begin] + i);
                if (p->bias) sum += load_some(p->bias + first + i, width - i);
                if (out_floats)
                    store_some_floats(out_floats + row * n + first + i, sum, width - i);
                else
                    store_some(out + row * n + first + i, sum, width - i);
            }
    }
}

#endif
