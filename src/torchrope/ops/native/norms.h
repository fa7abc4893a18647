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
    const float *weight, *bias;  /* (head_dim); bias of LAYER_NORM alone */
    float *d_weight, *d_bias;    /* as these, or NULL */
} Norm;

typedef struct {
    float mean, inverse;
} Moments;

INLINE float sum_lanes(vf x) {
    float lanes[VW];
    *(vf *)lanes = x;
    for (int half = VW / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Squares of numbers beyond 1e19 are infinite in float. What comes out is that of double, and NaN where it is. */
static __attribute__((noinline, cold, unused)) Moments moments_far(const float *x, int64_t n, int kind, float eps) {
    double mean = 0, square = 0;
    for (int64_t i = 0; kind == LAYER_NORM && i < n; i++) mean += (double)x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    return (Moments){(float)mean, (float)(1 / sqrt(square + (double)eps))};
}

INLINE float mean_of(const float *x, int64_t n) {
    vf sum = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) sum += *(const vf *)(x + i);
    for (; i < n; i++) rest += x[i];
    return (sum_lanes(sum) + rest) / (float)n;
}

INLINE Moments moments_of(const float *x, int64_t n, int kind, float eps) {
    float mean = kind == LAYER_NORM ? mean_of(x, n) : 0, rest = 0;
    vf sum = {0};
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf apart = *(const vf *)(x + i) - mean;
        sum += apart * apart;
    }
    for (; i < n; i++) rest += (x[i] - mean) * (x[i] - mean);
    float square = (sum_lanes(sum) + rest) / (float)n;
    return square <= FLT_MAX ? (Moments){mean, 1 / sqrtf(square + eps)} : moments_far(x, n, kind, eps);
}

INLINE void normalise_row(const float *x, Moments of, const Norm *norm, float *y, int64_t n, int kind) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf out = (*(const vf *)(x + i) - of.mean) * of.inverse * *(const vf *)(norm->weight + i);
        if (kind == LAYER_NORM) out += *(const vf *)(norm->bias + i);
        *(vf *)(y + i) = out;
    }
    for (; i < n; i++) {
        float out = (x[i] - of.mean) * of.inverse * norm->weight[i];
        y[i] = kind == LAYER_NORM ? out + norm->bias[i] : out;
    }
}

/* dx = r (h - mean h - u mean(h u)),  h = w dy,  u = (x - m) r,  without mean h for RMSNorm; sums gain the gradients of
   the weight, dy u, and of the bias, dy. dx may lie where dy or x do. */
INLINE void normalise_row_back(const float *x, const float *dy, Moments of, const Norm *norm, float *dx,
                               float *d_weight, float *d_bias, int64_t n, int kind) {
    vf sums = {0}, products = {0};
    float rest = 0, rest_of_products = 0;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf unit = (*(const vf *)(x + i) - of.mean) * of.inverse, up = *(const vf *)(dy + i);
        vf own = up * unit;
        *(vf *)(d_weight + i) += own;
        products += own * *(const vf *)(norm->weight + i);
        if (kind == LAYER_NORM) {
            *(vf *)(d_bias + i) += up;
            sums += up * *(const vf *)(norm->weight + i);
        }
    }
    for (; i < n; i++) {
        float unit = (x[i] - of.mean) * of.inverse, own = dy[i] * unit;
        d_weight[i] += own;
        rest_of_products += own * norm->weight[i];
        if (kind == LAYER_NORM) {
            d_bias[i] += dy[i];
            rest += dy[i] * norm->weight[i];
        }
    }
    float along = (sum_lanes(products) + rest_of_products) / (float)n;
    float mean = kind == LAYER_NORM ? (sum_lanes(sums) + rest) / (float)n : 0;
    for (i = 0; i + VW <= n; i += VW) {
        vf unit = (*(const vf *)(x + i) - of.mean) * of.inverse;
        *(vf *)(dx + i) = (*(const vf *)(dy + i) * *(const vf *)(norm->weight + i) - mean - unit * along) * of.inverse;
    }
    for (; i < n; i++) {
        float unit = (x[i] - of.mean) * of.inverse;
        dx[i] = (dy[i] * norm->weight[i] - mean - unit * along) * of.inverse;
    }
}

#endif
