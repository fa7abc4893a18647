/* cos and sin of the angles  a_i = sum_a p_a f_ai  of a tile of tokens, and rotation of rows by them. */
#ifndef TORCHROPE_ANGLES_H
#define TORCHROPE_ANGLES_H

#include "common.h"

enum { MOST_TOKENS = 64 }; /* per tile */

/* Inputs of the angles, and the layout of channel pairs in a row. */
typedef struct {
    int64_t tokens, axes, heads, pairs; /* heads: those of the rotation */
    int64_t halves;                     /* whether pair i is channels (i, i + pairs), or (2i, 2i + 1) */
    const float *positions;             /* (sets, tokens, axes) */
    const float *frequencies;           /* (axes, heads, pairs) */
    const float *table;                 /* (sets, heads, tokens, pairs, 2), cos and sin, or NULL */
} Angles;

/* cos and sin of a tile, in one or both of two layouts of a token's row of 2 `padded`:
   interleaved  c_0 s_0 c_1 s_1 ...,  or split  c_0 c_1 ... s_0 s_1 ...  with the sines at `padded`. */
typedef struct {
    const Angles *angles;
    float *in_turn, *apart;
    double *frequencies; /* of a head (axes, padded), zeros after the pairs */
    double *steepest;    /* its largest frequency along each axis */
    int64_t padded, head, most; /* most: tokens allocated */
    int64_t in_place;           /* whether a table is read in place, without a copy */
} Tile;

INLINE int64_t padded_pairs(const Angles *a) { return round_up(a->pairs, VW); }

/* Tile size such that cos and sin take at most this many bytes of the L1 cache. */
INLINE Tile lay_out_tile(const Angles *a, int in_turn, int apart, int64_t bytes, Arena *arena) {
    Tile t = {a, NULL, NULL, NULL, NULL, padded_pairs(a), 0, 0, 0};
    t.in_place = a->table && !apart && t.padded == a->pairs;
    int64_t fitting = bytes / (8 * t.padded + 1);
    t.most = fitting < 4 ? 4 : least(fitting, MOST_TOKENS);
    bytes = 8 * t.most * t.padded;
    if (in_turn) t.in_turn = take(arena, bytes);
    if (apart) t.apart = take(arena, bytes);
    t.frequencies = take(arena, 8 * a->axes * t.padded);
    t.steepest = take(arena, 8 * a->axes);
    return t;
}

