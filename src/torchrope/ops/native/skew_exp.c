/* exp of skew matrices, and its gradient, by scaling and squaring of E = exp - 1.

   Below a norm of LARGEST both are polynomials, near-minimax: exp in S = A^2, split into its even and odd part, and
   the gradient in ad_A, where [A, X] = A X - (A X)^T is one product because both are skew. Small matrices lie side by
   side, one a vector lane; large ones one after the other. */
#include "common.h"

static const float LARGEST = 1.4f;
/* (cosh A - 1) = sum C_k S^(k+1), sinh A / A - 1 = sum Z_k S^(k+1), interpolated at Chebyshev nodes: 6e-8 and 8e-9. */
static const float C[4] = {0.4999999691572175f, 0.04166616287544764f, 0.0013876004607485544f, 2.37431172196823e-05f};
static const float Z[4] = {0.16666666384991646f, 0.00833328732738491f, 0.0001982950858612987f, 2.659205633109999e-06f};
/* integral_0^1 exp(-u ad) du = sum F_k ad^k, for |ad| <= 2 LARGEST, likewise: 2e-8 (even), 3e-7 (odd). */
enum { TERMS = 11 };
static const float F[TERMS] = {
    0.9999999837239144f,    -0.4999998915652492f,    0.16666651711288374f,    -0.041665974506914706f,
    0.008333110170772082f,  -0.0013881793244331939f, 0.00019829055748350234f, -2.4545568750042247e-05f,
    2.7253588056820374e-06f, -2.3739691237199817e-07f, 2.1528246140961405e-08f,
};

typedef struct {
    int64_t heads, blocks, b, axes, sets, tokens, threads; /* heads: those of the rotation */
    const float *positions;  /* (sets, tokens, axes), or NULL: generators are the exponents (heads, blocks, b, b) */
    const float *generators; /* (axes, heads, blocks, b, b) */
    float *table;            /* (sets, heads, tokens, blocks, b, b), each block transposed */
    const float *tangent;    /* (sets, heads, tokens, blocks, b (b - 1) / 2), the gradient that came */
    float *d_generators;     /* (parts, axes, heads, blocks, b, b) */
    float *d_positions;      /* (heads, blocks, sets, tokens, axes) or NULL */
} SkewExp;

/* How matrices lie: `lanes` of them side by side, element (i, j) of lane l at (i width + j) lanes + l. */
typedef struct {
    int64_t b, width, lanes, size;
} Layout;

INLINE Layout layout_for(int64_t b) {
    Layout y;
    y.b = b;
    y.lanes = b <= 8 ? VW : 1;
    y.width = b <= 8 ? b : padded(b);
    y.size = (b <= 8 ? b : y.width) * y.width * y.lanes;
    return y;
}

/* ---- products of both layouts ---- */

#if VW == 16
#define LANE_ROWS 4
#else
#define LANE_ROWS 2
#endif

INLINE void lane_tile(int rows, int columns, int64_t b, const vf *a, int64_t ai, int64_t ak, const vf *right, vf *c,
                      int accumulate) {
    vf sum[LANE_ROWS][4];
    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
        _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++) sum[i][j] = accumulate ? c[i * b + j] : (vf){0};
    for (int64_t k = 0; k < b; k++) {
        _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
            _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++)
                sum[i][j] += a[i * ai + k * ak] * right[k * b + j];
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
        _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++) c[i * b + j] = sum[i][j];
}

