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
                      const vf *initial, float factor) {
    vf sum[LANE_ROWS][4];
    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
        _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++) {
            sum[i][j] = (vf){0};
            if (initial) sum[i][j] = factor * initial[i * b + j];
        }
    for (int64_t k = 0; k < b; k++) {
        _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
            _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++)
                sum[i][j] += a[i * ai + k * ak] * right[k * b + j];
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
        _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++) c[i * b + j] = sum[i][j];
}

/* Whether a product, with its initial value, equals its transpose or the negative of it. */
typedef enum { NEITHER = 0, SYMMETRIC = 1, SKEW = -1 } Symmetry;

INLINE void lane_product(int64_t b, vf *c, const vf *a, const vf *right, int transposed, const vf *initial,
                         float factor, Symmetry symmetry) {
    int64_t ai = transposed ? 1 : b, ak = transposed ? b : 1, i = 0;
#define TILE(ROWS, COLUMNS)                                                                                           \
    lane_tile(ROWS, COLUMNS, b, a + i * ai, ai, ak, right + j, c + i * b + j, initial ? initial + i * b + j : NULL, factor)
    for (; i + LANE_ROWS <= b; i += LANE_ROWS) {
        int64_t j = symmetry ? i / 4 * 4 : 0;
        for (; j + 4 <= b; j += 4) TILE(LANE_ROWS, 4);
        for (; j < b; j++) TILE(LANE_ROWS, 1);
    }
    for (; i < b; i++) {
        int64_t j = symmetry ? i / 4 * 4 : 0;
        for (; j + 4 <= b; j += 4) TILE(1, 4);
        for (; j < b; j++) TILE(1, 1);
    }
#undef TILE
    for (i = 4; symmetry && i < b; i++)
        for (int64_t j = 0; j < i / 4 * 4; j++) c[i * b + j] = symmetry == SKEW ? -c[j * b + i] : c[j * b + i];
}

/* Out-of-line copies of products, one unrolled for size 4: products dominate the run time. */
#define NOINLINE static __attribute__((noinline)) void
NOINLINE lane_product_4(vf *c, const vf *a, const vf *right, int transposed, const vf *initial, float factor,
                        Symmetry symmetry) {
    lane_product(4, c, a, right, transposed, initial, factor, symmetry);
}
NOINLINE lane_product_any(int64_t b, vf *c, const vf *a, const vf *right, int transposed, const vf *initial,
                          float factor, Symmetry symmetry) {
    lane_product(b, c, a, right, transposed, initial, factor, symmetry);
}

/* c = factor initial + a right, or a^T right; c may be the initial value, which may be NULL. */
INLINE void multiply(int64_t b, vf *c, const vf *a, const vf *right, int transposed, const vf *initial, float factor,
                     Symmetry symmetry) {
    if (b == 4)
        lane_product_4(c, a, right, transposed, initial, factor, symmetry);
    else
        lane_product_any(b, c, a, right, transposed, initial, factor, symmetry);
}

/* The larger of the absolute values in each lane, as bits: ordered as the numbers, then infinity, then NaN. */
INLINE vi larger(vi a, vi b) {
    a &= INT32_MAX, b &= INT32_MAX;
    vi first = a > b;
    return (a & first) | (b & ~first);
}

/* Largest row sum of absolute values, over all lanes. */
INLINE float row_norm(int64_t b, const vf *a) {
    vf norm = {0};
    for (int64_t i = 0; i < b; i++) {
        vf sum = {0};
        for (int64_t j = 0; j < b; j++) sum += (vf)((vi)a[i * b + j] & INT32_MAX);
        norm = (vf)larger((vi)sum, (vi)norm);
    }
    float largest = norm[0];
    for (int l = 1; l < VW; l++) largest = norm[l] > largest ? norm[l] : largest;
    return largest;
}

/* ---- the exponential ---- */

/* Exponents with a norm above 2^FARTHEST are scaled down below it: such angles have no correct digit in float32, and a
   common scale would reduce the accuracy of the other lanes. */
static const int FARTHEST = 40;
enum {
    LEVELS = 48,  /* squarings are fewer: FARTHEST and a few for the row sums */
    RENEW = 8,    /* squarings between orthogonalisations */
    ENOUGH = 16,  /* allowed growth of the error since the last orthogonalisation; a squaring doubles it */
};

