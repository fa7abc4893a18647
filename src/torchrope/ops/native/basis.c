/* Commuting rotations in a learned basis:  R(p) = U rot(s w) U^T,  s = sum_a p_a c_a,  per block.

   In the basis a block's channels are ordered as the first of every plane, then the second of every plane. */
#include "panel.h"

typedef struct {
    int64_t size;
    Side sides[2];
    int64_t tokens, axes, heads, blocks, b, head_dim; /* heads: those of the rotation */
    int64_t sets, threads, outer;                     /* outer: whether U is applied last, or may be omitted */
    const float *positions;                           /* (sets, tokens, axes) */
    const float *coefficients;                        /* (axes, heads, blocks) */
    const float *basis;                               /* (heads, blocks, b, b), columns in pairs */
    const float *angular;                             /* (heads, blocks, b / 2) */
    float *d_coefficients;                            /* as coefficients; or NULL, together with d_base */
    float *d_positions;                               /* as positions, or NULL */
    float *d_base;                                    /* as basis, or NULL */
} Basis;

/* A call, its partial sums, and the parts that tokens are split into. */
typedef struct {
    const Basis *p;
    int64_t parts;
    float *matrices;     /* U and then U^T of every head and block, rows padded, as panels are multiplied by them */
    float *coefficients; /* (parts, axes, heads, blocks) */
    float *positions;    /* (heads, sets, tokens, axes), or NULL */
    float *inside;       /* (parts, heads, blocks, b, b), the gradient to the base in the basis */
} Job;

/* Buffers of a thread. */
typedef struct {
    float *x, *grad, *y, *h, *raw;    /* panels */
    float *spill;                     /* a product of a block that is narrower than its vectors */
    const float *inner, *outer;       /* U and U^T of every block of the head */
    float *products;                  /* sum h x'^T of a token */
    float *sums;                      /* alpha and beta, complex, summed over tokens */
    float *less, *sine;               /* cos - 1 and sin of every plane's angle */
    float *half_cosine, *half_sine;   /* of half the angles */
    float *moment;                    /* gradients of the angles */
    float *gaps;                      /* blocks of eight: 1 / (w_j + w_k) and 1 / (w_j - w_k) */
    float *turns;                     /* blocks of eight: coefficients of the rotation, (tokens, blocks, 2, 8) */
    double *scale;                    /* s of every block */
    int64_t *returns;                 /* whether U is applied last to a block: it must be if the block never rotates */
    int64_t row, width, planes;       /* planes: floats between tokens */
} Workspace;

static Workspace lay_out(const Basis *p, Arena *arena) {
    Workspace w;
    int64_t b = p->b, planes = p->blocks * b / 2, tokens = b == 8 ? GROUP_TOKENS : 1;
    w.width = padded(b);
    w.planes = planes + 64;
    w.row = round_up(p->blocks * b + w.width, 16);
    float **panels[] = {&w.x, &w.grad, &w.y, &w.h, &w.raw};
    for (int i = 0; i < 5; i++) *panels[i] = take(arena, 4 * ROWS * w.row);
    w.products = take(arena, 4 * tokens * p->blocks * b * w.width);
    float **rows[] = {&w.less, &w.sine, &w.half_cosine, &w.half_sine, &w.moment};
    for (int i = 0; i < 5; i++) *rows[i] = take(arena, 4 * tokens * w.planes);
    w.gaps = take(arena, 4 * 32 * (b == 8 ? p->blocks : 0));
    w.turns = take(arena, 4 * 16 * (b == 8 ? tokens * p->blocks : 0));
    w.spill = take(arena, 4 * ROWS * w.width);
    w.sums = take(arena, 4 * 2 * planes * b);
    w.scale = take(arena, 8 * tokens * p->blocks);
    w.returns = take(arena, 8 * p->blocks);
    return w;
}

static int64_t floats_of_head(const Basis *p) { return 2 * p->blocks * p->b * padded(p->b); }

