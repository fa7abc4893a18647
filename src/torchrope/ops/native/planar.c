/* Rotation of channel pairs (2i, 2i + 1) or (i, i + pairs) by the angles  φ_i = sum_a p_a f_ai,  optionally after
   RMSNorm or LayerNorm over all channels. */
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

/* Arguments of a call, its partial sums and its partition, shared by all threads. An item is a rotation head, a part of
   the tokens and a part of the rows.
   Rows are the samples and heads, of q and then of k, that one rotation is applied to. */
typedef struct {
    const Planar *p;
    int64_t token_parts, row_parts, backward, wanted; /* wanted: gradients of angles */
    float *frequencies; /* (token_parts, axes, heads, pairs) or NULL */
    float *positions;   /* (heads, sets, tokens, axes) or NULL */
    float *weights;     /* (items, 2 sides, weight and bias, head_dim) or NULL */
    uint8_t *runs;      /* (sets, tokens), of equally spaced tokens, or NULL with a table */
} Job;

/* Buffers of a thread. */
typedef struct {
    Tile tile;
    float *moment_interleaved, *moment_split; /* gradients of the tile's angles by channel, by pair */
    float *row, *row2, *result, *normed;  /* of a head, in float */
    float *d_weights;                     /* of a tile and a side: weight and bias, (2, head_dim) */
    float *means, *inverses;              /* mean and 1 / deviation of a strip's rows */
} Workspace;

enum { ANY = -1 }; /* no specialised code: rows are converted to float and back */

INLINE int is_absent_or(const Rows *rows, int64_t dtype) { return !rows->data || rows->dtype == dtype; }
INLINE int has_dtype(const Side *side, int64_t dtype) {
    return is_absent_or(&side->x, dtype) && is_absent_or(&side->grad, dtype) && is_absent_or(&side->out, dtype);
}

INLINE const Norm *norm_of(const Planar *p, const Side *side) { return &p->norms[side - p->sides]; }

/* Whether rows of bfloat16 are rotated in registers. */
INLINE int in_registers(const Planar *p, const Side *side) {
    if (norm_of(p, side)->kind) return 0;
    return has_dtype(side, BFLOAT16) && p->angles.pairs % VW == 0;
}

/* The dtype of a side whose rows are rotated in place, in registers; or ANY. */
INLINE int64_t dtype_of(const Planar *p, const Side *side) {
    return has_dtype(side, FLOAT32) ? FLOAT32 : in_registers(p, side) ? BFLOAT16 : ANY;
}

/* Whether gradients of angles are summed per pair, not per channel. */
INLINE int sums_pairs(const Planar *p, const Side *side) { return p->angles.halves || in_registers(p, side); }

static Workspace lay_out(const Job *job, Arena *arena) {
    const Planar *p = job->p;
    Workspace w = {0};
    int of_pairs[] = {sums_pairs(p, &p->sides[0]), sums_pairs(p, &p->sides[1])};
    w.tile = lay_out_tile(&p->angles, job->runs, 16384, arena);
    int64_t bytes = 4 * w.tile.most * w.tile.padded;
    if (job->wanted && !(of_pairs[0] && of_pairs[1])) w.moment_interleaved = take(arena, 2 * bytes);
    if (job->wanted && (of_pairs[0] || of_pairs[1])) w.moment_split = take(arena, bytes);
    float **rows[] = {&w.row, &w.row2, &w.result, &w.normed};
    for (int i = 0; i < 4; i++) *rows[i] = take(arena, 4 * p->head_dim);
    if (job->backward && (p->norms[0].kind || p->norms[1].kind)) w.d_weights = take(arena, 2 * 4 * p->head_dim);
    w.means = take(arena, 4 * MOST_TOKENS);
    w.inverses = take(arena, 4 * MOST_TOKENS);
    return w;
}

/* Rows of neighbouring tokens of one sample and head. */
typedef struct {
    const Rows *in, *x, *out; /* x: input of the forward pass, or NULL if no gradient to angles is wanted */
    int64_t at, x_at, target, count;
} Strip;

