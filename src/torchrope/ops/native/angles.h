/* cos and sin of the angles  φ_i = sum_a p_a f_ai  of a tile of tokens, and rotation of rows by them. */
#ifndef TORCHROPE_ANGLES_H
#define TORCHROPE_ANGLES_H

#include "common.h"

enum {
    MOST_TOKENS = 64, /* per tile */
    CHUNK = 16,       /* tokens: runs of equally spaced tokens end at multiples of it */
    SHORTEST_RUN = 4  /* tokens; cos and sin of shorter runs are computed token by token */
};

/* Inputs of the angles, and the layout of channel pairs in a row. */
typedef struct {
    int64_t tokens, axes, heads, pairs; /* heads: those of the rotation */
    int64_t halves;                     /* whether pair i is channels (i, i + pairs), or (2i, 2i + 1) */
    const float *positions;             /* (sets, tokens, axes) */
    const float *frequencies;           /* (axes, heads, pairs) */
    const float *table;                 /* cos and sin, (sets, heads, tokens, 2, pairs), or NULL */
} Angles;

/* cos and sin of a tile, a row of 2 `padded` per token:  c_0 c_1 ... s_0 s_1 ...  with the sines at `padded`. */
typedef struct {
    const Angles *angles;
    const uint8_t *runs; /* (sets, tokens): number of tokens of the run that starts at a token, or NULL with a table */
    float *cos_sin;
    double *frequencies; /* of a head (axes, padded), zeros after the pairs */
    double *steepest;    /* largest absolute frequency along each axis */
    float *start;        /* cos and sin of a run's first token, (2, padded) */
    float *steps;        /* cos and sin of k steps, k = 1 ... CHUNK - 1, (CHUNK, 2, padded) */
    double *step;        /* position difference d of a step, (axes) */
    int64_t padded, head, most; /* most: tokens allocated */
    int64_t in_place;           /* whether a table is read in place, without a copy */
    int64_t *known;             /* number of steps computed; 1 + head of steps and frequencies, or 0 */
} Tile;

INLINE int64_t padded_pairs(const Angles *a) { return round_up(a->pairs, VW); }

/* Lay out a tile. It must come first in a thread's memory, so that the next item of the same head finds its frequencies
   and steps. The number of tokens is the largest, at least 4, whose cos and sin fit into `bytes` of the L1 cache. */
INLINE Tile lay_out_tile(const Angles *a, const uint8_t *runs, int64_t bytes, Arena *arena) {
    Tile t = {.angles = a, .runs = runs, .padded = padded_pairs(a)};
    t.in_place = a->table && t.padded == a->pairs;
    t.known = take(arena, 16);
    int64_t fitting = bytes / (8 * t.padded);
    t.most = fitting < 4 ? 4 : least(fitting, MOST_TOKENS);
    t.cos_sin = take(arena, 8 * t.most * t.padded);
    t.frequencies = take(arena, 8 * a->axes * t.padded);
    t.steepest = take(arena, 8 * a->axes);
    if (a->table) return t;
    t.start = take(arena, 8 * t.padded);
    t.steps = take(arena, 8 * CHUNK * t.padded);
    t.step = take(arena, 8 * a->axes);
    return t;
}

static void start_tiles(Tile *t, int64_t head) {
    const Angles *a = t->angles;
    t->head = head;
    if (a->table || t->known[1] == head + 1) return;
    t->known[0] = 0;
    t->known[1] = head + 1;
    for (int64_t axis = 0; axis < a->axes; axis++) {
        const float *frequency = a->frequencies + (axis * a->heads + head) * a->pairs;
        double *wide = t->frequencies + axis * t->padded, steepest = 0;
        for (int64_t i = 0; i < a->pairs; i++) {
            wide[i] = (double)frequency[i];
            steepest = fabs(wide[i]) <= steepest ? steepest : fabs(wide[i]); /* keeps NaN */
        }
        for (int64_t i = a->pairs; i < t->padded; i++) wide[i] = 0;
        t->steepest[axis] = steepest;
    }
}

/* Store cos and sin of a vector of pairs of token `at`. */
INLINE void keep_lanes(Tile *t, int64_t at, int64_t i, vf c, vf s) {
    float *row = t->cos_sin + at * 2 * t->padded + i;
    *(vf *)row = c;
    *(vf *)(row + t->padded) = s;
}

/* Compute the angles of a vector of pairs. */
INLINE void add_axes(const Tile *t, const float *position, int64_t axes, int64_t i, vd *low, vd *high) {
    *low = *high = (vd){0};
    for (int64_t axis = 0; axis < axes; axis++) {
        double at = (double)position[axis];
        const double *frequency = t->frequencies + axis * t->padded + i;
        *low += at * *(const vd *)frequency;
        *high += at * *(const vd *)(frequency + VW / 2);
    }
}

