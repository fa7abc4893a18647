/* Commuting rotations in a learned basis: arguments, working memory, and the angles of a token.

   In the basis the channels of a block are the first coordinates of all planes, then the second coordinates. */
#ifndef TORCHROPE_BASIS_H
#define TORCHROPE_BASIS_H

#include "panel.h"

typedef struct {
    int64_t size;
    Side sides[2];
    int64_t tokens, axes, heads, blocks, b, head_dim; /* heads: those of the rotation */
    int64_t sets, threads, outer;                     /* outer: whether the left U is applied, or omitted */
    const float *positions;                           /* (sets, tokens, axes) */
    const float *coefficients;                        /* (axes, heads, blocks) */
    const float *basis;                               /* (heads, blocks, b, b), columns in pairs */
    const float *angular;                             /* (heads, blocks, b / 2) */
    float *d_coefficients;                            /* as coefficients; or NULL, together with d_base */
    float *d_positions;                               /* as positions, or NULL */
    float *d_base;                                    /* as basis, or NULL */
} Basis;

/* Arguments of a call and its partial sums, shared by all threads; tokens are split into `parts`. */
typedef struct {
    const Basis *p;
    int64_t parts;
    float *matrices;     /* U and then U^T of every head and block, rows padded, as panels are multiplied by them */
    float *coefficients; /* (parts, axes, heads, blocks) */
    float *positions;    /* (heads, sets, tokens, axes), or NULL */
    float *inside;       /* (parts, heads, blocks, b, b), the gradient to the base in the basis */
    double *squares;     /* blocks of eight: mean of p_a p_c over tokens, (axes, axes) */
} Job;

/* Buffers of a thread. */
typedef struct {
    float *x, *grad, *y, *h, *raw;  /* panels */
    float *spill;                   /* a product of a block that is narrower than its vectors */
    const float *inner, *outer;     /* U and U^T of every block of the head */
    float *products;                /* sum h x'^T of a token */
    float *sums;                    /* alpha and beta, complex, summed over tokens */
    float *less, *sine;             /* cos - 1 and sin of every plane's angle */
    float *half_cosine, *half_sine; /* of half the angles */
    float *moment;                  /* gradients of the angles */
    float *turned;                  /* blocks of eight: sums of p_a moment and s moment / 2, (axes + 1, planes) */
    float *gaps;                    /* blocks of eight not separated: 1 / (w_j + w_k) and 1 / (w_j - w_k) */
    double *scale;                  /* s of every block */
    double *along, *rates;          /* of the head: coefficients (axes, blocks), half frequencies (axes, planes), padded */
    double fastest;                 /* the largest half frequency of the head */
    int64_t *returns;               /* per block: whether the left U is applied; always for a block that never rotates */
    int64_t *separated;                /* blocks of eight: whether the frequencies of a block are well separated */
    int64_t row, width, planes;     /* planes: floats between tokens */
} Workspace;

static Workspace lay_out(const Basis *p, Arena *arena) {
    Workspace w;
    int64_t b = p->b, planes = p->blocks * b / 2, eight = b == 8, tokens = eight ? GROUP_TOKENS : 1;
    w.width = padded(b);
    w.planes = planes + 64;
    w.row = round_up(p->blocks * b + w.width, 16);
    float **panels[] = {&w.x, &w.grad, &w.y, &w.h, &w.raw};
    for (int i = 0; i < 5; i++) *panels[i] = take(arena, 4 * ROWS * w.row);
    w.products = take(arena, 4 * tokens * p->blocks * b * w.width);
    float **rows[] = {&w.less, &w.sine, &w.half_cosine, &w.half_sine, &w.moment};
    for (int i = 0; i < 5; i++) *rows[i] = take(arena, 4 * tokens * w.planes);
    w.turned = take(arena, 4 * eight * (p->axes + 1) * planes);
    w.gaps = take(arena, 4 * eight * 32 * p->blocks);
    w.spill = take(arena, 4 * ROWS * w.width);
    w.sums = take(arena, 4 * 2 * planes * b);
    w.scale = take(arena, 8 * tokens * p->blocks);
    w.along = take(arena, 8 * p->axes * p->blocks);
    w.rates = take(arena, 8 * p->axes * round_up(planes, VW));
    w.returns = take(arena, 8 * p->blocks);
    w.separated = take(arena, 8 * p->blocks);
    return w;
}

