/* Arguments of the exponential of skew matrices and of its gradient; reading exponents, writing results. */
#ifndef TORCHROPE_SKEW_EXP_H
#define TORCHROPE_SKEW_EXP_H
#include "common.h"

typedef struct {
    int64_t size, heads, blocks, b, axes, sets, tokens, threads; /* heads: those of the rotation */
    const float *positions;  /* (sets, tokens, axes), or NULL: generators are the exponents (heads, blocks, b, b) */
    const float *generators; /* (axes, heads, blocks, b, b) */
    float *table;            /* (sets, heads, tokens, blocks, b, b), each block transposed */
    const float *tangent;    /* (sets, heads, tokens, blocks, b (b - 1) / 2), the incoming gradient */
    float *d_generators;     /* as generators */
    float *d_positions;      /* as positions, or NULL */
} SkewExp;

/* Layout of matrices: `lanes` of them interleaved, element (i, j) of lane l at (i width + j) lanes + l. Large matrices,
   of more than 8 rows, are computed one at a time. */
typedef struct {
    int64_t b, width, lanes, size;
} Layout;

INLINE Layout layout_for(int64_t b) {
    Layout y;
    y.b = b;
    y.lanes = b <= 8 ? VW : 1;
    y.width = b <= 8 ? b : padded(b);
    y.size = (b <= 8 ? b : y.width) * y.width * y.lanes;
    return y;
}

/* Tokens grouped into rays: positions g p, |g| >= 1. Their exponents have the same planes, decomposed once. */
typedef struct {
    int64_t count;     /* rays */
    int64_t *first;    /* of each ray, in the members; one more at the end */
    int64_t *member;   /* tokens, by ray, then by length; without positions blocks */
    double *multiple;  /* of the ray's first token */
} Rays;

/* A call, the parts that its columns are split into, and their sums. */
typedef struct {
    const SkewExp *p;
    Rays rays; /* of large matrices */
    int64_t parts, backward;
    float *generators; /* (parts, axes, heads, blocks, b, b), or NULL */
    float *positions;  /* (heads, blocks, sets, tokens, axes), or NULL */
} Job;

/* A lane is a token of one head and block, or, without positions, a block. */
typedef struct {
    int64_t head, block, first, count;
} Group;

static int64_t length_of(const SkewExp *p) { return p->positions ? p->sets * p->tokens : p->heads * p->blocks; }

static int64_t flat_of(const SkewExp *p, const Group *g, int64_t lane) {
    if (!p->positions) return g->first + lane;
    int64_t token = g->first + lane, set = token / p->tokens;
    return ((set * p->heads + g->head) * p->tokens + token % p->tokens) * p->blocks + g->block;
}

/* flat_of for every lane; divides only at the first token of each set of positions. */
INLINE void flats_of(const SkewExp *p, const Group *g, int64_t *flat) {
    int64_t step = p->positions ? p->blocks : 1, left = 0;
    for (int64_t l = 0; l < g->count; l++, left--) {
        flat[l] = left ? flat[l - 1] + step : flat_of(p, g, l);
        if (!left) left = p->positions ? p->tokens - (g->first + l) % p->tokens : VW;
    }
}

static const float *generator_of(const SkewExp *p, int64_t axis, const Group *g) {
    return p->generators + ((axis * p->heads + g->head) * p->blocks + g->block) * p->b * p->b;
}

/* Exponents of small matrices. */
INLINE void read_exponents(Layout y, const SkewExp *p, const Group *g, float *a) {
    int64_t b = y.b;
    if (p->positions) {
        for (int64_t axis = 0; axis < p->axes; axis++) {
            const float *generator = generator_of(p, axis, g);
            vf position = {0};
            for (int64_t l = 0; l < g->count; l++) position[l] = p->positions[(g->first + l) * p->axes + axis];
            for (int64_t i = 0; i < b * b; i++)
                ((vf *)a)[i] = position * generator[i] + (axis ? ((vf *)a)[i] : (vf){0});
        }
        return;
    }
    for (int64_t l = 0; l < y.lanes; l++)
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                a[(i * y.width + j) * y.lanes + l] =
                    l < g->count ? p->generators[((g->first + l) * b + i) * b + j] : 0;
}