typedef struct {
    vf *a, *s, *s2, *s3, *s4, *t, *x;
    vf *level[LEVELS]; /* E before each squaring, the last after all; without `keep` only the first */
} Memory;

/* Make every lane finite and its norm less than 2^FARTHEST. Lanes that are not finite are set to zero, or they would
   affect the others; `bad` is their bit mask. Returns an exponent e with all entries below 2^e. */
INLINE int bring_near(int64_t b, vf *a, uint32_t *bad) {
    vi largest = {0};
    for (int64_t i = 0; i < b * b; i++) largest = larger((vi)a[i], largest);
    int far = 0, exponent[VW], most = -127;
    *bad = 0;
    for (int64_t l = 0; l < VW; l++) {
        exponent[l] = (largest[l] >> 23) - 127 + 1;
        most = exponent[l] > most ? exponent[l] : most;
        if (exponent[l] > 128) *bad |= (uint32_t)1 << l;
        exponent[l] = (int)least(0, FARTHEST - 7 - exponent[l]); /* 2^7 >= b */
        far |= exponent[l];
    }
    for (int64_t i = 0; far && i < b * b; i++)
        for (int64_t l = 0; l < VW; l++) a[i][l] = *bad >> l & 1 ? 0 : ldexpf(a[i][l], exponent[l]);
    return (int)least(most, FARTHEST - 7);
}

/* R <- R (1 - F / 2) with F = R^T R - 1, for R = 1 + E: the remaining error is F squared. */
NOINLINE renew(int64_t b, const Memory *m, vf *e) {
    vf *f = m->s3, *next = m->s4;
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < b; j++) f[i * b + j] = e[i * b + j] + e[j * b + i];
    multiply(b, f, e, e, 1, f, 1, SYMMETRIC);
    for (int64_t i = 0; i < b * b; i++) {
        f[i] *= -0.5f;
        next[i] = e[i] + f[i];
    }
    multiply(b, next, e, f, 0, next, 1, NEITHER);
    memcpy(e, next, sizeof(vf) * b * b);
}

enum { PLAIN = 9 }; /* entries below 2^PLAIN: the eighth power of A does not overflow */

/* From the exponent in m->a to E at every level (or the last alone); returns the number of squarings, with the scaled
   exponent in m->a if levels are kept. */
INLINE int64_t exponentiate(int64_t b, const Memory *m, int keep) {
    vf *a = m->a, *s = m->s, *s2 = m->s2, *s3 = m->s3, *s4 = m->s4, *t = m->t, *e = m->level[0];
    int64_t before = 0;
    uint32_t bad;
    if (bring_near(b, a, &bad) > PLAIN) {
        float norm = row_norm(b, a); /* 0 if no lane is finite */
        before = norm > 1 ? (int64_t)ceilf(log2f(norm)) : 0;
        float shrink = exp2f((float)-before);
        for (int64_t i = 0; i < b * b; i++) a[i] *= shrink;
    }
    multiply(b, s, a, a, 0, NULL, 1, SYMMETRIC);
    multiply(b, s2, s, s, 0, NULL, 1, SYMMETRIC);
    /* |A|^4 <= |A^4|, and the row sum bounds the right side */
    float bound = sqrtf(sqrtf(row_norm(b, s2))) * 1.0001f;
    int64_t squarings = bound > 0 ? before + (int64_t)ceilf(log2f(bound / LARGEST)) : 0;
    if (squarings < 0) squarings = 0;
    multiply(b, s3, s2, s, 0, NULL, 1, SYMMETRIC);
    multiply(b, s4, s2, s2, 0, NULL, 1, SYMMETRIC);
    float scale = exp2f((float)(before - squarings)), even[4], odd[4], power = scale;
    for (int k = 0; k < 4; k++) {
        power *= scale;
        even[k] = C[k] * power;
        power *= scale;
        odd[k] = Z[k] * power;
    }
    for (int64_t i = 0; i < b * b; i++) {
        vf s_i = s[i], s2_i = s2[i], s3_i = s3[i], s4_i = s4[i];
        t[i] = odd[0] * s_i + odd[1] * s2_i + odd[2] * s3_i + odd[3] * s4_i;
        e[i] = scale * a[i] + (even[0] * s_i + even[1] * s2_i + even[2] * s3_i + even[3] * s4_i);
    }
    multiply(b, e, a, t, 0, e, 1, NEITHER);
    for (int64_t i = 0; keep && scale != 1 && i < b * b; i++) a[i] *= scale;
    for (int64_t h = 0; h < squarings; h++) {
        vf *next = keep ? m->level[h + 1] : e == m->level[0] ? s : m->level[0];
        multiply(b, next, e, e, 0, e, 2, NEITHER);
        e = next;
        if (h % RENEW == RENEW - 1) renew(b, m, e);
    }
    if (1 << squarings % RENEW > ENOUGH) renew(b, m, e);
    if (!keep && e != m->level[0]) memcpy(m->level[0], e, sizeof(vf) * b * b);
    for (int64_t i = 0; bad && i < b * b; i++)
        for (int64_t l = 0; l < VW; l++)
            if (bad >> l & 1) a[i][l] = m->level[keep ? squarings : 0][i][l] = NAN; /* and so the gradient */
    return squarings;
}

