/* exp of large skew matrices, and its gradient, by planes:
   R - 1 = sum_i (cos w_i - 1) (p_i p_i^T + r_i r_i^T) + sin w_i (p_i r_i^T - r_i p_i^T).

   Tokens at multiples g of one position share their planes, with frequencies g w; on a lattice through the origin these
   are about two of five tokens. In the basis of the planes the gradient  integral_0^1 e^(-uG) M e^(uG) du  is a product
   of 2 x 2 blocks with rotations by the differences and the sums of two frequencies, averaged over u
   (Daleckii and Krein). */
#ifndef TORCHROPE_SKEW_LARGE_H
#define TORCHROPE_SKEW_LARGE_H
#include <float.h>

#include "skew_exp.h"
#include "skew_planes.h"

/* ---- tokens at multiples of one position ---- */

static const float LONGEST = 1 << 16;

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

/* Tokens whose positions have nearly equal directions, as linked lists in the order of length. */
typedef struct {
    int64_t size;    /* lists, a power of 2 */
    int64_t *newest; /* of each list the place that was added last, or -1 */
    int64_t *next;   /* of each place the next longer one in its list, or -1 */
} Directions;

/* Steps between directions: odd, so that no ratio of two small integers is halfway between two of them. */
static const float STEPS = 4093;

/* A hash of the direction: the sign of the widest axis and the ratios of all axes to it, rounded. Positions that are not
   finite have no multiples, so any value does. */
