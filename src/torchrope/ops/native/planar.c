/* Rotation of channel pairs (2i, 2i+1) by a_i = sum_a p_a f_ai:  y = cos a x + sin a J x. */
#include "common.h"

enum { TILE = 8 };

typedef struct {
    Side sides[2];
    int64_t tokens, axes, heads, pairs, head_dim; /* heads: those of the rotation */
    int64_t position_batch, threads;
    const float *positions;   /* (position_batch, tokens, axes) */
    const float *frequencies; /* (axes, heads, pairs) */
    const float *table;       /* (position_batch, heads, tokens, pairs, 2), cos and sin, or NULL */
    float *d_frequencies;     /* (parts, axes, heads, pairs) or NULL */
    float *d_positions;       /* (heads, position_batch, tokens, axes) or NULL */
} Planar;

/* cos twice, and -sin, sin:  y_j = cos_j x_j + sin_j x_(j xor 1). */
static void turn_of_token(const Planar *p, int64_t set, int64_t head, int64_t token, float *cosine, float *sine) {
    int64_t pairs = p->pairs;
    if (p->table) {
        const float *entry = p->table + ((set * p->heads + head) * p->tokens + token) * 2 * pairs;
        for (int64_t i = 0; i < pairs; i++) {
            cosine[2 * i] = cosine[2 * i + 1] = entry[2 * i];
            sine[2 * i] = -entry[2 * i + 1];
            sine[2 * i + 1] = entry[2 * i + 1];
        }
        return;
    }
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    for (int64_t start = 0; start < pairs; start += 64) {
        int64_t n = least(64, pairs - start);
        double angle[64];
        float c[64], s[64];
        memset(angle, 0, sizeof angle);
        for (int64_t axis = 0; axis < p->axes; axis++) {
            const float *frequency = p->frequencies + (axis * p->heads + head) * pairs + start;
            double at = position[axis];
            for (int64_t i = 0; i < n; i++) angle[i] += at * (double)frequency[i];
        }
        cos_sin(angle, c, s, 64);
        for (int64_t i = 0; i < n; i++) {
            int64_t j = 2 * (start + i);
            cosine[j] = cosine[j + 1] = c[i];
            sine[j] = -s[i];
            sine[j + 1] = s[i];
        }
    }
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

static void turn_tile(const Planar *p, int64_t set, int64_t head, int64_t first, int64_t count, int backward,
                      float *memory) {
    int64_t n = 2 * p->pairs, rest = p->head_dim - n;
    float *cosine = memory, *sine = cosine + TILE * n, *moment = sine + TILE * n;
    float *row = moment + TILE * n, *row2 = row + p->head_dim, *result = row2 + p->head_dim;
    int wanted = backward && (p->d_frequencies || p->d_positions);
    for (int64_t t = 0; t < count; t++) turn_of_token(p, set, head, first + t, cosine + t * n, sine + t * n);
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
                    const float *values = load_row(in, at, n, row);
                    float *y = side->out.dtype == FLOAT32 ? (float *)side->out.data + target : result;
                    if (backward) {
                        int64_t x_at = row_offset(&side->x, sample, own, first + t);
                        const float *x = wanted ? load_row(&side->x, x_at, n, row2) : NULL;
                        turn_row_back(values, x, cosine + t * n, sine + t * n, y, wanted ? moment + t * n : NULL, n);
                    } else {
                        turn_row(values, cosine + t * n, sine + t * n, y, n);
                    }
                    store_row(&side->out, target, n, y);
                    if (rest) copy_row(in, at, &side->out, target, n, rest);
                }
    }
}

static void reduce_tile(const Planar *p, int64_t set, int64_t head, int64_t first, int64_t count, int64_t part,
                        const float *moment) {
    int64_t pairs = p->pairs;
    for (int64_t t = 0; t < count; t++) {
        const float *turn = moment + 2 * t * pairs;
        for (int64_t axis = 0; axis < p->axes; axis++) {
            int64_t token = set * p->tokens + first + t;
            if (p->d_frequencies) {
                float at = p->positions[token * p->axes + axis];
                float *sum = p->d_frequencies + ((part * p->axes + axis) * p->heads + head) * pairs;
                for (int64_t i = 0; i < pairs; i++) sum[i] += at * (turn[2 * i + 1] - turn[2 * i]);
            }
            if (p->d_positions) {
                const float *frequency = p->frequencies + (axis * p->heads + head) * pairs;
                float sum = 0;
                for (int64_t i = 0; i < pairs; i++) sum += frequency[i] * (turn[2 * i + 1] - turn[2 * i]);
                p->d_positions[(head * p->position_batch * p->tokens + token) * p->axes + axis] = sum;
            }
        }
    }
}

static void planar_part(const Planar *p, int64_t item, int backward) {
    int64_t parts = parts_of(p->heads, p->tokens, p->threads);
    int64_t head = item / parts, part = item % parts;
    int64_t first = p->tokens * part / parts, last = p->tokens * (part + 1) / parts;
    float *memory = scratch(4 * (6 * TILE * p->pairs + 3 * p->head_dim + 64));
    for (int64_t set = 0; set < p->position_batch; set++)
        for (int64_t token = first; token < last; token += TILE) {
            int64_t count = least(TILE, last - token);
            turn_tile(p, set, head, token, count, backward, memory);
            if (backward && (p->d_frequencies || p->d_positions))
                reduce_tile(p, set, head, token, count, part, memory + 4 * TILE * p->pairs);
        }
    free(memory);
}

static void forward_part(void *context, int64_t item) { planar_part(context, item, 0); }
static void backward_part(void *context, int64_t item) { planar_part(context, item, 1); }

API int64_t torchrope_parts(int64_t heads, int64_t tokens, int64_t threads) {
    return parts_of(heads, tokens, threads);
}

API void torchrope_planar(const Planar *p, int64_t backward) {
    int64_t items = p->heads * parts_of(p->heads, p->tokens, p->threads);
    parallel_for(items, p->threads, backward ? backward_part : forward_part, (void *)p);
}
