/* exp of skew matrices, and its gradient, by scaling and squaring of E = exp - 1.

   Below a norm of LARGEST both are polynomials, near-minimax: exp in S = A^2, split into its even and odd part, and
   the gradient in ad_A, where [A, X] = A X - (A X)^T is one product because both are skew. Small matrices are
   interleaved, one per vector lane; large ones are computed one at a time. */
#include "common.h"

static const float LARGEST = 1.4f;
/* (cosh A - 1) = sum C_k S^(k+1), sinh A / A - 1 = sum Z_k S^(k+1), interpolated at Chebyshev nodes: 6e-8 and 8e-9. */
static const float C[4] = {0.4999999691572175f, 0.04166616287544764f, 0.0013876004607485544f, 2.37431172196823e-05f};
static const float Z[4] = {0.16666666384991646f, 0.00833328732738491f, 0.0001982950858612987f, 2.659205633109999e-06f};
/* integral_0^1 exp(-u ad) du = sum F_k ad^k, for |ad| <= 2 LARGEST, at Chebyshev nodes: 2e-8 (even), 3e-7 (odd). */
enum { TERMS = 11 };
static const float F[TERMS] = {
    0.9999999837239144f,    -0.4999998915652492f,    0.16666651711288374f,    -0.041665974506914706f,
    0.008333110170772082f,  -0.0013881793244331939f, 0.00019829055748350234f, -2.4545568750042247e-05f,
    2.7253588056820374e-06f, -2.3739691237199817e-07f, 2.1528246140961405e-08f,
};

typedef struct {
    int64_t size, heads, blocks, b, axes, sets, tokens, threads; /* heads: those of the rotation */
    const float *positions;  /* (sets, tokens, axes), or NULL: generators are the exponents (heads, blocks, b, b) */
    const float *generators; /* (axes, heads, blocks, b, b) */
    float *table;            /* (sets, heads, tokens, blocks, b, b), each block transposed */
    const float *tangent;    /* (sets, heads, tokens, blocks, b (b - 1) / 2), the incoming gradient */
    float *d_generators;     /* as generators */
    float *d_positions;      /* as positions, or NULL */
} SkewExp;

/* Layout of matrices: `lanes` of them interleaved, element (i, j) of lane l at (i width + j) lanes + l. */
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

/* Products dominate the time: one copy of each in this file, frequent sizes unrolled. */
#define APART static __attribute__((noinline)) void
APART lane_product_4(float *c, const float *a, const float *right, int transposed, int accumulate) {
    lane_product(4, c, a, right, transposed, accumulate);
}
APART lane_product_8(float *c, const float *a, const float *right, int transposed, int accumulate) {
    lane_product(8, c, a, right, transposed, accumulate);
}
APART lane_product_any(int64_t b, float *c, const float *a, const float *right, int transposed, int accumulate) {
    lane_product(b, c, a, right, transposed, accumulate);
}
APART large_product(Layout y, float *c, const float *a, const float *right, int transposed, int accumulate) {
    int64_t ai = transposed ? 1 : y.width, ak = transposed ? y.width : 1;
    product(y.b, y.b, y.width, a, ai, ak, right, y.width, c, y.width, accumulate);
}