/* U and U^T of a head, the first coordinates of planes before the second. */
static void pad_basis(const void *context, int64_t head, void *memory) {
    const Job *job = context;
    const Basis *p = job->p;
    int64_t b = p->b, width = padded(b), square = b * width;
    (void)memory;
    float *inner = job->matrices + head * floats_of_head(p), *outer = inner + p->blocks * square;
    if (width > b) memset(inner, 0, 4 * floats_of_head(p));
    for (int64_t block = 0; block < p->blocks; block++, inner += square, outer += square) {
        const float *basis = p->basis + (head * p->blocks + block) * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                int64_t place = j / 2 + j % 2 * (b / 2);
                inner[i * width + place] = basis[i * b + j];
                outer[place * width + i] = basis[i * b + j];
            }
    }
}

/* Of every block and plane j, 1 / (w_j + w_k) of the four k, then 1 / (w_j - w_k); infinite ones are not used. */
static void divide_gaps(const Basis *p, int64_t head, float *gaps) {
    const float *angular = p->angular + head * p->blocks * 4;
    for (int64_t i = 0; i < 4 * p->blocks; i++)
        for (int64_t k = 0; k < 4; k++) {
            float other = angular[i / 4 * 4 + k];
            gaps[8 * i + k] = 1 / (angular[i] + other);
            gaps[8 * i + 4 + k] = 1 / (angular[i] - other);
        }
}

static void start_head(const Job *job, int64_t head, Workspace *w) {
    const Basis *p = job->p;
    w->inner = job->matrices + head * floats_of_head(p);
    w->outer = w->inner + floats_of_head(p) / 2;
    for (int64_t block = 0; block < p->blocks; block++) {
        int along = 0, around = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            along |= p->coefficients[(axis * p->heads + head) * p->blocks + block] != 0;
        for (int64_t plane = 0; plane < p->b / 2; plane++)
            around |= p->angular[(head * p->blocks + block) * (p->b / 2) + plane] != 0;
        w->returns[block] = p->outer || !along || !around;
    }
    if (p->b == 8) divide_gaps(p, head, w->gaps);
}

/* cos and sin of half the angles; cos - 1 and sin of the angles follow by doubling. */
INLINE void find_rotation(int64_t b, const Basis *p, int64_t set, int64_t head, int64_t token, Workspace w) {
    int64_t pairs = b / 2, count = p->blocks * pairs;
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    const float *angular = p->angular + head * count;
    double angle[64];
    for (int64_t block = 0; block < p->blocks; block++) {
        double at = 0;
        for (int64_t axis = 0; axis < p->axes; axis++)
            at += (double)position[axis] * (double)p->coefficients[(axis * p->heads + head) * p->blocks + block];
        w.scale[block] = at;
    }
    for (int64_t start = 0; start < count; start += 64) {
        int64_t n = least(64, count - start);
        for (int64_t i = 0; i < n; i++)
            angle[i] = 0.5 * w.scale[(start + i) / pairs] * (double)angular[start + i];
        for (int64_t i = n; i < round_up(n, 8); i++) angle[i] = 0;
        int far = 0;
        for (int64_t i = 0; i < n; i++) far |= !(fabs(angle[i]) <= FARTHEST_ANGLE);
        if (far)
            cos_sin_far(angle, w.half_cosine + start, w.half_sine + start, n);
        else
            cos_sin(angle, w.half_cosine + start, w.half_sine + start, round_up(n, 8));
    }
    for (int64_t i = 0; i < count; i++) {
        w.less[i] = -2 * w.half_sine[i] * w.half_sine[i];
        w.sine[i] = 2 * w.half_sine[i] * w.half_cosine[i];
    }
}

/* y (+)= x M in one block, for the rows of a panel. A sum covers only the block's own channels: NaN must not
   spread to other blocks through the zeros of the padding. */
INLINE void times(int64_t b, int64_t count, int64_t block, const float *matrices, const float *x, float *y,
                  int accumulate, Workspace w) {
    int64_t width = w.width;
    const float *matrix = matrices + block * b * width;
    x += block * b, y += block * b;
    if (!accumulate || width == b) {
        product(count, b, width, x, w.row, 1, matrix, width, y, w.row, accumulate);
        return;
    }
    product(count, b, width, x, w.row, 1, matrix, width, w.spill, width, 0);
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < b; j++) y[i * w.row + j] += w.spill[i * width + j];
}

