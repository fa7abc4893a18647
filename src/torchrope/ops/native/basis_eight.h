/* Commuting rotations of blocks of eight, the most frequent size: a row of a block is one vector, U stays in registers.

   Gradients to the base. With N = h x'^T, x' = U^T x, per token, the gradient of Daleckii and Krein weights the complex
   parts a, b of N by  e^(-i s (w_j +- w_k) / 2) sin(s (w_j -+ w_k) / 2) / (w_j -+ w_k),  which is smooth where
   frequencies are equal. The numerators are the entries of  D = N rot^T - rot^T N.  If the frequencies of a block are
   well separated, D is summed over all tokens and divided once; otherwise each token's terms are computed. */
#ifndef TORCHROPE_BASIS_EIGHT_H
#define TORCHROPE_BASIS_EIGHT_H

#include "basis.h"

typedef int32_t vi8 __attribute__((vector_size(32), aligned(4), may_alias));

INLINE v8 concatenate(v4 low, v4 high) { return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE v8 swap_halves(v8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3); }
INLINE v4 low_half(v8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINE v4 high_half(v8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }
INLINE v8 choose(vi8 where, v8 x, v8 otherwise) { return (v8)(((vi8)x & where) | ((vi8)otherwise & ~where)); }

/* A rotation of one block as vectors:  c x + s swap_halves(x). `turn_of` gives rot - 1. */
typedef struct {
    v8 c, s;
} Turn;

INLINE Turn turn_of(int64_t token, int64_t block, float sign, Workspace w) {
    v4 less = *(const v4 *)(w.less + token * w.planes + 4 * block);
    v4 sine = sign * *(const v4 *)(w.sine + token * w.planes + 4 * block);
    return (Turn){concatenate(less, less), concatenate(-sine, sine)};
}

INLINE v8 rotated(Turn turn, v8 x) { return turn.c * x + turn.s * swap_halves(x); }

/* rot, or rot - 1 if U is applied last. */
INLINE Turn turn_of_rows(int64_t token, int64_t block, float sign, Workspace w) {
    Turn turn = turn_of(token, block, sign, w);
    turn.c += w.returns[block] ? 0.0f : 1.0f;
    return turn;
}

/* R x or rot U^T x in one block of the rows of a group. */
INLINE void rotate_rows(const Places *places, Group g, int64_t block, Workspace w) {
    float changes[GROUP][8];
    int64_t returns = w.returns[block];
    v8 matrix[8];
    load_matrix(w.inner + 64 * block, matrix);
    for (int64_t t = 0, i = 0; t < g.tokens; t++) {
        Turn turn = turn_of_rows(t, block, 1, w);
        for (int64_t last = i + g.rows; i < last; i++) {
            v8 y = rotated(turn, times_matrix(places->x[i] + 8 * block, matrix));
            *(v8 *)(returns ? changes[i] : places->out[i] + 8 * block) = y;
        }
    }
    if (!returns) return;
    load_matrix(w.outer + 64 * block, matrix);
    for (int64_t i = 0; i < g.tokens * g.rows; i++) {
        v8 x = *(const v8 *)(places->x[i] + 8 * block);
        *(v8 *)(places->out[i] + 8 * block) = x + times_matrix(changes[i], matrix);
    }
}

/* In one block of the rows of a group: dx = dy + U (rot^T - 1) h or U rot^T h, and sum h x^T of each token. */
INLINE void rotate_rows_back(const Places *places, Group g, int64_t blocks, int64_t block, int wanted, Workspace w) {
    float h[GROUP][8], changes[GROUP][8];
    const float *rows[GROUP];
    int64_t returns = w.returns[block], count = g.tokens * g.rows;
    v8 matrix[8];
    load_matrix(w.inner + 64 * block, matrix);
    for (int64_t t = 0, i = 0; t < g.tokens; t++) {
        Turn turn = turn_of_rows(t, block, -1, w);
        for (int64_t last = i + g.rows; i < last; i++) {
            rows[i] = places->grad[i] + 8 * block;
            v8 into = *(const v8 *)rows[i];
            if (returns) {
                into = times_matrix(rows[i], matrix);
                *(v8 *)h[i] = into;
                rows[i] = h[i];
            }
            *(v8 *)changes[i] = rotated(turn, into);
        }
    }
    for (int64_t t = 0; wanted && t < g.tokens; t++)
        add_outer(rows + t * g.rows, places->x + t * g.rows, 8 * block, g.rows, w.products + 64 * (t * blocks + block));
    load_matrix(w.outer + 64 * block, matrix);
    for (int64_t i = 0; i < count; i++) {
        v8 dx = times_matrix(changes[i], matrix);
        if (returns) dx += *(const v8 *)(places->grad[i] + 8 * block);
        *(v8 *)(places->out[i] + 8 * block) = dx;
    }
}

/* The workspace of a token of a group: its angles, their gradients and its products. */
INLINE Workspace of_token(Workspace w, int64_t blocks, int64_t token) {
    int64_t step = token * w.planes;
    w.less += step, w.sine += step, w.half_cosine += step, w.half_sine += step, w.moment += step;
    w.scale += token * blocks;
    w.products += token * 64 * blocks;
    return w;
}

/* Rotate all rows of some tokens, or compute their gradients. */
INLINE void rotate_group_8(const Basis *p, int64_t set, int64_t head, int64_t first, int64_t tokens, int backward,
                           Workspace w) {
    int64_t n = 8 * p->blocks;
    int wanted = backward && p->d_base;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    Places places;
    Scratch scratch = {w.raw, w.grad, w.y, w.row};
    for (int64_t t = 0; t < tokens; t++) find_rotation(8, p, set, first + t, of_token(w, p->blocks, t));
    if (wanted) memset(w.products, 0, 4 * tokens * 64 * p->blocks);
    while (next_panel(&walk, &panel))
        for (int64_t from = 0; from < panel.count; from += GROUP_ROWS) {
            Group g = {&panel, from, least(GROUP_ROWS, panel.count - from), first, tokens};
            find_places(g, n, !backward || wanted, backward, scratch, &places);
            fetch_places(&places, g.rows * g.tokens, n, !backward || wanted, backward);
            for (int64_t block = 0; block < p->blocks; block++)
                if (backward)
                    rotate_rows_back(&places, g, p->blocks, block, wanted, w);
                else
                    rotate_rows(&places, g, block, w);
            finish_rows(g, n, p->head_dim, backward, scratch);
        }
}

/* ---- gradients to frequencies and base ---- */

/* Frequencies of a block are separated if the smallest difference, times the root mean square of s, is at least this many
   radians: rounding errors of D are divided by differences, and stay below those of plain PyTorch in float32. */
static const double SEPARATED = 0.1;

/* Decide per block of a head whether its frequencies are separated. If not, compute 1 / (w_j + w_k) and 1 / (w_j - w_k)
   for the four k; infinite entries are not used. */
static void compare_frequencies(const Job *job, int64_t head, Workspace w) {
    const Basis *p = job->p;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *angular = p->angular + (head * p->blocks + block) * 4;
        double square = 0, closest = INFINITY;
        for (int64_t a = 0; a < p->axes; a++)
            for (int64_t c = 0; c < p->axes; c++)
                square += w.along[a * p->blocks + block] * w.along[c * p->blocks + block] * job->squares[a * p->axes + c];
        for (int64_t j = 0; j < 4; j++)
            for (int64_t k = 0; k < j; k++) closest = fmin(closest, fabs((double)angular[j] - (double)angular[k]));
        w.separated[block] = closest * closest * square >= SEPARATED * SEPARATED;
        for (int64_t i = 0; i < (w.separated[block] ? 0 : 16); i++) {
            w.gaps[32 * block + i / 4 * 8 + i % 4] = 1 / (angular[i / 4] + angular[i % 4]);
            w.gaps[32 * block + i / 4 * 8 + i % 4 + 4] = 1 / (angular[i / 4] - angular[i % 4]);
        }
    }
}