INLINE void lane_product(int64_t b, float *c, const float *a, const float *right, int transposed, int accumulate) {
    int64_t ai = transposed ? 1 : b, ak = transposed ? b : 1, i = 0;
    const vf *left = (const vf *)a, *r = (const vf *)right;
    vf *out = (vf *)c;
    for (; i + LANE_ROWS <= b; i += LANE_ROWS) {
        int64_t j = 0;
        for (; j + 4 <= b; j += 4) lane_tile(LANE_ROWS, 4, b, left + i * ai, ai, ak, r + j, out + i * b + j, accumulate);
        for (; j < b; j++) lane_tile(LANE_ROWS, 1, b, left + i * ai, ai, ak, r + j, out + i * b + j, accumulate);
    }
    for (; i < b; i++) {
        int64_t j = 0;
        for (; j + 4 <= b; j += 4) lane_tile(1, 4, b, left + i * ai, ai, ak, r + j, out + i * b + j, accumulate);
        for (; j < b; j++) lane_tile(1, 1, b, left + i * ai, ai, ak, r + j, out + i * b + j, accumulate);
    }
}

/* c (+)= a right, or a^T right. */
INLINE void multiply(Layout y, float *c, const float *a, const float *right, int transposed, int accumulate) {
    if (y.lanes > 1) {
        switch (y.b) { /* sizes that the compiler unrolls */
        case 4: lane_product(4, c, a, right, transposed, accumulate); return;
        case 8: lane_product(8, c, a, right, transposed, accumulate); return;
        default: lane_product(y.b, c, a, right, transposed, accumulate); return;
        }
    }
    int64_t ai = transposed ? 1 : y.width, ak = transposed ? y.width : 1;
    product(y.b, y.b, y.width, a, ai, ak, right, y.width, c, y.width, accumulate);
}

/* Transpose a square of vectors. */
INLINE void transpose_square(const float *from, int64_t from_width, float *to, int64_t to_width) {
    vf rows[VW], next[VW];
    for (int i = 0; i < VW; i++) rows[i] = *(const vf *)(from + i * from_width);
    for (int step = 1; step < VW; step *= 2) { /* each perfect shuffle of rows moves one bit of the index */
        for (int i = 0; i < VW / 2; i++) {
#if VW == 16
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                                  22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                                      29, 14, 30, 15, 31);
#elif VW == 8
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
#else
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 2], 0, 4, 1, 5);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 2], 2, 6, 3, 7);
#endif
        }
        for (int i = 0; i < VW; i++) rows[i] = next[i];
    }
    for (int i = 0; i < VW; i++) *(vf *)(to + i * to_width) = rows[i];
}

/* c = t^T */
INLINE void transpose(Layout y, float *c, const float *t) {
    if (y.lanes > 1) {
        for (int64_t i = 0; i < y.b; i++)
            for (int64_t j = 0; j < y.b; j++) ((vf *)c)[i * y.b + j] = ((const vf *)t)[j * y.b + i];
        return;
    }
    for (int64_t i = 0; i < y.width; i += VW)
        for (int64_t j = 0; j < y.width; j += VW)
            transpose_square(t + i * y.width + j, y.width, c + j * y.width + i, y.width);
}

/* Largest row sum of absolute values, over all lanes. */
INLINE float row_norm(Layout y, const float *a) {
    float norm = 0;
    for (int64_t i = 0; i < y.b; i++)
        for (int64_t l = 0; l < y.lanes; l++) {
            float sum = 0;
            for (int64_t j = 0; j < y.b; j++) sum += fabsf(a[(i * y.width + j) * y.lanes + l]);
            norm = sum > norm || sum != sum ? sum : norm;
        }
    return norm;
}

/* ---- the exponential ---- */

enum { LEVELS = 48 };

typedef struct {
    float *a, *s, *s2, *s3, *s4, *t, *x;
    float *level[LEVELS]; /* E before each squaring, the last after all; made when first needed */
} Memory;

/* From the exponent in m->a to E at every level (or the last alone); returns the squarings, and leaves the scaled
   exponent in m->a. */