/* The change of one block by the rotation of a token, or its inverse:  y = (rot - 1) x, or y = rot x. */
INLINE void rotate_block(int64_t b, int64_t count, int64_t block, const float *x, float *y, float sign, int whole,
                       Workspace w) {
    int64_t pairs = b / 2;
    const float *restrict less = w.less + block * pairs, *restrict sine = w.sine + block * pairs;
    for (int64_t i = 0; i < count; i++) {
        const float *restrict first = x + i * w.row + block * b, *restrict second = first + pairs;
        float *restrict out = y + i * w.row + block * b;
        for (int64_t j = 0; j < pairs; j++) {
            float even = first[j], odd = second[j], s = sign * sine[j], c = less[j];
            float change = c * even - s * odd, change_odd = s * even + c * odd;
            out[j] = whole ? even + change : change;
            out[j + pairs] = whole ? odd + change_odd : change_odd;
        }
    }
}

/* R x = x + U (rot - 1) U^T x, exactly x if all angles are 0; or rot U^T x. */
INLINE void rotate_token(int64_t b, const Basis *p, int64_t set, int64_t head, int64_t token, Workspace w) {
    int64_t n = p->blocks * b;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    find_rotation(b, p, set, head, token, w);
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 0, w.x, w.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t block = 0; block < p->blocks; block++) {
            times(b, panel.count, block, w.inner, w.x, w.h, 0, w);
            if (w.returns[block]) {
                rotate_block(b, panel.count, block, w.h, w.y, 1, 0, w);
                times(b, panel.count, block, w.outer, w.y, w.x, 1, w);
            } else {
                rotate_block(b, panel.count, block, w.h, w.x, 1, 1, w);
            }
        }
        spread(&panel, token, n, p->head_dim, 0, w.x, w.row);
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
INLINE void add_products(int64_t b, const Basis *p, int64_t head, Workspace w) {
    int64_t pairs = b / 2, area = pairs * pairs, width = w.width;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *cosine = w.half_cosine + block * pairs, *sine = w.half_sine + block * pairs;
        const float *angular = p->angular + (head * p->blocks + block) * pairs;
        const float *m = w.products + block * b * width;
        float s = (float)w.scale[block], half = 0.5f * s;
        for (int64_t j = 0; j < pairs; j++) {
            const float *restrict upper = m + j * width, *restrict lower = upper + pairs * width;
            float *restrict sums = w.sums + 4 * block * area + j * pairs;
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

static void reduce_angles(const Job *job, int64_t set, int64_t head, int64_t token, int64_t part, Workspace w) {
    const Basis *p = job->p;
    int64_t pairs = p->b / 2;
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    float *d_position = NULL;
    if (job->positions) d_position = job->positions + ((head * p->sets + set) * p->tokens + token) * p->axes;
    for (int64_t axis = 0; d_position && axis < p->axes; axis++) d_position[axis] = 0;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *angular = p->angular + (head * p->blocks + block) * pairs, *moment = w.moment + block * pairs;
        float of_scale = 0;
        for (int64_t i = 0; i < pairs; i++) of_scale += angular[i] * moment[i];
        for (int64_t axis = 0; axis < p->axes; axis++) {
            int64_t at = (axis * p->heads + head) * p->blocks + block;
            job->coefficients[part * p->axes * p->heads * p->blocks + at] += position[axis] * of_scale;
            if (d_position) d_position[axis] += p->coefficients[at] * of_scale;
        }
    }
}

/* One block: sum h x'^T, and the gradients of the angles,  gx_2 x_1 - gx_1 x_2  with gx = rot^T h = h + y. */
INLINE void collect(int64_t b, int64_t count, int64_t block, int more, Workspace w) {
    int64_t pairs = b / 2, width = w.width;
    product(b, count, width, w.h + block * b, 1, w.row, w.x + block * b, w.row,
            w.products + block * b * width, width, more);
    float *restrict moment = w.moment + block * pairs;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i * w.row + block * b;
        const float *restrict h = w.h + at, *restrict y = w.y + at, *restrict x = w.x + at;
        for (int64_t j = 0; j < pairs; j++)
            moment[j] += (h[j + pairs] + y[j + pairs]) * x[j] - (h[j] + y[j]) * x[j + pairs];
    }
}

