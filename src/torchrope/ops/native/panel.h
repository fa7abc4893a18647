/* A panel: the rows of one token, of all samples and heads that share its rotation, gathered as float. */
#ifndef TORCHROPE_PANEL_H
#define TORCHROPE_PANEL_H

#include "common.h"

enum { ROWS = 32 };

typedef struct {
    const Side *side[ROWS];
    int64_t sample[ROWS], head[ROWS], count;
} Panel;

/* Iterator over the rows of a token in panels. */
typedef struct {
    const Side *sides;
    int64_t head, heads, set, sets; /* of the rotation */
    int64_t which, sample, member;
    int64_t group[2]; /* heads of q or k per head of the rotation */
} Walk;

INLINE int64_t first_sample(const Walk *walk) { return walk->sets == 1 ? 0 : walk->set; }

INLINE Walk walk_over(const Side *sides, int64_t head, int64_t heads, int64_t set, int64_t sets) {
    Walk walk = {sides, head, heads, set, sets, 0, 0, 0, {sides[0].heads / heads, sides[1].heads / heads}};
    walk.sample = first_sample(&walk);
    return walk;
}

static int next_panel(Walk *walk, Panel *panel) {
    panel->count = 0;
    while (walk->which < 2 && panel->count < ROWS) {
        const Side *side = &walk->sides[walk->which];
        int64_t group = walk->group[walk->which];
        int64_t last = walk->sets == 1 ? side->batch : walk->set + 1;
        if (!side->batch || !group || walk->sample >= last) {
            walk->which++;
            walk->sample = first_sample(walk);
            walk->member = 0;
            continue;
        }
        panel->side[panel->count] = side;
        panel->sample[panel->count] = walk->sample;
        panel->head[panel->count++] = walk->head * group + walk->member;
        if (++walk->member == group) {
            walk->member = 0;
            walk->sample++;
        }
    }
    return panel->count > 0;
}

/* Inlined copy of n floats; for short rows a call of memcpy takes as long as the copy. */
INLINE void copy_floats(float *restrict target, const float *restrict source, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) *(vf *)(target + i) = *(const vf *)(source + i);
    for (; i < n; i++) target[i] = source[i];
}

/* Read n channels of every row, the gradient's or x's own, into a panel of the given width. */
INLINE void gather(const Panel *panel, int64_t token, int64_t n, int of_gradient, float *target, int64_t width) {
    for (int64_t i = 0; i < panel->count; i++) {
        const Rows *rows = of_gradient ? &panel->side[i]->grad : &panel->side[i]->x;
        float *row = target + i * width;
        const float *values = load_row(rows, row_offset(rows, panel->sample[i], panel->head[i], token), n, row);
        if (values != row) copy_floats(row, values, n);
    }
}