enum { AHEAD = 4 }; /* rows */

/* Prefetch a later row of a strip: rows of a packed projection are too far apart for the hardware prefetcher. */
INLINE void prefetch_row(const Rows *rows, int64_t at, int64_t t, int64_t count, int64_t n, int64_t dtype,
                         int writes) {
    if (t + AHEAD >= count) return;
    int64_t size = dtype == FLOAT32 ? 4 : 2;
    const char *row = (const char *)rows->data + (at + (t + AHEAD) * rows->stride[2]) * size;
    for (int64_t byte = 0; byte < n * size; byte += 64) {
        if (writes)
            __builtin_prefetch(row + byte, 1);
        else
            __builtin_prefetch(row + byte, 0);
    }
}

/* One row in float, of token t of the tile. */
INLINE void rotate_row(const float *x, const float *of_x, Workspace *w, int64_t t, float *y, int moments, int64_t pairs,
                       int halves, int back) {
    int64_t padded = w->tile.padded;
    const float *cos_sin = w->tile.cos_sin + t * 2 * padded;
    if (halves)
        rotate_halves(1, &x, &of_x, cos_sin, padded, &y, moments ? w->moment_split + t * padded : NULL, pairs, back);
    else
        rotate_neighbours(1, &x, &of_x, cos_sin, padded, &y, moments ? w->moment_interleaved + t * 2 * padded : NULL,
                          pairs, back);
}

INLINE void rotate_rows_float(const Strip *s, int strips, Workspace *w, int64_t pairs, int halves, int back,
                              int moments) {
    int64_t padded = w->tile.padded;
    const float *cos_sin = w->tile.cos_sin, *x[2], *of_x[2] = {NULL, NULL};
    float *moment = halves ? w->moment_split : w->moment_interleaved, *y[2];
    for (int i = 0; i < strips; i++) {
        x[i] = (const float *)s[i].in->data + s[i].at, y[i] = (float *)s[i].out->data + s[i].target;
        if (moments) of_x[i] = (const float *)s[i].x->data + s[i].x_at;
    }
    for (int64_t t = 0; t < s->count; t++) {
        if (halves)
            rotate_halves(strips, x, of_x, cos_sin, padded, y, moments ? moment : NULL, pairs, back);
        else
            rotate_neighbours(strips, x, of_x, cos_sin, padded, y, moments ? moment : NULL, pairs, back);
        cos_sin += 2 * padded;
        if (moments) moment += halves ? padded : 2 * padded;
        for (int i = 0; i < strips; i++) {
            x[i] += s[i].in->stride[2], y[i] += s[i].out->stride[2];
            if (moments) of_x[i] += s[i].x->stride[2];
        }
    }
}

INLINE void rotate_rows_bf16(const Strip *s, int strips, Workspace *w, int64_t pairs, int halves, int back,
                             int moments) {
    int64_t padded = w->tile.padded;
    const float *cos_sin = w->tile.cos_sin;
    const uint16_t *x[2], *of_x[2] = {NULL, NULL};
    float *moment = w->moment_split;
    uint16_t *y[2];
    for (int i = 0; i < strips; i++) {
        x[i] = (const uint16_t *)s[i].in->data + s[i].at, y[i] = (uint16_t *)s[i].out->data + s[i].target;
        if (moments) of_x[i] = (const uint16_t *)s[i].x->data + s[i].x_at;
    }
    for (int64_t t = 0; t < s->count; t++) {
        rotate_bf16(strips, x, of_x, cos_sin, padded, y, moments ? moment : NULL, pairs, halves, back);
        cos_sin += 2 * padded;
        if (moments) moment += padded;
        for (int i = 0; i < strips; i++) {
            x[i] += s[i].in->stride[2], y[i] += s[i].out->stride[2];
            if (moments) of_x[i] += s[i].x->stride[2];
        }
    }
}

