/* Rotation of channel pairs, (2i, 2i+1) or (i, i + pairs), by a_i = sum_a p_a f_ai:  y = cos a x + sin a J x. */
#include "angles.h"

typedef struct {
    int64_t size;
    Side sides[2];
    Angles angles;
    int64_t head_dim, sets, threads; /* sets of positions: 1, or one a sample */
    float *d_frequencies;            /* as frequencies, or NULL */
    float *d_positions;              /* as positions, or NULL */
} Planar;

/* A call, its partial sums, and how it is cut: items are a rotation's head, a part of the tokens and one of the rows.
   Rows are the samples and heads, of q and then of k, that one rotation turns. */
typedef struct {
    const Planar *p;
    int64_t token_parts, row_parts, backward, wanted;
    float *frequencies; /* (token_parts, axes, heads, pairs) or NULL */
    float *positions;   /* (heads, sets, tokens, axes) or NULL */
} Job;

/* Memory of a thread. */
typedef struct {
    Tile tile;
    float *moment_in_turn, *moment_apart; /* gradients of the tile's angles, as cos and sin lie */
    float *row, *row2, *result;           /* of a head, in float */
    float *moment;                        /* of one token's angles */
} Workspace;

INLINE int is_at_hand(const Rows *rows, int64_t dtype) { return !rows->data || rows->dtype == dtype; }

/* Whether rows of bfloat16 are turned in registers. */
INLINE int in_registers(const Planar *p, const Side *side) {
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
    float **rows[] = {&w.row, &w.row2, &w.result};
    for (int i = 0; i < 3; i++) *rows[i] = take(arena, 4 * p->head_dim);
    w.moment = take(arena, 4 * w.tile.padded);
    return w;
}

/* Rows of neighbouring tokens of one sample and head. */
typedef struct {
    const Rows *in, *x, *out; /* x: what was turned forward, or NULL where no gradient to angles is wanted */
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

/* Whether moments are wanted is one question a strip, not one a row. */
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
    s.x = NULL; /* its moments are there */
    turn_rows_bf16(s, w, pairs, halves, back, 1, &unordered);
}

/* Any dtypes, by way of float. */
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

/* The most frequent size is one that the compiler should know. */
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

INLINE int64_t samples_of(const Planar *p, const Side *side) { return p->sets == 1 ? side->batch : side->batch > 0; }
INLINE int64_t rows_of(const Planar *p, const Side *side) {
    return samples_of(p, side) * (side->heads / p->angles.heads);
}

/* Turn rows `from` to `to` of a tile of tokens. */
static void turn_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t from, int64_t to,
                      Workspace *w) {
    const Planar *p = job->p;
    int64_t n = 2 * p->angles.pairs, rest = p->head_dim - n, before = 0;
    fill_tile(&w->tile, set, first, count);
    if (w->moment_in_turn) memset(w->moment_in_turn, 0, 4 * count * 2 * w->tile.padded);
    if (w->moment_apart) memset(w->moment_apart, 0, 4 * count * w->tile.padded);
    for (int which = 0; which < 2; which++) {
        const Side *side = &p->sides[which];
        int64_t group = side->heads / p->angles.heads, rows = rows_of(p, side);
        Strip s = {job->backward ? &side->grad : &side->x, job->wanted ? &side->x : NULL, &side->out, 0, 0, 0, count};
        int64_t last = least(to - before, rows);
        for (int64_t row = from > before ? from - before : 0; s.in->data && row < last; row++) {
            int64_t sample = (p->sets == 1 ? 0 : set) + row / group, own = head * group + row % group;
            s.at = row_offset(s.in, sample, own, first);
            s.x_at = row_offset(&side->x, sample, own, first);
            s.target = row_offset(s.out, sample, own, first);
            turn_strip(p, side, s, w, (int)job->backward);
            for (int64_t t = 0; rest && t < count; t++)
                copy_row(s.in, s.at + t * s.in->stride[2], s.out, s.target + t * s.out->stride[2], n, rest);
        }
        before += rows;
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
    for (int64_t set = 0; set < p->sets; set++)
        for (int64_t token = first; token < last; token += w.tile.most) {
            int64_t count = least(w.tile.most, last - token);
            turn_tile(job, set, head, token, count, from, to, &w);
            if (job->wanted) reduce_tile(job, set, head, token, count, part, &w);
        }
}

/* Enough items for the threads; with sums as many as they always are, whatever the threads: rounding must not depend
   on them. Rows are parted first: an angle is cheaper than a row that is far from the last one. */
static void cut(Job *job) {
    const Planar *p = job->p;
    const Angles *a = &p->angles;
    int64_t rows = rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]);
    int64_t floats = rows * p->sets * a->heads * a->tokens * p->head_dim;
    int64_t threads = floats < SMALL ? 1 : p->threads;
    job->token_parts = job->row_parts = 1;
    if (job->wanted) {
        job->token_parts = parts_of(a->heads, (a->tokens + 7) / 8, 1, threads);
    } else if (threads > 1) {
        job->row_parts = parts_of(a->heads, rows / 4, 0, threads);
        job->token_parts = parts_of(a->heads * job->row_parts, (a->tokens + 7) / 8, 0, threads);
    }
}

API int64_t torchrope_planar(const Planar *p, int64_t backward) {
    CHECK_LAYOUT(p);
    const Angles *a = &p->angles;
    Job job = {p, 1, 1, backward, backward && (p->d_frequencies || p->d_positions), NULL, NULL};
    cut(&job);
    int64_t numbers = job.wanted && p->d_frequencies ? a->axes * a->heads * a->pairs : 0;
    int64_t places = job.wanted && p->d_positions ? p->sets * a->tokens * a->axes : 0;
    float *partial = NULL;
    if (numbers || places) {
        partial = allocate(4 * (job.token_parts * numbers + a->heads * places));
        if (!partial) return OUT_OF_MEMORY;
        if (numbers) job.frequencies = partial;
        if (places) job.positions = partial + job.token_parts * numbers;
    }
    Arena arena = {NULL, 0};
    lay_out(&job, &arena);
    int64_t rows = p->sets * (rows_of(p, &p->sides[0]) + rows_of(p, &p->sides[1]));
    int64_t threads = rows * a->heads * a->tokens * p->head_dim < SMALL ? 1 : p->threads;
    int64_t status = parallel_for(a->heads * job.token_parts * job.row_parts, threads, arena.used, planar_part, &job);
    if (status == DONE && numbers) add_parts(job.frequencies, job.token_parts, numbers, p->d_frequencies);
    if (status == DONE && places) add_parts(job.positions, a->heads, places, p->d_positions);
    free(partial);
    return status;
}
