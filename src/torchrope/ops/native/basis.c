/* Commuting rotations in a learned basis:  R(p) = U rot(s w) U^T,  s = sum_a p_a c_a,  per block.

   In the basis a block's channels lie as the first of every plane, then the second of every plane. */
#include "panel.h"

typedef struct {
    Side sides[2];
    int64_t tokens, axes, heads, blocks, b, head_dim; /* heads: those of the rotation */
    int64_t sets, threads, outer;                     /* outer: whether U is applied last, or may be left out */
    const float *positions;                           /* (sets, tokens, axes) */
    const float *coefficients;                        /* (axes, heads, blocks) */
    const float *basis;                               /* (heads, blocks, b, b), columns in pairs */
    const float *angular;                             /* (heads, blocks, b / 2) */
    float *d_coefficients;                            /* (parts, axes, heads, blocks) */
    float *d_positions;                               /* (heads, sets, tokens, axes) or NULL */
    float *d_base;                                    /* (parts, heads, blocks, b, b), in the basis; or NULL */
} Basis;

typedef struct {
    float *x, *grad, *y, *h, *raw;    /* panels */
    float *inner, *outer;             /* U and U^T of every block, rows padded */
    float *products;                  /* sum h x'^T of a token */
    float *sums;                      /* alpha and beta, complex, summed over tokens */
    float *less, *sine;               /* cos - 1 and sin of every plane's angle */
    float *half_cosine, *half_sine;   /* of half the angles */
    float *moment;                    /* gradients of the angles */
    float *scale;                     /* s of every block */
    int64_t *returns;                 /* whether a block comes back from the basis: one that never turns must */
    int64_t row, width;
} Room;

static Room room_for(const Basis *p) {
    Room room;
    int64_t b = p->b, planes = p->blocks * b / 2;
    room.width = padded(b);
    room.row = round_up(p->blocks * b + room.width, 16);
    int64_t panel = ROWS * room.row, square = p->blocks * b * room.width, per_plane = round_up(planes + 64, 16);
    int64_t floats = 5 * panel + 3 * square + 2 * planes * b + 6 * per_plane;
    float *next = scratch(4 * floats + 8 * p->blocks);
    memset(next, 0, 4 * floats + 8 * p->blocks);
    float **panels[] = {&room.x, &room.grad, &room.y, &room.h, &room.raw};
    for (int i = 0; i < 5; i++, next += panel) *panels[i] = next;
    float **squares[] = {&room.inner, &room.outer, &room.products};
    for (int i = 0; i < 3; i++, next += square) *squares[i] = next;
    float **rows[] = {&room.less, &room.sine, &room.half_cosine, &room.half_sine, &room.moment, &room.scale};
    for (int i = 0; i < 6; i++, next += per_plane) *rows[i] = next;
    room.sums = next;
    room.returns = (int64_t *)(next + 2 * planes * b);
    return room;
}

static void read_basis(const Basis *p, int64_t head, Room room) {
    int64_t b = p->b;
    for (int64_t block = 0; block < p->blocks; block++) {
        int along = 0, around = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            along |= p->coefficients[(axis * p->heads + head) * p->blocks + block] != 0;
        for (int64_t plane = 0; plane < b / 2; plane++)
            around |= p->angular[(head * p->blocks + block) * (b / 2) + plane] != 0;
        room.returns[block] = p->outer || !along || !around;
        const float *basis = p->basis + (head * p->blocks + block) * b * b;
        float *inner = room.inner + block * b * room.width, *outer = room.outer + block * b * room.width;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                int64_t place = j / 2 + j % 2 * (b / 2);
                inner[i * room.width + place] = basis[i * b + j];
                outer[place * room.width + i] = basis[i * b + j];
            }
    }
}

