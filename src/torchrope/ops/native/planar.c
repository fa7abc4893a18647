/* Rotation of channel pairs, (2i, 2i+1) or (i, i + pairs), by a_i = sum_a p_a f_ai:  y = cos a x + sin a J x;
   after a norm of x over all channels if one is given. */
#include "angles.h"
#include "norms.h"

typedef struct {
    int64_t size;
    Side sides[2];
    Angles angles;
    int64_t head_dim, sets, threads; /* sets of positions: 1, or one per sample */
    float *d_frequencies;            /* as frequencies, or NULL */
    float *d_positions;              /* as positions, or NULL */
    Norm norms[2];                   /* of each side */
} Planar;

/* A call, its partial sums, and its partition: an item is a rotation head, a part of the tokens and a part of the rows.
   Rows are the samples and heads, of q and then of k, that one rotation is applied to. */
typedef struct {
    const Planar *p;
    int64_t token_parts, row_parts, backward, wanted; /* wanted: gradients of angles */
    float *frequencies; /* (token_parts, axes, heads, pairs) or NULL */
    float *positions;   /* (heads, sets, tokens, axes) or NULL */
    float *weights;     /* (items, 2 sides, weight and bias, head_dim) or NULL */
} Job;

/* Buffers of a thread. */
typedef struct {
    Tile tile;
    float *moment_in_turn, *moment_apart; /* gradients of the tile's angles, laid out as cos and sin */
    float *row, *row2, *result, *normed;  /* of a head, in float */
    float *d_weights;                     /* of a tile and a side: weight and bias, (2, head_dim) */
    float *means, *inverses;              /* mean and 1 / deviation of a strip's rows */
    float *moment;                        /* of one token's angles */
} Workspace;

INLINE int is_at_hand(const Rows *rows, int64_t dtype) { return !rows->data || rows->dtype == dtype; }

INLINE const Norm *norm_of(const Planar *p, const Side *side) { return &p->norms[side - p->sides]; }

/* Whether rows of bfloat16 are rotated in registers. */
INLINE int in_registers(const Planar *p, const Side *side) {
    if (norm_of(p, side)->kind) return 0;
    int alike = is_at_hand(&side->x, BFLOAT16) && is_at_hand(&side->grad, BFLOAT16) && is_at_hand(&side->out, BFLOAT16);
    return alike && p->angles.pairs % VW == 0;
}

INLINE int takes_apart(const Planar *p, const Side *side) { return p->angles.halves || in_registers(p, side); }

static Workspace lay_out(const Job *job, Arena *arena) {
    const Planar *p = job->p;
    Workspace w = {0};
    int apart = takes_apart(p, &p->sides[0]) || takes_apart(p, &p->sides[1]);
    int in_turn = !takes_apart(p, &p->sides[0]) || !takes_apart(p, &p->sides[1]);
    w.tile = lay_out_tile(&p->angles, in_turn, apart, job->wanted ? 8192 : 16384, arena);
    int64_t bytes = 4 * w.tile.most * w.tile.padded;
    if (job->wanted && in_turn) w.moment_in_turn = take(arena, 2 * bytes);
    if (job->wanted && apart) w.moment_apart = take(arena, bytes);
    float **rows[] = {&w.row, &w.row2, &w.result, &w.normed};
    for (int i = 0; i < 4; i++) *rows[i] = take(arena, 4 * p->head_dim);
    if (job->backward) w.d_weights = take(arena, 2 * 4 * p->head_dim);
    w.means = take(arena, 4 * MOST_TOKENS);
    w.inverses = take(arena, 4 * MOST_TOKENS);
    w.moment = take(arena, 4 * w.tile.padded);
    return w;
}

/* Rows of neighbouring tokens of one sample and head. */
typedef struct {
    const Rows *in, *x, *out; /* x: input of the forward pass, or NULL if no gradient to angles is wanted */
    int64_t at, x_at, target, count;
} Strip;