/* cos and sin of one token's angles up to FARTHEST_ANGLE. */
INLINE void find_near(const Tile *t, const float *position, int64_t axes, float *row) {
    for (int64_t i = 0; i < t->padded; i += VW) {
        vd low, high;
        vf c, s;
        add_axes(t, position, axes, i, &low, &high);
        cos_sin_lanes(low, high, &c, &s);
        *(vf *)(row + i) = c;
        *(vf *)(row + t->padded + i) = s;
    }
}

/* The same for angles of any size; NaN becomes the default NaN, which stays NaN when rounded to bfloat16. */
static __attribute__((noinline, cold, unused)) void find_far(const Tile *t, const float *position, float *row) {
    for (int64_t i = 0; i < t->padded; i += VW) {
        vd low, high;
        double angle[VW];
        add_axes(t, position, t->angles->axes, i, &low, &high);
        memcpy(angle, &low, sizeof low);
        memcpy(angle + VW / 2, &high, sizeof high);
        cos_sin_far(angle, row + i, row + t->padded + i, VW);
    }
}

/* Upper bound of the absolute values of a token's angles. */
INLINE double farthest_angle(const Tile *t, const float *position) {
    double sum = 0;
    for (int64_t axis = 0; axis < t->angles->axes; axis++) sum += fabs((double)position[axis]) * t->steepest[axis];
    return sum;
}

INLINE int is_near(const Tile *t, const float *position) { return farthest_angle(t, position) <= FARTHEST_ANGLE / 2; }

INLINE void find_token(const Tile *t, const float *position, float *row) {
    if (!(farthest_angle(t, position) <= FARTHEST_ANGLE))
        find_far(t, position, row);
    else if (t->angles->axes == 2) /* the most frequent number, as a compile-time constant */
        find_near(t, position, 2, row);
    else
        find_near(t, position, t->angles->axes, row);
}

INLINE void read_table(Tile *t, const float *entry, int64_t at) {
    int64_t pairs = t->angles->pairs, i = 0;
    for (; i + VW <= pairs; i += VW)
        keep_lanes(t, at, i, with_default_nan(*(const vf *)(entry + i)), with_default_nan(*(const vf *)(entry + pairs + i)));
    if (i == pairs) return;
    float c[VW] = {0}, s[VW] = {0};
    memcpy(c, entry + i, 4 * (pairs - i));
    memcpy(s, entry + pairs + i, 4 * (pairs - i));
    keep_lanes(t, at, i, with_default_nan(*(const vf *)c), with_default_nan(*(const vf *)s));
}

/* ---- runs of equally spaced tokens, such as rows of a lattice ---- */

INLINE int is_origin(const float *position, int64_t axes) {
    int zero = 1;
    for (int64_t axis = 0; axis < axes; axis++) zero &= position[axis] == 0;
    return zero;
}

/* Length, up to `most`, of the run of tokens at exactly p + k d. A token at the origin starts a run, so that its cos
   and sin are exactly 1 and 0. */
INLINE int64_t run_length(const float *position, int64_t axes, int64_t most) {
    int64_t count = 1;
    for (; count < most; count++) {
        const float *next = position + count * axes;
        int fits = !is_origin(next, axes);
        for (int64_t axis = 0; axis < axes; axis++) {
            double first = position[axis], step = position[axes + axis] - first;
            fits &= next[axis] - first == (double)count * step;
        }
        if (!fits) break;
    }
    return count;
}

/* Compute cos and sin of k d f for k < count, d the run's step; the next run with the same step reuses them. */
static void find_steps(Tile *t, const float *position, int64_t count) {
    int64_t axes = t->angles->axes;
    int same = t->known[0] > 0;
    for (int64_t axis = 0; axis < axes; axis++)
        same &= t->known[0] > 0 && t->step[axis] == (double)position[axes + axis] - (double)position[axis];
    if (!same) {
        t->known[0] = 1;
        for (int64_t axis = 0; axis < axes; axis++)
            t->step[axis] = (double)position[axes + axis] - (double)position[axis];
    }
    for (; t->known[0] < count; t->known[0]++) {
        float *row = t->steps + t->known[0] * 2 * t->padded;
        for (int64_t i = 0; i < t->padded; i += VW) {
            vd low = {0}, high = {0};
            vf c, s;
            for (int64_t axis = 0; axis < axes; axis++) {
                const double *frequency = t->frequencies + axis * t->padded + i;
                double at = (double)t->known[0] * t->step[axis];
                low += at * *(const vd *)frequency;
                high += at * *(const vd *)(frequency + VW / 2);
            }
            cos_sin_lanes(low, high, &c, &s);
            *(vf *)(row + i) = c;
            *(vf *)(row + t->padded + i) = s;
        }
    }
}