/* Any dtypes, converted to float. */
static void rotate_rows_any(const Strip *s, Workspace *w, int64_t pairs, int halves, int back, int moments) {
    for (int64_t t = 0; t < s->count; t++) {
        const float *x = load_row(s->in, s->at + t * s->in->stride[2], 2 * pairs, w->row);
        const float *of_x = moments ? load_row(s->x, s->x_at + t * s->x->stride[2], 2 * pairs, w->row2) : NULL;
        rotate_row(x, of_x, w, t, w->result, moments, pairs, halves, back);
        store_row(s->out, s->target + t * s->out->stride[2], 2 * pairs, w->result);
    }
}

/* Specialised for the most frequent size, and for calls with and without gradients of angles. */
#define WITH_SIZE(ROTATE, HALVES)                                                                                     \
    do {                                                                                                              \
        if (pairs == 32 && moments)                                                                                   \
            ROTATE(s, strips, w, 32, HALVES, 1, 1);                                                                   \
        else if (pairs == 32 && back)                                                                                 \
            ROTATE(s, strips, w, 32, HALVES, 1, 0);                                                                   \
        else if (pairs == 32)                                                                                         \
            ROTATE(s, strips, w, 32, HALVES, 0, 0);                                                                   \
        else if (moments)                                                                                             \
            ROTATE(s, strips, w, pairs, HALVES, 1, 1);                                                                \
        else                                                                                                          \
            ROTATE(s, strips, w, pairs, HALVES, back, 0);                                                             \
    } while (0)

INLINE void rotate_strips(const Job *job, const Strip *s, int strips, int64_t dtype, Workspace *w) {
    int64_t pairs = job->p->angles.pairs;
    int halves = (int)job->p->angles.halves, back = (int)job->backward, moments = (int)job->wanted;
    if (dtype == FLOAT32 && halves)
        WITH_SIZE(rotate_rows_float, 1);
    else if (dtype == FLOAT32)
        WITH_SIZE(rotate_rows_float, 0);
    else if (halves)
        WITH_SIZE(rotate_rows_bf16, 1);
    else
        WITH_SIZE(rotate_rows_bf16, 0);
}

static __attribute__((noinline)) void rotate_strip(const Job *job, const Strip *s, int64_t dtype, Workspace *w) {
    rotate_strips(job, s, 1, dtype, w);
}

static __attribute__((noinline)) void rotate_two_strips(const Job *job, const Strip *s, int64_t dtype, Workspace *w) {
    rotate_strips(job, s, 2, dtype, w);
}

/* ---- rows that are normalised first ---- */

/* Reads and writes rows of any dtype. */
static __attribute__((noinline)) const float *load_any(const Rows *rows, int64_t at, int64_t n, float *scratch) {
    return load_row(rows, at, n, scratch);
}

static __attribute__((noinline)) void store_any(const Rows *rows, int64_t at, int64_t n, const float *values) {
    store_row(rows, at, n, values);
}

INLINE const float *read_row(const Rows *rows, int64_t at, int64_t n, int64_t dtype, float *scratch) {
    if (dtype == FLOAT32) return (const float *)rows->data + at;
    if (dtype == ANY) return load_any(rows, at, n, scratch);
    for (int64_t i = 0; i < n; i += VW) *(vf *)(scratch + i) = from_bf16((const uint16_t *)rows->data + at + i);
    return scratch;
}

INLINE void keep_row(const Rows *rows, int64_t at, int64_t n, const float *values, int64_t dtype) {
    if (dtype == FLOAT32) return; /* computed in place */
    if (dtype == ANY) {
        store_any(rows, at, n, values);
        return;
    }
    uint16_t *target = (uint16_t *)rows->data + at; /* rounding could turn a NaN of a weight into a number */
    for (int64_t i = 0; i < n; i += VW) *(vshort *)(target + i) = to_bf16(with_default_nan(*(const vf *)(values + i)));
}

/* The buffer that a row of results is computed in. */
INLINE float *place_of(const Rows *rows, int64_t at, int64_t dtype, float *scratch) {
    return dtype == FLOAT32 ? (float *)rows->data + at : scratch;
}

