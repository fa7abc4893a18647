/* Commuting rotations in a learned basis:  R(p) = U rot(s w) U^T,  s = sum_a p_a c_a,  per block. */
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
    float *x, *grad, *y, *h, *raw, *inner, *outer, *cosine, *sine, *moment, *products, *sums;
    float *scale;   /* s of each block */
    float *half;    /* cos and sin of half the angles */
    int64_t *outer_too; /* whether a block comes back from the basis: one that never turns must stay as it is */
    int64_t row, width;
} Room;

static Room room_for(const Basis *p) {
    Room room;
    int64_t b = p->b, n = p->blocks * b, pairs = b / 2;
    room.width = padded(b);
    room.row = round_up(n + room.width, 16);
    int64_t square = p->blocks * b * room.width;
    int64_t floats = 5 * ROWS * room.row + 3 * square + 4 * p->blocks * pairs * pairs + 6 * room.row;
    room.x = scratch(4 * floats + 8 * p->blocks);
    memset(room.x, 0, 4 * floats + 8 * p->blocks);
    room.grad = room.x + ROWS * room.row;
    room.y = room.grad + ROWS * room.row;
    room.h = room.y + ROWS * room.row;
    room.raw = room.h + ROWS * room.row;
    room.inner = room.raw + ROWS * room.row; /* U, rows padded: x^T U */
    room.outer = room.inner + square;      /* U^T: z^T U^T */
    room.products = room.outer + square;   /* sum h x'^T of a token */
    room.sums = room.products + square;    /* alpha and beta, complex, summed over tokens */
    room.cosine = room.sums + 4 * p->blocks * pairs * pairs;
    room.sine = room.cosine + room.row;
    room.moment = room.sine + room.row;
    room.scale = room.moment + room.row;
    room.half = room.scale + room.row;
    room.outer_too = (int64_t *)(room.x + floats);
    return room;
}

static void read_basis(const Basis *p, int64_t head, Room room) {
    int64_t b = p->b;
    for (int64_t block = 0; block < p->blocks; block++) {
        int turns = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            turns |= p->coefficients[(axis * p->heads + head) * p->blocks + block] != 0;
        room.outer_too[block] = p->outer || !turns;
        const float *basis = p->basis + (head * p->blocks + block) * b * b;
        float *inner = room.inner + block * b * room.width, *outer = room.outer + block * b * room.width;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                inner[i * room.width + j] = basis[i * b + j];
                outer[j * room.width + i] = basis[i * b + j];
            }
    }
}

/* cos and sin of half the angles; cos - 1 and sin of the angles follow by doubling. */
static void turn_of_token(const Basis *p, int64_t set, int64_t head, int64_t token, Room room) {
    int64_t pairs = p->b / 2, count = p->blocks * pairs;
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    double angle[64];
    float c[64], s[64];
    const float *angular = p->angular + head * count;
    for (int64_t block = 0; block < p->blocks; block++) {
        double at = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            at += (double)position[axis] * (double)p->coefficients[(axis * p->heads + head) * p->blocks + block];
        room.scale[block] = (float)at;
    }
    for (int64_t start = 0; start < count; start += 64) {
        int64_t n = least(64, count - start);
        for (int64_t i = 0; i < 64; i++)
            angle[i] = i < n ? 0.5 * (double)room.scale[(start + i) / pairs] * (double)angular[start + i] : 0.0;
        cos_sin(angle, c, s, 64);
        for (int64_t i = 0; i < n; i++) {
            int64_t j = 2 * (start + i);
            float double_sine = 2 * s[i] * c[i];
            room.half[j] = c[i];
            room.half[j + 1] = s[i];
            room.cosine[j] = room.cosine[j + 1] = -2 * s[i] * s[i];
            room.sine[j] = -double_sine;
            room.sine[j + 1] = double_sine;
        }
    }
}

/* y (+)= x M in one block, for the rows of a panel. */
INLINE void times(const Basis *p, const Panel *panel, int64_t block, const float *matrices, const float *x, float *y,
                  int accumulate, Room room) {
    int64_t b = p->b;
    const float *matrix = matrices + block * b * room.width;
    x += block * b;
    y += block * b;
    if (b == 8)
        product(panel->count, 8, 8, x, room.row, 1, matrix, 8, y, room.row, accumulate);
    else
        product(panel->count, b, room.width, x, room.row, 1, matrix, room.width, y, room.row, accumulate);
}