INLINE void turn_rows_float(Strip s, Workspace *w, int64_t pairs, int halves, int back) {
    int64_t padded = w->tile.padded;
    for (int64_t t = 0; t < s.count; t++) {
        const float *row = (const float *)s.in->data + s.at + t * s.in->stride[2];
        const float *of_x = s.x ? (const float *)s.x->data + s.x_at + t * s.x->stride[2] : NULL;
        float *out = (float *)s.out->data + s.target + t * s.out->stride[2];
        if (halves)
            turn_halves(row, of_x, w->tile.apart + t * 2 * padded, padded, out,
                        s.x ? w->moment_apart + t * padded : NULL, pairs, back);
        else
            turn_neighbours(row, of_x, w->tile.in_turn + t * 2 * padded, out,
                            s.x ? w->moment_in_turn + t * 2 * padded : NULL, pairs, back);
    }
}

/* Tests once per strip, not per row, whether moments are wanted. */
INLINE void turn_strip_float(Strip s, Workspace *w, int64_t pairs, int halves, int back) {
    if (s.x)
        turn_rows_float(s, w, pairs, halves, back);
    else
        turn_rows_float((Strip){s.in, NULL, s.out, s.at, 0, s.target, s.count}, w, pairs, halves, back);
}

INLINE void turn_rows_bf16(Strip s, Workspace *w, int64_t pairs, int halves, int back, int with_nan, vf *unordered) {
    int64_t padded = w->tile.padded;
    for (int64_t t = 0; t < s.count; t++)
        turn_bf16((const uint16_t *)s.in->data + s.at + t * s.in->stride[2],
                  s.x ? (const uint16_t *)s.x->data + s.x_at + t * s.x->stride[2] : NULL,
                  w->tile.apart + t * 2 * padded, padded,
                  (uint16_t *)s.out->data + s.target + t * s.out->stride[2],
                  s.x ? w->moment_apart + t * padded : NULL, pairs, halves, back, with_nan, unordered);
}

INLINE void turn_strip_bf16(Strip s, Workspace *w, int64_t pairs, int halves, int back) {
    vf unordered = {0};
    if (s.x)
        turn_rows_bf16(s, w, pairs, halves, back, 0, &unordered);
    else
        turn_rows_bf16((Strip){s.in, NULL, s.out, s.at, 0, s.target, s.count}, w, pairs, halves, back, 0, &unordered);
    if (!any_nan(unordered)) return;
    s.x = NULL; /* its moments are computed already */
    turn_rows_bf16(s, w, pairs, halves, back, 1, &unordered);
}

/* Any dtypes, converted to float. */
INLINE void turn_strip_any(Strip s, Workspace *w, int64_t pairs, int halves, int back) {
    int64_t padded = w->tile.padded;
    for (int64_t t = 0; t < s.count; t++) {
        const float *row = load_row(s.in, s.at + t * s.in->stride[2], 2 * pairs, w->row);
        const float *of_x = s.x ? load_row(s.x, s.x_at + t * s.x->stride[2], 2 * pairs, w->row2) : NULL;
        if (halves)
            turn_halves(row, of_x, w->tile.apart + t * 2 * padded, padded, w->result,
                        s.x ? w->moment_apart + t * padded : NULL, pairs, back);
        else
            turn_neighbours(row, of_x, w->tile.in_turn + t * 2 * padded, w->result,
                            s.x ? w->moment_in_turn + t * 2 * padded : NULL, pairs, back);
        store_row(s.out, s.target + t * s.out->stride[2], 2 * pairs, w->result);
    }
}

/* Specialised for the most frequent size. */
#define WITH_SIZE(TURN, HALVES)                                                                                       \
    do {                                                                                                              \
        if (pairs == 32 && back)                                                                                      \
            TURN(s, w, 32, HALVES, 1);                                                                                \
        else if (pairs == 32)                                                                                         \
            TURN(s, w, 32, HALVES, 0);                                                                                \
        else                                                                                                          \
            TURN(s, w, pairs, HALVES, back);                                                                          \
    } while (0)