/* Recompute mean and inverse deviation of rows whose squares are infinite or NaN. */
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
        prefetch_row(rows, at, t, count, n, rows->dtype, 0);
        const float *x = read_row(rows, at + t * rows->stride[2], n, dtype, w->row);
        float mean = kind == LAYER_NORM ? mean_of(x, n) : 0, square = mean_square(x, mean, n, kind);
        w->means[t] = mean;
        inverses[t] = square;
        far |= !(square <= FLT_MAX);
    }
    for (int64_t t = 0; t < count; t++) inverses[t] = 1 / sqrtf(inverses[t] + eps);
    if (far) find_far_moments(rows, at, count, norm, w, n, kind);
}

INLINE void rotate_normed(Strip s, const Norm *norm, Workspace *w, int64_t n, int64_t pairs, int64_t dtype, int halves,
                        int kind) {
    find_moments(s.in, s.at, s.count, norm, w, n, dtype, kind);
    for (int64_t t = 0; t < s.count; t++) {
        int64_t target = s.target + t * s.out->stride[2];
        prefetch_row(s.out, s.target, t, s.count, n, s.out->dtype, 1);
        const float *x = read_row(s.in, s.at + t * s.in->stride[2], n, dtype, w->row);
        float *out = place_of(s.out, target, dtype, w->result);
        normalise_row(x, (Moments){w->means[t], w->inverses[t]}, norm, out, n, kind);
        rotate_row(out, NULL, w, t, out, 0, pairs, halves, 0);
        keep_row(s.out, target, n, out, dtype);
    }
}

INLINE void rotate_normed_back(Strip s, const Norm *norm, Workspace *w, int64_t n, int64_t pairs, int64_t dtype,
                             int halves, int kind, int moments) {
    const float *weight = norm->weight;
    float *d_weights = w->d_weights, *normed = w->normed;
    find_moments(s.x, s.x_at, s.count, norm, w, n, dtype, kind);
    for (int64_t t = 0; t < s.count; t++) {
        int64_t target = s.target + t * s.out->stride[2];
        prefetch_row(s.in, s.at, t, s.count, n, s.in->dtype, 0);
        prefetch_row(s.out, s.target, t, s.count, n, s.out->dtype, 1);
        const float *grad = read_row(s.in, s.at + t * s.in->stride[2], n, dtype, w->row);
        const float *x = read_row(s.x, s.x_at + t * s.x->stride[2], n, dtype, w->row2);
        float *out = place_of(s.out, target, dtype, w->result);
        Moments of = {w->means[t], w->inverses[t]};
        if (moments) normalise_row(x, of, norm, normed, 2 * pairs, kind);
        memcpy(out + 2 * pairs, grad + 2 * pairs, 4 * (n - 2 * pairs));
        rotate_row(grad, normed, w, t, out, moments, pairs, halves, 1);
        normalise_row_back(x, out, of, weight, out, d_weights, d_weights + n, n, kind);
        keep_row(s.out, target, n, out, dtype);
    }
}

/* Specialised for layouts of pairs and norms, at the most frequent size. */
#define WITH_KIND(ROTATE, DTYPE, ...)                                                                                   \
    do {                                                                                                              \
        if (halves && kind == RMS_NORM)                                                                               \
            ROTATE(s, norm, w, 64, 32, DTYPE, 1, RMS_NORM __VA_ARGS__);                                                 \
        else if (halves)                                                                                              \
            ROTATE(s, norm, w, 64, 32, DTYPE, 1, LAYER_NORM __VA_ARGS__);                                               \
        else if (kind == RMS_NORM)                                                                                    \
            ROTATE(s, norm, w, 64, 32, DTYPE, 0, RMS_NORM __VA_ARGS__);                                                 \
        else                                                                                                          \
            ROTATE(s, norm, w, 64, 32, DTYPE, 0, LAYER_NORM __VA_ARGS__);                                               \
    } while (0)

