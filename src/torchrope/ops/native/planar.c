/* Rotation of channel pairs, (2i, 2i+1) or (i, i + pairs), by a_i = sum_a p_a f_ai:  y = cos a x + sin a J x. */
#include "common.h"

enum { TILE = 8 };

typedef struct {
    Side sides[2];
    int64_t tokens, axes, heads, pairs, head_dim; /* heads: those of the rotation */
    int64_t position_batch, threads, halves; /* halves: pair i is channels (i, i + pairs) */
    const float *positions;   /* (position_batch, tokens, axes) */
    const float *frequencies; /* (axes, heads, pairs) */
    const float *table;       /* (position_batch, heads, tokens, pairs, 2), cos and sin, or NULL */
    float *d_frequencies;     /* as frequencies, or NULL */
    float *d_positions;       /* as positions, or NULL */
} Planar;

/* A call, its partial sums, and the parts that tokens are cut into. */
typedef struct {
    const Planar *p;
    int64_t parts;
    float *frequencies; /* (parts, axes, heads, pairs) or NULL */
    float *positions;   /* (heads, position_batch, tokens, axes) or NULL */
} Job;

/* Memory of a thread. */
typedef struct {
    float *cosine, *sine, *moment; /* of a tile of tokens */
    float *row, *row2, *result;    /* of a head */
    float *steepest;               /* the largest frequency of the head along each axis */
} Workspace;

static Workspace lay_out(const Planar *p, Arena *arena) {
    Workspace w;
    float **tiles[] = {&w.cosine, &w.sine, &w.moment}, **rows[] = {&w.row, &w.row2, &w.result};
    for (int i = 0; i < 3; i++) *tiles[i] = take(arena, 4 * TILE * 2 * p->pairs);
    for (int i = 0; i < 3; i++) *rows[i] = take(arena, 4 * p->head_dim);
    w.steepest = take(arena, 4 * p->axes);
    return w;
}

/* cos twice, and -sin, sin:  y_j = cos_j x_j + sin_j x_(other channel of the pair), for pairs `start` to `start` + n. */
INLINE void spread_pairs(const Planar *p, const float *c, const float *s, int64_t apart, int64_t start, int64_t n,
                         float *cosine, float *sine) {
    int64_t step = p->halves ? 1 : 2, other = p->halves ? p->pairs : 1;
    cosine += step * start, sine += step * start;
    for (int64_t i = 0; i < n; i++) {
        cosine[step * i] = cosine[step * i + other] = c[i * apart];
        sine[step * i] = -s[i * apart];
        sine[step * i + other] = s[i * apart];
    }
}

INLINE void turn_by_angles(const Planar *p, int64_t set, int64_t head, int64_t token, float *cosine, float *sine,
                           void (*find)(const double *, float *, float *, int64_t)) {
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    for (int64_t start = 0; start < p->pairs; start += 64) {
        int64_t n = least(64, p->pairs - start);
        double angle[64];
        float c[64], s[64];
        memset(angle, 0, sizeof angle);
        for (int64_t axis = 0; axis < p->axes; axis++) {
            const float *frequency = p->frequencies + (axis * p->heads + head) * p->pairs + start;
            double at = position[axis];
            for (int64_t i = 0; i < n; i++) angle[i] += at * (double)frequency[i];
        }
        find(angle, c, s, 64);
        spread_pairs(p, c, s, 1, start, n, cosine, sine);
    }
}

static __attribute__((noinline, cold)) void turn_far(const Planar *p, int64_t set, int64_t head, int64_t token,
                                                     float *cosine, float *sine) {
    turn_by_angles(p, set, head, token, cosine, sine, cos_sin_far);
}

static void turn_of_token(const Planar *p, int64_t set, int64_t head, int64_t token, const float *steepest,
                          float *cosine, float *sine) {
    if (p->table) {
        const float *entry = p->table + ((set * p->heads + head) * p->tokens + token) * 2 * p->pairs;
        spread_pairs(p, entry, entry + 1, 2, 0, p->pairs, cosine, sine);
        return;
    }
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    double farthest = 0;
    for (int64_t axis = 0; axis < p->axes; axis++) farthest += fabs((double)position[axis]) * (double)steepest[axis];
    if (farthest <= FARTHEST_ANGLE)
        turn_by_angles(p, set, head, token, cosine, sine, cos_sin);
    else
        turn_far(p, set, head, token, cosine, sine);
}

INLINE vf swap_pairs(vf x) {
#if VW == 16
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif VW == 8
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#endif
}