INLINE void rotate_token_back(int64_t b, const Job *job, int64_t set, int64_t head, int64_t token, int64_t part,
                            Workspace w) {
    const Basis *p = job->p;
    int64_t n = p->blocks * b;
    int wanted = p->d_base != NULL, more = 0;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    find_rotation(b, p, set, head, token, w);
    if (wanted) memset(w.moment, 0, 4 * p->blocks * (b / 2));
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 1, w.grad, w.row);
        if (wanted) gather(&panel, token, n, 0, w.raw, w.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t block = 0; block < p->blocks; block++) {
            /* h = U^T gy, or gy if U was omitted */
            if (w.returns[block])
                times(b, panel.count, block, w.inner, w.grad, w.h, 0, w);
            else
                for (int64_t i = 0; i < panel.count; i++)
                    copy_floats(w.h + i * w.row + block * b, w.grad + i * w.row + block * b, b);
            rotate_block(b, panel.count, block, w.h, w.y, -1, 0, w);
            if (wanted) {
                times(b, panel.count, block, w.inner, w.raw, w.x, 0, w);
                collect(b, panel.count, block, more, w);
            }
            /* dx = gy + U (rot^T - 1) h, or U rot^T h = U (h + (rot^T - 1) h) */
            if (!w.returns[block])
                for (int64_t i = 0; i < panel.count; i++) {
                    int64_t at = i * w.row + block * b;
                    for (int64_t j = 0; j < b; j++) {
                        w.y[at + j] += w.h[at + j];
                        w.grad[at + j] = 0;
                    }
                }
            times(b, panel.count, block, w.outer, w.y, w.grad, 1, w);
        }
        more = 1;
        spread(&panel, token, n, p->head_dim, 1, w.grad, w.row);
    }
    if (wanted && more) add_products(b, p, head, w);
    if (wanted) reduce_angles(job, set, head, token, part, w);
}

/* ---- blocks of eight, the most frequent size: a row of a block is one vector, U stays in registers ---- */

typedef int32_t vi8 __attribute__((vector_size(32), aligned(4), may_alias));

INLINE v8 halves(v4 low, v4 high) { return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE v8 swap_halves(v8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3); }

/* Of a block and token, so that rot x, or (rot - 1) x if U is applied last, is  c x + s (x with its halves swapped). */
INLINE void find_turns(const Basis *p, int64_t token, float sign, Workspace w) {
    float *turn = w.turns + token * 16 * p->blocks;
    for (int64_t block = 0; block < p->blocks; block++, turn += 16) {
        v4 less = *(const v4 *)(w.less + 4 * block), sine = sign * *(const v4 *)(w.sine + 4 * block);
        v4 c = less + (w.returns[block] ? 0.0f : 1.0f);
        *(v8 *)turn = halves(c, c);
        *(v8 *)(turn + 8) = halves(-sine, sine);
    }
}

INLINE v8 rotated(v8 c, v8 s, v8 x) { return c * x + s * swap_halves(x); }

/* R x or rot U^T x in one block of the rows of a group. */
INLINE void rotate_rows(const Places *places, Group g, int64_t blocks, int64_t block, Workspace w) {
    float changes[GROUP][8];
    int64_t returns = w.returns[block];
    v8 matrix[8];
    load_matrix(w.inner + 64 * block, matrix);
    for (int64_t t = 0, i = 0; t < g.tokens; t++) {
        const float *turn = w.turns + 16 * (t * blocks + block);
        v8 c = *(const v8 *)turn, s = *(const v8 *)(turn + 8);
        for (int64_t last = i + g.rows; i < last; i++) {
            v8 y = rotated(c, s, times_matrix(places->x[i] + 8 * block, matrix));
            *(v8 *)(returns ? changes[i] : places->out[i] + 8 * block) = y;
        }
    }
    if (!returns) return;
    load_matrix(w.outer + 64 * block, matrix);
    for (int64_t i = 0; i < g.tokens * g.rows; i++) {
        v8 x = *(const v8 *)(places->x[i] + 8 * block);
        *(v8 *)(places->out[i] + 8 * block) = x + times_matrix(changes[i], matrix);
    }
}