/* c (+)= a right, or a^T right. */
INLINE void multiply(Layout y, float *c, const float *a, const float *right, int transposed, int accumulate) {
    if (y.lanes == 1)
        large_product(y, c, a, right, transposed, accumulate);
    else if (y.b == 8)
        lane_product_8(c, a, right, transposed, accumulate);
    else if (y.b == 4)
        lane_product_4(c, a, right, transposed, accumulate);
    else
        lane_product_any(y.b, c, a, right, transposed, accumulate);
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
APART transpose(Layout y, float *c, const float *t) {
    if (y.lanes > 1) {
        for (int64_t i = 0; i < y.b; i++)
            for (int64_t j = 0; j < y.b; j++) ((vf *)c)[i * y.b + j] = ((const vf *)t)[j * y.b + i];
        return;
    }
    for (int64_t i = 0; i < y.width; i += VW)
        for (int64_t j = 0; j < y.width; j += VW)
            transpose_square(t + i * y.width + j, y.width, c + j * y.width + i, y.width);
}

/* The larger of the absolute values in each lane, as bits: ordered as the numbers, then infinity, then NaN. */
INLINE vi larger(vi a, vi b) {
    a &= INT32_MAX, b &= INT32_MAX;
    vi first = a > b;
    return (a & first) | (b & ~first);
}

/* Largest row sum of absolute values, over all lanes. */
INLINE float row_norm(Layout y, const float *a) {
    vf norm = {0};
    for (int64_t i = 0; i < y.b; i++) {
        const vf *row = (const vf *)(a + i * y.width * y.lanes);
        vf sum = {0};
        for (int64_t j = 0; j < y.width * y.lanes / VW; j++) sum += (vf)((vi)row[j] & INT32_MAX);
        if (y.lanes == 1)
            for (int l = 1; l < VW; l++) sum[0] += sum[l];
        norm = (vf)larger((vi)sum, (vi)norm);
    }
    float largest = norm[0];
    for (int l = 1; l < y.lanes; l++) largest = norm[l] > largest ? norm[l] : largest;
    return largest;
}

/* ---- the exponential ---- */

/* Exponents of a larger norm are halved until they are below it: float32 resolves no such angle, and the
   other lanes that share the scale keep their accuracy. */
static const int FARTHEST = 40;
enum {
    LEVELS = 48,  /* squarings are fewer: FARTHEST and a few for the row sums */
    RENEW = 8,    /* squarings, or powers, between orthogonalisations */
    ENOUGH = 16,  /* growth of the error allowed without one at the end: squarings double it, powers add to it */
};

typedef struct {
    float *a, *s, *s2, *s3, *s4, *t, *x;
    float *level[LEVELS]; /* E before each squaring, the last after all; without `keep` only the first */
} Memory;

/* Make every lane finite and its norm less than 2^FARTHEST. Lanes that are not finite are set to zero, or they would
   affect the others; a bit mask returns them. */
INLINE uint32_t bring_near(Layout y, float *a) {
    vi largest = {0};
    for (int64_t i = 0; i < y.size / VW; i++) largest = larger(((const vi *)a)[i], largest);
    if (y.lanes == 1)
        for (int l = 1; l < VW; l++) largest[0] = largest[l] > largest[0] ? largest[l] : largest[0];
    uint32_t bad = 0;
    int far = 0, exponent[VW];
    for (int64_t l = 0; l < y.lanes; l++) {
        exponent[l] = (largest[l] >> 23) - 127 + 1;
        if (exponent[l] > 128) bad |= (uint32_t)1 << l;
        exponent[l] = (int)least(0, FARTHEST - 7 - exponent[l]); /* 2^7 >= b */
        far |= exponent[l];
    }
    for (int64_t i = 0; far && i < y.size; i++) {
        int64_t l = i % y.lanes;
        a[i] = bad >> l & 1 ? 0 : ldexpf(a[i], exponent[l]);
    }
    return bad;
}

/* R <- R (1 - F / 2) with F = R^T R - 1, for R = 1 + E: the remaining error is F squared. */
APART renew(Layout y, Memory *m, float *e) {
    float *f = m->s3, *next = m->s4;
    transpose(y, f, e);
    for (int64_t i = 0; i < y.size; i++) f[i] += e[i];
    multiply(y, f, e, e, 1, 1);
    for (int64_t i = 0; i < y.size; i++) {
        f[i] *= -0.5f;
        next[i] = e[i] + f[i];
    }
    multiply(y, next, e, f, 0, 1);
    memcpy(e, next, 4 * y.size);
}

/* From the exponent in m->a to E at every level (or the last alone), of which powers up to `highest` are needed;
   returns the number of squarings, with the scaled exponent in m->a. */
static __attribute__((noinline)) int64_t exponentiate(Layout y, Memory *m, int keep, int64_t highest) {
    uint32_t bad = bring_near(y, m->a);
    float norm = row_norm(y, m->a);
    int64_t before = norm > 1 ? (int64_t)ceilf(log2f(norm)) : 0;
    float shrink = exp2f((float)-before);
    for (int64_t i = 0; i < y.size; i++) m->a[i] *= shrink;
    multiply(y, m->s, m->a, m->a, 0, 0);
    multiply(y, m->s2, m->s, m->s, 0, 0);
    /* |A|^4 <= |A^4|, and the row sum bounds the right side */
    float bound = sqrtf(sqrtf(row_norm(y, m->s2))) * 1.0001f;
    int64_t squarings = bound > 0 ? before + (int64_t)ceilf(log2f(bound / LARGEST)) : 0;
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
        float *next = keep ? m->level[h + 1] : e == m->level[0] ? m->s : m->level[0];
        for (int64_t i = 0; i < y.size; i++) next[i] = 2 * e[i];
        multiply(y, next, e, e, 0, 1);
        e = next;
        if (h % RENEW == RENEW - 1) renew(y, m, e);
    }
    if (highest << squarings % RENEW > ENOUGH) renew(y, m, e);
    if (!keep && e != m->level[0]) memcpy(m->level[0], e, 4 * y.size);
    for (int64_t i = 0; bad && i < y.size; i++)
        if (bad >> i % y.lanes & 1) m->a[i] = m->level[keep ? squarings : 0][i] = NAN; /* and so the gradient */
    return squarings;
}

