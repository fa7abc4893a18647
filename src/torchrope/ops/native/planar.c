/* Rotation of channel pairs (2i, 2i + 1) or (i, i + pairs) by the angles  φ_i = sum_a p_a f_ai. */
#include "angles.h"

typedef struct {
    int64_t size;
    Side sides[2];
    Angles angles;
    int64_t head_dim, sets, threads; /* sets of positions: 1, or one per sample */
    float *d_frequencies;            /* as frequencies, or NULL */
    float *d_positions;              /* as positions, without axes of angles (sets, heads, tokens, pairs); or NULL */
} Planar;

/* Arguments of a call, its partial sums and its partition, shared by all threads. An item is a rotation head, a part of
   the tokens and a part of the rows.
   Rows are the samples and heads, of q and then of k, that one rotation is applied to. */
typedef struct {
    const Planar *p;
    int64_t token_parts, row_parts, backward, wanted; /* wanted: gradients of angles */
    float *frequencies; /* (token_parts, axes, heads, pairs) or NULL */
    float *positions;   /* (heads, sets, tokens, axes) or NULL */
    uint8_t *runs;      /* (sets, tokens), of equally spaced tokens, or NULL with a table */
} Job;

/* Buffers of a thread. */
typedef struct {
    Tile tile;
    float *moment_interleaved, *moment_split; /* gradients of the tile's angles by channel, by pair */
    float *row, *row2, *result;           /* of a head, in float */
} Workspace;

enum { ANY = -1 }; /* no specialised code: rows are converted to float and back */

INLINE int is_absent_or(const Rows *rows, int64_t dtype) { return !rows->data || rows->dtype == dtype; }
INLINE int has_dtype(const Side *side, int64_t dtype) {
    return is_absent_or(&side->x, dtype) && is_absent_or(&side->grad, dtype) && is_absent_or(&side->out, dtype);
}

/* Whether rows of bfloat16 are rotated in registers. */
INLINE int in_registers(const Planar *p, const Side *side) {
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
    float **rows[] = {&w.row, &w.row2, &w.result};
    for (int i = 0; i < 3; i++) *rows[i] = take(arena, 4 * p->head_dim);
    return w;
}