/* In one block of the rows of a group: dx = gy + U (rot^T - 1) h or U rot^T h, and sum h x^T of each token. */
INLINE void rotate_rows_back(const Places *places, Group g, int64_t blocks, int64_t block, int wanted, Workspace w) {
    float h[GROUP][8], changes[GROUP][8];
    const float *rows[GROUP];
    int64_t returns = w.returns[block], count = g.tokens * g.rows;
    v8 matrix[8];
    load_matrix(w.inner + 64 * block, matrix);
    for (int64_t t = 0, i = 0; t < g.tokens; t++) {
        const float *turn = w.turns + 16 * (t * blocks + block);
        v8 c = *(const v8 *)turn, s = *(const v8 *)(turn + 8);
        for (int64_t last = i + g.rows; i < last; i++) {
            rows[i] = places->grad[i] + 8 * block;
            v8 into = *(const v8 *)rows[i];
            if (returns) {
                into = times_matrix(rows[i], matrix);
                *(v8 *)h[i] = into;
                rows[i] = h[i];
            }
            *(v8 *)changes[i] = rotated(c, s, into);
        }
    }
    for (int64_t t = 0; wanted && t < g.tokens; t++)
        add_outer(rows + t * g.rows, places->x + t * g.rows, 8 * block, g.rows, w.products + 64 * (t * blocks + block));
    load_matrix(w.outer + 64 * block, matrix);
    for (int64_t i = 0; i < count; i++) {
        v8 dx = times_matrix(changes[i], matrix);
        if (returns) dx += *(const v8 *)(places->grad[i] + 8 * block);
        *(v8 *)(places->out[i] + 8 * block) = dx;
    }
}

/* The workspace of a token of a group: its angles, their gradients and its products. */
INLINE Workspace of_token(Workspace w, int64_t blocks, int64_t token) {
    int64_t step = token * w.planes;
    w.less += step, w.sine += step, w.half_cosine += step, w.half_sine += step, w.moment += step;
    w.scale += token * blocks;
    w.products += token * 64 * blocks;
    return w;
}

/* Rotate all rows of some tokens, or compute their gradients. */
INLINE void rotate_group_8(const Basis *p, int64_t set, int64_t head, int64_t first, int64_t tokens, int backward,
                           Workspace w) {
    int64_t n = 8 * p->blocks;
    int wanted = backward && p->d_base;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    Places places;
    Scratch scratch = {w.raw, w.grad, w.y, w.row};
    for (int64_t t = 0; t < tokens; t++) {
        Workspace own = of_token(w, p->blocks, t);
        find_rotation(8, p, set, head, first + t, own);
        find_turns(p, t, backward ? -1 : 1, own);
    }
    if (wanted) memset(w.products, 0, 4 * tokens * 64 * p->blocks);
    while (next_panel(&walk, &panel))
        for (int64_t from = 0; from < panel.count; from += GROUP_ROWS) {
            Group g = {&panel, from, least(GROUP_ROWS, panel.count - from), first, tokens};
            find_places(g, n, !backward || wanted, backward, scratch, &places);
            for (int64_t block = 0; block < p->blocks; block++)
                if (backward)
                    rotate_rows_back(&places, g, p->blocks, block, wanted, w);
                else
                    rotate_rows(&places, g, p->blocks, block, w);
            finish_rows(g, n, p->head_dim, backward, scratch);
        }
}

/* As `add_products`, with [w_j + w_k, w_j - w_k] for the four k side by side: `gaps` are their reciprocals. The sums
   of a pair of vectors are [re a, im b] and [re b, -im a]. The gradients of the angles,
   sum gx_2 x_1 - gx_1 x_2  with  gx = rot^T h,  come with them: -im a at j = k, before it is weighted. */