/* 1 + E of small matrices. */
INLINE void write_table(Layout y, const SkewExp *p, const Group *g, const float *e) {
    int64_t b = y.b, flat[VW];
    flats_of(p, g, flat);
    if (g->count == VW && b * b % VW == 0) {
        for (int64_t k = 0; k < b * b; k += VW) {
            vf entries[VW];
            for (int64_t n = 0; n < VW; n++) {
                int64_t j = (k + n) / b, i = (k + n) % b;
                entries[n] = ((const vf *)e)[i * b + j] + (i == j ? 1.0f : 0.0f);
            }
            transpose_lanes(entries);
            for (int64_t l = 0; l < VW; l++) *(vf *)(p->table + flat[l] * b * b + k) = entries[l];
        }
        return;
    }
    for (int64_t l = 0; l < g->count; l++) {
        float *target = p->table + flat[l] * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                target[j * b + i] = e[(i * b + j) * VW + l] + (i == j ? 1.0f : 0.0f);
    }
}

/* M of small matrices: half the gradient of the entries above the diagonal, and skew. */
INLINE void read_tangents(Layout y, const SkewExp *p, const Group *g, float *x) {
    int64_t b = y.b, count = b * (b - 1) / 2, flat[VW];
    vf entries[28 + VW];
    flats_of(p, g, flat);
    if (g->count == VW && count >= VW) {
        for (int64_t k = 0; k < count; k += VW) {
            int64_t at = least(k, count - VW);
            for (int64_t l = 0; l < VW; l++) entries[at + l] = *(const vf *)(p->tangent + flat[l] * count + at);
            transpose_lanes(entries + at);
        }
    } else {
        memset(entries, 0, sizeof entries);
        for (int64_t l = 0; l < g->count; l++)
            for (int64_t k = 0; k < count; k++) entries[k][l] = p->tangent[flat[l] * count + k];
    }
    const vf *entry = entries;
    for (int64_t i = 0; i < b; i++) {
        ((vf *)x)[i * b + i] = (vf){0};
        for (int64_t j = i + 1; j < b; j++) {
            vf value = 0.5f * *entry++;
            ((vf *)x)[i * b + j] = value;
            ((vf *)x)[j * b + i] = -value;
        }
    }
}

/* Add p_a J to the sums of this part, `(axes, size)`; write <A_a, J>, this column's gradient of the positions. */
INLINE void collect(Layout y, const Job *job, const Group *g, const float *x, float *sums) {
    const SkewExp *p = job->p;
    int64_t b = y.b;
    for (int64_t axis = 0; axis < p->axes; axis++) {
        float *sum = sums + axis * y.size;
        if (y.lanes == 1) {
            float position = p->positions[g->first * p->axes + axis];
            for (int64_t i = 0; i < y.size; i++) sum[i] += position * x[i];
        } else {
            vf position = {0};
            for (int64_t l = 0; l < g->count; l++) position[l] = p->positions[(g->first + l) * p->axes + axis];
            for (int64_t i = 0; i < b * b; i++) ((vf *)sum)[i] += position * ((const vf *)x)[i];
        }
        if (!job->positions) continue;
        const float *generator = generator_of(p, axis, g);
        for (int64_t l = 0; l < g->count; l++) {
            double dot = 0; /* thousands of terms with cancellation */
            for (int64_t i = 0; i < b; i++)
                for (int64_t j = 0; j < b; j++) dot += generator[i * b + j] * x[(i * y.width + j) * y.lanes + l];
            int64_t token = g->first + l, all = p->sets * p->tokens;
            job->positions[((g->head * p->blocks + g->block) * all + token) * p->axes + axis] = (float)dot;
        }
    }
}

/* Without positions each exponent has a separate gradient. */
INLINE void write_gradient(Layout y, const SkewExp *p, const Group *g, const float *x) {
    int64_t b = y.b;
    for (int64_t l = 0; l < g->count; l++)
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                p->d_generators[((g->first + l) * b + i) * b + j] = x[(i * y.width + j) * y.lanes + l];
}

INLINE void write_sums(Layout y, const Job *job, const Group *g, int64_t part, const float *sums) {
    const SkewExp *p = job->p;
    int64_t b = y.b;
    for (int64_t axis = 0; axis < p->axes; axis++) {
        float *target = job->generators + (((part * p->axes + axis) * p->heads + g->head) * p->blocks + g->block) * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                float sum = 0;
                for (int64_t l = 0; l < y.lanes; l++) sum += sums[axis * y.size + (i * y.width + j) * y.lanes + l];
                target[i * b + j] = sum;
            }
    }
}

#endif