/* What turning by the token's angles, or back, adds to the pairs of every row:  y = (rot - 1) x. */
INLINE void turn_panel(const Basis *p, const Panel *panel, const float *x, float *y, float sign, Room room) {
    int64_t n = p->blocks * p->b;
    for (int64_t i = 0; i < panel->count; i++) {
        const float *in = x + i * room.row;
        float *out = y + i * room.row;
        for (int64_t j = 0; j < n; j += 2) {
            float even = in[j], odd = in[j + 1], sine = sign * room.sine[j + 1];
            out[j] = room.cosine[j] * even - sine * odd;
            out[j + 1] = sine * even + room.cosine[j] * odd;
        }
    }
}

INLINE void add_block(const Basis *p, const Panel *panel, int64_t block, const float *x, float *y, Room room) {
    for (int64_t i = 0; i < panel->count; i++)
        for (int64_t j = block * p->b; j < (block + 1) * p->b; j++) y[i * room.row + j] += x[i * room.row + j];
}

/* R x = x + U (rot - 1) U^T x, exactly x where nothing turns; or rot U^T x. */
static void turn_token(const Basis *p, int64_t set, int64_t head, int64_t token, Room room) {
    int64_t n = p->blocks * p->b;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    turn_of_token(p, set, head, token, room);
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 0, room.x, room.row);
        for (int64_t block = 0; block < p->blocks; block++) times(p, &panel, block, room.inner, room.x, room.grad, 0, room);
        turn_panel(p, &panel, room.grad, room.y, 1, room);
        for (int64_t block = 0; block < p->blocks; block++)
            if (room.outer_too[block]) {
                times(p, &panel, block, room.outer, room.y, room.x, 1, room);
            } else {
                add_block(p, &panel, block, room.grad, room.y, room);
                for (int64_t i = 0; i < panel.count; i++)
                    memcpy(room.x + i * room.row + block * p->b, room.y + i * room.row + block * p->b, 4 * p->b);
            }
        spread(&panel, token, n, p->head_dim, 0, room.x, room.row);
    }
}

INLINE float sinc(float x, float sine) {
    float z = x * x;
    float series = 1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040)));
    return z < 0.09f ? series : sine / (z < 0.09f ? 1.0f : x);
}

/* Daleckii-Krein: the products of a token, split into the parts that commute and anticommute with i,
   times the conjugate of  g(u, v) = s e^(i s (u + v) / 2) sinc(s (u - v) / 2)  at (w_j, w_k) and (w_j, -w_k). */
static void add_products(const Basis *p, int64_t head, Room room) {
    int64_t b = p->b, pairs = b / 2;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *half = room.half + block * b, *m = room.products + block * b * room.width;
        const float *angular = p->angular + (head * p->blocks + block) * pairs;
        float s = room.scale[block], *sums = room.sums + 4 * block * pairs * pairs;
        for (int64_t j = 0; j < pairs; j++) {
            float cj = half[2 * j], sj = half[2 * j + 1], aj = 0.5f * s * angular[j];
            const float *upper = m + 2 * j * room.width, *lower = upper + room.width;
            float *re_alpha = sums + j * pairs, *im_alpha = re_alpha + pairs * pairs;
            float *re_beta = im_alpha + pairs * pairs, *im_beta = re_beta + pairs * pairs;
            for (int64_t k = 0; k < pairs; k++) {
                float ck = half[2 * k], sk = half[2 * k + 1], ak = 0.5f * s * angular[k];
                float cos_sum = cj * ck - sj * sk, sin_sum = sj * ck + cj * sk;
                float cos_gap = cj * ck + sj * sk, sin_gap = sj * ck - cj * sk;
                float near = s * sinc(aj - ak, sin_gap), far = s * sinc(aj + ak, sin_sum);
                float m00 = upper[2 * k], m01 = upper[2 * k + 1], m10 = lower[2 * k], m11 = lower[2 * k + 1];
                float ar = 0.5f * (m00 + m11), ai = 0.5f * (m10 - m01);
                float br = 0.5f * (m00 - m11), bi = 0.5f * (m10 + m01);
                re_alpha[k] += near * (cos_sum * ar + sin_sum * ai);
                im_alpha[k] += near * (cos_sum * ai - sin_sum * ar);
                re_beta[k] += far * (cos_gap * br + sin_gap * bi);
                im_beta[k] += far * (cos_gap * bi - sin_gap * br);
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
        const float *angular = p->angular + (head * p->blocks + block) * pairs;
        const float *turn = room.moment + block * p->b;
        float of_scale = 0;
        for (int64_t i = 0; i < pairs; i++) of_scale += angular[i] * (turn[2 * i + 1] - turn[2 * i]);
        for (int64_t axis = 0; axis < p->axes; axis++) {
            int64_t at = (axis * p->heads + head) * p->blocks + block;
            p->d_coefficients[part * p->axes * p->heads * p->blocks + at] += position[axis] * of_scale;
            if (d_position) d_position[axis] += p->coefficients[at] * of_scale;
        }
    }
}

/* Sum h x'^T of each block, and the moments whose odd minus even entries are the angles' gradients. */
INLINE void collect(const Basis *p, const Panel *panel, int more, Room room) {
    int64_t b = p->b, n = p->blocks * b;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *h = room.h + block * b, *x = room.x + block * b;
        float *target = room.products + block * b * room.width;
        if (b == 8)
            product(8, panel->count, 8, h, 1, room.row, x, room.row, target, 8, more);
        else
            product(b, panel->count, room.width, h, 1, room.row, x, room.row, target, room.width, more);
    }
    for (int64_t i = 0; i < panel->count; i++) {
        const float *h = room.h + i * room.row, *turned = room.y + i * room.row, *x = room.x + i * room.row;
        for (int64_t j = 0; j < n; j += 2) {
            room.moment[j] += (h[j] + turned[j]) * x[j + 1];
            room.moment[j + 1] += (h[j + 1] + turned[j + 1]) * x[j];
        }
    }
}