/* Specialised for one dtype at the most frequent size, else any. */
static __attribute__((noinline)) void rotate_strip_normed(const Job *job, const Norm *norm, Strip s, Workspace *w) {
    int64_t n = job->p->head_dim, pairs = job->p->angles.pairs, dtype = s.in->dtype;
    int halves = (int)job->p->angles.halves, kind = (int)norm->kind;
    if (s.out->dtype != dtype || n != 64 || pairs != 32) dtype = ANY;
    if (dtype == FLOAT32)
        WITH_KIND(rotate_normed, FLOAT32);
    else if (dtype == BFLOAT16)
        WITH_KIND(rotate_normed, BFLOAT16);
    else
        rotate_normed(s, norm, w, n, pairs, ANY, halves, kind);
}

static __attribute__((noinline)) void rotate_strip_normed_back(const Job *job, const Norm *norm, Strip s, Workspace *w) {
    int64_t n = job->p->head_dim, pairs = job->p->angles.pairs, dtype = s.in->dtype;
    int halves = (int)job->p->angles.halves, kind = (int)norm->kind, moments = (int)job->wanted;
    if (s.out->dtype != dtype || s.x->dtype != dtype || n != 64 || pairs != 32) dtype = ANY;
    if (dtype == FLOAT32 && moments)
        WITH_KIND(rotate_normed_back, FLOAT32, , 1);
    else if (dtype == FLOAT32)
        WITH_KIND(rotate_normed_back, FLOAT32, , 0);
    else if (dtype == BFLOAT16 && moments)
        WITH_KIND(rotate_normed_back, BFLOAT16, , 1);
    else if (dtype == BFLOAT16)
        WITH_KIND(rotate_normed_back, BFLOAT16, , 0);
    else
        rotate_normed_back(s, norm, w, n, pairs, ANY, halves, kind, moments);
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

/* Rotate rows `from` to `to` of a tile of tokens, two at once where dtypes allow. */
static void rotate_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t from,
                        int64_t to, int64_t item, Workspace *w) {
    const Planar *p = job->p;
    int64_t n = 2 * p->angles.pairs, rest = p->head_dim - n, before = 0, waiting = ANY; /* dtype of strips[0], or none */
    Strip strips[2];
    fill_tile(&w->tile, set, first, count);
    if (w->moment_interleaved) memset(w->moment_interleaved, 0, 4 * count * 2 * w->tile.padded);
    if (w->moment_split) memset(w->moment_split, 0, 4 * count * w->tile.padded);
    for (int which = 0; which < 2; which++) {
        const Side *side = &p->sides[which];
        const Norm *norm = &p->norms[which];
        int64_t group = side->heads / p->angles.heads, rows = rows_of(p, side), dtype = dtype_of(p, side);
        int reads_x = job->wanted || (job->backward && norm->kind);
        Strip s = {job->backward ? &side->grad : &side->x, reads_x ? &side->x : NULL, &side->out, 0, 0, 0, count};
        if (w->d_weights) memset(w->d_weights, 0, 2 * 4 * p->head_dim);
        int64_t last = least(to - before, rows);
        for (int64_t row = from > before ? from - before : 0; s.in->data && row < last; row++) {
            int64_t sample = (p->sets == 1 ? 0 : set) + row / group, own = head * group + row % group;
            s.at = row_offset(s.in, sample, own, first);
            s.x_at = row_offset(&side->x, sample, own, first);
            s.target = row_offset(s.out, sample, own, first);
            if (norm->kind) {
                (job->backward ? rotate_strip_normed_back : rotate_strip_normed)(job, norm, s, w);
                continue;
            }
            if (dtype == ANY) {
                rotate_rows_any(&s, w, p->angles.pairs, (int)p->angles.halves, (int)job->backward, (int)job->wanted);
            } else if (waiting == dtype) {
                strips[1] = s;
                rotate_two_strips(job, strips, dtype, w);
                waiting = ANY;
            } else {
                if (waiting != ANY) rotate_strip(job, strips, waiting, w);
                strips[0] = s;
                waiting = dtype;
            }
            for (int64_t t = 0; rest && t < count; t++)
                copy_row(s.in, s.at + t * s.in->stride[2], s.out, s.target + t * s.out->stride[2], n, rest);
        }
        before += rows;
        if (job->weights && norm->kind) keep_weights(job, item, which, w);
    }
    if (waiting != ANY) rotate_strip(job, strips, waiting, w);
}