INLINE void add_products_8(const Basis *p, int64_t head, Workspace w) {
    const vi8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int64_t block = 0; block < p->blocks; block++) {
        v4 c = *(const v4 *)(w.half_cosine + 4 * block), s = *(const v4 *)(w.half_sine + 4 * block);
        v8 ck = halves(c, c), sk = halves(s, -s);
        const float *angular = p->angular + (head * p->blocks + block) * 4;
        v4 at = *(const v4 *)angular;
        v8 wk = halves(at, -at), diagonal = {0};
        float half = 0.5f * (float)w.scale[block];
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
            float *sums = w.sums + 64 * block + 16 * j;
            v8 upper = *(const v8 *)(w.products + 64 * block + 8 * j);
            v8 lower = swap_halves(*(const v8 *)(w.products + 64 * block + 8 * j + 32));
            v8 first = upper + lower, second = upper - lower; /* [re a, im b], [re b, -im a] */
            float cj = w.half_cosine[4 * block + j], sj = w.half_sine[4 * block + j];
            v8 cosine = cj * ck - sj * sk, sine = sj * ck + cj * sk;
            v8 x = half * (angular[j] + wk), z = x * x;
            v8 series = half * (1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040))));
            v8 direct = sine * *(const v8 *)(w.gaps + 32 * block + 8 * j);
            vi8 close = z < 0.09f;
            v8 far = (v8)(((vi8)series & close) | ((vi8)direct & ~close));
            v8 plain = cosine * first - sine * swap_halves(second);
            v8 other = swap_halves(cosine) * second + swap_halves(sine) * swap_halves(first);
            *(v8 *)sums += swap_halves(far) * plain;
            *(v8 *)(sums + 8) += far * other;
            vi8 own = lanes == 4 + j;
            diagonal = (v8)(((vi8)other & own) | ((vi8)diagonal & ~own));
        }
        *(v4 *)(w.moment + 4 * block) = -__builtin_shufflevector(diagonal, diagonal, 4, 5, 6, 7);
    }
}

INLINE void rotate_set_8(const Job *job, int64_t set, int64_t head, int64_t first, int64_t last, int64_t part,
                         int backward, Workspace w) {
    const Basis *p = job->p;
    for (int64_t token = first; token < last; token += GROUP_TOKENS) {
        int64_t tokens = least(GROUP_TOKENS, last - token);
        rotate_group_8(p, set, head, token, tokens, backward, w);
        for (int64_t t = 0; backward && p->d_base && t < tokens; t++) {
            Workspace own = of_token(w, p->blocks, t);
            for (int64_t block = 0; block < p->blocks; block++)
                multiply_matrix(own.products + 64 * block, w.inner + 64 * block);
            add_products_8(p, head, own);
            reduce_angles(job, set, head, token + t, part, own);
        }
    }
}

/* The gradient in the basis, as a real matrix: [[re a + re b, im b - im a], [im a + im b, re a - re b]] a pair. */
static void write_sums(const Job *job, int64_t head, int64_t part, Workspace w) {
    const Basis *p = job->p;
    int64_t b = p->b, pairs = b / 2, area = pairs * pairs;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *sums = w.sums + 4 * block * area;
        float *target = job->inside + ((part * p->heads + head) * p->blocks + block) * b * b;
        for (int64_t j = 0; j < pairs; j++)
            for (int64_t k = 0; k < pairs; k++) {
                const float *at = b == 8 ? sums + 16 * j + k : sums + j * pairs + k;
                float ar = at[0], ai = b == 8 ? -at[12] : at[area];
                float br = at[b == 8 ? 8 : 2 * area], bi = at[b == 8 ? 4 : 3 * area];
                target[2 * j * b + 2 * k] = ar + br;
                target[2 * j * b + 2 * k + 1] = bi - ai;
                target[(2 * j + 1) * b + 2 * k] = ai + bi;
                target[(2 * j + 1) * b + 2 * k + 1] = ar - br;
            }
    }
}