/* The diagonals of the four quarters of N, as two vectors, collected from its rows. */
typedef struct {
    v8 upper, lower;
} Diagonals;

INLINE void collect_diagonals(int64_t j, v8 upper, v8 lower, Diagonals *d) {
    const vi8 lanes = {0, 1, 2, 3, 0, 1, 2, 3};
    d->upper = choose(lanes == (int32_t)j, upper, d->upper);
    d->lower = choose(lanes == (int32_t)j, lower, d->lower);
}

/* Gradients of the angles,  sum h_2 y_1 - h_1 y_2  with  y = rot x',  from the diagonals of N; added per axis. */
INLINE void add_moments(const Basis *p, const float *position, int64_t block, Diagonals d, Workspace w) {
    v4 less = *(const v4 *)(w.less + 4 * block), sine = *(const v4 *)(w.sine + 4 * block);
    v4 odd = low_half(d.lower) - high_half(d.upper), even = low_half(d.upper) + high_half(d.lower);
    v4 moment = odd + less * odd - sine * even;
    float *turned = w.turned + 4 * block;
    *(v4 *)(w.moment + 4 * block) = moment;
    for (int64_t axis = 0; axis < p->axes; axis++, turned += 4 * p->blocks) *(v4 *)turned += position[axis] * moment;
    *(v4 *)turned += 0.5f * (float)w.scale[block] * moment;
}