/* Rows of neighbouring tokens of one sample and head. */
typedef struct {
    const Rows *in, *x, *out; /* x: input of the forward pass, or NULL if no gradient to angles is wanted */
    int64_t at, x_at, target, count;
} Strip;

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
    int64_t padded = w->tile.padded;
    for (int64_t t = 0; t < s->count; t++) {
        const float *cos_sin = w->tile.cos_sin + t * 2 * padded;
        const float *x = load_row(s->in, s->at + t * s->in->stride[2], 2 * pairs, w->row);
        const float *of_x = moments ? load_row(s->x, s->x_at + t * s->x->stride[2], 2 * pairs, w->row2) : NULL;
        if (halves)
            rotate_halves(1, &x, &of_x, cos_sin, padded, &w->result, moments ? w->moment_split + t * padded : NULL,
                          pairs, back);
        else
            rotate_neighbours(1, &x, &of_x, cos_sin, padded, &w->result,
                              moments ? w->moment_interleaved + t * 2 * padded : NULL, pairs, back);
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

/* ---- tiles ---- */

INLINE int64_t samples_of(const Planar *p, const Side *side) { return p->sets == 1 ? side->batch : side->batch > 0; }
INLINE int64_t rows_of(const Planar *p, const Side *side) {
    return samples_of(p, side) * (side->heads / p->angles.heads);
}

/* Rotate rows `from` to `to` of a tile of tokens, two at once where dtypes allow. */
static void rotate_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t from,
                        int64_t to, Workspace *w) {
    const Planar *p = job->p;
    int64_t n = 2 * p->angles.pairs, rest = p->head_dim - n, before = 0, waiting = ANY; /* dtype of strips[0], or none */
    Strip strips[2];
    fill_tile(&w->tile, set, first, count);
    if (w->moment_interleaved) memset(w->moment_interleaved, 0, 4 * count * 2 * w->tile.padded);
    if (w->moment_split) memset(w->moment_split, 0, 4 * count * w->tile.padded);
    for (int which = 0; which < 2; which++) {
        const Side *side = &p->sides[which];
        int64_t group = side->heads / p->angles.heads, rows = rows_of(p, side), dtype = dtype_of(p, side);
        Strip s = {job->backward ? &side->grad : &side->x, job->wanted ? &side->x : NULL, &side->out, 0, 0, 0, count};
        int64_t last = least(to - before, rows);
        for (int64_t row = from > before ? from - before : 0; s.in->data && row < last; row++) {
            int64_t sample = (p->sets == 1 ? 0 : set) + row / group, own = head * group + row % group;
            s.at = row_offset(s.in, sample, own, first);
            s.x_at = row_offset(&side->x, sample, own, first);
            s.target = row_offset(s.out, sample, own, first);
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

INLINE float sum_lanes(vf x) {
#if VW == 16
    v8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#elif VW == 8
    v8 eight = x;
#endif
#if VW == 4
    v4 four = x;
#else
    v4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#endif
    v4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
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

/* Add a tile's gradients of angles to the part's gradient of frequencies; write this head's gradient of positions, or
   of given angles. */
static void reduce_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t part,
                        Workspace *w) {
    const Angles *a = &job->p->angles;
    AngleGradients g = collect_moments(w, count, a->pairs);
    int64_t token = set * a->tokens + first;
    float *given = a->axes ? NULL : job->p->d_positions + ((set * a->heads + head) * a->tokens + first) * a->pairs;
    for (int64_t t = 0; given && t < count; t++) memcpy(given + t * a->pairs, g.data + t * g.stride, 4 * a->pairs);
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
    for (int64_t set = 0; set < p->sets; set++)
        for (int64_t token = first; token < last; token += w.tile.most) {
            int64_t count = least(w.tile.most, last - token);
            rotate_tile(job, set, head, token, count, from, to, &w);
            if (job->wanted) reduce_tile(job, set, head, token, count, part, &w);
        }
}

enum { MANY_ROWS = 16 }; /* rows per angle from which the cost of computing it is negligible */

/* Split the work into items. With partial sums their number does not depend on the number of threads, because rounding
   must not. Rows are split before tokens, into parts of MANY_ROWS or more, because reading rows in order is faster.
   Gradients of angles are sums over rows, so only tokens are split. */
static void cut(Job *job) {
    const Planar *p = job->p;
    const Angles *a = &p->angles;
    int64_t rows = rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]), chunks = (a->tokens + CHUNK - 1) / CHUNK;
    int64_t floats = rows * p->sets * a->heads * a->tokens * p->head_dim;
    int64_t threads = floats < SMALL ? 1 : p->threads;
    job->token_parts = job->row_parts = 1;
    if (job->wanted) {
        job->token_parts = parts_of(a->heads, chunks, 1, threads);
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
    int64_t sums = job.token_parts * numbers + a->heads * places, bytes = a->table ? 0 : p->sets * a->tokens;
    float *partial = allocate(4 * sums + bytes);
    if (!partial) return OUT_OF_MEMORY;
    if (numbers) job.frequencies = partial;
    if (places) job.positions = partial + job.token_parts * numbers;
    if (bytes) job.runs = (uint8_t *)(partial + sums);
    int64_t status = bytes ? find_runs(a, job.runs, p->sets, p->threads) : DONE;
    Arena arena = {NULL, 0};
    lay_out(&job, &arena);
    int64_t rows = p->sets * (rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]));
    int64_t threads = rows * a->heads * a->tokens * p->head_dim < SMALL ? 1 : p->threads;
    int64_t items = a->heads * job.token_parts * job.row_parts;
    if (status == DONE) status = parallel_for(items, threads, arena.used, planar_part, &job);
    if (status == DONE && numbers) add_parts(job.frequencies, job.token_parts, numbers, p->d_frequencies);
    if (status == DONE && places) add_parts(job.positions, a->heads, places, p->d_positions);
    free(partial);
    return status;
}