INLINE uint64_t direction_of(int64_t axes, const float *p) {
    int64_t widest = 0;
    for (int64_t axis = 1; axis < axes; axis++)
        if (fabsf(p[axis]) > fabsf(p[widest])) widest = axis;
    uint64_t hash = 2 * (uint64_t)widest + (p[widest] < 0);
    for (int64_t axis = 0; axis < axes; axis++) {
        float ratio = p[axis] / p[widest]; /* NaN at the origin */
        int64_t step = fabsf(ratio) <= 1 ? (int64_t)roundf(STEPS * ratio) : 0;
        hash = (hash ^ (uint64_t)step) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

INLINE void link_directions(const SkewExp *p, const float *positions, const Place *places, Directions *d) {
    for (int64_t list = 0; list < d->size; list++) d->newest[list] = -1;
    for (int64_t i = p->tokens - 1; i >= 0; i--) {
        int64_t *newest = d->newest + (direction_of(p->axes, positions + places[i].token * p->axes) & (d->size - 1));
        d->next[i] = *newest;
        *newest = i;
    }
}

/* Places in a row that are no multiple of a base, after which no more are searched: on a line without a common unit
   the search would take time quadratic in the number of tokens. */
enum { MISSES = 256 };

/* Append the rays of one set of positions. */
static void find_rays_of(const SkewExp *p, int64_t set, int together, Rays *rays, Place *places, char *taken,
                         Directions *d) {
    const float *positions = p->positions + set * p->tokens * p->axes;
    int64_t members = set * p->tokens;
    for (int64_t i = 0; i < p->tokens; i++) {
        float length = 0;
        for (int64_t axis = 0; axis < p->axes; axis++) length += positions[i * p->axes + axis] * positions[i * p->axes + axis];
        places[i] = (Place){length < INFINITY ? length : INFINITY, i}; /* NaN cannot be sorted */
    }
    qsort(places, p->tokens, sizeof(Place), by_length);
    memset(taken, 0, p->tokens);
    if (together) link_directions(p, positions, places, d);
    for (int64_t i = 0; i < p->tokens; i++) {
        if (taken[i]) continue;
        const float *base = positions + places[i].token * p->axes;
        rays->first[rays->count++] = members;
        rays->member[members] = set * p->tokens + places[i].token;
        rays->multiple[members++] = 1;
        int64_t misses = 0;
        for (int64_t j = together ? d->next[i] : -1; j >= 0 && misses < MISSES; j = d->next[j]) {
            int64_t g = taken[j] ? 0 : multiple_of(p->axes, positions + places[j].token * p->axes, base);
            misses = g < 1 ? misses + 1 : 0;
            if (g < 1) continue;
            taken[j] = 1;
            rays->member[members] = set * p->tokens + places[j].token;
            rays->multiple[members++] = g;
        }
    }
}

/* Find the rays of every set of positions; unless `together`, each token is a separate ray, as is each block without
   positions. Returns 0 if memory cannot be allocated. */
static int find_rays(const SkewExp *p, int together, Rays *rays) {
    int64_t all = length_of(p), pieces = 8 * (all + 1), lists = 1;
    while (lists < p->tokens) lists *= 2;
    int64_t bytes = 3 * round_up(pieces, 64) + round_up(sizeof(Place) * p->tokens, 64) + round_up(p->tokens, 64);
    Arena arena = {allocate(bytes + round_up(8 * lists, 64) + round_up(8 * p->tokens, 64)), 0};
    if (!arena.memory) return 0;
    rays->first = take(&arena, pieces);
    rays->member = take(&arena, pieces);
    rays->multiple = take(&arena, pieces);
    Place *places = take(&arena, sizeof(Place) * p->tokens);
    char *taken = take(&arena, p->tokens);
    Directions d = {lists, take(&arena, 8 * lists), take(&arena, 8 * p->tokens)};
    rays->count = 0;
    for (int64_t set = 0; p->positions && set < p->sets; set++) find_rays_of(p, set, together, rays, places, taken, &d);
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
    int bad[VW];                          /* whether an exponent is not finite */
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

/* sum_a p_a A_a in double, or the block itself; an exponent that is not finite in float32 is replaced by zero. */
INLINE int read_exponent(Sizes z, const SkewExp *p, const Group *g, double *a) {
    memset(a, 0, 8 * z.n * z.stride);
    for (int64_t axis = 0; axis < (p->positions ? p->axes : 1); axis++) {
        double position = p->positions ? p->positions[g->first * p->axes + axis] : 1;
        const float *source = p->positions ? generator_of(p, axis, g) : p->generators + g->first * z.b * z.b;
        for (int64_t i = 0; i < z.b; i++)
            for (int64_t j = 0; j < z.b; j++) a[i * z.stride + j] += position * source[i * z.b + j];
    }
    double squares = sum_of_squares(z.n * z.stride, a), norm = sqrt(squares);
    int bad = !(norm < INFINITY);
    for (int64_t i = 0; norm > FLT_MAX && i < z.n * z.stride; i++) bad |= !(fabs(a[i]) <= FLT_MAX);
    if (bad) memset(a, 0, 8 * z.n * z.stride);
    for (int64_t i = 0; norm > LARGEST_NORM && !bad && i < z.n * z.stride; i++) a[i] *= LARGEST_NORM / norm;
    return bad;
}

/* From the exponents of `count` rays to frequencies, planes in the coordinates of T, and Q^T of each. */
INLINE void decompose_rays(Sizes z, const SkewExp *p, const Rays *rays, Group g, int64_t first, int64_t count, Large *l) {
    memset(l->d, 0, sizeof(Lanes) * z.planes);
    memset(l->e, 0, sizeof(Lanes) * z.planes);
    for (int64_t lane = 0; lane < count; lane++) {
        g.first = rays->member[rays->first[first + lane]];
        l->bad[lane] = read_exponent(z, p, &g, l->a);
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

/* cos and sin of all frequencies, times g. */
INLINE void compute_angles(Sizes z, Large *l, int64_t g) {
    int near = 1;
    for (int64_t i = 0; i < z.padded; i++) {
        l->angle[i] = (double)g * l->frequency[i];
        near &= fabs(l->angle[i]) <= FARTHEST_ANGLE;
    }
    (near ? cos_sin : cos_sin_far)(l->angle, l->cosine, l->sine, z.padded);
}

/* ---- the exponential ---- */

/* R^T of the ray's first token, to the power of g. R - 1 is computed, whose error vanishes with the angles. */
INLINE void write_rotation(Sizes z, const SkewExp *p, const Group *token, int64_t g, int bad, Large *l) {
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
INLINE void add_gradient(Sizes z, const SkewExp *p, const Group *token, int64_t g, Large *l) {
    compute_angles(z, l, g);
    read_tangent(z, p, token, l->x);
    product(z.rank, z.b, z.width, l->basis, z.width, 1, l->x, z.width, l->product, z.width, 0);
    product(z.rank, z.b, z.rank, l->product, z.width, 1, l->transposed, z.rank, l->part, z.rank, 0);
    for (int64_t i = 0; i < z.planes; i++)
        for (int64_t j = 0; j < z.planes; j += VW) average_blocks(z, l, i, j, (float)g);
}

INLINE void backward_ray(Sizes z, Layout y, const Job *job, int64_t ray, Group g, int bad, Large *l) {
    const Rays *rays = &job->rays;
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
                backward_ray(z, y, job, first + lane, g, l.bad[lane], &l);
                continue;
            }
            for (int64_t i = rays->first[first + lane]; i < rays->first[first + lane + 1]; i++) {
                g.first = rays->member[i];
                write_rotation(z, p, &g, rays->multiple[i], l.bad[lane], &l);
            }
        }
    }
    if (job->backward && p->positions) write_sums(y, job, &g, part, l.sums);
}

#endif