/* result = R^T x R with R = 1 + E */
INLINE void conjugate(Layout y, const float *e, const float *x, float *t, float *result) {
    memcpy(t, x, 4 * y.size);
    multiply(y, t, x, e, 0, 1);
    memcpy(result, t, 4 * y.size);
    multiply(y, result, e, t, 1, 1);
}

/* From M in m->x to  J = integral_0^1 e^(-uG) M e^(uG) du  in m->x. */
APART carry_back(Layout y, Memory *m, int64_t squarings) {
    float *power = m->x, *sum = m->s, *next = m->s2, *transposed = m->s3;
    for (int64_t i = 0; i < y.size; i++) sum[i] = F[0] * power[i];
    for (int k = 1; k < TERMS; k++) {
        multiply(y, m->t, m->a, power, 0, 0);
        transpose(y, transposed, m->t);
        for (int64_t i = 0; i < y.size; i++) {
            next[i] = m->t[i] - transposed[i];
            sum[i] += F[k] * next[i];
        }
        float *spare = power;
        power = next;
        next = spare;
    }
    float *j = sum, *result = m->s4;
    for (int64_t h = 0; h < squarings; h++) { /* J <- (J + R^T J R) / 2 with R = 1 + E */
        conjugate(y, m->level[h], j, m->t, result);
        for (int64_t i = 0; i < y.size; i++) result[i] = 0.5f * (j[i] + result[i]);
        float *spare = j;
        j = result;
        result = spare;
    }
    if (j != m->x) memcpy(m->x, j, 4 * y.size);
}

/* ---- matrices in and out ---- */

typedef struct {
    int64_t count;     /* rays */
    int64_t *first;    /* of each ray, in the members; one more at the end */
    int64_t *member;   /* tokens, by ray, then by multiple */
    int64_t *multiple; /* of the ray's first token */
} Rays;

/* A call, the parts that its columns are split into, and their sums. */
typedef struct {
    const SkewExp *p;
    Rays rays; /* unused if matrices are interleaved or have no positions */
    int64_t parts, backward;
    float *generators; /* (parts, axes, heads, blocks, b, b), or NULL */
    float *positions;  /* (heads, blocks, sets, tokens, axes), or NULL */
} Job;

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