static __attribute__((noinline)) void turn_strip(const Planar *p, const Side *side, Strip s, Workspace *w, int back) {
    int64_t pairs = p->angles.pairs;
    int is_float = is_at_hand(s.in, FLOAT32) && is_at_hand(s.out, FLOAT32) && (!s.x || is_at_hand(s.x, FLOAT32));
    if (is_float && p->angles.halves)
        WITH_SIZE(turn_strip_float, 1);
    else if (is_float)
        WITH_SIZE(turn_strip_float, 0);
    else if (in_registers(p, side) && p->angles.halves)
        WITH_SIZE(turn_strip_bf16, 1);
    else if (in_registers(p, side))
        WITH_SIZE(turn_strip_bf16, 0);
    else
        turn_strip_any(s, w, pairs, (int)p->angles.halves, back);
}

/* ---- rows that are normalised first ---- */

INLINE void turn_row(const float *x, const float *of_x, Workspace *w, int64_t t, float *y, int moments, int64_t pairs,
                     int halves, int back) {
    int64_t padded = w->tile.padded;
    if (halves)
        turn_halves(x, of_x, w->tile.apart + t * 2 * padded, padded, y, moments ? w->moment_apart + t * padded : NULL,
                    pairs, back);
    else
        turn_neighbours(x, of_x, w->tile.in_turn + t * 2 * padded, y,
                        moments ? w->moment_in_turn + t * 2 * padded : NULL, pairs, back);
}

/* Reads and writes rows of any dtype. */
static __attribute__((noinline)) const float *load_any(const Rows *rows, int64_t at, int64_t n, float *scratch) {
    return load_row(rows, at, n, scratch);
}

static __attribute__((noinline)) void store_any(const Rows *rows, int64_t at, int64_t n, const float *values) {
    store_row(rows, at, n, values);
}

enum { ANY = -1 }; /* dtypes known only at run time */

INLINE const float *read_row(const Rows *rows, int64_t at, int64_t n, int64_t dtype, float *scratch) {
    if (dtype == FLOAT32) return (const float *)rows->data + at;
    if (dtype == ANY) return load_any(rows, at, n, scratch);
    for (int64_t i = 0; i < n; i += VW) *(vf *)(scratch + i) = from_bf16((const uint16_t *)rows->data + at + i);
    return scratch;
}

/* NaN may become another number unless `with_nan`; returns NaN if there are any, or infinity. */
INLINE float keep_bf16(uint16_t *target, const float *values, int64_t n, int with_nan) {
    vf unordered = {0};
    for (int64_t i = 0; i < n; i += VW) {
        vf lanes = *(const vf *)(values + i);
        if (!with_nan) unordered += lanes * 0.0f;
        *(vshort *)(target + i) = __builtin_convertvector(rounded_to_bf16(lanes, with_nan) >> 16, vshort);
    }
    return sum_lanes(unordered);
}

INLINE void keep_row(const Rows *rows, int64_t at, int64_t n, const float *values, int64_t dtype) {
    if (dtype == FLOAT32) return; /* computed in place */
    if (dtype == ANY) {
        store_any(rows, at, n, values);
        return;
    }
    float unordered = keep_bf16((uint16_t *)rows->data + at, values, n, 0);
    if (unordered != unordered) keep_bf16((uint16_t *)rows->data + at, values, n, 1);
}

/* The buffer that a row of results is computed in. */
INLINE float *place_of(const Rows *rows, int64_t at, int64_t dtype, float *scratch) {
    return dtype == FLOAT32 ? (float *)rows->data + at : scratch;
}

enum { AHEAD = 4 }; /* rows */

/* Prefetch a later row of a strip: rows of a packed projection are too far apart for the hardware prefetcher. */
INLINE void foresee(const Rows *rows, int64_t at, int64_t t, int64_t count, int64_t n, int writes) {
    if (t + AHEAD >= count) return;
    int64_t size = rows->dtype == FLOAT32 ? 4 : 2;
    const char *row = (const char *)rows->data + (at + (t + AHEAD) * rows->stride[2]) * size;
    for (int64_t byte = 0; byte < n * size; byte += 64) {
        if (writes)
            __builtin_prefetch(row + byte, 1);
        else
            __builtin_prefetch(row + byte, 0);
    }
}