static inline __attribute__((always_inline)) int64_t exponentiate(Layout y, Memory *m, int keep) {
    float norm = row_norm(y, m->a);
    int bad = !(norm < 1e9f);
    int64_t before = norm > 1 && !bad ? (int64_t)ceilf(log2f(norm)) : 0;
    float shrink = exp2f((float)-before);
    for (int64_t i = 0; i < y.size; i++) m->a[i] *= shrink;
    multiply(y, m->s, m->a, m->a, 0, 0);
    multiply(y, m->s2, m->s, m->s, 0, 0);
    /* |A|^4 <= |A^4|, and the row sum bounds the right side */
    float bound = sqrtf(sqrtf(row_norm(y, m->s2))) * 1.0001f;
    int64_t squarings = bound > 0 && !bad ? before + (int64_t)ceilf(log2f(bound / LARGEST)) : 0;
    if (squarings < 0) squarings = 0;
    float scale = exp2f((float)(before - squarings)), scale2 = scale * scale, scale4 = scale2 * scale2;
    for (int64_t i = 0; i < y.size; i++) {
        m->a[i] *= scale;
        m->s[i] *= scale2;
        m->s2[i] *= scale4;
    }
    multiply(y, m->s3, m->s2, m->s, 0, 0);
    multiply(y, m->s4, m->s2, m->s2, 0, 0);
    float *e = m->level[0];
    for (int64_t i = 0; i < y.size; i++) {
        m->t[i] = Z[0] * m->s[i] + Z[1] * m->s2[i] + Z[2] * m->s3[i] + Z[3] * m->s4[i];
        e[i] = m->a[i] + (C[0] * m->s[i] + C[1] * m->s2[i] + C[2] * m->s3[i] + C[3] * m->s4[i]);
    }
    multiply(y, e, m->a, m->t, 0, 1);
    for (int64_t h = 0; h < squarings; h++) {
        if (keep && !m->level[h + 1]) m->level[h + 1] = scratch(4 * y.size);
        float *next = keep ? m->level[h + 1] : e == m->level[0] ? m->s : m->level[0];
        for (int64_t i = 0; i < y.size; i++) next[i] = 2 * e[i];
        multiply(y, next, e, e, 0, 1);
        e = next;
    }
    if (!keep && e != m->level[0]) memcpy(m->level[0], e, 4 * y.size);
    if (bad)
        for (int64_t i = 0; i < y.size; i++) m->level[keep ? squarings : 0][i] = NAN;
    return squarings;
}

/* From M in m->x to  J = integral_0^1 e^(-uG) M e^(uG) du  in m->x. */
static inline __attribute__((always_inline)) void carry_back(Layout y, Memory *m, int64_t squarings) {
    float *power = m->x, *sum = m->s, *next = m->s2, *turned = m->s3;
    for (int64_t i = 0; i < y.size; i++) sum[i] = F[0] * power[i];
    for (int k = 1; k < TERMS; k++) {
        multiply(y, m->t, m->a, power, 0, 0);
        transpose(y, turned, m->t);
        for (int64_t i = 0; i < y.size; i++) {
            next[i] = m->t[i] - turned[i];
            sum[i] += F[k] * next[i];
        }
        float *spare = power;
        power = next;
        next = spare;
    }
    float *j = sum, *half = m->t, *result = m->s4;
    for (int64_t h = 0; h < squarings; h++) { /* J <- (J + R^T J R) / 2 with R = 1 + E */
        memcpy(half, j, 4 * y.size);
        multiply(y, half, j, m->level[h], 0, 1);
        for (int64_t i = 0; i < y.size; i++) result[i] = j[i] + half[i];
        multiply(y, result, m->level[h], half, 1, 1);
        for (int64_t i = 0; i < y.size; i++) result[i] *= 0.5f;
        float *spare = j;
        j = result;
        result = spare;
    }
    if (j != m->x) memcpy(m->x, j, 4 * y.size);
}

/* ---- matrices in and out ---- */

/* A lane is a token of one head and block, or, without positions, a block. */
typedef struct {
    int64_t head, block, first, count;
} Group;

static int64_t flat_of(const SkewExp *p, const Group *g, int64_t lane) {
    if (!p->positions) return g->first + lane;
    int64_t token = g->first + lane, set = token / p->tokens;
    return ((set * p->heads + g->head) * p->tokens + token % p->tokens) * p->blocks + g->block;
}

