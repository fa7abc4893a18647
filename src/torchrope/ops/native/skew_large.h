/* exp of large skew matrices, and its gradient, by planes:
   R - 1 = sum_i (cos w_i - 1) (p_i p_i^T + r_i r_i^T) + sin w_i (p_i r_i^T - r_i p_i^T).

   Tokens at multiples g of one position share their planes, with frequencies g w; on two axes these are about two of
   five tokens of a lattice from the origin, and up to two of three of one around it. In the basis of the planes the
   gradient  integral_0^1 e^(-uG) M e^(uG) du  is a product of 2 x 2 blocks with rotations by the differences and the
   sums of two frequencies, averaged over u (Daleckii and Krein). */
#ifndef TORCHROPE_SKEW_LARGE_H
#define TORCHROPE_SKEW_LARGE_H
#include <float.h>

#include "skew_exp.h"
#include "skew_planes.h"

/* ---- tokens at multiples of one position ---- */

typedef struct {
    uint64_t direction;
    float length; /* along the widest axis */
    int64_t token;
} Place;

static int by_direction(const void *a, const void *b) {
    const Place *x = a, *y = b;
    if (x->direction != y->direction) return x->direction < y->direction ? -1 : 1;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

INLINE int64_t widest_axis(int64_t axes, const float *p) {
    int64_t widest = 0;
    for (int64_t axis = 1; axis < axes; axis++)
        if (fabsf(p[axis]) > fabsf(p[widest])) widest = axis;
    return widest;
}

/* The token with a hash of its direction: the ratios of all axes to the widest one, equal for multiples. */
INLINE Place place_of(int64_t axes, const float *p, int64_t token) {
    int64_t widest = widest_axis(axes, p);
    uint64_t hash = (uint64_t)widest;
    for (int64_t axis = 0; axis < axes; axis++) {
        float ratio = p[axis] / p[widest]; /* NaN at the origin */
        int64_t bits = fabsf(ratio) <= 1 ? (int64_t)(0x1p62f * ratio) : 0;
        hash = (hash ^ (uint64_t)bits) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    float length = fabsf(p[widest]);
    return (Place){hash, length < INFINITY ? length : INFINITY, token}; /* NaN cannot be sorted */
}

static const double LONGEST = 1 << 16;

/* The g, 1 <= |g| <= LONGEST, with  p = g base,  exactly but for the rounding of g; or 0. Products are exact. */
static double multiple_of(int64_t axes, const float *p, const float *base) {
    int64_t widest = widest_axis(axes, p);
    double g = p[widest] == base[widest] ? 1 : (double)p[widest] / base[widest];
    int same = fabs(g) >= 1 && fabs(g) <= LONGEST;
    for (int64_t axis = 0; axis < axes; axis++)
        same &= (double)p[axis] * base[widest] == (double)base[axis] * p[widest];
    return same ? g : 0;
}

/* Members of a ray: more would save little, and threads share the work ray by ray. */
enum { MOST = 256 };

/* Append the rays of one set of positions: tokens by direction, then by length, each compared with the first of the last
   ray alone, so that time is n log n; directions of one hash may be split into more rays than there are lines. */
static void find_rays_of(const SkewExp *p, int64_t set, int together, Rays *rays, Place *places) {
    const float *positions = p->positions + set * p->tokens * p->axes, *base = positions;
    int64_t before = set * p->tokens, first = -MOST;
    for (int64_t i = 0; i < p->tokens; i++) places[i] = place_of(p->axes, positions + i * p->axes, i);
    if (together) qsort(places, p->tokens, sizeof(Place), by_direction);
    for (int64_t i = 0; i < p->tokens; i++) {
        const float *position = positions + places[i].token * p->axes;
        double g = together && i - first < MOST ? multiple_of(p->axes, position, base) : 0;
        if (g == 0) {
            rays->first[rays->count++] = before + i;
            base = position, first = i, g = 1;
        }
        rays->member[before + i] = before + places[i].token;
        rays->multiple[before + i] = g;
    }
}

/* Find the rays of every set of positions; unless `together`, each token is a separate ray, as is each block without
   positions. Returns 0 if memory cannot be allocated. */
static int find_rays(const SkewExp *p, int together, Rays *rays) {
    int64_t all = length_of(p), pieces = 8 * (all + 1);
    Arena arena = {allocate(3 * round_up(pieces, 64) + sizeof(Place) * p->tokens), 0};
    if (!arena.memory) return 0;
    rays->first = take(&arena, pieces);
    rays->member = take(&arena, pieces);
    rays->multiple = take(&arena, pieces);
    Place *places = take(&arena, sizeof(Place) * p->tokens);
    rays->count = 0;
    for (int64_t set = 0; p->positions && set < p->sets; set++) find_rays_of(p, set, together, rays, places);
    for (int64_t i = 0; !p->positions && i < all; i++) {
        rays->first[i] = rays->member[i] = i;
        rays->multiple[i] = 1;
        rays->count = all;
    }
    rays->first[rays->count] = all;
    return 1;
}

/* ---- memory of a thread ---- */

typedef struct {
    int64_t b, n;            /* rows; rows with one of zeros if b is odd */
    int64_t planes, padded;  /* n / 2; rounded up to vectors */
    int64_t rank;            /* vectors of planes: p, then r, with zeros behind both */
    int64_t width, stride;   /* floats and doubles from row to row */
} Sizes;

typedef struct {
    double *a, *t, *y;                    /* one tridiagonalisation */
    Lanes *d, *e;                         /* the bidiagonals of VW rays */
    vf *u, *v;                            /* their singular vectors */
    float *transposed_q;                  /* (VW, width, width) */
    float *x, *product, *part, *sum;      /* squares */
    float *basis;                         /* (rank, width): p and r in rows */
    float *transposed;                    /* (width, rank) */
    double *frequency, *angle;            /* (padded) */
    float *cosine, *sine;                 /* (padded) */
    float *sums;                          /* (axes, width, width), the gradient of the generators */
    double largest[VW];                   /* absolute entries that may overflow, of `read_exponent` */
} Large;

INLINE Sizes sizes_of(int64_t b) {
    Sizes z;
    z.b = b, z.n = round_up(b, 2);
    z.planes = z.n / 2, z.padded = round_up(z.planes, VW), z.rank = 2 * z.padded;
    z.width = padded(b), z.stride = round_up(z.n, DOUBLES); /* width >= n */
    return z;
}

static Large lay_out_large(const Job *job, Arena *arena) {
    Sizes z = sizes_of(job->p->b);
    int64_t widest = z.rank > z.width ? z.rank : z.width, m = z.planes;
    Large l;
    l.a = take(arena, 8 * z.n * z.stride);
    l.t = take(arena, 8 * z.n);
    l.y = take(arena, 8 * 3 * z.stride);
    Lanes **diagonals[] = {&l.d, &l.e};
    for (int i = 0; i < 2; i++) *diagonals[i] = take(arena, sizeof(Lanes) * m);
    vf **sides[] = {&l.u, &l.v};
    for (int i = 0; i < 2; i++) *sides[i] = take(arena, sizeof(vf) * m * m);
    l.transposed_q = take(arena, 4 * VW * z.width * z.width);
    float **floats[] = {&l.x, &l.product, &l.part, &l.sum, &l.basis, &l.transposed};
    for (int i = 0; i < 6; i++) *floats[i] = take(arena, 4 * widest * widest);
    double **doubles[] = {&l.frequency, &l.angle};
    for (int i = 0; i < 2; i++) *doubles[i] = take(arena, 8 * z.padded);
    float **angles[] = {&l.cosine, &l.sine};
    for (int i = 0; i < 2; i++) *angles[i] = take(arena, 4 * z.padded);
    l.sums = take(arena, job->backward ? 4 * job->p->axes * z.width * z.width : 0);
    return l;
}

/* ---- planes of a group of rays ---- */

/* Larger exponents, whose angles have no correct digit in float32, are scaled down to this norm. */
static const double LARGEST_NORM = 1099511627776; /* 2^40 */

/* sum_a p_a A_a in double, or the block itself; an exponent that is not finite is replaced by zero. Returns the largest
   absolute entry, or infinity; or 0 if that of no multiple overflows. */
INLINE double read_exponent(Sizes z, const SkewExp *p, const Group *g, double *a) {
    memset(a, 0, 8 * z.n * z.stride);
    for (int64_t axis = 0; axis < (p->positions ? p->axes : 1); axis++) {
        double position = p->positions ? p->positions[g->first * p->axes + axis] : 1;
        const float *source = p->positions ? generator_of(p, axis, g) : p->generators + g->first * z.b * z.b;
        for (int64_t i = 0; i < z.b; i++)
            for (int64_t j = 0; j < z.b; j++) a[i * z.stride + j] += position * source[i * z.b + j];
    }
    double norm = sqrt(sum_of_squares(z.n * z.stride, a)), largest = 0;
    for (int64_t i = 0; norm > FLT_MAX / LONGEST && i < z.n * z.stride; i++)
        largest = fabs(a[i]) > largest ? fabs(a[i]) : largest;
    if (!(norm < INFINITY)) memset(a, 0, 8 * z.n * z.stride);
    for (int64_t i = 0; norm > LARGEST_NORM && i < z.n * z.stride; i++) a[i] *= LARGEST_NORM / norm;
    return norm < INFINITY ? largest : INFINITY;
}

/* From the exponents of `count` rays to frequencies, planes in the coordinates of T, and Q^T of each. */
INLINE void decompose_rays(Sizes z, const SkewExp *p, const Rays *rays, Group g, int64_t first, int64_t count, Large *l) {
    memset(l->d, 0, sizeof(Lanes) * z.planes);
    memset(l->e, 0, sizeof(Lanes) * z.planes);
    for (int64_t lane = 0; lane < count; lane++) {
        g.first = rays->member[rays->first[first + lane]];
        l->largest[lane] = read_exponent(z, p, &g, l->a);
        tridiagonalize(z.n, z.stride, l->a, l->t, l->y);
        multiply_reflections(z.n, z.stride, z.width, l->a, l->x, l->product);
        float *q = l->transposed_q + lane * z.width * z.width;
        for (int64_t i = 0; i < z.n; i += VW)
            for (int64_t j = 0; j < z.width; j += VW)
                transpose_square(l->product + j * z.width + i, z.width, q + i * z.width + j, z.width);
        for (int64_t i = 0; i < z.planes; i++) LANE(l->d[i], lane) = l->t[2 * i];
        for (int64_t i = 0; i + 1 < z.planes; i++) LANE(l->e[i], lane) = -l->t[2 * i + 1];
    }
    decompose_bidiagonal(z.planes, l->d, l->e, l->u, l->v);
}

/* rows of `basis` = (singular vectors of a lane, `planes` x `planes`) times every second row of Q^T. */
INLINE void rotate_rows(Sizes z, const vf *vectors, int64_t lane, const float *q, float *left, float *basis) {
    for (int64_t i = 0; i < z.planes * z.planes; i++) left[i] = vectors[i][lane];
    product(z.planes, z.planes, z.width, left, z.planes, 1, q, 2 * z.width, basis, z.width, 0);
}

/* Frequencies and basis of one lane. */
INLINE void read_planes(Sizes z, Large *l, int64_t lane) {
    const float *q = l->transposed_q + lane * z.width * z.width;
    memset(l->basis, 0, 4 * z.rank * z.width);
    rotate_rows(z, l->v, lane, q, l->x, l->basis);
    rotate_rows(z, l->u, lane, q + z.width, l->x, l->basis + z.padded * z.width);
    for (int64_t i = 0; i < z.padded; i++) l->frequency[i] = i < z.planes ? LANE(l->d[i], lane) : 0;
}

/* Whether an entry of the exponent g times the first of this lane overflows float32. */
INLINE int overflows(const Large *l, int64_t lane, double g) { return !(fabs(g) * l->largest[lane] <= FLT_MAX); }

/* cos and sin of all frequencies, times g. */
INLINE void compute_angles(Sizes z, Large *l, double g) {
    int near = 1;
    for (int64_t i = 0; i < z.padded; i++) {
        l->angle[i] = g * l->frequency[i];
        near &= fabs(l->angle[i]) <= FARTHEST_ANGLE;
    }
    (near ? cos_sin : cos_sin_far)(l->angle, l->cosine, l->sine, z.padded);
}

/* ---- the exponential ---- */

/* R^T of the ray's first token, to the power of g. R - 1 is computed, whose error vanishes with the angles. */
INLINE void write_rotation(Sizes z, const SkewExp *p, const Group *token, double g, int bad, Large *l) {
    float *table = p->table + flat_of(p, token, 0) * z.b * z.b;
    compute_angles(z, l, g);
    for (int64_t i = 0; i < z.planes; i++) {
        const float *first = l->basis + i * z.width, *second = first + z.padded * z.width;
        float *x = l->x + i * z.width, *y = x + z.padded * z.width, c = l->cosine[i] - 1, s = l->sine[i];
        for (int64_t j = 0; j < z.width; j += VW) {
            *(vf *)(x + j) = c * *(const vf *)(first + j) - s * *(const vf *)(second + j);
            *(vf *)(y + j) = c * *(const vf *)(second + j) + s * *(const vf *)(first + j);
        }
    }
    if (z.planes < z.padded) {
        memset(l->x + z.planes * z.width, 0, 4 * (z.padded - z.planes) * z.width);
        memset(l->x + (z.padded + z.planes) * z.width, 0, 4 * (z.padded - z.planes) * z.width);
    }
    float *out = z.width == z.b ? table : l->product;
    product(z.b, z.rank, z.width, l->basis, 1, z.width, l->x, z.width, out, z.width, 0);
    for (int64_t i = 0; i < z.b; i++) {
        if (z.width != z.b) memcpy(table + i * z.b, out + i * z.width, 4 * z.b);
        table[i * z.b + i] += 1;
    }
    for (int64_t i = 0; bad && i < z.b * z.b; i++) table[i] = NAN;
}

/* ---- its gradient ---- */

/* Vectors of  sin x / x  and  (1 - cos x) / x. */
INLINE void average_rotation(vf x, vf cosine, vf sine, vf *along, vf *across) {
    vf z = x * x;
    vi near = z < 0.25f;
    vf divisor = (vf)(((vi)x & ~near) | ((vi)((vf){0} + 1) & near));
    vf p = 1 + z * (-1.66666667e-1f + z * (8.33333333e-3f + z * -1.98412698e-4f));
    vf q = x * (0.5f + z * (-4.16666667e-2f + z * (1.38888889e-3f + z * -2.48015873e-5f)));
    *along = (vf)(((vi)p & near) | ((vi)(sine / divisor) & ~near));
    *across = (vf)(((vi)q & near) | ((vi)((1 - cosine) / divisor) & ~near));
}

/* Multiply the 2 x 2 block [[pp, pr], [rp, rr]] by the averages: its part that commutes with rotations of the plane by
   that of the difference of angles, its other part by that of the sum; add the result times g to `sum`. */
INLINE void average_blocks(Sizes z, const Large *l, int64_t i, int64_t j, float g) {
    float *at = l->part + i * z.rank + j, *to = l->sum + i * z.rank + j;
    int64_t below = z.padded * z.rank, right = z.padded;
    vf pp = *(vf *)at, pr = *(vf *)(at + right), rp = *(vf *)(at + below), rr = *(vf *)(at + below + right);
    vf c = *(const vf *)(l->cosine + j), s = *(const vf *)(l->sine + j), along, across;
    vd low = *(const vd *)(l->angle + j), high = *(const vd *)(l->angle + j + DOUBLES);
    float ci = l->cosine[i], si = l->sine[i];
    double own = l->angle[i];
    average_rotation(narrow(low - own, high - own), c * ci + s * si, s * ci - c * si, &along, &across);
    vf a = 0.5f * g * (pp + rr), b = 0.5f * g * (pr - rp);
    vf a2 = a * along - b * across, b2 = a * across + b * along;
    average_rotation(narrow(low + own, high + own), c * ci - s * si, s * ci + c * si, &along, &across);
    a = 0.5f * g * (pp - rr), b = 0.5f * g * (pr + rp);
    vf a3 = a * along - b * across, b3 = a * across + b * along;
    *(vf *)to += a2 + a3;
    *(vf *)(to + right) += b2 + b3;
    *(vf *)(to + below) += b3 - b2;
    *(vf *)(to + below + right) += a2 - a3;
}

/* M of one token's matrix: half the gradient of the entries above the diagonal, and skew. */
INLINE void read_tangent(Sizes z, const SkewExp *p, const Group *token, float *x) {
    const float *entry = p->tangent + flat_of(p, token, 0) * (z.b * (z.b - 1) / 2);
    memset(x, 0, 4 * z.b * z.width);
    for (int64_t i = 0; i < z.b; i++)
        for (int64_t j = i + 1; j < z.b; j++) {
            float value = 0.5f * *entry++;
            x[i * z.width + j] = value;
            x[j * z.width + i] = -value;
        }
}

/* Add  g integral_0^1 e^(-ugG) M e^(ugG) du  to l->sum, in the basis of the planes. */
INLINE void add_gradient(Sizes z, const SkewExp *p, const Group *token, double g, Large *l) {
    compute_angles(z, l, g);
    read_tangent(z, p, token, l->x);
    product(z.rank, z.b, z.width, l->basis, z.width, 1, l->x, z.width, l->product, z.width, 0);
    product(z.rank, z.b, z.rank, l->product, z.width, 1, l->transposed, z.rank, l->part, z.rank, 0);
    for (int64_t i = 0; i < z.planes; i++)
        for (int64_t j = 0; j < z.planes; j += VW) average_blocks(z, l, i, j, (float)g);
}

INLINE void backward_ray(Sizes z, Layout y, const Job *job, int64_t ray, Group g, int64_t lane, Large *l) {
    const Rays *rays = &job->rays;
    int bad = overflows(l, lane, rays->multiple[rays->first[ray + 1] - 1]); /* the longest */
    memset(l->sum, 0, 4 * z.rank * z.rank);
    for (int64_t i = 0; i < z.rank; i += VW)
        for (int64_t j = 0; j < z.width; j += VW)
            transpose_square(l->basis + i * z.width + j, z.width, l->transposed + j * z.rank + i, z.rank);
    for (int64_t i = rays->first[ray]; i < rays->first[ray + 1]; i++) {
        g.first = rays->member[i];
        add_gradient(z, job->p, &g, rays->multiple[i], l);
    }
    product(z.rank, z.rank, z.width, l->sum, z.rank, 1, l->basis, z.width, l->product, z.width, 0);
    product(z.b, z.rank, z.width, l->basis, 1, z.width, l->product, z.width, l->x, z.width, 0);
    for (int64_t i = 0; bad && i < y.size; i++) l->x[i] = NAN;
    g.first = rays->member[rays->first[ray]];
    if (job->p->positions)
        collect(y, job, &g, l->x, l->sums);
    else
        write_gradient(y, job->p, &g, l->x);
}

/* ---- the loop ---- */

static void run_large_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    const SkewExp *p = job->p;
    const Rays *rays = &job->rays;
    Sizes z = sizes_of(p->b);
    Layout y = layout_for(p->b);
    Arena arena = {memory, 0};
    Large l = lay_out_large(job, &arena);
    int64_t part = item % job->parts, last = rays->count * (part + 1) / job->parts;
    Group g = {item / job->parts / p->blocks, item / job->parts % p->blocks, 0, 1};
    memset(memory, 0, arena.used); /* the padding of matrices */
    for (int64_t first = rays->count * part / job->parts; first < last; first += VW) {
        int64_t count = least(VW, last - first);
        decompose_rays(z, p, rays, g, first, count, &l);
        for (int64_t lane = 0; lane < count; lane++) {
            read_planes(z, &l, lane);
            if (job->backward) {
                backward_ray(z, y, job, first + lane, g, lane, &l);
                continue;
            }
            for (int64_t i = rays->first[first + lane]; i < rays->first[first + lane + 1]; i++) {
                g.first = rays->member[i];
                write_rotation(z, p, &g, rays->multiple[i], overflows(&l, lane, rays->multiple[i]), &l);
            }
        }
    }
    if (job->backward && p->positions) write_sums(y, job, &g, part, l.sums);
}

#endif