/* Recomputes moments of rows whose squares are infinite or NaN. */
static __attribute__((noinline, cold)) void find_far_moments(const Rows *rows, int64_t at, int64_t count,
                                                             const Norm *norm, Workspace *w, int64_t n, int kind) {
    for (int64_t t = 0; t < count; t++) {
        if (w->inverses[t] > 0) continue;
        const float *x = load_row(rows, at + t * rows->stride[2], n, w->row);
        Moments of = moments_far(x, n, kind, (float)norm->eps);
        w->means[t] = of.mean;
        w->inverses[t] = of.inverse;
    }
}

/* Moments of all rows first: square roots and divisions of many rows are vectorised. */
INLINE void find_moments(const Rows *rows, int64_t at, int64_t count, const Norm *norm, Workspace *w, int64_t n,
                         int64_t dtype, int kind) {
    float eps = (float)norm->eps, *inverses = w->inverses;
    int far = 0;
    for (int64_t t = 0; t < count; t++) {
        foresee(rows, at, t, count, n, 0);
        const float *x = read_row(rows, at + t * rows->stride[2], n, dtype, w->row);
        float mean = kind == LAYER_NORM ? mean_of(x, n) : 0, square = mean_square(x, mean, n, kind);
        w->means[t] = mean;
        inverses[t] = square;
        far |= !(square <= FLT_MAX);
    }
    for (int64_t t = 0; t < count; t++) inverses[t] = 1 / sqrtf(inverses[t] + eps);
    if (far) find_far_moments(rows, at, count, norm, w, n, kind);
}

INLINE void turn_normed(Strip s, const Norm *norm, Workspace *w, int64_t n, int64_t pairs, int64_t dtype, int halves,
                        int kind) {
    find_moments(s.in, s.at, s.count, norm, w, n, dtype, kind);
    for (int64_t t = 0; t < s.count; t++) {
        int64_t target = s.target + t * s.out->stride[2];
        foresee(s.out, s.target, t, s.count, n, 1);
        const float *x = read_row(s.in, s.at + t * s.in->stride[2], n, dtype, w->row);
        float *out = place_of(s.out, target, dtype, w->result);
        normalise_row(x, (Moments){w->means[t], w->inverses[t]}, norm, out, n, kind);
        turn_row(out, NULL, w, t, out, 0, pairs, halves, 0);
        keep_row(s.out, target, n, out, dtype);
    }
}

INLINE void turn_normed_back(Strip s, const Norm *norm, Workspace *w, int64_t n, int64_t pairs, int64_t dtype,
                             int halves, int kind, int moments) {
    const float *weight = norm->weight;
    float *d_weights = w->d_weights, *normed = w->normed;
    find_moments(s.x, s.x_at, s.count, norm, w, n, dtype, kind);
    for (int64_t t = 0; t < s.count; t++) {
        int64_t target = s.target + t * s.out->stride[2];
        foresee(s.in, s.at, t, s.count, n, 0);
        foresee(s.out, s.target, t, s.count, n, 1);
        const float *grad = read_row(s.in, s.at + t * s.in->stride[2], n, dtype, w->row);
        const float *x = read_row(s.x, s.x_at + t * s.x->stride[2], n, dtype, w->row2);
        float *out = place_of(s.out, target, dtype, w->result);
        Moments of = {w->means[t], w->inverses[t]};
        if (moments) normalise_row(x, of, norm, normed, 2 * pairs, kind);
        memcpy(out + 2 * pairs, grad + 2 * pairs, 4 * (n - 2 * pairs));
        turn_row(grad, normed, w, t, out, moments, pairs, halves, 1);
        normalise_row_back(x, out, of, weight, out, d_weights, d_weights + n, n, kind);
        keep_row(s.out, target, n, out, dtype);
    }
}