static void turn_token_back(const Basis *p, int64_t set, int64_t head, int64_t token, int64_t part, Room room) {
    int64_t b = p->b, n = p->blocks * b, more = 0;
    int wanted = p->d_base != NULL;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    turn_of_token(p, set, head, token, room);
    if (wanted) memset(room.moment, 0, 4 * room.row);
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 1, room.grad, room.row);
        /* h = U^T gy, or gy where U was left out */
        for (int64_t block = 0; block < p->blocks; block++)
            if (room.outer_too[block])
                times(p, &panel, block, room.inner, room.grad, room.h, 0, room);
            else
                for (int64_t i = 0; i < panel.count; i++)
                    memcpy(room.h + i * room.row + block * b, room.grad + i * room.row + block * b, 4 * b);
        turn_panel(p, &panel, room.h, room.y, -1, room);
        if (wanted) {
            gather(&panel, token, n, 0, room.raw, room.row);
            for (int64_t block = 0; block < p->blocks; block++)
                times(p, &panel, block, room.inner, room.raw, room.x, 0, room);
            collect(p, &panel, more, room);
            more = 1;
        }
        /* dx = gy + U (rot^T - 1) h, or U rot^T h */
        for (int64_t block = 0; block < p->blocks; block++)
            if (room.outer_too[block]) {
                times(p, &panel, block, room.outer, room.y, room.grad, 1, room);
            } else {
                add_block(p, &panel, block, room.h, room.y, room);
                for (int64_t i = 0; i < panel.count; i++) memset(room.grad + i * room.row + block * b, 0, 4 * b);
                times(p, &panel, block, room.outer, room.y, room.grad, 1, room);
            }
        spread(&panel, token, n, p->head_dim, 1, room.grad, room.row);
    }
    if (wanted && more) {
        add_products(p, head, room);
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

static void basis_part(const Basis *p, int64_t item, int backward) {
    int64_t parts = parts_of(p->heads, p->tokens, p->threads);
    int64_t head = item / parts, part = item % parts;
    int64_t first = p->tokens * part / parts, last = p->tokens * (part + 1) / parts;
    Room room = room_for(p);
    read_basis(p, head, room);
    for (int64_t set = 0; set < p->sets; set++)
        for (int64_t token = first; token < last; token++)
            if (backward)
                turn_token_back(p, set, head, token, part, room);
            else
                turn_token(p, set, head, token, room);
    if (backward && p->d_base) write_sums(p, head, part, room);
    free(room.x);
}

static void forward_part(void *context, int64_t item) { basis_part(context, item, 0); }
static void backward_part(void *context, int64_t item) { basis_part(context, item, 1); }

API void torchrope_basis(const Basis *p, int64_t backward) {
    int64_t items = p->heads * parts_of(p->heads, p->tokens, p->threads);
    parallel_for(items, p->threads, backward ? backward_part : forward_part, (void *)p);
}