/* cos and sin of half the angles; cos - 1 and sin of the angles follow by doubling. */
INLINE void turn_of_token(int64_t b, const Basis *p, int64_t set, int64_t head, int64_t token, Room room) {
    int64_t pairs = b / 2, count = p->blocks * pairs;
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    const float *angular = p->angular + head * count;
    double angle[64];
    for (int64_t block = 0; block < p->blocks; block++) {
        double at = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            at += (double)position[axis] * (double)p->coefficients[(axis * p->heads + head) * p->blocks + block];
        room.scale[block] = (float)at;
    }
    for (int64_t start = 0; start < count; start += 64) {
        int64_t n = least(64, count - start);
        for (int64_t i = 0; i < n; i++)
            angle[i] = 0.5 * (double)room.scale[(start + i) / pairs] * (double)angular[start + i];
        for (int64_t i = n; i < round_up(n, 8); i++) angle[i] = 0;
        cos_sin(angle, room.half_cosine + start, room.half_sine + start, round_up(n, 8));
    }
    for (int64_t i = 0; i < count; i++) {
        room.less[i] = -2 * room.half_sine[i] * room.half_sine[i];
        room.sine[i] = 2 * room.half_sine[i] * room.half_cosine[i];
    }
}

/* y (+)= x M in one block, for the rows of a panel. */
INLINE void times(int64_t b, int64_t count, int64_t block, const float *matrices, const float *x, float *y,
                  int accumulate, Room room) {
    int64_t width = b == 8 ? 8 : room.width;
    product(count, b, width, x + block * b, room.row, 1, matrices + block * b * width, width, y + block * b, room.row,
            accumulate);
}

/* What turning one block by the token's angles, or back, adds:  y = (rot - 1) x, or y = rot x. */
INLINE void turn_block(int64_t b, int64_t count, int64_t block, const float *x, float *y, float sign, int whole,
                       Room room) {
    int64_t pairs = b / 2;
    if (b == 8) { /* a plane a lane */
        v4 c = *(const v4 *)(room.less + block * 4), s = sign * *(const v4 *)(room.sine + block * 4);
        for (int64_t i = 0; i < count; i++) {
            const v4 *in = (const v4 *)(x + i * room.row + block * 8);
            v4 *out = (v4 *)(y + i * room.row + block * 8);
            v4 first = c * in[0] - s * in[1], second = s * in[0] + c * in[1];
            if (whole) {
                first += in[0];
                second += in[1];
            }
            out[0] = first;
            out[1] = second;
        }
        return;
    }
    const float *restrict less = room.less + block * pairs, *restrict sine = room.sine + block * pairs;
    for (int64_t i = 0; i < count; i++) {
        const float *restrict first = x + i * room.row + block * b, *restrict second = first + pairs;
        float *restrict out = y + i * room.row + block * b;
        for (int64_t j = 0; j < pairs; j++) {
            float even = first[j], odd = second[j], s = sign * sine[j], c = less[j];
            float change = c * even - s * odd, change_odd = s * even + c * odd;
            out[j] = whole ? even + change : change;
            out[j + pairs] = whole ? odd + change_odd : change_odd;
        }
    }
}

/* R x = x + U (rot - 1) U^T x, exactly x where nothing turns; or rot U^T x. */
INLINE void turn_token(int64_t b, const Basis *p, int64_t set, int64_t head, int64_t token, Room room) {
    int64_t n = p->blocks * b;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    turn_of_token(b, p, set, head, token, room);
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 0, room.x, room.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t block = 0; block < p->blocks; block++) {
            times(b, panel.count, block, room.inner, room.x, room.h, 0, room);
            if (room.returns[block]) {
                turn_block(b, panel.count, block, room.h, room.y, 1, 0, room);
                times(b, panel.count, block, room.outer, room.y, room.x, 1, room);
            } else {
                turn_block(b, panel.count, block, room.h, room.x, 1, 1, room);
            }
        }
        spread(&panel, token, n, p->head_dim, 0, room.x, room.row);
    }
}

/* sin(x) / x, given the sine */
INLINE float sinc(float x, float sine) {
    float z = x * x;
    float series = 1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040)));
    float direct = sine / (z < 0.09f ? 1.0f : x);
    return z < 0.09f ? series : direct;
}

/* Daleckii-Krein: the products of a token, split into the parts that commute and anticommute with i,
   times the conjugate of  g(u, v) = s e^(i s (u + v) / 2) sinc(s (u - v) / 2)  at (w_j, w_k) and (w_j, -w_k). */