/* Add D of one block with separated frequencies, summed over the tokens of a group. */
INLINE void add_commutators(const Basis *p, const float *positions, int64_t tokens, int64_t block, Workspace w) {
    v8 matrix[8], sums[8];
    load_matrix(w.inner + 64 * block, matrix);
    load_matrix(w.sums + 64 * block, sums);
    for (int64_t t = 0; t < tokens; t++) {
        const float *products = w.products + 64 * (t * p->blocks + block);
        const float *less = w.less + t * w.planes + 4 * block, *sine = w.sine + t * w.planes + 4 * block;
        Turn turn = turn_of(t, block, 1, w);
        Diagonals diagonals = {{0}, {0}};
        _Pragma("GCC unroll 4") for (int64_t j = 0; j < 4; j++) {
            v8 upper = times_matrix(products + 8 * j, matrix), lower = times_matrix(products + 8 * j + 32, matrix);
            Turn gap = {turn.c - less[j], turn.s};
            sums[j] += rotated(gap, upper) - sine[j] * lower;
            sums[j + 4] += rotated(gap, lower) + sine[j] * upper;
            collect_diagonals(j, upper, lower, &diagonals);
        }
        add_moments(p, positions + t * p->axes, block, diagonals, of_token(w, p->blocks, t));
    }
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) *(v8 *)(w.sums + 64 * block + 8 * j) = sums[j];
}

/* As `add_products`, for the tokens of a group, with [w_j + w_k, w_j - w_k] for the four k side by side. The sums of a
   pair of vectors are [re a, im b] and [re b, -im a]. */
