/* exp of skew matrices, and its gradient, by scaling and squaring of E = exp - 1.

   Below a norm of LARGEST both are polynomials, near-minimax: exp in S = A^2, split into its even and odd part, and
   the gradient in ad_A, where [A, X] = A X - (A X)^T is one product because both are skew. Matrices are interleaved,
   one per vector lane. Those of more than 8 rows are decomposed into planes instead (skew_large.h). */
#include "skew_exp.h"
#include "skew_large.h"

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

/* ---- products ---- */

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

/* c (+)= a right, or a^T right. */
INLINE void multiply(Layout y, float *c, const float *a, const float *right, int transposed, int accumulate) {
    if (y.b == 8)
        lane_product_8(c, a, right, transposed, accumulate);
    else if (y.b == 4)
        lane_product_4(c, a, right, transposed, accumulate);
    else
        lane_product_any(y.b, c, a, right, transposed, accumulate);
}

/* c = t^T */
APART transpose(Layout y, float *c, const float *t) {
    for (int64_t i = 0; i < y.b; i++)
        for (int64_t j = 0; j < y.b; j++) ((vf *)c)[i * y.b + j] = ((const vf *)t)[j * y.b + i];
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
        for (int64_t j = 0; j < y.b; j++) sum += (vf)((vi)row[j] & INT32_MAX);
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
    RENEW = 8,    /* squarings between orthogonalisations */
    ENOUGH = 16,  /* growth of the error allowed without one at the end: squarings double it */
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

/* From the exponent in m->a to E at every level (or the last alone); returns the number of squarings, with the scaled
   exponent in m->a. */
static __attribute__((noinline)) int64_t exponentiate(Layout y, Memory *m, int keep) {
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
    if (1 << squarings % RENEW > ENOUGH) renew(y, m, e);
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

/* ---- the loop ---- */

static int is_large(const SkewExp *p) { return p->b > 8; }
static int64_t columns_of(const SkewExp *p) { return p->positions ? p->heads * p->blocks : 1; }
static int64_t groups_of(const SkewExp *p) {
    int64_t size = !is_large(p) ? layout_for(p->b).lanes : p->positions ? 4 * VW : VW; /* two of five are on other rays */
    return (length_of(p) + size - 1) / size;
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
    int64_t count = groups_of(p), part = item % job->parts;
    Arena arena = {memory, 0};
    float *sums;
    Memory m = lay_out(job, y, &arena, &sums);
    if (job->backward) memset(sums, 0, 4 * y.size * p->axes);
    Group g = {item / job->parts / p->blocks, item / job->parts % p->blocks, 0, 0};
    for (int64_t group = count * part / job->parts; group < count * (part + 1) / job->parts; group++) {
        g.first = group * y.lanes;
        g.count = least(y.lanes, length_of(p) - g.first);
        read_exponents(y, p, &g, m.a);
        int64_t squarings = exponentiate(y, &m, (int)job->backward);
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

/* All columns, in parts that need this memory. */
static int64_t run_parts(Job *job) {
    Arena arena = {NULL, 0};
    int64_t items = columns_of(job->p) * job->parts;
    if (is_large(job->p)) {
        if (!find_rays(job->p, !job->p->d_positions, &job->rays)) return OUT_OF_MEMORY;
        lay_out_large(job, &arena);
        int64_t status = parallel_for(items, job->p->threads, arena.used, run_large_part, job);
        free(job->rays.first);
        return status;
    }
    float *sums;
    lay_out(job, layout_for(job->p->b), &arena, &sums);
    return parallel_for(items, job->p->threads, arena.used, run_part, job);
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
    int64_t status = run_parts(&job);
    if (status == DONE && numbers) add_parts(job.generators, job.parts, numbers, p->d_generators);
    if (status == DONE && places) add_parts(job.positions, columns_of(p), places, p->d_positions);
    free(partial);
    return status;
}
