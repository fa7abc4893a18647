/* A panel: the rows of one token, of all samples and heads that share its rotation, gathered as float. */
#ifndef TORCHROPE_PANEL_H
#define TORCHROPE_PANEL_H

#include "common.h"

enum { ROWS = 32 };

typedef struct {
    const Side *side[ROWS];
    int64_t sample[ROWS], head[ROWS], count;
} Panel;

/* Iterates over the rows of a token in panels. */
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

/* Copies inline: a call of memcpy takes as long as a row. */
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

#endif