/* Gradients of the angles of a tile's tokens: a row of pairs per token, in place of one of the moments. */
typedef struct {
    const float *data;
    int64_t stride;
} AngleGradients;

INLINE AngleGradients collect_moments(const Workspace *w, int64_t count, int64_t pairs) {
    int64_t padded = w->tile.padded;
    if (!w->moment_interleaved) return (AngleGradients){w->moment_split, padded};
    for (int64_t t = 0; t < count; t++) {
        float *row = w->moment_interleaved + t * 2 * padded;
        const float *split = w->moment_split ? w->moment_split + t * padded : NULL;
        int64_t i = 0;
        for (; i + VW <= pairs; i += VW) {
            vf near = *(const vf *)(row + 2 * i), far = *(const vf *)(row + 2 * i + VW);
            vf of_angles = __builtin_shufflevector(near, far, ODD_LANES) - __builtin_shufflevector(near, far, EVEN_LANES);
            if (split) of_angles += *(const vf *)(split + i);
            *(vf *)(row + i) = of_angles;
        }
        for (; i < pairs; i++) row[i] = row[2 * i + 1] - row[2 * i] + (split ? split[i] : 0);
    }
    return (AngleGradients){w->moment_interleaved, 2 * padded};
}

/* sum_t p_t g_ti, of one axis, added to the gradient of its frequencies. */
INLINE void add_frequencies(const float *position, int64_t axes, AngleGradients g, int64_t count, int64_t pairs,
                            float *sum) {
    int64_t i = 0;
    for (; i + VW <= pairs; i += VW) {
        vf even = {0}, odd = {0};
        int64_t t = 0;
        for (; t + 2 <= count; t += 2) {
            even += position[t * axes] * *(const vf *)(g.data + t * g.stride + i);
            odd += position[(t + 1) * axes] * *(const vf *)(g.data + (t + 1) * g.stride + i);
        }
        if (t < count) even += position[t * axes] * *(const vf *)(g.data + t * g.stride + i);
        *(vf *)(sum + i) += even + odd;
    }
    for (; i < pairs; i++)
        for (int64_t t = 0; t < count; t++) sum[i] += position[t * axes] * g.data[t * g.stride + i];
}

/* sum_i f_i g_i, of one token and axis. */
INLINE float position_gradient(const float *frequency, const float *g, int64_t pairs) {
    vf sum = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + VW <= pairs; i += VW) sum += *(const vf *)(frequency + i) * *(const vf *)(g + i);
    for (; i < pairs; i++) rest += frequency[i] * g[i];
    return sum_lanes(sum) + rest;
}

