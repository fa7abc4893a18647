/* Decomposition of large skew matrices into planes:  A = sum_i w_i (p_i r_i^T - r_i p_i^T), all p and r orthonormal.

   Reflections make A tridiagonal: A = Q T Q^T. T connects even coordinates with odd ones alone, by a bidiagonal matrix,
   whose singular values are the frequencies w and whose singular vectors are the planes (Ward and Gray, Eigensystem
   computation for skew-symmetric matrices, ACM Trans. Math. Softw. 4, 1978). QR iterations are sequences of dependent
   steps, so several matrices are iterated side by side, one per lane. T and w are computed in double, so that angles are
   accurate to float32 at any norm; vectors in float32, which is accurate enough for orthogonal factors. */
#ifndef TORCHROPE_SKEW_PLANES_H
#define TORCHROPE_SKEW_PLANES_H
#include "common.h"

enum { DOUBLES = VW / 2, REFLECTIONS = 4, SWEEPS_PER_PLANE = 30 };
typedef int64_t vl __attribute__((vector_size(4 * VW), aligned(8), may_alias));

/* Off-diagonal entries, relative to the largest entry, that are neglected: far below the resolution of float32. */
static const double NEGLIGIBLE = 1e-12;

INLINE vd select_lanes(vl mask, vd a, vd b) { return (vd)(((vl)a & mask) | ((vl)b & ~mask)); }
INLINE vd square_root(vd x) {
#if VW == 16
    return (vd)_mm512_sqrt_pd((__m512d)x);
#elif VW == 8
    return (vd)_mm256_sqrt_pd((__m256d)x);
#else
    for (int l = 0; l < DOUBLES; l++) x[l] = sqrt(x[l]);
    return x;
#endif
}

/* ---- A = Q T Q^T ---- */

/* For `vectors` of columns and rows i >= first: row_i += old_v[i] old_y - old_y[i] old_v, then y = -sum_i v[i] row_i. */
INLINE void reflect_columns(int vectors, int64_t first, int64_t n, int64_t width, double *a, const double *old_v,
                            const double *old_y, const double *v, double *y, int64_t column) {
    vd sum[4] = {{0}}, ov[4], oy[4];
    _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) {
        ov[j] = *(const vd *)(old_v + column + j * DOUBLES);
        oy[j] = *(const vd *)(old_y + column + j * DOUBLES);
    }
    for (int64_t i = first; i < n; i++) {
        vd *row = (vd *)(a + i * width + column);
        double left = old_v[i], right = old_y[i], factor = v[i];
        _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) {
            vd x = row[j] + left * oy[j] - right * ov[j];
            row[j] = x;
            sum[j] -= factor * x;
        }
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) *(vd *)(y + column + j * DOUBLES) = sum[j];
}

INLINE double sum_of_squares(int64_t n, const double *x) {
    vd sums = {0};
    for (int64_t i = 0; i < n; i += DOUBLES) sums += *(const vd *)(x + i) * *(const vd *)(x + i);
    for (int l = 1; l < DOUBLES; l++) sums[0] += sums[l];
    return sums[0];
}

/* a: (n, width), skew, zero from column n on. Row k becomes v of the reflection 1 - v v^T, t_k = T[k][k + 1].
   y: three vectors of `width`. Conjugation by a reflection adds  v y^T - y v^T  with y = A v. */
INLINE void tridiagonalize(int64_t n, int64_t width, double *a, double *t, double *y) {
    double *old_y = y + width, *zero = y + 2 * width;
    const double *old_v = zero;
    memset(y, 0, 8 * 3 * width);
    for (int64_t k = 0; k < n - 1; k++) {
        double *row = a + k * width;
        for (int64_t j = k + 1; j < n; j++) row[j] += old_v[k] * old_y[j] - old_y[k] * old_v[j];
        double first = row[k + 1];
        memset(row, 0, 8 * (k + 2));
        double squares = sum_of_squares(width, row), norm = sqrt(first * first + squares);
        t[k] = squares > 0 ? (first > 0 ? -norm : norm) : first;
        row[k + 1] = squares > 0 ? first - t[k] : 0;
        double scale = squares > 0 ? 1 / sqrt(norm * (norm + fabs(first))) : 0; /* v^T v = 2, or v = 0 */
        for (int64_t j = k + 1; j < n; j++) row[j] *= scale;
        int64_t column = (k + 1) / DOUBLES * DOUBLES;
        for (; column + 4 * DOUBLES <= width; column += 4 * DOUBLES)
            reflect_columns(4, k + 1, n, width, a, old_v, old_y, row, y, column);
        for (; column < width; column += DOUBLES) reflect_columns(1, k + 1, n, width, a, old_v, old_y, row, y, column);
        double *spare = old_y;
        old_v = row, old_y = y, y = spare;
    }
}