/* Add p_a J to the sums of this part, `(axes, size)`; write <A_a, J>, this column's gradient to the positions. */
INLINE void collect(Layout y, const Job *job, const Group *g, const float *x, float *sums) {
    const SkewExp *p = job->p;
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
        if (!job->positions) continue;
        const float *generator = generator_of(p, axis, g);
        for (int64_t l = 0; l < g->count; l++) {
            double dot = 0; /* thousands of terms with cancellation */
            for (int64_t i = 0; i < b; i++)
                for (int64_t j = 0; j < b; j++) dot += generator[i * b + j] * x[(i * y.width + j) * y.lanes + l];
            int64_t token = g->first + l, all = p->sets * p->tokens;
            job->positions[((g->head * p->blocks + g->block) * all + token) * p->axes + axis] = (float)dot;
        }
    }
}

/* Without positions each exponent has a separate gradient. */
INLINE void write_gradient(Layout y, const SkewExp *p, const Group *g, const float *x) {
    int64_t b = y.b;
    for (int64_t l = 0; l < g->count; l++)
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++)
                p->d_generators[((g->first + l) * b + i) * b + j] = x[(i * y.width + j) * y.lanes + l];
}

INLINE void write_sums(Layout y, const Job *job, const Group *g, int64_t part, const float *sums) {
    const SkewExp *p = job->p;
    int64_t b = y.b;
    for (int64_t axis = 0; axis < p->axes; axis++) {
        float *target = job->generators + (((part * p->axes + axis) * p->heads + g->head) * p->blocks + g->block) * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                float sum = 0;
                for (int64_t l = 0; l < y.lanes; l++) sum += sums[axis * y.size + (i * y.width + j) * y.lanes + l];
                target[i * b + j] = sum;
            }
    }
}

/* ---- rays: tokens at whole multiples of one position ----

   R(g p) = R(p)^g costs one product per step instead of an exponential, and with R = R(p), G = sum_a p_a A_a
   sum_g g J_gG(M_g) = J_G(sum_m R^-m (sum_(g > m) M_g) R^m),  by Horner's rule: one J for the whole ray.
   On a lattice through the origin two of five tokens are on the ray of another. */

enum { LONGEST = 32, GAP = 4 };

typedef struct {
    float length;
    int64_t token;
} Place;