static const float *generator_of(const SkewExp *p, int64_t axis, const Group *g) {
    return p->generators + ((axis * p->heads + g->head) * p->blocks + g->block) * p->b * p->b;
}

INLINE void read_exponents(Layout y, const SkewExp *p, const Group *g, float *a) {
    int64_t b = y.b;
    if (p->positions && y.lanes == 1) {
        const float *position = p->positions + g->first * p->axes;
        for (int64_t axis = 0; axis < p->axes; axis++) {
            const float *generator = generator_of(p, axis, g);
            for (int64_t i = 0; i < b; i++)
                for (int64_t j = 0; j < b; j++)
                    a[i * y.width + j] = position[axis] * generator[i * b + j] + (axis ? a[i * y.width + j] : 0);
        }
        return;
    }
    if (p->positions) {
        for (int64_t axis = 0; axis < p->axes; axis++) {
            const float *generator = generator_of(p, axis, g);
            vf position = {0};
            for (int64_t l = 0; l < g->count; l++) position[l] = p->positions[(g->first + l) * p->axes + axis];
            for (int64_t i = 0; i < b * b; i++)
                ((vf *)a)[i] = position * generator[i] + (axis ? ((vf *)a)[i] : (vf){0});
        }
        return;
    }
    for (int64_t l = 0; l < y.lanes; l++)
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                a[(i * y.width + j) * y.lanes + l] =
                    l < g->count ? p->generators[((g->first + l) * b + i) * b + j] : 0;
}

INLINE void write_table(Layout y, const SkewExp *p, const Group *g, const float *e) {
    int64_t b = y.b;
    for (int64_t l = 0; l < g->count; l++) {
        float *target = p->table + flat_of(p, g, l) * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                target[j * b + i] = e[(i * y.width + j) * y.lanes + l] + (i == j ? 1.0f : 0.0f);
    }
}

/* M is half the gradient of the entries above the diagonal, and skew. */
INLINE void read_tangent(Layout y, const SkewExp *p, const Group *g, float *x) {
    int64_t b = y.b, entries = b * (b - 1) / 2;
    memset(x, 0, 4 * y.size);
    for (int64_t l = 0; l < g->count; l++) {
        const float *entry = p->tangent + flat_of(p, g, l) * entries;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = i + 1; j < b; j++) {
                float value = 0.5f * *entry++;
                x[(i * y.width + j) * y.lanes + l] = value;
                x[(j * y.width + i) * y.lanes + l] = -value;
            }
    }
}

/* Add p_a J to the sums of this part, `(axes, size)`, and <A_a, J> to the positions' gradient. */
INLINE void collect(Layout y, const SkewExp *p, const Group *g, const float *x, float *sums) {
    int64_t b = y.b;
    for (int64_t axis = 0; axis < p->axes; axis++) {
        float *sum = sums + axis * y.size;
        if (y.lanes == 1) {
            float position = p->positions[g->first * p->axes + axis];
            for (int64_t i = 0; i < y.size; i++) sum[i] += position * x[i];
        } else {
            vf position = {0};
            for (int64_t l = 0; l < g->count; l++) position[l] = p->positions[(g->first + l) * p->axes + axis];
            for (int64_t i = 0; i < b * b; i++) ((vf *)sum)[i] += position * ((const vf *)x)[i];
        }
        if (!p->d_positions) continue;
        const float *generator = generator_of(p, axis, g);
        for (int64_t l = 0; l < g->count; l++) {
            float dot = 0;
            for (int64_t i = 0; i < b; i++)
                for (int64_t j = 0; j < b; j++) dot += generator[i * b + j] * x[(i * y.width + j) * y.lanes + l];
            int64_t token = g->first + l, all = p->sets * p->tokens;
            p->d_positions[((g->head * p->blocks + g->block) * all + token) * p->axes + axis] = dot;
        }
    }
}