INLINE void add_products(int64_t b, const Basis *p, int64_t head, Room room) {
    int64_t pairs = b / 2, area = pairs * pairs, width = b == 8 ? 8 : room.width;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *cosine = room.half_cosine + block * pairs, *sine = room.half_sine + block * pairs;
        const float *angular = p->angular + (head * p->blocks + block) * pairs;
        const float *m = room.products + block * b * width;
        float s = room.scale[block], half = 0.5f * s;
        for (int64_t j = 0; j < pairs; j++) {
            const float *restrict upper = m + j * width, *restrict lower = upper + pairs * width;
            float *restrict sums = room.sums + 4 * block * area + j * pairs;
            float cj = cosine[j], sj = sine[j], aj = half * angular[j];
            for (int64_t k = 0; k < pairs; k++) {
                float ck = cosine[k], sk = sine[k], ak = half * angular[k];
                float cos_sum = cj * ck - sj * sk, sin_sum = sj * ck + cj * sk;
                float cos_gap = cj * ck + sj * sk, sin_gap = sj * ck - cj * sk;
                float near = 0.5f * s * sinc(aj - ak, sin_gap), far = 0.5f * s * sinc(aj + ak, sin_sum);
                float m00 = upper[k], m01 = upper[k + pairs], m10 = lower[k], m11 = lower[k + pairs];
                float ar = m00 + m11, ai = m10 - m01, br = m00 - m11, bi = m10 + m01;
                sums[k] += near * (cos_sum * ar + sin_sum * ai);
                sums[k + area] += near * (cos_sum * ai - sin_sum * ar);
                sums[k + 2 * area] += far * (cos_gap * br + sin_gap * bi);
                sums[k + 3 * area] += far * (cos_gap * bi - sin_gap * br);
            }
        }
    }
}

static void reduce_angles(const Basis *p, int64_t set, int64_t head, int64_t token, int64_t part, Room room) {
    int64_t pairs = p->b / 2;
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    float *d_position = NULL;
    if (p->d_positions) d_position = p->d_positions + ((head * p->sets + set) * p->tokens + token) * p->axes;
    for (int64_t axis = 0; d_position && axis < p->axes; axis++) d_position[axis] = 0;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *angular = p->angular + (head * p->blocks + block) * pairs, *moment = room.moment + block * pairs;
        float of_scale = 0;
        for (int64_t i = 0; i < pairs; i++) of_scale += angular[i] * moment[i];
        for (int64_t axis = 0; axis < p->axes; axis++) {
            int64_t at = (axis * p->heads + head) * p->blocks + block;
            p->d_coefficients[part * p->axes * p->heads * p->blocks + at] += position[axis] * of_scale;
            if (d_position) d_position[axis] += p->coefficients[at] * of_scale;
        }
    }
}

/* One block: sum h x'^T, and the gradients of the angles,  gx_2 x_1 - gx_1 x_2  with gx = rot^T h = h + y. */
INLINE void collect(int64_t b, int64_t count, int64_t block, int more, Room room) {
    int64_t pairs = b / 2, width = b == 8 ? 8 : room.width;
    product(b, count, width, room.h + block * b, 1, room.row, room.x + block * b, room.row,
            room.products + block * b * width, width, more);
    if (b == 8) {
        v4 sum = *(const v4 *)(room.moment + block * 4);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = i * room.row + block * 8;
            const v4 *h = (const v4 *)(room.h + at), *y = (const v4 *)(room.y + at), *x = (const v4 *)(room.x + at);
            sum += (h[1] + y[1]) * x[0] - (h[0] + y[0]) * x[1];
        }
        *(v4 *)(room.moment + block * 4) = sum;
        return;
    }
    float *restrict moment = room.moment + block * pairs;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i * room.row + block * b;
        const float *restrict h = room.h + at, *restrict y = room.y + at, *restrict x = room.x + at;
        for (int64_t j = 0; j < pairs; j++)
            moment[j] += (h[j + pairs] + y[j + pairs]) * x[j] - (h[j] + y[j]) * x[j + pairs];
    }
}