static int by_length(const void *a, const void *b) {
    const Place *x = a, *y = b;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

/* The integer g with  p = g base  exactly, or 0. */
static int64_t multiple_of(int64_t axes, const float *p, const float *base) {
    int64_t widest = 0;
    for (int64_t axis = 1; axis < axes; axis++)
        if (fabsf(base[axis]) > fabsf(base[widest])) widest = axis;
    float ratio = base[widest] != 0 ? roundf(p[widest] / base[widest]) : 1;
    if (!(ratio >= 1 && ratio <= LONGEST)) return 0;
    for (int64_t axis = 0; axis < axes; axis++)
        if (ratio * base[axis] != p[axis]) return 0;
    return (int64_t)ratio;
}

/* Rays of every set of positions; without `together`, each token is a separate ray. Returns false without memory. */
static int find_rays(const SkewExp *p, int together, Rays *rays) {
    int64_t all = p->sets * p->tokens, members = 0;
    Arena arena = {allocate(3 * round_up(8 * (all + 1), 64) + round_up(sizeof(Place) * p->tokens, 64) + p->tokens), 0};
    if (!arena.memory) return 0;
    rays->first = take(&arena, 8 * (all + 1));
    rays->member = take(&arena, 8 * (all + 1));
    rays->multiple = take(&arena, 8 * (all + 1));
    Place *places = take(&arena, sizeof(Place) * p->tokens);
    char *taken = take(&arena, p->tokens);
    rays->count = 0;
    for (int64_t set = 0; set < p->sets; set++) {
        const float *positions = p->positions + set * p->tokens * p->axes;
        for (int64_t i = 0; i < p->tokens; i++) {
            float length = 0;
            for (int64_t axis = 0; axis < p->axes; axis++) length += positions[i * p->axes + axis] * positions[i * p->axes + axis];
            places[i] = (Place){length < INFINITY ? length : INFINITY, i}; /* NaN cannot be sorted */
        }
        qsort(places, p->tokens, sizeof(Place), by_length);
        memset(taken, 0, p->tokens);
        for (int64_t i = 0; i < p->tokens; i++) {
            if (taken[i]) continue;
            const float *base = positions + places[i].token * p->axes;
            int64_t last = 1;
            rays->first[rays->count++] = members;
            rays->member[members] = set * p->tokens + places[i].token;
            rays->multiple[members++] = 1;
            for (int64_t j = i + 1; j < p->tokens && together; j++) {
                int64_t g = taken[j] ? 0 : multiple_of(p->axes, positions + places[j].token * p->axes, base);
                if (g < last || g > last + GAP) continue;
                taken[j] = 1;
                rays->member[members] = set * p->tokens + places[j].token;
                rays->multiple[members++] = last = g;
            }
        }
    }
    rays->first[rays->count] = members;
    return 1;
}

INLINE void forward_ray(Layout y, const SkewExp *p, const Rays *rays, int64_t ray, Group g, Memory *m) {
    g.first = rays->member[rays->first[ray]];
    g.count = 1;
    read_exponents(y, p, &g, m->a);
    exponentiate(y, m, 0, rays->multiple[rays->first[ray + 1] - 1]);
    float *e = m->s, *next = m->s2;
    memcpy(e, m->level[0], 4 * y.size);
    int64_t power = 1;
    for (int64_t i = rays->first[ray]; i < rays->first[ray + 1]; i++) {
        for (; power < rays->multiple[i]; power++) { /* (1 + E)(1 + E1) - 1 */
            for (int64_t at = 0; at < y.size; at++) next[at] = e[at] + m->level[0][at];
            multiply(y, next, e, m->level[0], 0, 1);
            float *spare = e;
            e = next;
            next = spare;
            if (power % RENEW == 0) renew(y, m, e);
        }
        g.first = rays->member[i];
        write_table(y, p, &g, e);
    }
}

INLINE void backward_ray(Layout y, const Job *job, int64_t ray, Group g, Memory *m, float *sums) {
    const SkewExp *p = job->p;
    const Rays *rays = &job->rays;
    int64_t start = rays->first[ray], i = rays->first[ray + 1] - 1;
    g.first = rays->member[start];
    g.count = 1;
    read_exponents(y, p, &g, m->a);
    int64_t squarings = exponentiate(y, m, 1, rays->multiple[i]);
    float *e = m->level[squarings], *sum = m->s, *x = m->s2, *next = m->s3;
    memset(sum, 0, 4 * y.size);
    memset(x, 0, 4 * y.size);
    for (int64_t step = rays->multiple[i] - 1; step >= 0; step--) {
        for (; i >= start && rays->multiple[i] == step + 1; i--) {
            g.first = rays->member[i];
            read_tangent(y, p, &g, m->x);
            for (int64_t at = 0; at < y.size; at++) sum[at] += m->x[at];
        }
        if (step < rays->multiple[rays->first[ray + 1] - 1] - 1) {
            conjugate(y, e, x, m->t, next);
            for (int64_t at = 0; at < y.size; at++) x[at] = next[at] + sum[at];
        } else {
            memcpy(x, sum, 4 * y.size);
        }
    }
    memcpy(m->x, x, 4 * y.size);
    carry_back(y, m, squarings);
    g.first = rays->member[start];
    collect(y, job, &g, m->x, sums);
}

/* ---- the loop ---- */

static int has_rays(const SkewExp *p) { return p->positions && p->b > 8; }
static int64_t columns_of(const SkewExp *p) { return p->positions ? p->heads * p->blocks : 1; }
static int64_t length_of(const SkewExp *p) { return p->positions ? p->sets * p->tokens : p->heads * p->blocks; }
static int64_t groups_of(const SkewExp *p) {
    int64_t lanes = layout_for(p->b).lanes;
    return (length_of(p) + lanes - 1) / lanes;
}

static Memory lay_out(const Job *job, Layout y, Arena *arena, float **sums) {
    Memory m;
    float **squares[] = {&m.a, &m.s, &m.s2, &m.s3, &m.s4, &m.t, &m.x};
    for (int i = 0; i < 7; i++) *squares[i] = take(arena, 4 * y.size);
    *sums = take(arena, job->backward ? 4 * y.size * job->p->axes : 0);
    for (int h = 0; h < (job->backward ? LEVELS : 1); h++) m.level[h] = take(arena, 4 * y.size);
    return m;
}

static void run_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    const SkewExp *p = job->p;
    Layout y = layout_for(p->b);
    int64_t count = has_rays(p) ? job->rays.count : groups_of(p), part = item % job->parts;
    Arena arena = {memory, 0};
    float *sums;
    Memory m = lay_out(job, y, &arena, &sums);
    if (y.lanes == 1 && y.width > y.b) memset(m.a, 0, (char *)m.level[0] - (char *)m.a); /* the padding of blocks */
    if (job->backward) memset(sums, 0, 4 * y.size * p->axes);
    Group g = {item / job->parts / p->blocks, item / job->parts % p->blocks, 0, 0};
    for (int64_t group = count * part / job->parts; group < count * (part + 1) / job->parts; group++) {
        if (has_rays(p)) {
            if (job->backward)
                backward_ray(y, job, group, g, &m, sums);
            else
                forward_ray(y, p, &job->rays, group, g, &m);
            continue;
        }
        g.first = group * y.lanes;
        g.count = least(y.lanes, length_of(p) - g.first);
        read_exponents(y, p, &g, m.a);
        int64_t squarings = exponentiate(y, &m, (int)job->backward, 1);
        if (!job->backward) {
            write_table(y, p, &g, m.level[0]);
            continue;
        }
        read_tangent(y, p, &g, m.x);
        carry_back(y, &m, squarings);
        if (p->positions)
            collect(y, job, &g, m.x, sums);
        else
            write_gradient(y, p, &g, m.x);
    }
    if (job->backward && p->positions) write_sums(y, job, &g, part, sums);
}