/* Add a tile's gradients of angles to the part's gradient of frequencies; write this head's gradient of positions. */
static void reduce_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t part,
                        Workspace *w) {
    const Angles *a = &job->p->angles;
    AngleGradients g = collect_moments(w, count, a->pairs);
    int64_t token = set * a->tokens + first;
    for (int64_t axis = 0; axis < a->axes; axis++) {
        if (job->frequencies) {
            float *sum = job->frequencies + ((part * a->axes + axis) * a->heads + head) * a->pairs;
            add_frequencies(a->positions + token * a->axes + axis, a->axes, g, count, a->pairs, sum);
        }
        const float *frequency = a->frequencies + (axis * a->heads + head) * a->pairs;
        float *positions = job->positions + (head * job->p->sets * a->tokens + token) * a->axes + axis;
        for (int64_t t = 0; job->positions && t < count; t++)
            positions[t * a->axes] = position_gradient(frequency, g.data + t * g.stride, a->pairs);
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
    int64_t chunks = (a->tokens + CHUNK - 1) / CHUNK;
    int64_t first = chunks * part / job->token_parts * CHUNK;
    int64_t last = least(chunks * (part + 1) / job->token_parts * CHUNK, a->tokens);
    Arena arena = {memory, 0};
    Workspace w = lay_out(job, &arena);
    start_tiles(&w.tile, head);
    for (int64_t axis = 0; job->frequencies && axis < a->axes; axis++)
        memset(job->frequencies + ((part * a->axes + axis) * a->heads + head) * a->pairs, 0, 4 * a->pairs);
    if (job->weights) memset(job->weights + item * 4 * p->head_dim, 0, 4 * 4 * p->head_dim);
    for (int64_t set = 0; set < p->sets; set++)
        for (int64_t token = first; token < last; token += w.tile.most) {
            int64_t count = least(w.tile.most, last - token);
            rotate_tile(job, set, head, token, count, from, to, item, &w);
            if (job->wanted) reduce_tile(job, set, head, token, count, part, &w);
        }
}

enum { MANY_ROWS = 16 }; /* rows per angle from which the cost of computing it is negligible */

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

/* Split the work into items. With partial sums their number does not depend on the number of threads, because rounding
   must not. Rows are split before tokens, into parts of MANY_ROWS or more, because reading rows in order is faster.
   Gradients of angles are sums over rows, so only tokens are split; those of weights are sums over both. */
static void cut(Job *job) {
    const Planar *p = job->p;
    const Angles *a = &p->angles;
    int64_t rows = rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]), chunks = (a->tokens + CHUNK - 1) / CHUNK;
    int64_t floats = rows * p->sets * a->heads * a->tokens * p->head_dim;
    int64_t threads = floats < SMALL ? 1 : p->threads;
    job->token_parts = job->row_parts = 1;
    if (job->wanted) {
        job->token_parts = parts_of(a->heads, chunks, 1, threads);
    } else if (has_weights(job)) {
        job->row_parts = least(parts_of(a->heads, rows / 4, 1, threads), 16);
        job->token_parts = parts_of(a->heads * job->row_parts, (chunks + 1) / 2, 1, threads);
    } else if (threads > 1) {
        job->row_parts = parts_of(a->heads, rows / MANY_ROWS, 0, threads);
        job->token_parts = parts_of(a->heads * job->row_parts, chunks, 0, threads);
    }
}

API int64_t torchrope_planar(const Planar *p, int64_t backward) {
    CHECK_LAYOUT(p);
    const Angles *a = &p->angles;
    Job job = {.p = p, .backward = backward, .wanted = backward && (p->d_frequencies || p->d_positions)};
    cut(&job);
    int64_t numbers = job.wanted && p->d_frequencies ? a->axes * a->heads * a->pairs : 0;
    int64_t places = job.wanted && p->d_positions ? p->sets * a->tokens * a->axes : 0;
    int64_t weights = has_weights(&job) ? items_of(&job) * 4 * p->head_dim : 0;
    int64_t sums = job.token_parts * numbers + a->heads * places + weights, bytes = a->table ? 0 : p->sets * a->tokens;
    float *partial = allocate(4 * sums + bytes);
    if (!partial) return OUT_OF_MEMORY;
    if (numbers) job.frequencies = partial;
    if (places) job.positions = partial + job.token_parts * numbers;
    if (weights) job.weights = partial + job.token_parts * numbers + a->heads * places;
    if (bytes) job.runs = (uint8_t *)(partial + sums);
    int64_t status = bytes ? find_runs(a, job.runs, p->sets, p->threads) : DONE;
    Arena arena = {NULL, 0};
    lay_out(&job, &arena);
    int64_t rows = p->sets * (rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]));
    int64_t threads = rows * a->heads * a->tokens * p->head_dim < SMALL ? 1 : p->threads;
    if (status == DONE) status = parallel_for(items_of(&job), threads, arena.used, planar_part, &job);
    if (status == DONE && numbers) add_parts(job.frequencies, job.token_parts, numbers, p->d_frequencies);
    if (status == DONE && places) add_parts(job.positions, a->heads, places, p->d_positions);
    if (status == DONE && weights) add_weights(&job);
    free(partial);
    return status;
}
