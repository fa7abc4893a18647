/* Skew blocks in their planes:  B = U diag([[0, -w], [w, 0]]) U^T,  U orthogonal, w >= 0.

   -B^2 is symmetric with each w^2 twice. Jacobi's rotations diagonalise it, several matrices side by side, in double;
   then each eigenvector v is paired with B v / w, and both are taken out of what is left. */
#include "common.h"

enum { LANES = 8, SWEEPS = 40 };
typedef double lanes[LANES];

typedef struct {
    int64_t count, b, threads; /* b even */
    const float *base;         /* (count, b, b) */
    float *basis;              /* (count, b, b) */
    float *angular;            /* (count, b / 2) */
} SkewEig;

/* Rotate columns (and rows) p and q of every lane by its own angle. */
INLINE void rotate_pair(double *first, double *second, const double *cosine, const double *sine) {
    for (int l = 0; l < LANES; l++) {
        double x = first[l], y = second[l];
        first[l] = cosine[l] * x - sine[l] * y;
        second[l] = sine[l] * x + cosine[l] * y;
    }
}

INLINE double off_diagonal(int64_t b, lanes *a) {
    double worst = 0;
    for (int l = 0; l < LANES; l++) {
        double off = 0, on = 0;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j <= i; j++) {
                double square = a[i * b + j][l] * a[i * b + j][l];
                if (i == j) on += square; else off += square;
            }
        if (off > worst * on) worst = on > 0 ? off / on : 0;
    }
    return worst;
}

/* Cyclic Jacobi: a becomes diagonal, the columns of v its eigenvectors. */
INLINE void diagonalise(int64_t b, lanes *a, lanes *v) {
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < b; j++)
            for (int l = 0; l < LANES; l++) v[i * b + j][l] = i == j;
    for (int sweep = 0; sweep < SWEEPS && off_diagonal(b, a) > 1e-28; sweep++)
        for (int64_t p = 0; p < b; p++)
            for (int64_t q = p + 1; q < b; q++) {
                double cosine[LANES], sine[LANES];
                for (int l = 0; l < LANES; l++) {
                    double apq = a[p * b + q][l], gap = 0.5 * (a[q * b + q][l] - a[p * b + p][l]);
                    double length = fabs(gap) + sqrt(gap * gap + apq * apq);
                    double t = length > 0 ? (gap < 0 ? -apq : apq) / length : 0;
                    cosine[l] = 1 / sqrt(1 + t * t);
                    sine[l] = t * cosine[l];
                }
                for (int64_t k = 0; k < b; k++) rotate_pair(a[k * b + p], a[k * b + q], cosine, sine);
                for (int64_t k = 0; k < b; k++) rotate_pair(a[p * b + k], a[q * b + k], cosine, sine);
                for (int64_t k = 0; k < b; k++) rotate_pair(v[k * b + p], v[k * b + q], cosine, sine);
            }
}

INLINE double dot(int64_t n, const double *x, const double *y) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* Take the unit vector u out of x, twice for orthogonality to the last bit. */
INLINE void take_out(int64_t n, double *x, const double *u) {
    for (int again = 0; again < 2; again++) {
        double along = dot(n, x, u);
        for (int64_t i = 0; i < n; i++) x[i] -= along * u[i];
    }
}

INLINE void normalise(int64_t n, double *x) {
    double length = sqrt(dot(n, x, x));
    for (int64_t i = 0; i < n; i++) x[i] /= length;
}

/* Pair the b eigenvectors in the rows of v; u receives the columns of U as rows. */
static void pair_up(int64_t b, const double *base, double *v, double *u, float *basis, float *angular) {
    double largest = 0;
    for (int64_t plane = 0; plane < b / 2; plane++) {
        double *x = u + 2 * plane * b, *y = x + b, most = -1;
        int64_t pick = 0;
        for (int64_t i = 0; i < b; i++) {
            double left = dot(b, v + i * b, v + i * b);
            if (left > most * 1.0000001) most = left, pick = i;
        }
        memcpy(x, v + pick * b, 8 * b);
        normalise(b, x);
        for (int64_t i = 0; i < 2 * plane; i++) take_out(b, x, u + i * b);
        normalise(b, x);
        for (int64_t i = 0; i < b; i++) y[i] = dot(b, base + i * b, x);
        for (int64_t i = 0; i <= 2 * plane; i++) take_out(b, y, u + i * b);
        double w = sqrt(dot(b, y, y));
        largest = w > largest ? w : largest;
        for (int64_t i = 0; i < b; i++) take_out(b, v + i * b, x);
        if (w > 1e-9 * largest && w > 0) {
            normalise(b, y);
        } else { /* a plane that does not turn: any vector that is left */
            w = 0;
            most = -1;
            for (int64_t i = 0; i < b; i++) {
                double left = dot(b, v + i * b, v + i * b);
                if (left > most) most = left, pick = i;
            }
            memcpy(y, v + pick * b, 8 * b);
            normalise(b, y);
            for (int64_t i = 0; i <= 2 * plane; i++) take_out(b, y, u + i * b);
            normalise(b, y);
        }
        for (int64_t i = 0; i < b; i++) take_out(b, v + i * b, y);
        angular[plane] = (float)w;
    }
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < b; j++) basis[i * b + j] = (float)u[j * b + i];
}

INLINE void decompose(int64_t b, const SkewEig *p, int64_t first) {
    int64_t square = b * b, count = least(LANES, p->count - first);
    lanes *a = scratch(2 * square * sizeof(lanes) + 3 * 8 * square);
    lanes *v = a + square;
    double *base = (double *)(v + square), *rows = base + square, *u = rows + square;
    for (int l = 0; l < LANES; l++) {
        const float *source = p->base + (first + least(l, count - 1)) * square;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                double sum = 0;
                for (int64_t k = 0; k < b; k++) sum += (double)source[i * b + k] * (double)source[j * b + k];
                a[i * b + j][l] = sum;
            }
    }
    diagonalise(b, a, v);
    for (int64_t l = 0; l < count; l++) {
        float *basis = p->basis + (first + l) * square, *angular = p->angular + (first + l) * (b / 2);
        for (int64_t i = 0; i < square; i++) base[i] = p->base[(first + l) * square + i];
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) rows[j * b + i] = v[i * b + j][l];
        pair_up(b, base, rows, u, basis, angular);
        if (dot(square, base, base) < INFINITY) continue;
        for (int64_t i = 0; i < square; i++) basis[i] = NAN; /* what is not finite has no planes */
        for (int64_t i = 0; i < b / 2; i++) angular[i] = NAN;
    }
    free(a);
}

static void group(void *context, int64_t item) {
    const SkewEig *p = context;
    switch (p->b) { /* sizes that the compiler should know */
    case 4: decompose(4, p, item * LANES); return;
    case 8: decompose(8, p, item * LANES); return;
    default: decompose(p->b, p, item * LANES); return;
    }
}

API void torchrope_skew_eig(const SkewEig *p) {
    parallel_for((p->count + LANES - 1) / LANES, p->threads, group, (void *)p);
}