/* Specialised for layouts of pairs and norms, at the most frequent size. */
#define WITH_KIND(TURN, DTYPE, ...)                                                                                   \
    do {                                                                                                              \
        if (halves && kind == RMS_NORM)                                                                               \
            TURN(s, norm, w, 64, 32, DTYPE, 1, RMS_NORM __VA_ARGS__);                                                 \
        else if (halves)                                                                                              \
            TURN(s, norm, w, 64, 32, DTYPE, 1, LAYER_NORM __VA_ARGS__);                                               \
        else if (kind == RMS_NORM)                                                                                    \
            TURN(s, norm, w, 64, 32, DTYPE, 0, RMS_NORM __VA_ARGS__);                                                 \
        else                                                                                                          \
            TURN(s, norm, w, 64, 32, DTYPE, 0, LAYER_NORM __VA_ARGS__);                                               \
    } while (0)

/* Specialised for one dtype at the most frequent size, else any. */
static __attribute__((noinline)) void turn_strip_normed(const Job *job, const Norm *norm, Strip s, Workspace *w) {
    int64_t n = job->p->head_dim, pairs = job->p->angles.pairs, dtype = s.in->dtype;
    int halves = (int)job->p->angles.halves, kind = (int)norm->kind;
    if (s.out->dtype != dtype || n != 64 || pairs != 32) dtype = ANY;
    if (dtype == FLOAT32)
        WITH_KIND(turn_normed, FLOAT32);
    else if (dtype == BFLOAT16)
        WITH_KIND(turn_normed, BFLOAT16);
    else
        turn_normed(s, norm, w, n, pairs, ANY, halves, kind);
}

static __attribute__((noinline)) void turn_strip_normed_back(const Job *job, const Norm *norm, Strip s, Workspace *w) {
    int64_t n = job->p->head_dim, pairs = job->p->angles.pairs, dtype = s.in->dtype;
    int halves = (int)job->p->angles.halves, kind = (int)norm->kind, moments = (int)job->wanted;
    if (s.out->dtype != dtype || s.x->dtype != dtype || n != 64 || pairs != 32) dtype = ANY;
    if (dtype == FLOAT32 && moments)
        WITH_KIND(turn_normed_back, FLOAT32, , 1);
    else if (dtype == FLOAT32)
        WITH_KIND(turn_normed_back, FLOAT32, , 0);
    else if (dtype == BFLOAT16 && moments)
        WITH_KIND(turn_normed_back, BFLOAT16, , 1);
    else if (dtype == BFLOAT16)
        WITH_KIND(turn_normed_back, BFLOAT16, , 0);
    else
        turn_normed_back(s, norm, w, n, pairs, ANY, halves, kind, moments);
}

/* ---- tiles ---- */

INLINE int64_t samples_of(const Planar *p, const Side *side) { return p->sets == 1 ? side->batch : side->batch > 0; }
INLINE int64_t rows_of(const Planar *p, const Side *side) {
    return samples_of(p, side) * (side->heads / p->angles.heads);
}

/* Add a tile's gradients of a side's weights to those of the item. */
static void keep_weights(const Job *job, int64_t item, int64_t which, const Workspace *w) {
    int64_t n = 2 * job->p->head_dim;
    float *sums = job->weights + (item * 2 + which) * n;
    for (int64_t i = 0; i < n; i++) sums[i] += w->d_weights[i];
}