/* result = factor x + t - t^T, of a skew x, which may be NULL; if `sum`, add weight (t - t^T) to its upper triangle */
INLINE void antisymmetrise(int64_t b, vf *result, const vf *x, float factor, const vf *t, vf *sum, float weight) {
    for (int64_t i = 0; i < b; i++) {
        result[i * b + i] = (vf){0};
        for (int64_t j = i + 1; j < b; j++) {
            vf value = t[i * b + j] - t[j * b + i];
            if (x) value += factor * x[i * b + j];
            if (sum) sum[i * b + j] += weight * value;
            result[i * b + j] = value;
            result[j * b + i] = -value;
        }
    }
}

/* result = A x - x A, of which weight times the upper triangle is added to the sum */
INLINE void commutator(int64_t b, const vf *a, const vf *x, vf *result, vf *sum, float weight, vf *t) {
    multiply(b, t, a, x, 0, NULL, 1, NEITHER);
    antisymmetrise(b, result, NULL, 0, t, sum, weight);
}

/* From M in m->x to  J = integral_0^1 e^(-uG) M e^(uG) du  in m->x. */
INLINE void carry_back(int64_t b, const Memory *m, int64_t squarings) {
    vf *power = m->x, *sum = m->s, *next = m->s2, *t = m->t;
    for (int64_t i = 0; i < b * b; i++) sum[i] = F[0] * power[i];
    for (int k = 1; k < TERMS; k++) {
        commutator(b, m->a, power, next, sum, F[k], t);
        vf *spare = power;
        power = next;
        next = spare;
    }
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < i; j++) sum[i * b + j] = -sum[j * b + i];
    for (int64_t h = 0; h < squarings; h++) { /* 2 J + E^T J + J E + E^T J E = J + R^T J R, twice the next J */
        multiply(b, t, sum, m->level[h], 0, NULL, 1, NEITHER);
        antisymmetrise(b, sum, sum, 2, t, NULL, 0);
        multiply(b, sum, m->level[h], t, 1, sum, 1, SKEW);
    }
    float scale = exp2f((float)-squarings);
    for (int64_t i = 0; i < b * b; i++) m->x[i] = scale * sum[i];
}

/* ---- the loop ---- */

static int is_large(const SkewExp *p) { return p->b > 8; }
static int64_t columns_of(const SkewExp *p) { return p->positions ? p->heads * p->blocks : 1; }
static int64_t groups_of(const SkewExp *p) {
    int64_t size = !is_large(p) ? layout_for(p->b).lanes : p->positions ? 4 * VW : VW; /* two of five share a ray */
    return (length_of(p) + size - 1) / size;
}

static Memory lay_out(const Job *job, Layout y, Arena *arena, float **sums) {
    Memory m;
    vf **squares[] = {&m.a, &m.s, &m.s2, &m.s3, &m.s4, &m.t, &m.x};
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
        read_exponents(y, p, &g, (float *)m.a);
        int64_t squarings = exponentiate(y.b, &m, (int)job->backward);
        if (!job->backward) {
            write_table(y, p, &g, (const float *)m.level[0]);
            continue;
        }
        read_tangents(y, p, &g, (float *)m.x);
        carry_back(y.b, &m, squarings);
        if (p->positions)
            collect(y, job, &g, (float *)m.x, sums);
        else
            write_gradient(y, p, &g, (float *)m.x);
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