/* Q <- H_0 H_1 H_2 H_3 Q for `vectors` of columns, H_r = 1 - v_r v_r^T;  dots[r][o] = v_r^T v_o. */
INLINE void apply_reflections(int vectors, int64_t first, int64_t n, int64_t width, const float *v,
                              float (*dots)[REFLECTIONS], float *q, int64_t column) {
    vf sum[REFLECTIONS][2] = {{{0}}};
    for (int64_t i = first; i < n; i++)
        _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) {
            vf x = loaded(q + i * width + column + j * VW);
            _Pragma("GCC unroll 4") for (int r = 0; r < REFLECTIONS; r++) sum[r][j] += v[r * width + i] * x;
        }
    _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++)
        _Pragma("GCC unroll 4") for (int r = REFLECTIONS - 1; r >= 0; r--)
            _Pragma("GCC unroll 4") for (int o = r + 1; o < REFLECTIONS; o++) sum[r][j] -= dots[r][o] * sum[o][j];
    for (int64_t i = first; i < n; i++)
        _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) {
            vf x = *(vf *)(q + i * width + column + j * VW);
            _Pragma("GCC unroll 4") for (int r = 0; r < REFLECTIONS; r++) x -= v[r * width + i] * sum[r][j];
            *(vf *)(q + i * width + column + j * VW) = x;
        }
}

/* Compute Q (n, width), the product of the reflections that `tridiagonalize` stored in the array a (n, stride).
   v: REFLECTIONS rows. */
INLINE void multiply_reflections(int64_t n, int64_t stride, int64_t width, const double *a, float *v, float *q) {
    memset(q, 0, 4 * n * width);
    for (int64_t i = 0; i < n; i++) q[i * width + i] = 1;
    for (int64_t k = (n - 2) / REFLECTIONS * REFLECTIONS; k >= 0; k -= REFLECTIONS) {
        float dots[REFLECTIONS][REFLECTIONS];
        for (int r = 0; r < REFLECTIONS; r++) {
            int exists = k + r < n - 2;
            for (int64_t j = 0; j < n; j++) v[r * width + j] = exists ? (float)a[(k + r) * stride + j] : 0;
            for (int o = 0; o < r; o++) {
                vd dot = {0};
                for (int64_t j = k / DOUBLES * DOUBLES; exists && j < stride; j += DOUBLES)
                    dot += *(const vd *)(a + (k + r) * stride + j) * *(const vd *)(a + (k + o) * stride + j);
                for (int l = 1; l < DOUBLES; l++) dot[0] += dot[l];
                dots[o][r] = (float)dot[0];
            }
        }
        int64_t column = (k + 1) / VW * VW;
        for (; column + 2 * VW <= width; column += 2 * VW)
            apply_reflections(2, k + 1, n, width, v, dots, q, column);
        for (; column < width; column += VW) apply_reflections(1, k + 1, n, width, v, dots, q, column);
    }
}

/* ---- bidiagonal = U diag(d) V^T, in every lane ---- */

/* Givens rotation:  c f + s g = r,  c g = s f.  Inactive lanes and zero vectors get c = 1, s = 0. */
INLINE void find_rotation(vd f, vd g, vl active, vd *c, vd *s, vd *r) {
    vd length = square_root(f * f + g * g);
    vl usable = active & (length > 0);
    vd inverse = 1 / select_lanes(usable, length, (vd){0} + 1);
    *c = select_lanes(usable, f * inverse, (vd){0} + 1);
    *s = select_lanes(usable, g * inverse, (vd){0});
    *r = select_lanes(usable, length, f);
}

INLINE void rotate_vectors(int64_t m, vf *x, vf *y, vf c, vf s) {
    for (int64_t i = 0; i < m; i++) {
        vf a = x[i], b = y[i];
        x[i] = c * a + s * b;
        y[i] = c * b - s * a;
    }
}

/* As many doubles as a vector has floats. */
typedef struct {
    vd half[2];
} Lanes;

#define LANE(x, l) (x).half[(l) / DOUBLES][(l) % DOUBLES]

/* For each lane the rows low ... high of the bidiagonal matrix that are not diagonal yet; low = high if none are. */
typedef struct {
    int64_t low[VW], high[VW];
    Lanes start; /* the first entry of the first column of B^T B - shift, divided by the first diagonal entry */
    int64_t first, last;
} Window;