/* Prefetch the rows of the next token, into the L2 cache: rows of many samples may share few sets of the L1 cache. */
INLINE void fetch_ahead(const Rows *rows, const Panel *panel, int64_t i, int64_t token, int64_t n) {
    if (!rows->data) return;
    int64_t size = rows->dtype == FLOAT32 ? 4 : 2;
    const char *row = (const char *)rows->data + row_offset(rows, panel->sample[i], panel->head[i], token) * size;
    for (int64_t byte = 0; byte < n * size; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

INLINE void fetch_panel(const Panel *panel, int64_t token, int64_t n) {
    for (int64_t i = 0; i < panel->count; i++) {
        fetch_ahead(&panel->side[i]->x, panel, i, token, n);
        fetch_ahead(&panel->side[i]->grad, panel, i, token, n);
        fetch_ahead(&panel->side[i]->out, panel, i, token, n);
    }
}

/* Write n channels of every row; the others are copied. */
INLINE void spread(const Panel *panel, int64_t token, int64_t n, int64_t head_dim, int of_gradient,
                   const float *source, int64_t width) {
    for (int64_t i = 0; i < panel->count; i++) {
        const Rows *in = of_gradient ? &panel->side[i]->grad : &panel->side[i]->x, *out = &panel->side[i]->out;
        int64_t target = row_offset(out, panel->sample[i], panel->head[i], token);
        if (out->dtype == FLOAT32)
            copy_floats((float *)out->data + target, source + i * width, n);
        else
            store_row(out, target, n, source + i * width);
        if (n < head_dim) {
            int64_t at = row_offset(in, panel->sample[i], panel->head[i], token);
            copy_row(in, at, out, target, n, head_dim - n);
        }
    }
}

/* ---- blocks of eight, in place: a row of a block is one vector ---- */

enum { GROUP_TOKENS = 8, GROUP_ROWS = 4, GROUP = GROUP_TOKENS * GROUP_ROWS };

/* Some rows of a panel, at neighbouring tokens, so that memory is read in order. */
typedef struct {
    const Panel *panel;
    int64_t from, rows, first, tokens; /* rows of the panel; tokens of the set */
} Group;

/* Where the rows of a group are read and written, token by token: in their tensors if those are float32, else in
   scratch. */
typedef struct {
    const float *x[GROUP], *grad[GROUP];
    float *out[GROUP];
} Places;

/* GROUP rows of each. */
typedef struct {
    float *x, *grad, *out;
    int64_t row; /* floats */
} Scratch;

INLINE void find_places(Group g, int64_t n, int with_x, int with_grad, Scratch w, Places *places) {
    for (int64_t r = 0; r < g.rows; r++) {
        const Side *side = g.panel->side[g.from + r];
        int64_t sample = g.panel->sample[g.from + r], head = g.panel->head[g.from + r];
        int64_t x = row_offset(&side->x, sample, head, g.first), grad = row_offset(&side->grad, sample, head, g.first);
        int64_t out = row_offset(&side->out, sample, head, g.first);
        for (int64_t t = 0; t < g.tokens; t++) {
            int64_t i = t * g.rows + r;
            if (with_x) places->x[i] = load_row(&side->x, x + t * side->x.stride[2], n, w.x + i * w.row);
            if (with_grad)
                places->grad[i] = load_row(&side->grad, grad + t * side->grad.stride[2], n, w.grad + i * w.row);
            places->out[i] = side->out.dtype == FLOAT32 ? (float *)side->out.data + out + t * side->out.stride[2]
                                                        : w.out + i * w.row;
        }
    }
}

/* Prefetch all rows of a group, in the order in which their channels are used. */
INLINE void fetch_places(const Places *places, int64_t count, int64_t n, int with_x, int with_grad) {
    for (int64_t at = 0; at < n; at += 16)
        for (int64_t i = 0; i < count; i++) {
            if (with_x) __builtin_prefetch(places->x[i] + at, 0, 3);
            if (with_grad) __builtin_prefetch(places->grad[i] + at, 0, 3);
            __builtin_prefetch(places->out[i] + at, 1, 3);
        }
}

/* Rows computed in scratch are rounded to their dtype; unrotated channels are copied. */
INLINE void finish_rows(Group g, int64_t n, int64_t head_dim, int of_gradient, Scratch w) {
    for (int64_t r = 0; r < g.rows; r++) {
        const Side *side = g.panel->side[g.from + r];
        const Rows *in = of_gradient ? &side->grad : &side->x;
        if (side->out.dtype == FLOAT32 && n == head_dim) continue;
        for (int64_t t = 0; t < g.tokens; t++) {
            int64_t sample = g.panel->sample[g.from + r], head = g.panel->head[g.from + r];
            int64_t target = row_offset(&side->out, sample, head, g.first + t);
            if (side->out.dtype != FLOAT32) store_row(&side->out, target, n, w.out + (t * g.rows + r) * w.row);
            copy_row(in, row_offset(in, sample, head, g.first + t), &side->out, target, n, head_dim - n);
        }
    }
}

INLINE void load_matrix(const float *source, v8 *matrix) {
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) matrix[k] = *(const v8 *)(source + 8 * k);
}

/* x M for one row */
INLINE v8 times_matrix(const float *x, const v8 *matrix) {
    v8 sum = x[0] * matrix[0];
    _Pragma("GCC unroll 8") for (int k = 1; k < 8; k++) sum += x[k] * matrix[k];
    return sum;
}

/* Replace an 8 x 8 matrix by its product with another. */
INLINE void multiply_matrix(float *left, const float *right) {
    v8 matrix[8];
    load_matrix(right, matrix);
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) *(v8 *)(left + 8 * j) = times_matrix(left + 8 * j, matrix);
}

/* Add  sum a b^T  over rows of a token, whose block begins at `at` in b, to a matrix. */
INLINE void add_outer(const float *const *a, const float *const *b, int64_t at, int64_t rows, float *matrix) {
    v8 sum[8];
    load_matrix(matrix, sum);
    for (int64_t i = 0; i < rows; i++) {
        v8 row = *(const v8 *)(b[i] + at);
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) sum[j] += a[i][j] * row;
    }
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) *(v8 *)(matrix + 8 * j) = sum[j];
}

#endif