INLINE void basis_part(int64_t b, const Job *job, int64_t item, void *memory, int backward) {
    const Basis *p = job->p;
    int64_t head = item / job->parts, part = item % job->parts;
    int64_t first = p->tokens * part / job->parts, last = p->tokens * (part + 1) / job->parts;
    Arena arena = {memory, 0};
    Workspace w = lay_out(p, &arena);
    start_head(job, head, &w);
    if (backward && p->d_base) {
        memset(w.sums, 0, 4 * p->blocks * b * b);
        for (int64_t axis = 0; axis < p->axes; axis++)
            memset(job->coefficients + ((part * p->axes + axis) * p->heads + head) * p->blocks, 0, 4 * p->blocks);
    }
    for (int64_t set = 0; set < p->sets; set++)
        if (b == 8)
            rotate_set_8(job, set, head, first, last, part, backward, w);
        else
            for (int64_t token = first; token < last; token++)
                if (backward)
                    rotate_token_back(b, job, set, head, token, part, w);
                else
                    rotate_token(b, p, set, head, token, w);
    if (backward && p->d_base) write_sums(job, head, part, w);
}

static void forward_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    if (job->p->b == 8) /* specialised for the most frequent size */
        basis_part(8, job, item, memory, 0);
    else
        basis_part(job->p->b, job, item, memory, 0);
}

static void backward_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    if (job->p->b == 8)
        basis_part(8, job, item, memory, 1);
    else
        basis_part(job->p->b, job, item, memory, 1);
}

/* Of one block: U (G - G^T) / 2 U^T for the sum G of the parts in the basis. */
static void base_of_block(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    const Basis *p = job->p;
    int64_t b = p->b, width = padded(b), all = p->heads * p->blocks * b * b;
    const float *basis = p->basis + item * b * b;
    float *skew = memory, *transposed = skew + b * width, *half = transposed + b * width, *sum = half + b * width;
    memset(memory, 0, 4 * 2 * b * width);
    for (int64_t i = 0; i < b * b; i++) {
        sum[i] = 0;
        for (int64_t part = 0; part < job->parts; part++) sum[i] += job->inside[part * all + item * b * b + i];
    }
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < b; j++) {
            skew[i * width + j] = 0.5f * (sum[i * b + j] - sum[j * b + i]);
            transposed[i * width + j] = basis[j * b + i];
        }
    product(b, b, width, basis, b, 1, skew, width, half, width, 0);
    product(b, b, width, half, width, 1, transposed, width, sum, width, 0);
    for (int64_t i = 0; i < b; i++) memcpy(p->d_base + (item * b + i) * b, sum + i * width, 4 * b);
}

static int64_t run(const Job *job, int64_t backward) {
    const Basis *p = job->p;
    int64_t few = p->heads * floats_of_head(p) < 1 << 15;
    int64_t status = parallel_for(p->heads, few ? 1 : p->threads, 0, pad_basis, job);
    if (status != DONE) return status;
    Arena arena = {NULL, 0};
    lay_out(p, &arena);
    return parallel_for(p->heads * job->parts, p->threads, arena.used, backward ? backward_part : forward_part, job);
}

API int64_t torchrope_basis(const Basis *p, int64_t backward) {
    CHECK_LAYOUT(p);
    int wanted = backward && p->d_base;
    Job job = {p, parts_of(p->heads, (p->tokens + 7) / 8, wanted, p->threads), NULL, NULL, NULL, NULL};
    int64_t factors = p->axes * p->heads * p->blocks, square = p->heads * p->blocks * p->b * p->b;
    int64_t places = p->d_positions ? p->sets * p->tokens * p->axes : 0, padded_floats = p->heads * floats_of_head(p);
    job.matrices = allocate(4 * (padded_floats + (wanted ? job.parts * (factors + square) + p->heads * places : 0)));
    if (!job.matrices) return OUT_OF_MEMORY;
    if (wanted) {
        job.inside = job.matrices + padded_floats;
        job.coefficients = job.inside + job.parts * square;
        if (places) job.positions = job.coefficients + job.parts * factors;
    }
    int64_t status = run(&job, backward);
    if (wanted && status == DONE)
        status = parallel_for(p->heads * p->blocks, p->threads, 16 * p->b * padded(p->b), base_of_block, &job);
    if (wanted && status == DONE) {
        add_parts(job.coefficients, job.parts, factors, p->d_coefficients);
        if (places) add_parts(job.positions, p->heads, places, p->d_positions);
    }
    free(job.matrices);
    return status;
}