static void start_tiles(Tile *t, int64_t head) {
    const Angles *a = t->angles;
    t->head = head;
    if (a->table) return;
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

INLINE void keep_lanes(Tile *t, int64_t at, int64_t i, vf c, vf s) {
    if (t->in_turn) {
        float *row = t->in_turn + at * 2 * t->padded + 2 * i;
        *(vf *)row = __builtin_shufflevector(c, s, FIRST_IN_TURN);
        *(vf *)(row + VW) = __builtin_shufflevector(c, s, LAST_IN_TURN);
    }
    if (t->apart) {
        float *row = t->apart + at * 2 * t->padded + i;
        *(vf *)row = c;
        *(vf *)(row + t->padded) = s;
    }
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

INLINE void turn_near(Tile *t, const float *position, int64_t axes, int64_t at) {
    for (int64_t i = 0; i < t->padded; i += VW) {
        vd low, high;
        vf c, s;
        add_axes(t, position, axes, i, &low, &high);
        cos_sin_lanes(low, high, &c, &s);
        keep_lanes(t, at, i, c, s);
    }
}

static __attribute__((noinline, cold, unused)) void turn_far(Tile *t, const float *position, int64_t at) {
    for (int64_t i = 0; i < t->padded; i += VW) {
        vd low, high;
        double angle[VW];
        float c[VW], s[VW];
        add_axes(t, position, t->angles->axes, i, &low, &high);
        memcpy(angle, &low, sizeof low);
        memcpy(angle + VW / 2, &high, sizeof high);
        cos_sin_far(angle, c, s, VW);
        keep_lanes(t, at, i, *(const vf *)c, *(const vf *)s);
    }
}

INLINE void read_table(Tile *t, const float *entry, int64_t at) {
    int64_t row = at * 2 * t->padded, pairs = t->angles->pairs;
    if (t->in_turn) memcpy(t->in_turn + row, entry, 8 * pairs);
    if (!t->apart) return;
    int64_t i = 0;
    for (; i + VW <= pairs; i += VW) {
        vf near = *(const vf *)(entry + 2 * i), far = *(const vf *)(entry + 2 * i + VW);
        *(vf *)(t->apart + row + i) = __builtin_shufflevector(near, far, EVEN_LANES);
        *(vf *)(t->apart + row + t->padded + i) = __builtin_shufflevector(near, far, ODD_LANES);
    }
    for (; i < pairs; i++) {
        t->apart[row + i] = entry[2 * i];
        t->apart[row + t->padded + i] = entry[2 * i + 1];
    }
}

/* cos and sin of tokens first ... first + count - 1 of a set, for the current head. */
static void fill_tile(Tile *t, int64_t set, int64_t first, int64_t count) {
    const Angles *a = t->angles;
    if (a->table) {
        const float *entry = a->table + ((set * a->heads + t->head) * a->tokens + first) * 2 * a->pairs;
        if (t->in_place) {
            t->in_turn = (float *)entry;
            return;
        }
        for (int64_t at = 0; at < count; at++) read_table(t, entry + at * 2 * a->pairs, at);
        return;
    }
    for (int64_t at = 0; at < count; at++) {
        const float *position = a->positions + (set * a->tokens + first + at) * a->axes;
        double farthest = 0;
        for (int64_t axis = 0; axis < a->axes; axis++) farthest += fabs((double)position[axis]) * t->steepest[axis];
        if (!(farthest <= FARTHEST_ANGLE))
            turn_far(t, position, at);
        else if (a->axes == 2) /* the most frequent number, as a compile-time constant */
            turn_near(t, position, 2, at);
        else
            turn_near(t, position, a->axes, at);
    }
}

/* ---- rows ---- */

/* y = R x, or R^T x when `back`, for one row of pairs (2i, 2i + 1) in float; if `moment` is not NULL, add
   y_j x'_(j xor 1) to it, x' the input of the forward rotation: the angle's gradient is its odd minus even entries. */
INLINE void turn_neighbours(const float *x, const float *of_x, const float *turn, float *y, float *moment, int64_t pairs,
                            int back) {
    int64_t j = 0, n = 2 * pairs;
    for (; j + VW <= n; j += VW) {
        vf in = *(const vf *)(x + j), both = *(const vf *)(turn + j);
        vf c = __builtin_shufflevector(both, both, EVEN_TWICE), s = __builtin_shufflevector(both, both, ODD_TWICE);
        vf out = add_in_turn(c, in, s * swap_pairs(in), back);
        if (moment) *(vf *)(moment + j) += out * swap_pairs(*(const vf *)(of_x + j));
        *(vf *)(y + j) = out;
    }
    for (; j < n; j += 2) {
        float even = x[j], odd = x[j + 1], c = turn[j], s = back ? -turn[j + 1] : turn[j + 1];
        float first = c * even - s * odd, second = c * odd + s * even;
        if (moment) {
            moment[j] += first * of_x[j + 1];
            moment[j + 1] += second * of_x[j];
        }
        y[j] = first;
        y[j + 1] = second;
    }
}

/* The same for pairs (i, i + pairs); adds the angle's gradient itself to the moment. Sines start at `padded`. */
INLINE void turn_halves(const float *x, const float *of_x, const float *turn, int64_t padded, float *y, float *moment,
                        int64_t pairs, int back) {
    int64_t i = 0;
    for (; i + VW <= pairs; i += VW) {
        vf first = *(const vf *)(x + i), second = *(const vf *)(x + pairs + i);
        vf c = *(const vf *)(turn + i), s = *(const vf *)(turn + padded + i);
        vf out = back ? c * first + s * second : c * first - s * second;
        vf out_second = back ? c * second - s * first : c * second + s * first;
        if (moment)
            *(vf *)(moment + i) += out_second * *(const vf *)(of_x + i) - out * *(const vf *)(of_x + pairs + i);
        *(vf *)(y + i) = out;
        *(vf *)(y + pairs + i) = out_second;
    }
    for (; i < pairs; i++) {
        float first = x[i], second = x[i + pairs], c = turn[i], s = back ? -turn[padded + i] : turn[padded + i];
        float out = c * first - s * second, out_second = c * second + s * first;
        if (moment) moment[i] += out_second * of_x[i] - out * of_x[i + pairs];
        y[i] = out;
        y[i + pairs] = out_second;
    }
}

/* Floats to bfloat16 in the high halves, ties to even; NaN is kept only if requested. */
INLINE vu rounded_to_bf16(vf x, int with_nan) {
    vu bits = (vu)x, rounded = bits + (0x7fff + ((bits >> 16) & 1));
    if (!with_nan) return rounded;
    vu is_nan = (vu)((vi)(bits & 0x7fffffff) > 0x7f800000);
    return (rounded & ~is_nan) | ((bits | 0x400000) & is_nan);
}

INLINE int any_nan(vf x) {
    float lanes[VW];
    int any = 0;
    *(vf *)lanes = x;
    for (int i = 0; i < VW; i++) any |= lanes[i] != lanes[i];
    return any;
}

/* As `turn_halves`, for a row of bfloat16 of either layout of pairs, in registers; pairs are a multiple of VW. Unless
   `with_nan`, NaN may become another number; `unordered` is then set to NaN. */
INLINE void turn_bf16(const uint16_t *x, const uint16_t *of_x, const float *turn, int64_t padded, uint16_t *y,
                      float *moment, int64_t pairs, int halves, int back, int with_nan, vf *unordered) {
    for (int64_t i = 0; i < pairs; i += VW) {
        vf c = *(const vf *)(turn + i), s = *(const vf *)(turn + padded + i), first, second, of_first, of_second;
        if (halves) {
            first = from_bf16(x + i), second = from_bf16(x + pairs + i);
            if (moment) of_first = from_bf16(of_x + i), of_second = from_bf16(of_x + pairs + i);
        } else {
            vu words = *(const vu *)(x + 2 * i);
            first = (vf)(words << 16), second = (vf)(words & 0xffff0000);
            if (moment) {
                words = *(const vu *)(of_x + 2 * i);
                of_first = (vf)(words << 16), of_second = (vf)(words & 0xffff0000);
            }
        }
        vf out = back ? c * first + s * second : c * first - s * second;
        vf out_second = back ? c * second - s * first : c * second + s * first;
        if (moment) *(vf *)(moment + i) += out_second * of_first - out * of_second;
        vu rounded = rounded_to_bf16(out, with_nan), rounded_second = rounded_to_bf16(out_second, with_nan);
        if (!with_nan) *unordered += out * 0.0f; /* if an input is NaN, out is NaN or infinite */
        if (halves) {
            *(vshort *)(y + i) = __builtin_convertvector(rounded >> 16, vshort);
            *(vshort *)(y + pairs + i) = __builtin_convertvector(rounded_second >> 16, vshort);
        } else {
            *(vu *)(y + 2 * i) = (rounded >> 16) | (rounded_second & 0xffff0000);
        }
    }
}

#endif
