/* Decomposition of skew blocks into planes:  B = U diag([[0, -w], [w, 0]]) U^T,  U orthogonal, w >= 0.

   Jacobi's method on pairs of planes, in double, several matrices side by side. Conjugation by a rotation of four
   coordinates is, in quaternions, x -> a x b, which rotates the two halves l and r of a skew 4 x 4 block
   x -> l x + x r  separately:  a^-1 l a  and  b r b^-1.  Rotating l and r onto the first axis, in its nearer
   direction, zeroes the entries between the two planes. U is a product of rotations for any rank of B, so no plane is
   lost.
   (Hacon, Jacobi's method for skew-symmetric matrices, SIAM J. Matrix Anal. Appl. 14, 1993) */
#include "common.h"

enum { LANES = 8, SWEEPS = 60 };
typedef double lanes[LANES];

/* Remaining squared entries between planes, relative to all: far below the resolution of float32. */
static const double RESIDUE = 1e-20;

typedef struct {
    int64_t size, count, b, threads; /* b even */
    const float *base;         /* (count, b, b) */
    float *basis;              /* (count, b, b) */
    float *angular;            /* (count, b / 2) */
} SkewEig;

/* The largest ratio, over all lanes, of squared entries between planes to all; NaN counts as 0. */
INLINE double between_planes(int64_t b, lanes *a) {
    double worst = 0;
    lanes outside = {0}, all = {0};
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < i; j++)
            for (int l = 0; l < LANES; l++) {
                double square = a[i * b + j][l] * a[i * b + j][l];
                all[l] += square;
                outside[l] += i / 2 == j / 2 ? 0 : square;
            }
    for (int l = 0; l < LANES; l++)
        if (outside[l] > worst * all[l]) worst = outside[l] / all[l];
    return worst;
}

/* The unit quaternion (q0, 0, q2, q3) that rotates v onto the first axis, in its nearer direction; or back for sign -1. */
INLINE void quaternion(double first, double second, double third, double sign, double *q0, double *q2, double *q3) {
    double along = fabs(first), across = second * second + third * third, near = first < 0 ? -sign : sign;
    double whole = sqrt(along * along + across) + along, length = sqrt(whole * whole + across);
    double scale = length > 0 ? 1 / length : 0;
    *q0 = length > 0 ? whole * scale : 1;
    *q2 = near * third * scale;
    *q3 = -near * second * scale;
}

/* The rotation of coordinates x -> a x b that zeroes the entries between planes p and q. */
INLINE void find_rotation(int64_t b, lanes *a, int64_t p, int64_t q, double (*rotation)[4][LANES]) {
    lanes *p0 = a + 2 * p * b + 2 * q, *p1 = p0 + b;
    for (int l = 0; l < LANES; l++) {
        double k01 = a[2 * p * b + 2 * p + 1][l], k23 = a[2 * q * b + 2 * q + 1][l];
        double k02 = p0[0][l], k03 = p0[1][l], k12 = p1[0][l], k13 = p1[1][l];
        double a0, a2, a3, b0, b2, b3;
        quaternion(-(k01 + k23), k13 - k02, -(k03 + k12), -1, &a0, &a2, &a3);
        quaternion(k23 - k01, -(k02 + k13), k12 - k03, 1, &b0, &b2, &b3);
        double left[4][4] = {{a0, 0, -a2, -a3}, {0, a0, -a3, a2}, {a2, a3, a0, 0}, {a3, -a2, 0, a0}};
        double right[4][4] = {{b0, 0, -b2, -b3}, {0, b0, b3, -b2}, {b2, -b3, b0, 0}, {b3, b2, 0, b0}};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                double sum = 0;
                for (int k = 0; k < 4; k++) sum += left[i][k] * right[k][j];
                rotation[i][j][l] = sum;
            }
    }
}