/* Fill tokens k = from ... to - 1 of a run, from tile row `at` on:  exp(i (φ + k δ)) = exp(i φ) exp(i k δ). */
INLINE void fill_run(Tile *t, int64_t from, int64_t to, int64_t at) {
    int64_t padded = t->padded;
    for (int64_t i = 0; i < padded; i += VW) {
        vf c = *(const vf *)(t->start + i), s = *(const vf *)(t->start + padded + i);
        const float *step = t->steps + i;
        if (from == 0) keep_lanes(t, at, i, c, s);
        for (int64_t k = from > 1 ? from : 1; k < to; k++) {
            vf of_step = *(const vf *)(step + k * 2 * padded), sine = *(const vf *)(step + k * 2 * padded + padded);
            keep_lanes(t, at + k - from, i, c * of_step - s * sine, s * of_step + c * sine);
        }
    }
}

/* Fill tokens first ... last - 1 of a set, in one chunk. Runs depend only on the chunk, so that the result does not
   depend on how tokens are split among tiles and threads. */
INLINE void fill_chunk(Tile *t, int64_t set, int64_t first, int64_t last, int64_t at) {
    int64_t axes = t->angles->axes;
    const float *positions = t->angles->positions + set * t->angles->tokens * axes;
    const uint8_t *runs = t->runs + set * t->angles->tokens;
    for (int64_t token = first / CHUNK * CHUNK; token < last; token += runs[token]) {
        const float *position = positions + token * axes;
        int64_t count = runs[token], from = token < first ? first - token : 0, to = least(count, last - token);
        if (from >= to) continue;
        if (is_near(t, position) && is_near(t, position + (count - 1) * axes)) {
            find_token(t, position, t->start);
            if (count > 1) find_steps(t, position, to);
            fill_run(t, from, to, at + token + from - first);
            continue;
        }
        for (int64_t k = from; k < to; k++) {
            find_token(t, position + k * axes, t->start);
            fill_run(t, 0, 1, at + token + k - first);
        }
    }
}

/* Positions of a call, and the runs to be found in them. */
typedef struct {
    const Angles *angles;
    uint8_t *runs;
} Spacing;

enum { TOKENS_OF_ITEM = 64 * CHUNK }; /* tokens per item of the parallel loop that finds runs */

static void find_runs_of_item(const void *context, int64_t item, void *memory) {
    const Spacing *spacing = context;
    const Angles *a = spacing->angles;
    int64_t items = (a->tokens + TOKENS_OF_ITEM - 1) / TOKENS_OF_ITEM, set = item / items;
    int64_t first = item % items * TOKENS_OF_ITEM, last = least(first + TOKENS_OF_ITEM, a->tokens);
    (void)memory;
    for (int64_t token = first; token < last;) {
        int64_t end = least(token / CHUNK * CHUNK + CHUNK, a->tokens);
        const float *position = a->positions + (set * a->tokens + token) * a->axes;
        int64_t count = a->axes == 2 ? run_length(position, 2, end - token) : run_length(position, a->axes, end - token);
        if (count < SHORTEST_RUN) count = 1;
        spacing->runs[set * a->tokens + token] = (uint8_t)count;
        token += count;
    }
}

/* Find the runs of all tokens once, for all heads. Only entries of tokens that start a run are set. */
static int64_t find_runs(const Angles *a, uint8_t *runs, int64_t sets, int64_t threads) {
    int64_t items = sets * ((a->tokens + TOKENS_OF_ITEM - 1) / TOKENS_OF_ITEM);
    Spacing spacing = {a, runs};
    return parallel_for(items, items < 16 ? 1 : threads, 0, find_runs_of_item, &spacing);
}

/* cos and sin of tokens first ... first + count - 1 of a set, for the current head. */
static void fill_tile(Tile *t, int64_t set, int64_t first, int64_t count) {
    const Angles *a = t->angles;
    if (a->table) {
        const float *entry = a->table + ((set * a->heads + t->head) * a->tokens + first) * 2 * a->pairs;
        if (t->in_place) {
            t->cos_sin = (float *)entry;
            return;
        }
        for (int64_t at = 0; at < count; at++) read_table(t, entry + at * 2 * a->pairs, at);
        return;
    }
    int64_t last = first + count;
    for (int64_t from = first; from < last;) {
        int64_t end = least(from / CHUNK * CHUNK + CHUNK, last);
        fill_chunk(t, set, from, end, from - first);
        from = end;
    }
}

/* ---- rows ---- */

/* y = R x, or R^T x if `back`, for one or two rows of pairs (2i, 2i + 1) in float. If `moment` is given, add
   y_j x'_(j xor 1) to it, x' the input of the forward pass: the gradient of angle i is then entry 2i + 1 minus entry 2i.
   For two rows cos and sin are read, and the moment updated, once. Sines start at `padded`. */