/* Rotate rows `from` to `to` of a tile of tokens. */
static void turn_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t from, int64_t to,
                      int64_t item, Workspace *w) {
    const Planar *p = job->p;
    int64_t n = 2 * p->angles.pairs, rest = p->head_dim - n, before = 0;
    fill_tile(&w->tile, set, first, count);
    if (w->moment_in_turn) memset(w->moment_in_turn, 0, 4 * count * 2 * w->tile.padded);
    if (w->moment_apart) memset(w->moment_apart, 0, 4 * count * w->tile.padded);
    for (int which = 0; which < 2; which++) {
        const Side *side = &p->sides[which];
        const Norm *norm = &p->norms[which];
        int64_t group = side->heads / p->angles.heads, rows = rows_of(p, side);
        int reads_x = job->wanted || (job->backward && norm->kind);
        Strip s = {job->backward ? &side->grad : &side->x, reads_x ? &side->x : NULL, &side->out, 0, 0, 0, count};
        if (job->backward) memset(w->d_weights, 0, 2 * 4 * p->head_dim);
        int64_t last = least(to - before, rows);
        for (int64_t row = from > before ? from - before : 0; s.in->data && row < last; row++) {
            int64_t sample = (p->sets == 1 ? 0 : set) + row / group, own = head * group + row % group;
            s.at = row_offset(s.in, sample, own, first);
            s.x_at = row_offset(&side->x, sample, own, first);
            s.target = row_offset(s.out, sample, own, first);
            if (norm->kind) {
                (job->backward ? turn_strip_normed_back : turn_strip_normed)(job, norm, s, w);
                continue;
            }
            turn_strip(p, side, s, w, (int)job->backward);
            for (int64_t t = 0; rest && t < count; t++)
                copy_row(s.in, s.at + t * s.in->stride[2], s.out, s.target + t * s.out->stride[2], n, rest);
        }
        before += rows;
        if (job->weights && norm->kind) keep_weights(job, item, which, w);
    }
}

/* Gradients of the angles of a token, in order. */
INLINE void collect_moment(const Workspace *w, int64_t at, int64_t pairs) {
    int64_t padded = w->tile.padded;
    const float *in_turn = w->moment_in_turn ? w->moment_in_turn + at * 2 * padded : NULL;
    const float *apart = w->moment_apart ? w->moment_apart + at * padded : NULL;
    for (int64_t i = 0; i < pairs; i++) w->moment[i] = apart ? apart[i] : 0;
    for (int64_t i = 0; in_turn && i < pairs; i++) w->moment[i] += in_turn[2 * i + 1] - in_turn[2 * i];
}

/* Add a tile's gradients of angles to the part's gradient of frequencies; write the positions' of this head. */
static void reduce_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t part,
                        Workspace *w) {
    const Angles *a = &job->p->angles;
    float *restrict moment = w->moment;
    for (int64_t t = 0; t < count; t++) {
        collect_moment(w, t, a->pairs);
        int64_t token = set * a->tokens + first + t;
        for (int64_t axis = 0; axis < a->axes; axis++) {
            if (job->frequencies) {
                float at = a->positions[token * a->axes + axis];
                float *restrict sum = job->frequencies + ((part * a->axes + axis) * a->heads + head) * a->pairs;
                for (int64_t i = 0; i < a->pairs; i++) sum[i] += at * moment[i];
            }
            if (job->positions) {
                const float *frequency = a->frequencies + (axis * a->heads + head) * a->pairs;
                float sum = 0;
                for (int64_t i = 0; i < a->pairs; i++) sum += frequency[i] * moment[i];
                job->positions[(head * job->p->sets * a->tokens + token) * a->axes + axis] = sum;
            }
        }
    }
}

static void planar_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    const Planar *p = job->p;
    const Angles *a = &p->angles;
    int64_t row_part = item % job->row_parts, part = item / job->row_parts % job->token_parts;
    int64_t head = item / job->row_parts / job->token_parts;
    int64_t rows = rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]);
    int64_t from = rows * row_part / job->row_parts, to = rows * (row_part + 1) / job->row_parts;
    int64_t first = a->tokens * part / job->token_parts, last = a->tokens * (part + 1) / job->token_parts;
    Arena arena = {memory, 0};
    Workspace w = lay_out(job, &arena);
    start_tiles(&w.tile, head);
    for (int64_t axis = 0; job->frequencies && axis < a->axes; axis++)
        memset(job->frequencies + ((part * a->axes + axis) * a->heads + head) * a->pairs, 0, 4 * a->pairs);
    if (job->weights) memset(job->weights + item * 4 * p->head_dim, 0, 4 * 4 * p->head_dim);
    for (int64_t set = 0; set < p->sets; set++)
        for (int64_t token = first; token < last; token += w.tile.most) {
            int64_t count = least(w.tile.most, last - token);
            turn_tile(job, set, head, token, count, from, to, item, &w);
            if (job->wanted) reduce_tile(job, set, head, token, count, part, &w);
        }
}