INLINE void turn_row(const float *x, const float *cosine, const float *sine, float *y, int64_t n) {
    int64_t j = 0;
    for (; j + VW <= n; j += VW) {
        vf in = *(const vf *)(x + j);
        *(vf *)(y + j) = *(const vf *)(cosine + j) * in + *(const vf *)(sine + j) * swap_pairs(in);
    }
    for (; j < n; j += 2) {
        float even = x[j], odd = x[j + 1];
        y[j] = cosine[j] * even + sine[j] * odd;
        y[j + 1] = cosine[j + 1] * odd + sine[j + 1] * even;
    }
}

/* Turn a gradient back and collect  gx_j x_(j xor 1), of which the angle's gradient is odd minus even. */
INLINE void turn_row_back(const float *grad, const float *x, const float *cosine, const float *sine, float *gx,
                          float *moment, int64_t n) {
    int64_t j = 0;
    for (; j + VW <= n; j += VW) {
        vf in = *(const vf *)(grad + j);
        vf back = *(const vf *)(cosine + j) * in - *(const vf *)(sine + j) * swap_pairs(in);
        *(vf *)(gx + j) = back;
        if (moment) *(vf *)(moment + j) += back * swap_pairs(*(const vf *)(x + j));
    }
    for (; j < n; j += 2) {
        float even = grad[j], odd = grad[j + 1];
        float back = cosine[j] * even - sine[j] * odd, back_odd = cosine[j + 1] * odd - sine[j + 1] * even;
        gx[j] = back;
        gx[j + 1] = back_odd;
        if (moment) {
            moment[j] += back * x[j + 1];
            moment[j + 1] += back_odd * x[j];
        }
    }
}

/* Pairs in halves: the first and the second channels of all pairs are two rows of `pairs`. */
INLINE void turn_halves(const float *x, const float *cosine, const float *sine, float *restrict y, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) {
        float first = x[i], second = x[i + pairs];
        y[i] = cosine[i] * first + sine[i] * second;
        y[i + pairs] = cosine[i + pairs] * second + sine[i + pairs] * first;
    }
}

INLINE void turn_halves_back(const float *grad, const float *x, const float *cosine, const float *sine,
                             float *restrict gx, float *restrict moment, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) {
        float first = grad[i], second = grad[i + pairs];
        float back = cosine[i] * first - sine[i] * second;
        float back_second = cosine[i + pairs] * second - sine[i + pairs] * first;
        gx[i] = back;
        gx[i + pairs] = back_second;
        if (moment) {
            moment[i] += back * x[i + pairs];
            moment[i + pairs] += back_second * x[i];
        }
    }
}

INLINE void turn_tile(const Planar *p, int64_t set, int64_t head, int64_t first, int64_t count, int backward,
                      Workspace w) {
    int64_t n = 2 * p->pairs, rest = p->head_dim - n;
    int wanted = backward && (p->d_frequencies || p->d_positions);
    float *cosine = w.cosine, *sine = w.sine, *moment = w.moment; /* in registers: rows may alias what w holds */
    for (int64_t t = 0; t < count; t++)
        turn_of_token(p, set, head, first + t, w.steepest, cosine + t * n, sine + t * n);
    if (wanted) memset(moment, 0, 4 * TILE * n);
    for (int which = 0; which < 2; which++) {
        const Side *side = &p->sides[which];
        const Rows *in = backward ? &side->grad : &side->x;
        if (!in->data || !side->batch) continue;
        int64_t group = side->heads / p->heads;
        int64_t from = p->position_batch == 1 ? 0 : set, to = p->position_batch == 1 ? side->batch : set + 1;
        for (int64_t sample = from; sample < to; sample++)
            for (int64_t own = head * group; own < (head + 1) * group; own++)
                for (int64_t t = 0; t < count; t++) {
                    int64_t at = row_offset(in, sample, own, first + t);
                    int64_t target = row_offset(&side->out, sample, own, first + t);
                    const float *values = load_row(in, at, n, w.row);
                    float *y = side->out.dtype == FLOAT32 ? (float *)side->out.data + target : w.result;
                    if (backward) {
                        int64_t x_at = row_offset(&side->x, sample, own, first + t);
                        const float *x = wanted ? load_row(&side->x, x_at, n, w.row2) : NULL;
                        float *sums = wanted ? moment + t * n : NULL;
                        if (p->halves)
                            turn_halves_back(values, x, cosine + t * n, sine + t * n, y, sums, p->pairs);
                        else
                            turn_row_back(values, x, cosine + t * n, sine + t * n, y, sums, n);
                    } else if (p->halves) {
                        turn_halves(values, cosine + t * n, sine + t * n, y, p->pairs);
                    } else {
                        turn_row(values, cosine + t * n, sine + t * n, y, n);
                    }
                    store_row(&side->out, target, n, y);
                    if (rest) copy_row(in, at, &side->out, target, n, rest);
                }
    }
}