/* Daleckii and Krein's sums of two planes: alpha and beta, complex. */
typedef struct {
    float ar, ai, br, bi;
} Sums;

static int64_t floats_of_head(const Basis *p) { return 2 * p->blocks * p->b * padded(p->b); }

static void start_head(const Job *job, int64_t head, Workspace *w) {
    const Basis *p = job->p;
    int64_t pairs = p->b / 2, stride = round_up(p->blocks * pairs, VW);
    const float *angular = p->angular + head * p->blocks * pairs;
    memset(w->rates, 0, 8 * p->axes * stride);
    w->fastest = 0;
    w->inner = job->matrices + head * floats_of_head(p);
    w->outer = w->inner + floats_of_head(p) / 2;
    for (int64_t axis = 0; axis < p->axes; axis++)
        for (int64_t block = 0; block < p->blocks; block++) {
            double along = p->coefficients[(axis * p->heads + head) * p->blocks + block];
            w->along[axis * p->blocks + block] = along;
            for (int64_t i = block * pairs; i < (block + 1) * pairs; i++) {
                double rate = w->rates[axis * stride + i] = 0.5 * along * (double)angular[i];
                w->fastest = fmax(w->fastest, fabs(rate));
            }
        }
    for (int64_t block = 0; block < p->blocks; block++) {
        int along = 0, around = 0;
        for (int64_t axis = 0; axis < p->axes; axis++) along |= w->along[axis * p->blocks + block] != 0;
        for (int64_t plane = 0; plane < pairs; plane++) around |= angular[block * pairs + plane] != 0;
        w->returns[block] = p->outer || !along || !around;
    }
}

/* cos and sin of half the angles; cos - 1 and sin of the angles follow by doubling. Each has room for a vector more. */
INLINE void find_rotation(int64_t b, const Basis *p, int64_t set, int64_t token, Workspace w) {
    int64_t count = p->blocks * (b / 2), stride = round_up(count, VW);
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    double distance = 0;
    for (int64_t axis = 0; axis < p->axes; axis++) distance += fabs((double)position[axis]);
    for (int64_t block = 0; p->d_base && block < p->blocks; block++) {
        w.scale[block] = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            w.scale[block] += (double)position[axis] * w.along[axis * p->blocks + block];
    }
    for (int64_t i = 0; i < count; i += VW) {
        vd angle[2] = {{0}, {0}};
        vf cosine, sine;
        for (int64_t axis = 0; axis < p->axes; axis++) {
            angle[0] += (double)position[axis] * *(const vd *)(w.rates + axis * stride + i);
            angle[1] += (double)position[axis] * *(const vd *)(w.rates + axis * stride + i + VW / 2);
        }
        if (distance * w.fastest <= FARTHEST_ANGLE)
            cos_sin_lanes(angle[0], angle[1], &cosine, &sine);
        else
            cos_sin_far((const double *)angle, (float *)&cosine, (float *)&sine, VW);
        *(vf *)(w.half_cosine + i) = cosine, *(vf *)(w.half_sine + i) = sine;
        *(vf *)(w.less + i) = -2 * sine * sine, *(vf *)(w.sine + i) = 2 * sine * cosine;
    }
}

/* Compute the gradient of a token's position from those of its angles. */
INLINE void reduce_to_position(const Job *job, int64_t set, int64_t head, int64_t token, Workspace w) {
    const Basis *p = job->p;
    int64_t pairs = p->b / 2;
    const float *angular = p->angular + head * p->blocks * pairs;
    float *d_position = job->positions + ((head * p->sets + set) * p->tokens + token) * p->axes;
    for (int64_t axis = 0; axis < p->axes; axis++) {
        double sum = 0;
        for (int64_t block = 0; block < p->blocks; block++)
            for (int64_t i = block * pairs; i < (block + 1) * pairs; i++)
                sum += w.along[axis * p->blocks + block] * (double)angular[i] * (double)w.moment[i];
        d_position[axis] = (float)sum;
    }
}

#endif