API int64_t torchrope_skew_exp(const SkewExp *p, int64_t backward) {
    CHECK_LAYOUT(p);
    int with_sums = backward && p->positions;
    int64_t parts = parts_of(columns_of(p), groups_of(p), with_sums, p->threads);
    Job job = {p, {0, NULL, NULL, NULL}, parts, backward, NULL, NULL};
    int64_t numbers = with_sums ? p->axes * p->heads * p->blocks * p->b * p->b : 0;
    int64_t places = backward && p->d_positions ? p->sets * p->tokens * p->axes : 0;
    float *partial = NULL;
    if (numbers) {
        partial = allocate(4 * (job.parts * numbers + columns_of(p) * places));
        if (!partial) return OUT_OF_MEMORY;
        job.generators = partial;
        if (places) job.positions = partial + job.parts * numbers;
    }
    /* the gradient of a position needs a separate J */
    int64_t status = has_rays(p) && !find_rays(p, !p->d_positions, &job.rays) ? OUT_OF_MEMORY : DONE;
    if (status == DONE) {
        Arena arena = {NULL, 0};
        float *sums;
        lay_out(&job, layout_for(p->b), &arena, &sums);
        status = parallel_for(columns_of(p) * job.parts, p->threads, arena.used, run_part, &job);
    }
    if (status == DONE && numbers) add_parts(job.generators, job.parts, numbers, p->d_generators);
    if (status == DONE && places) add_parts(job.positions, columns_of(p), places, p->d_positions);
    free(job.rays.first);
    free(partial);
    return status;
}