INLINE void turn_token_back(int64_t b, const Basis *p, int64_t set, int64_t head, int64_t token, int64_t part,
                            Room room) {
    int64_t n = p->blocks * b;
    int wanted = p->d_base != NULL, more = 0;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    turn_of_token(b, p, set, head, token, room);
    if (wanted) memset(room.moment, 0, 4 * p->blocks * (b / 2));
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 1, room.grad, room.row);
        if (wanted) gather(&panel, token, n, 0, room.raw, room.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t block = 0; block < p->blocks; block++) {
            /* h = U^T gy, or gy where U was left out */
            if (room.returns[block])
                times(b, panel.count, block, room.inner, room.grad, room.h, 0, room);
            else
                for (int64_t i = 0; i < panel.count; i++)
                    copy_floats(room.h + i * room.row + block * b, room.grad + i * room.row + block * b, b);
            turn_block(b, panel.count, block, room.h, room.y, -1, 0, room);
            if (wanted) {
                times(b, panel.count, block, room.inner, room.raw, room.x, 0, room);
                collect(b, panel.count, block, more, room);
            }
            /* dx = gy + U (rot^T - 1) h, or U rot^T h = U (h + (rot^T - 1) h) */
            if (!room.returns[block])
                for (int64_t i = 0; i < panel.count; i++) {
                    int64_t at = i * room.row + block * b;
                    for (int64_t j = 0; j < b; j++) {
                        room.y[at + j] += room.h[at + j];
                        room.grad[at + j] = 0;
                    }
                }
            times(b, panel.count, block, room.outer, room.y, room.grad, 1, room);
        }
        more = 1;
        spread(&panel, token, n, p->head_dim, 1, room.grad, room.row);
    }
    if (wanted && more) {
        add_products(b, p, head, room);
        reduce_angles(p, set, head, token, part, room);
    }
}

/* The gradient in the basis, as a real matrix: [[re a + re b, im b - im a], [im a + im b, re a - re b]] a pair. */
static void write_sums(const Basis *p, int64_t head, int64_t part, Room room) {
    int64_t b = p->b, pairs = b / 2, area = pairs * pairs;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *sums = room.sums + 4 * block * area;
        float *target = p->d_base + ((part * p->heads + head) * p->blocks + block) * b * b;
        for (int64_t j = 0; j < pairs; j++)
            for (int64_t k = 0; k < pairs; k++) {
                const float *at = sums + j * pairs + k;
                float ar = at[0], ai = at[area], br = at[2 * area], bi = at[3 * area];
                target[2 * j * b + 2 * k] = ar + br;
                target[2 * j * b + 2 * k + 1] = bi - ai;
                target[(2 * j + 1) * b + 2 * k] = ai + bi;
                target[(2 * j + 1) * b + 2 * k + 1] = ar - br;
            }
    }
}

INLINE void basis_part(int64_t b, const Basis *p, int64_t item, int backward) {
    int64_t parts = parts_of(p->heads, p->tokens, p->threads);
    int64_t head = item / parts, part = item % parts;
    int64_t first = p->tokens * part / parts, last = p->tokens * (part + 1) / parts;
    Room room = room_for(p);
    read_basis(p, head, room);
    for (int64_t set = 0; set < p->sets; set++)
        for (int64_t token = first; token < last; token++)
            if (backward)
                turn_token_back(b, p, set, head, token, part, room);
            else
                turn_token(b, p, set, head, token, room);
    if (backward && p->d_base) write_sums(p, head, part, room);
    free(room.x);
}

static void forward_part(void *context, int64_t item) {
    const Basis *p = context;
    if (p->b == 8) /* the most frequent size, which the compiler should know */
        basis_part(8, p, item, 0);
    else
        basis_part(p->b, p, item, 0);
}

static void backward_part(void *context, int64_t item) {
    const Basis *p = context;
    if (p->b == 8)
        basis_part(8, p, item, 1);
    else
        basis_part(p->b, p, item, 1);
}

API void torchrope_basis(const Basis *p, int64_t backward) {
    int64_t items = p->heads * parts_of(p->heads, p->tokens, p->threads);
    parallel_for(items, p->threads, backward ? backward_part : forward_part, (void *)p);
}