/* Add a tile's gradients of angles to the part's gradient of frequencies; write the positions' of this head. */
static void reduce_tile(const Job *job, int64_t set, int64_t head, int64_t first, int64_t count, int64_t part,
                        const float *moment) {
    const Planar *p = job->p;
    int64_t pairs = p->pairs, step = p->halves ? 1 : 2, other = p->halves ? pairs : 1;
    for (int64_t t = 0; t < count; t++) {
        const float *turn = moment + 2 * t * pairs;
        for (int64_t axis = 0; axis < p->axes; axis++) {
            int64_t token = set * p->tokens + first + t;
            if (job->frequencies) {
                float at = p->positions[token * p->axes + axis];
                float *sum = job->frequencies + ((part * p->axes + axis) * p->heads + head) * pairs;
                for (int64_t i = 0; i < pairs; i++) sum[i] += at * (turn[step * i + other] - turn[step * i]);
            }
            if (job->positions) {
                const float *frequency = p->frequencies + (axis * p->heads + head) * pairs;
                float sum = 0;
                for (int64_t i = 0; i < pairs; i++) sum += frequency[i] * (turn[step * i + other] - turn[step * i]);
                job->positions[(head * p->position_batch * p->tokens + token) * p->axes + axis] = sum;
            }
        }
    }
}

static void find_steepest(const Planar *p, int64_t head, float *steepest) {
    for (int64_t axis = 0; axis < p->axes; axis++) {
        const float *frequency = p->frequencies + (axis * p->heads + head) * p->pairs;
        steepest[axis] = 0;
        for (int64_t i = 0; i < p->pairs; i++) /* NaN stays */
            steepest[axis] = fabsf(frequency[i]) <= steepest[axis] ? steepest[axis] : fabsf(frequency[i]);
    }
}

static int64_t tiles_of(const Planar *p) { return (p->tokens + TILE - 1) / TILE; }

INLINE void planar_part(const Job *job, int64_t item, void *memory, int backward) {
    const Planar *p = job->p;
    int64_t head = item / job->parts, part = item % job->parts;
    int64_t tiles = tiles_of(p), first = tiles * part / job->parts * TILE;
    int64_t last = least(tiles * (part + 1) / job->parts * TILE, p->tokens);
    Arena arena = {memory, 0};
    Workspace w = lay_out(p, &arena);
    find_steepest(p, head, w.steepest);
    for (int64_t axis = 0; job->frequencies && axis < p->axes; axis++)
        memset(job->frequencies + ((part * p->axes + axis) * p->heads + head) * p->pairs, 0, 4 * p->pairs);
    for (int64_t set = 0; set < p->position_batch; set++)
        for (int64_t token = first; token < last; token += TILE) {
            int64_t count = least(TILE, last - token);
            turn_tile(p, set, head, token, count, backward, w);
            if (backward && (job->frequencies || job->positions))
                reduce_tile(job, set, head, token, count, part, w.moment);
        }
}

static void forward_part(const void *context, int64_t item, void *memory) { planar_part(context, item, memory, 0); }
static void backward_part(const void *context, int64_t item, void *memory) { planar_part(context, item, memory, 1); }

API int64_t torchrope_planar(const Planar *p, int64_t backward) {
    int with_sums = backward && p->d_frequencies;
    Job job = {p, parts_of(p->heads, tiles_of(p), with_sums, p->threads), NULL, NULL};
    int64_t numbers = with_sums ? p->axes * p->heads * p->pairs : 0;
    int64_t places = backward && p->d_positions ? p->position_batch * p->tokens * p->axes : 0;
    float *partial = NULL;
    if (numbers || places) {
        partial = allocate(4 * (job.parts * numbers + p->heads * places));
        if (!partial) return OUT_OF_MEMORY;
        if (numbers) job.frequencies = partial;
        if (places) job.positions = partial + job.parts * numbers;
    }
    Arena arena = {NULL, 0};
    lay_out(p, &arena);
    int64_t status = parallel_for(p->heads * job.parts, p->threads, arena.used, backward ? backward_part : forward_part,
                                  &job);
    if (status == DONE && numbers) add_parts(job.frequencies, job.parts, numbers, p->d_frequencies);
    if (status == DONE && places) add_parts(job.positions, p->heads, places, p->d_positions);
    free(partial);
    return status;
}
