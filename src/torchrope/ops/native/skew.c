/* Skew blocks from their strict upper triangles, row by row:  A_ij = u, A_ji = -u  for i < j; and the gradient. */
#include "common.h"

typedef struct {
    int64_t size, count, b, threads;
    float *upper; /* (count, b (b - 1) / 2) */
    float *block; /* (count, b, b) */
} Skew;

static void build(const void *context, int64_t item, void *memory) {
    const Skew *p = context;
    int64_t b = p->b;
    const float *upper = p->upper + item * (b * (b - 1) / 2);
    float *block = p->block + item * b * b;
    (void)memory;
    for (int64_t i = 0; i < b; i++) {
        block[i * b + i] = 0;
        for (int64_t j = i + 1; j < b; j++, upper++) {
            block[i * b + j] = *upper;
            block[j * b + i] = -*upper;
        }
    }
}

/* du = dA_ij - dA_ji */
static void reduce(const void *context, int64_t item, void *memory) {
    const Skew *p = context;
    int64_t b = p->b;
    float *upper = p->upper + item * (b * (b - 1) / 2);
    const float *block = p->block + item * b * b;
    (void)memory;
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = i + 1; j < b; j++) *upper++ = block[i * b + j] - block[j * b + i];
}

API int64_t torchrope_skew(const Skew *p, int64_t backward) {
    CHECK_LAYOUT(p);
    int64_t few = p->count * p->b * p->b < SMALL;
    return parallel_for(p->count, few ? 1 : p->threads, 0, backward ? reduce : build, p);
}