/* One QR iteration of B^T B, implicitly on B with diagonal d and superdiagonal e (Golub and Van Loan, 8.6.1). */
INLINE void sweep(int64_t m, const Window *w, Lanes *d, Lanes *e, vf *u, vf *v) {
    Lanes f = {{{0}}}, g = {{{0}}}, c, s, r;
    for (int64_t i = w->first; i < w->last; i++) {
        vl active[2];
        for (int h = 0; h < 2; h++) {
            vl at = (vl){0} + i, low = *(const vl *)(w->low + h * DOUBLES);
            active[h] = (low <= at) & (at < *(const vl *)(w->high + h * DOUBLES));
            vl starts = active[h] & (low == at);
            f.half[h] = select_lanes(starts, w->start.half[h], f.half[h]);
            g.half[h] = select_lanes(starts, e[i].half[h], g.half[h]);
            find_rotation(f.half[h], g.half[h], active[h], &c.half[h], &s.half[h], &r.half[h]);
            if (i > w->first) e[i - 1].half[h] = select_lanes(active[h] & ~starts, r.half[h], e[i - 1].half[h]);
            f.half[h] = c.half[h] * d[i].half[h] + s.half[h] * e[i].half[h];
            e[i].half[h] = c.half[h] * e[i].half[h] - s.half[h] * d[i].half[h];
            g.half[h] = s.half[h] * d[i + 1].half[h];
            d[i + 1].half[h] = c.half[h] * d[i + 1].half[h];
        }
        rotate_vectors(m, v + i * m, v + (i + 1) * m, narrow(c.half[0], c.half[1]), narrow(s.half[0], s.half[1]));
        for (int h = 0; h < 2; h++) {
            find_rotation(f.half[h], g.half[h], active[h], &c.half[h], &s.half[h], &d[i].half[h]);
            f.half[h] = c.half[h] * e[i].half[h] + s.half[h] * d[i + 1].half[h];
            d[i + 1].half[h] = c.half[h] * d[i + 1].half[h] - s.half[h] * e[i].half[h];
            e[i].half[h] = f.half[h];
            g.half[h] = s.half[h] * e[i + 1].half[h];
            e[i + 1].half[h] = c.half[h] * e[i + 1].half[h];
        }
        rotate_vectors(m, u + i * m, u + (i + 1) * m, narrow(c.half[0], c.half[1]), narrow(s.half[0], s.half[1]));
    }
}

/* The shift of Wilkinson, from the last two rows and columns of B^T B; 0 if B is singular, which then deflates. */
INLINE double shift_of(const Lanes *d, const Lanes *e, int l, int64_t low, int64_t high, double negligible) {
    for (int64_t i = low; i <= high; i++)
        if (fabs(LANE(d[i], l)) <= negligible) return 0;
    double above = high - 1 > low ? LANE(e[high - 2], l) : 0, last = LANE(e[high - 1], l);
    double diagonal = LANE(d[high - 1], l), final = LANE(d[high], l);
    double t11 = diagonal * diagonal + above * above, t12 = diagonal * last, t22 = final * final + last * last;
    double half = 0.5 * (t11 - t22), root = sqrt(half * half + t12 * t12);
    double shift = t22 - t12 * t12 / (half + (half < 0 ? -root : root));
    return shift > 0 ? shift : 0;
}

/* Set negligible superdiagonal entries to zero, and find in each lane the last block that is not diagonal; returns 0 if
   there is none. */
INLINE int find_window(Window *w, const Lanes *d, Lanes *e, const double *negligible) {
    w->first = INT64_MAX, w->last = 0;
    for (int l = 0; l < VW; l++) {
        int64_t high = w->high[l], low;
        while (high > 0 && fabs(LANE(e[high - 1], l)) <= negligible[l]) {
            high--;
            LANE(e[high], l) = 0;
        }
        low = high;
        while (low > 0 && fabs(LANE(e[low - 1], l)) > negligible[l]) low--;
        if (low > 0) LANE(e[low - 1], l) = 0;
        w->low[l] = low, w->high[l] = high;
        if (low == high) continue;
        double shift = shift_of(d, e, l, low, high, negligible[l]), first = LANE(d[low], l);
        LANE(w->start, l) = shift > 0 ? first - shift / first : first;
        w->first = least(w->first, low);
        w->last = high > w->last ? high : w->last;
    }
    return w->last > 0;
}

/* d, e: (m), diagonal and superdiagonal, with e[m - 1] = 0. u and v: (m, m), left and right singular vectors in rows. */
static __attribute__((noinline)) void decompose_bidiagonal(int64_t m, Lanes *d, Lanes *e, vf *u, vf *v) {
    Window window;
    double negligible[VW] = {0};
    memset(&window, 0, sizeof window);
    memset(u, 0, sizeof(vf) * m * m);
    memset(v, 0, sizeof(vf) * m * m);
    for (int64_t i = 0; i < m; i++) u[i * m + i] = v[i * m + i] = (vf){0} + 1;
    for (int l = 0; l < VW; l++) {
        window.high[l] = m - 1;
        for (int64_t i = 0; i < m; i++)
            negligible[l] = fmax(negligible[l], NEGLIGIBLE * fmax(fabs(LANE(d[i], l)), fabs(LANE(e[i], l))));
    }
    for (int64_t left = SWEEPS_PER_PLANE * m; left > 0 && find_window(&window, d, e, negligible); left--)
        sweep(m, &window, d, e, u, v);
}

#endif