INLINE int64_t items_of(const Job *job) { return job->p->angles.heads * job->token_parts * job->row_parts; }

/* Whether gradients of a norm's weights are wanted. */
INLINE int has_weights(const Job *job) {
    const Norm *norms = job->p->norms;
    return job->backward && (norms[0].d_weight || norms[0].d_bias || norms[1].d_weight || norms[1].d_bias);
}

/* Sum the gradients of the norms' weights over items. */
static void add_weights(const Job *job) {
    int64_t n = job->p->head_dim, parts = items_of(job);
    for (int64_t part = 1; part < parts; part++)
        for (int64_t i = 0; i < 4 * n; i++) job->weights[i] += job->weights[part * 4 * n + i];
    for (int which = 0; which < 2; which++) {
        const Norm *norm = &job->p->norms[which];
        if (norm->d_weight) memcpy(norm->d_weight, job->weights + 2 * which * n, 4 * n);
        if (norm->d_bias) memcpy(norm->d_bias, job->weights + (2 * which + 1) * n, 4 * n);
    }
}

/* Enough items for the threads; with sums a number independent of the threads, on which rounding must not depend.
   Rows are split first: recomputing an angle is cheaper than reading a row far from the last one. Gradients of angles are
   summed over rows, and only tokens are split; those of weights are summed over both. */
static void cut(Job *job) {
    const Planar *p = job->p;
    const Angles *a = &p->angles;
    int64_t rows = rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]);
    int64_t floats = rows * p->sets * a->heads * a->tokens * p->head_dim;
    int64_t threads = floats < SMALL ? 1 : p->threads;
    job->token_parts = job->row_parts = 1;
    if (job->wanted) {
        job->token_parts = parts_of(a->heads, (a->tokens + 7) / 8, 1, threads);
    } else if (has_weights(job)) {
        job->row_parts = least(parts_of(a->heads, rows / 4, 1, threads), 16);
        job->token_parts = parts_of(a->heads * job->row_parts, (a->tokens + 31) / 32, 1, threads);
    } else if (threads > 1) {
        job->row_parts = parts_of(a->heads, rows / 4, 0, threads);
        job->token_parts = parts_of(a->heads * job->row_parts, (a->tokens + 7) / 8, 0, threads);
    }
}

API int64_t torchrope_planar(const Planar *p, int64_t backward) {
    CHECK_LAYOUT(p);
    const Angles *a = &p->angles;
    Job job = {p, 1, 1, backward, backward && (p->d_frequencies || p->d_positions), NULL, NULL, NULL};
    cut(&job);
    int64_t numbers = job.wanted && p->d_frequencies ? a->axes * a->heads * a->pairs : 0;
    int64_t places = job.wanted && p->d_positions ? p->sets * a->tokens * a->axes : 0;
    int64_t weights = has_weights(&job) ? items_of(&job) * 4 * p->head_dim : 0;
    float *partial = NULL;
    if (numbers || places || weights) {
        partial = allocate(4 * (job.token_parts * numbers + a->heads * places + weights));
        if (!partial) return OUT_OF_MEMORY;
        if (numbers) job.frequencies = partial;
        if (places) job.positions = partial + job.token_parts * numbers;
        if (weights) job.weights = partial + job.token_parts * numbers + a->heads * places;
    }
    Arena arena = {NULL, 0};
    lay_out(&job, &arena);
    int64_t rows = p->sets * (rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]));
    int64_t threads = rows * a->heads * a->tokens * p->head_dim < SMALL ? 1 : p->threads;
    int64_t status = parallel_for(items_of(&job), threads, arena.used, planar_part, &job);
    if (status == DONE && numbers) add_parts(job.frequencies, job.token_parts, numbers, p->d_frequencies);
    if (status == DONE && places) add_parts(job.positions, a->heads, places, p->d_positions);
    if (status == DONE && weights) add_weights(&job);
    free(partial);
    return status;
}