INLINE void rotate_neighbours(int rows, const float *const *x, const float *const *of_x, const float *cos_sin,
                              int64_t padded, float *const *y, float *moment, int64_t pairs, int back) {
    int64_t j = 0, n = 2 * pairs;
    for (; j + VW <= n; j += VW) {
        vhalf cosines = *(const vhalf *)(cos_sin + j / 2), sines = *(const vhalf *)(cos_sin + padded + j / 2);
        vf c = __builtin_shufflevector(cosines, cosines, EACH_TWICE), sum = {0};
        vf s = __builtin_shufflevector(sines, sines, EACH_TWICE);
        for (int row = 0; row < rows; row++) {
            vf in = loaded(x[row] + j), out = add_alternating(c, in, s * swap_pairs(in), back);
            if (moment) sum += out * swap_pairs(*(const vf *)(of_x[row] + j));
            *(vf *)(y[row] + j) = out;
        }
        if (moment) *(vf *)(moment + j) += sum;
    }
    for (; j < n; j += 2)
        for (int row = 0; row < rows; row++) {
            float even = x[row][j], odd = x[row][j + 1], c = cos_sin[j / 2];
            float sine = cos_sin[padded + j / 2], s = back ? -sine : sine;
            float first = c * even - s * odd, second = c * odd + s * even;
            if (moment) {
                moment[j] += first * of_x[row][j + 1];
                moment[j + 1] += second * of_x[row][j];
            }
            y[row][j] = first;
            y[row][j + 1] = second;
        }
}

/* The same for pairs (i, i + pairs); the gradients of the angles are added to `moment`. */
INLINE void rotate_halves(int rows, const float *const *x, const float *const *of_x, const float *cos_sin,
                          int64_t padded, float *const *y, float *moment, int64_t pairs, int back) {
    int64_t i = 0;
    for (; i + VW <= pairs; i += VW) {
        vf c = loaded(cos_sin + i), s = loaded(cos_sin + padded + i), sum = {0};
        for (int row = 0; row < rows; row++) {
            vf first = loaded(x[row] + i), second = loaded(x[row] + pairs + i);
            vf out = back ? c * first + s * second : c * first - s * second;
            vf out_second = back ? c * second - s * first : c * second + s * first;
            if (moment) sum += out_second * *(const vf *)(of_x[row] + i) - out * *(const vf *)(of_x[row] + pairs + i);
            *(vf *)(y[row] + i) = out;
            *(vf *)(y[row] + pairs + i) = out_second;
        }
        if (moment) *(vf *)(moment + i) += sum;
    }
    for (; i < pairs; i++)
        for (int row = 0; row < rows; row++) {
            float first = x[row][i], second = x[row][i + pairs];
            float c = cos_sin[i], s = back ? -cos_sin[padded + i] : cos_sin[padded + i];
            float out = c * first - s * second, out_second = c * second + s * first;
            if (moment) moment[i] += out_second * of_x[row][i] - out * of_x[row][i + pairs];
            y[row][i] = out;
            y[row][i + pairs] = out_second;
        }
}

INLINE void load_bf16(const uint16_t *x, int64_t i, int64_t pairs, int halves, vf *first, vf *second) {
    if (halves)
        *first = from_bf16(x + i), *second = from_bf16(x + pairs + i);
    else
        pairs_from_bf16(x + 2 * i, first, second);
}

INLINE void store_bf16(uint16_t *y, int64_t i, int64_t pairs, int halves, vf first, vf second) {
    if (halves)
        *(vshort *)(y + i) = to_bf16(first), *(vshort *)(y + pairs + i) = to_bf16(second);
    else
        pairs_to_bf16(y + 2 * i, first, second);
}

/* As `rotate_halves`, for rows of bfloat16 of either layout of pairs, in registers; pairs are a multiple of VW. */
INLINE void rotate_bf16(int rows, const uint16_t *const *x, const uint16_t *const *of_x, const float *cos_sin,
                        int64_t padded, uint16_t *const *y, float *moment, int64_t pairs, int halves, int back) {
    for (int64_t i = 0; i < pairs; i += VW) {
        vf c = loaded(cos_sin + i), s = loaded(cos_sin + padded + i), sum = {0};
        for (int row = 0; row < rows; row++) {
            vf first, second, of_first, of_second;
            load_bf16(x[row], i, pairs, halves, &first, &second);
            vf out = back ? c * first + s * second : c * first - s * second;
            vf out_second = back ? c * second - s * first : c * second + s * first;
            if (moment) {
                load_bf16(of_x[row], i, pairs, halves, &of_first, &of_second);
                sum += out_second * of_first - out * of_second;
            }
            store_bf16(y[row], i, pairs, halves, out, out_second);
        }
        if (moment) *(vf *)(moment + i) += sum;
    }
}

#endif