/* Without positions each exponent has a gradient of its own. */
INLINE void write_gradient(Layout y, const SkewExp *p, const Group *g, const float *x) {
    int64_t b = y.b;
    for (int64_t l = 0; l < g->count; l++)
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                p->d_generators[((g->first + l) * b + i) * b + j] = x[(i * y.width + j) * y.lanes + l];
}

INLINE void write_sums(Layout y, const SkewExp *p, const Group *g, int64_t part, const float *sums) {
    int64_t b = y.b;
    for (int64_t axis = 0; axis < p->axes; axis++) {
        float *target = p->d_generators + (((part * p->axes + axis) * p->heads + g->head) * p->blocks + g->block) * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                float sum = 0;
                for (int64_t l = 0; l < y.lanes; l++) sum += sums[axis * y.size + (i * y.width + j) * y.lanes + l];
                target[i * b + j] = sum;
            }
    }
}

/* ---- the loop ---- */

static int64_t columns_of(const SkewExp *p) { return p->positions ? p->heads * p->blocks : 1; }
static int64_t length_of(const SkewExp *p) { return p->positions ? p->sets * p->tokens : p->heads * p->blocks; }
static int64_t groups_of(const SkewExp *p) {
    int64_t lanes = layout_for(p->b).lanes;
    return (length_of(p) + lanes - 1) / lanes;
}

INLINE void run_part(Layout y, const SkewExp *p, int64_t item, int backward) {
    int64_t groups = groups_of(p), parts = parts_of(columns_of(p), groups, p->threads);
    int64_t column = item / parts, part = item % parts;
    Memory m;
    memset(&m, 0, sizeof m);
    float *memory = scratch(4 * y.size * (8 + (backward ? p->axes : 0)));
    memset(memory, 0, 4 * y.size * (8 + (backward ? p->axes : 0)));
    float **places[] = {&m.a, &m.s, &m.s2, &m.s3, &m.s4, &m.t, &m.x, &m.level[0]};
    for (int i = 0; i < 8; i++) *places[i] = memory + i * y.size;
    float *sums = memory + 8 * y.size;
    Group g = {column / p->blocks, column % p->blocks, 0, 0};
    for (int64_t group = groups * part / parts; group < groups * (part + 1) / parts; group++) {
        g.first = group * y.lanes;
        g.count = least(y.lanes, length_of(p) - g.first);
        read_exponents(y, p, &g, m.a);
        int64_t squarings = exponentiate(y, &m, backward);
        if (!backward) {
            write_table(y, p, &g, m.level[0]);
            continue;
        }
        read_tangent(y, p, &g, m.x);
        carry_back(y, &m, squarings);
        if (p->positions)
            collect(y, p, &g, m.x, sums);
        else
            write_gradient(y, p, &g, m.x);
    }
    if (backward && p->positions) write_sums(y, p, &g, part, sums);
    for (int h = 1; h < LEVELS && m.level[h]; h++) free(m.level[h]);
    free(memory);
}

static void any_part(const SkewExp *p, int64_t item, int backward) {
    Layout y = layout_for(p->b);
    if (p->b == 8) { /* sizes that the compiler should know */
        y.b = y.width = 8;
        y.lanes = VW;
        y.size = 64 * VW;
        run_part(y, p, item, backward);
    } else {
        run_part(y, p, item, backward);
    }
}

static void forward_part(void *context, int64_t item) { any_part(context, item, 0); }
static void backward_part(void *context, int64_t item) { any_part(context, item, 1); }

/* Parts that the tokens of a column are cut into: the first dimension of d_generators. */
API int64_t torchrope_skew_exp_parts(const SkewExp *p) {
    return p->positions ? parts_of(columns_of(p), groups_of(p), p->threads) : 1;
}

API void torchrope_skew_exp(const SkewExp *p, int64_t backward) {
    int64_t items = columns_of(p) * parts_of(columns_of(p), groups_of(p), p->threads);
    parallel_for(items, p->threads, backward ? backward_part : forward_part, (void *)p);
}
