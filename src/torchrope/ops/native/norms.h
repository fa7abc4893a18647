/* RMSNorm and LayerNorm of a row, and their gradients:  y = (x - m) r w + b  with r = 1 / sqrt(mean (x - m)^2 + eps),
   m = mean x and b for LayerNorm, m = b = 0 for RMSNorm. */
#ifndef TORCHROPE_NORMS_H
#define TORCHROPE_NORMS_H

#include <float.h>

#include "common.h"

enum { NO_NORM = 0, RMS_NORM = 1, LAYER_NORM = 2 };

/* The norm of queries or keys over head_dim. */
typedef struct {
    int64_t kind;
    double eps;
    const float *weight, *bias; /* (head_dim); bias only for LAYER_NORM */
    float *d_weight, *d_bias;   /* as these, or NULL */
} Norm;

typedef struct {
    float mean, inverse; /* m and r */
} Moments;

INLINE float sum_lanes(vf x) {
#if VW == 16
    v8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#elif VW == 8
    v8 eight = x;
#endif
#if VW == 4
    v4 four = x;
#else
    v4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#endif
    v4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
}

INLINE float mean_of(const float *x, int64_t n) {
    vf sum = {0}, other = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + 2 * VW <= n; i += 2 * VW) {
        sum += *(const vf *)(x + i);
        other += *(const vf *)(x + i + VW);
    }
    for (; i + VW <= n; i += VW) sum += *(const vf *)(x + i);
    for (; i < n; i++) rest += x[i];
    return (sum_lanes(sum + other) + rest) / (float)n;
}

INLINE vf centred(const float *x, float mean, int kind) {
    vf lanes = *(const vf *)x;
    if (kind == LAYER_NORM) lanes -= mean;
    return lanes;
}

INLINE float mean_square(const float *x, float mean, int64_t n, int kind) {
    vf sum = {0}, other = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + 2 * VW <= n; i += 2 * VW) {
        vf one = centred(x + i, mean, kind), two = centred(x + i + VW, mean, kind);
        sum += one * one;
        other += two * two;
    }
    for (; i + VW <= n; i += VW) sum += centred(x + i, mean, kind) * centred(x + i, mean, kind);
    for (; i < n; i++) rest += (x[i] - mean) * (x[i] - mean);
    return (sum_lanes(sum + other) + rest) / (float)n;
}

/* Mean and inverse deviation in double, for rows whose squares overflow float (above 1e19); NaN if an entry is. */
static __attribute__((noinline, cold, unused)) Moments moments_far(const float *x, int64_t n, int kind, float eps) {
    double mean = 0, square = 0;
    for (int64_t i = 0; kind == LAYER_NORM && i < n; i++) mean += (double)x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    return (Moments){(float)mean, (float)(1 / sqrt(square + (double)eps))};
}

INLINE void normalise_row(const float *x, Moments of, const Norm *norm, float *y, int64_t n, int kind) {
    const float *weight = norm->weight, *bias = norm->bias;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf out = centred(x + i, of.mean, kind) * of.inverse * *(const vf *)(weight + i);
        if (kind == LAYER_NORM) out += *(const vf *)(bias + i);
        *(vf *)(y + i) = out;
    }
    for (; i < n; i++) {
        float out = (x[i] - of.mean) * of.inverse * weight[i];
        y[i] = kind == LAYER_NORM ? out + bias[i] : out;
    }
}

/* dx = r (h - mean h - u mean(h u)),  h = w dy,  u = (x - m) r,  without mean h for RMSNorm; adds the gradients of
   the weight, dy u, and of the bias, dy, to sums. dx may alias dy. */
INLINE void normalise_row_back(const float *x, const float *dy, Moments of, const float *weight, float *dx,
                               float *d_weight, float *d_bias, int64_t n, int kind) {
    vf sums = {0}, products = {0};
    float rest = 0, rest_of_products = 0;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf up = *(const vf *)(dy + i), own = up * of.inverse * centred(x + i, of.mean, kind);
        *(vf *)(d_weight + i) += own;
        products += own * *(const vf *)(weight + i);
        if (kind == LAYER_NORM) {
            *(vf *)(d_bias + i) += up;
            sums += up * *(const vf *)(weight + i);
        }
    }
    for (; i < n; i++) {
        float own = dy[i] * of.inverse * (x[i] - of.mean);
        d_weight[i] += own;
        rest_of_products += own * weight[i];
        if (kind == LAYER_NORM) {
            d_bias[i] += dy[i];
            rest += dy[i] * weight[i];
        }
    }
    float along = (sum_lanes(products) + rest_of_products) / (float)n * of.inverse;
    float mean = kind == LAYER_NORM ? (sum_lanes(sums) + rest) / (float)n : 0;
    for (i = 0; i + VW <= n; i += VW) {
        vf down = *(const vf *)(dy + i) * *(const vf *)(weight + i);
        if (kind == LAYER_NORM) down -= mean;
        *(vf *)(dx + i) = (down - centred(x + i, of.mean, kind) * along) * of.inverse;
    }
    for (; i < n; i++) dx[i] = (dy[i] * weight[i] - mean - (x[i] - of.mean) * along) * of.inverse;
}

#endif