/* Rotate the coordinates of planes p and q among themselves: entries p, p + 1, q, q + 1, `apart` from one another. */
INLINE void rotate_four(lanes *p, lanes *q, int64_t apart, double (*rotation)[4][LANES]) {
    for (int l = 0; l < LANES; l++) {
        double x[4] = {p[0][l], p[apart][l], q[0][l], q[apart][l]}, y[4];
        for (int j = 0; j < 4; j++) {
            y[j] = 0;
            for (int i = 0; i < 4; i++) y[j] += x[i] * rotation[i][j][l];
        }
        p[0][l] = y[0], p[apart][l] = y[1], q[0][l] = y[2], q[apart][l] = y[3];
    }
}

/* Cyclic sweeps over pairs of planes: a becomes planes on the diagonal, u the rotation that made it so. */
INLINE void separate_planes(int64_t b, lanes *a, lanes *u) {
    double rotation[4][4][LANES];
    for (int sweep = 0; sweep < SWEEPS && between_planes(b, a) > RESIDUE; sweep++)
        for (int64_t p = 0; p < b / 2; p++)
            for (int64_t q = p + 1; q < b / 2; q++) {
                find_rotation(b, a, p, q, rotation);
                for (int64_t k = 0; k < b; k++) rotate_four(a + k * b + 2 * p, a + k * b + 2 * q, 1, rotation);
                for (int64_t k = 0; k < b; k++) rotate_four(a + 2 * p * b + k, a + 2 * q * b + k, b, rotation);
                for (int64_t k = 0; k < b; k++) rotate_four(u + k * b + 2 * p, u + k * b + 2 * q, 1, rotation);
            }
}

INLINE void decompose(int64_t b, const SkewEig *p, int64_t first, lanes *a) {
    int64_t square = b * b, count = least(LANES, p->count - first);
    lanes *u = a + square;
    for (int l = 0; l < LANES; l++) {
        const float *source = p->base + (first + least(l, count - 1)) * square;
        for (int64_t i = 0; i < square; i++) a[i][l] = source[i];
        for (int64_t i = 0; i < square; i++) u[i][l] = i / b == i % b;
    }
    separate_planes(b, a, u);
    for (int64_t l = 0; l < count; l++) {
        const float *source = p->base + (first + l) * square;
        float *basis = p->basis + (first + l) * square, *angular = p->angular + (first + l) * (b / 2);
        double size = 0;
        for (int64_t i = 0; i < square; i++) size += fabs((double)source[i]);
        if (!(size < INFINITY)) { /* not finite: no decomposition */
            for (int64_t i = 0; i < square; i++) basis[i] = NAN;
            for (int64_t i = 0; i < b / 2; i++) angular[i] = NAN;
            continue;
        }
        for (int64_t plane = 0; plane < b / 2; plane++) {
            double w = a[(2 * plane + 1) * b + 2 * plane][l];
            int64_t swap = w < 0; /* the same plane with its vectors swapped has w > 0 */
            for (int64_t i = 0; i < b; i++) {
                basis[i * b + 2 * plane + swap] = (float)u[i * b + 2 * plane][l];
                basis[i * b + 2 * plane + 1 - swap] = (float)u[i * b + 2 * plane + 1][l];
            }
            angular[plane] = (float)fabs(w);
        }
    }
}

static void group(const void *context, int64_t item, void *memory) {
    const SkewEig *p = context;
    switch (p->b) { /* specialised sizes */
    case 4: decompose(4, p, item * LANES, memory); return;
    case 8: decompose(8, p, item * LANES, memory); return;
    default: decompose(p->b, p, item * LANES, memory); return;
    }
}

API int64_t torchrope_skew_eig(const SkewEig *p) {
    CHECK_LAYOUT(p);
    int64_t bytes = 2 * p->b * p->b * (int64_t)sizeof(lanes);
    return parallel_for((p->count + LANES - 1) / LANES, p->threads, bytes, group, p);
}