INLINE void add_weighted(const Basis *p, const float *positions, int64_t head, int64_t tokens, int64_t block,
                         Workspace all) {
    const float *angular = p->angular + (head * p->blocks + block) * 4;
    v4 at = *(const v4 *)angular;
    v8 wk = concatenate(at, -at);
    for (int64_t t = 0; t < tokens; t++) {
        Workspace w = of_token(all, p->blocks, t);
        v4 c = *(const v4 *)(w.half_cosine + 4 * block), s = *(const v4 *)(w.half_sine + 4 * block);
        v8 ck = concatenate(c, c), sk = concatenate(s, -s);
        float *products = w.products + 64 * block, half = 0.5f * (float)w.scale[block];
        Diagonals diagonals = {{0}, {0}};
        multiply_matrix(products, w.inner + 64 * block);
        _Pragma("GCC unroll 4") for (int64_t j = 0; j < 4; j++) {
            float *sums = w.sums + 64 * block + 16 * j;
            v8 upper = *(const v8 *)(products + 8 * j), lower = *(const v8 *)(products + 8 * j + 32);
            v8 first = upper + swap_halves(lower), second = upper - swap_halves(lower); /* [re a, im b], [re b, -im a] */
            float cj = w.half_cosine[4 * block + j], sj = w.half_sine[4 * block + j];
            v8 cosine = cj * ck - sj * sk, sine = sj * ck + cj * sk;
            v8 x = half * (angular[j] + wk), z = x * x;
            v8 series = half * (1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040))));
            v8 direct = sine * *(const v8 *)(w.gaps + 32 * block + 8 * j);
            v8 weights = swap_halves(choose(z < 0.09f, series, direct));
            *(v8 *)sums += weights * (cosine * first - sine * swap_halves(second));
            *(v8 *)(sums + 8) +=
                swap_halves(weights) * (swap_halves(cosine) * second + swap_halves(sine) * swap_halves(first));
            collect_diagonals(j, upper, lower, &diagonals);
        }
        add_moments(p, positions + t * p->axes, block, diagonals, w);
    }
}

INLINE void rotate_set_8(const Job *job, int64_t set, int64_t head, int64_t first, int64_t last, int backward,
                         Workspace w) {
    const Basis *p = job->p;
    for (int64_t token = first; token < last; token += GROUP_TOKENS) {
        int64_t tokens = least(GROUP_TOKENS, last - token);
        const float *positions = p->positions + (set * p->tokens + token) * p->axes;
        rotate_group_8(p, set, head, token, tokens, backward, w);
        for (int64_t block = 0; backward && p->d_base && block < p->blocks; block++)
            if (w.separated[block])
                add_commutators(p, positions, tokens, block, w);
            else
                add_weighted(p, positions, head, tokens, block, w);
        for (int64_t t = 0; backward && job->positions && t < tokens; t++)
            reduce_to_position(job, set, head, token + t, of_token(w, p->blocks, t));
    }
}

INLINE void start_sums_8(const Job *job, int64_t head, Workspace w) {
    const Basis *p = job->p;
    memset(w.turned, 0, 4 * (p->axes + 1) * 4 * p->blocks);
    compare_frequencies(job, head, w);
}

INLINE void reduce_to_coefficients_8(const Job *job, int64_t head, int64_t part, Workspace w) {
    const Basis *p = job->p;
    for (int64_t axis = 0; axis < p->axes; axis++)
        for (int64_t block = 0; block < p->blocks; block++) {
            const float *angular = p->angular + (head * p->blocks + block) * 4;
            const float *turned = w.turned + (axis * p->blocks + block) * 4;
            float sum = 0;
            for (int64_t j = 0; j < 4; j++) sum += angular[j] * turned[j];
            job->coefficients[((part * p->axes + axis) * p->heads + head) * p->blocks + block] = sum;
        }
}

/* alpha and beta of planes j and k; for j = k only the imaginary part of alpha, as the rest cancels in G - G^T. */
INLINE Sums sums_8(const Basis *p, int64_t head, int64_t block, int64_t j, int64_t k, Workspace w) {
    const float *sums = w.sums + 64 * block, *angular = p->angular + (head * p->blocks + block) * 4;
    if (!w.separated[block]) {
        const float *at = sums + 16 * j + k;
        return (Sums){at[0], -at[12], at[8], at[4]};
    }
    if (j == k) return (Sums){0, w.turned[(p->axes * p->blocks + block) * 4 + j], 0, 0};
    const float *upper = sums + 8 * j + k, *lower = upper + 32;
    float near = 0.5f / (angular[j] - angular[k]), far = 0.5f / (angular[j] + angular[k]);
    return (Sums){near * (lower[0] - upper[4]), -near * (upper[0] + lower[4]), far * (lower[0] + upper[4]),
                  far * (lower[4] - upper[0])};
}

#endif
