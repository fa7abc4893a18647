/* Commuting rotations in a learned basis:  R(p) = U rot(s w) U^T,  s = sum_a p_a c_a,  per block. */
#include "basis.h"
#include "basis_eight.h"

/* U and U^T of a head, the first coordinates of planes before the second. */
static void pad_basis(const void *context, int64_t head, void *memory) {
    const Job *job = context;
    const Basis *p = job->p;
    int64_t b = p->b, width = padded(b), square = b * width;
    (void)memory;
    float *inner = job->matrices + head * floats_of_head(p), *outer = inner + p->blocks * square;
    if (width > b) memset(inner, 0, 4 * floats_of_head(p));
    for (int64_t block = 0; block < p->blocks; block++, inner += square, outer += square) {
        const float *basis = p->basis + (head * p->blocks + block) * b * b;
        for (int64_t i = 0; i < b; i++)
            for (int64_t j = 0; j < b; j++) {
                int64_t place = j / 2 + j % 2 * (b / 2);
                inner[i * width + place] = basis[i * b + j];
                outer[place * width + i] = basis[i * b + j];
            }
    }
}

/* y (+)= x M in one block, for the rows of a panel. A sum covers only the block's own channels: NaN must not
   spread to other blocks through the zeros of the padding. */
INLINE void times(int64_t b, int64_t count, int64_t block, const float *matrices, const float *x, float *y,
                  int accumulate, Workspace w) {
    int64_t width = w.width;
    const float *matrix = matrices + block * b * width;
    x += block * b, y += block * b;
    if (!accumulate || width == b) {
        product(count, b, width, x, w.row, 1, matrix, width, y, w.row, accumulate);
        return;
    }
    product(count, b, width, x, w.row, 1, matrix, width, w.spill, width, 0);
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < b; j++) y[i * w.row + j] += w.spill[i * width + j];
}

/* y = (rot - 1) x in one block, or y = rot x if `whole`; rot is the token's rotation for sign 1, its inverse for -1. */
INLINE void rotate_block(int64_t b, int64_t count, int64_t block, const float *x, float *y, float sign, int whole,
                       Workspace w) {
    int64_t pairs = b / 2;
    const float *restrict less = w.less + block * pairs, *restrict sine = w.sine + block * pairs;
    for (int64_t i = 0; i < count; i++) {
        const float *restrict first = x + i * w.row + block * b, *restrict second = first + pairs;
        float *restrict out = y + i * w.row + block * b;
        for (int64_t j = 0; j < pairs; j++) {
            float even = first[j], odd = second[j], s = sign * sine[j], c = less[j];
            float change = c * even - s * odd, change_odd = s * even + c * odd;
            out[j] = whole ? even + change : change;
            out[j + pairs] = whole ? odd + change_odd : change_odd;
        }
    }
}

/* R x = x + U (rot - 1) U^T x, exactly x if all angles are 0; or rot U^T x. */
INLINE void rotate_token(int64_t b, const Basis *p, int64_t set, int64_t head, int64_t token, Workspace w) {
    int64_t n = p->blocks * b;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    find_rotation(b, p, set, token, w);
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 0, w.x, w.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t block = 0; block < p->blocks; block++) {
            times(b, panel.count, block, w.inner, w.x, w.h, 0, w);
            if (w.returns[block]) {
                rotate_block(b, panel.count, block, w.h, w.y, 1, 0, w);
                times(b, panel.count, block, w.outer, w.y, w.x, 1, w);
            } else {
                rotate_block(b, panel.count, block, w.h, w.x, 1, 1, w);
            }
        }
        spread(&panel, token, n, p->head_dim, 0, w.x, w.row);
    }
}

/* sin(x) / x, given the sine */
INLINE float sinc(float x, float sine) {
    float z = x * x;
    float series = 1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040)));
    float direct = sine / (z < 0.09f ? 1.0f : x);
    return z < 0.09f ? series : direct;
}

/* Add a token's gradient with respect to the base, in the basis (Daleckii and Krein): the parts of its products that
   commute and anticommute with i, times the conjugate of
   g(u, v) = s e^(i s (u + v) / 2) sinc(s (u - v) / 2)  at (w_j, w_k) and (w_j, -w_k). */
INLINE void add_products(int64_t b, const Basis *p, int64_t head, Workspace w) {
    int64_t pairs = b / 2, area = pairs * pairs, width = w.width;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *cosine = w.half_cosine + block * pairs, *sine = w.half_sine + block * pairs;
        const float *angular = p->angular + (head * p->blocks + block) * pairs;
        const float *m = w.products + block * b * width;
        float s = (float)w.scale[block], half = 0.5f * s;
        for (int64_t j = 0; j < pairs; j++) {
            const float *restrict upper = m + j * width, *restrict lower = upper + pairs * width;
            float *restrict sums = w.sums + 4 * block * area + j * pairs;
            float cj = cosine[j], sj = sine[j], aj = half * angular[j];
            for (int64_t k = 0; k < pairs; k++) {
                float ck = cosine[k], sk = sine[k], ak = half * angular[k];
                float cos_sum = cj * ck - sj * sk, sin_sum = sj * ck + cj * sk;
                float cos_gap = cj * ck + sj * sk, sin_gap = sj * ck - cj * sk;
                float near = 0.5f * s * sinc(aj - ak, sin_gap), far = 0.5f * s * sinc(aj + ak, sin_sum);
                float m00 = upper[k], m01 = upper[k + pairs], m10 = lower[k], m11 = lower[k + pairs];
                float ar = m00 + m11, ai = m10 - m01, br = m00 - m11, bi = m10 + m01;
                sums[k] += near * (cos_sum * ar + sin_sum * ai);
                sums[k + area] += near * (cos_sum * ai - sin_sum * ar);
                sums[k + 2 * area] += far * (cos_gap * br + sin_gap * bi);
                sums[k + 3 * area] += far * (cos_gap * bi - sin_gap * br);
            }
        }
    }
}

/* Add the gradients of a token's angles to those of the coefficients of a part. */
static void reduce_to_coefficients(const Job *job, int64_t set, int64_t head, int64_t token, int64_t part,
                                   Workspace w) {
    const Basis *p = job->p;
    int64_t pairs = p->b / 2;
    const float *position = p->positions + (set * p->tokens + token) * p->axes;
    for (int64_t block = 0; block < p->blocks; block++) {
        const float *angular = p->angular + (head * p->blocks + block) * pairs, *moment = w.moment + block * pairs;
        float of_scale = 0;
        for (int64_t i = 0; i < pairs; i++) of_scale += angular[i] * moment[i];
        for (int64_t axis = 0; axis < p->axes; axis++)
            job->coefficients[((part * p->axes + axis) * p->heads + head) * p->blocks + block] += position[axis] * of_scale;
    }
}

/* One block: sum h x'^T, and the gradients of the angles,  gx_2 x_1 - gx_1 x_2  with gx = rot^T h = h + y. */
INLINE void collect(int64_t b, int64_t count, int64_t block, int more, Workspace w) {
    int64_t pairs = b / 2, width = w.width;
    product(b, count, width, w.h + block * b, 1, w.row, w.x + block * b, w.row,
            w.products + block * b * width, width, more);
    float *restrict moment = w.moment + block * pairs;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i * w.row + block * b;
        const float *restrict h = w.h + at, *restrict y = w.y + at, *restrict x = w.x + at;
        for (int64_t j = 0; j < pairs; j++)
            moment[j] += (h[j + pairs] + y[j + pairs]) * x[j] - (h[j] + y[j]) * x[j + pairs];
    }
}

INLINE void rotate_token_back(int64_t b, const Job *job, int64_t set, int64_t head, int64_t token, int64_t part,
                            Workspace w) {
    const Basis *p = job->p;
    int64_t n = p->blocks * b;
    int wanted = p->d_base != NULL, more = 0;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    find_rotation(b, p, set, token, w);
    if (wanted) memset(w.moment, 0, 4 * p->blocks * (b / 2));
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 1, w.grad, w.row);
        if (wanted) gather(&panel, token, n, 0, w.raw, w.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t block = 0; block < p->blocks; block++) {
            /* h = U^T dy, or dy if U was omitted */
            if (w.returns[block])
                times(b, panel.count, block, w.inner, w.grad, w.h, 0, w);
            else
                for (int64_t i = 0; i < panel.count; i++)
                    copy_floats(w.h + i * w.row + block * b, w.grad + i * w.row + block * b, b);
            rotate_block(b, panel.count, block, w.h, w.y, -1, 0, w);
            if (wanted) {
                times(b, panel.count, block, w.inner, w.raw, w.x, 0, w);
                collect(b, panel.count, block, more, w);
            }
            /* dx = dy + U (rot^T - 1) h, or U rot^T h = U (h + (rot^T - 1) h) */
            if (!w.returns[block])
                for (int64_t i = 0; i < panel.count; i++) {
                    int64_t at = i * w.row + block * b;
                    for (int64_t j = 0; j < b; j++) {
                        w.y[at + j] += w.h[at + j];
                        w.grad[at + j] = 0;
                    }
                }
            times(b, panel.count, block, w.outer, w.y, w.grad, 1, w);
        }
        more = 1;
        spread(&panel, token, n, p->head_dim, 1, w.grad, w.row);
    }
    if (wanted && more) add_products(b, p, head, w);
    if (wanted) reduce_to_coefficients(job, set, head, token, part, w);
    if (wanted && job->positions) reduce_to_position(job, set, head, token, w);
}

/* Write the gradient in the basis as a real matrix, for each pair of planes the 2 x 2 block
   [[re a + re b, im b - im a], [im a + im b, re a - re b]]. */
INLINE void write_sums(int64_t b, const Job *job, int64_t head, int64_t part, Workspace w) {
    const Basis *p = job->p;
    int64_t pairs = b / 2, area = pairs * pairs;
    for (int64_t block = 0; block < p->blocks; block++) {
        float *target = job->inside + ((part * p->heads + head) * p->blocks + block) * b * b;
        for (int64_t j = 0; j < pairs; j++)
            for (int64_t k = 0; k < pairs; k++) {
                const float *at = w.sums + 4 * block * area + j * pairs + k;
                Sums s = {at[0], at[area], at[2 * area], at[3 * area]};
                if (b == 8) s = sums_8(p, head, block, j, k, w);
                target[2 * j * b + 2 * k] = s.ar + s.br;
                target[2 * j * b + 2 * k + 1] = s.bi - s.ai;
                target[(2 * j + 1) * b + 2 * k] = s.ai + s.bi;
                target[(2 * j + 1) * b + 2 * k + 1] = s.ar - s.br;
            }
    }
}

/* Set the sums of a part to zero. */
INLINE void start_sums(int64_t b, const Job *job, int64_t head, int64_t part, Workspace w) {
    const Basis *p = job->p;
    memset(w.sums, 0, 4 * p->blocks * b * b);
    for (int64_t axis = 0; axis < p->axes; axis++)
        memset(job->coefficients + ((part * p->axes + axis) * p->heads + head) * p->blocks, 0, 4 * p->blocks);
    if (b == 8) start_sums_8(job, head, w);
}

/* Write the sums of a part. */
INLINE void finish_sums(int64_t b, const Job *job, int64_t head, int64_t part, Workspace w) {
    if (b == 8) reduce_to_coefficients_8(job, head, part, w);
    write_sums(b, job, head, part, w);
}

INLINE void basis_part(int64_t b, const Job *job, int64_t item, void *memory, int backward) {
    const Basis *p = job->p;
    int64_t head = item / job->parts, part = item % job->parts;
    int64_t first = p->tokens * part / job->parts, last = p->tokens * (part + 1) / job->parts;
    Arena arena = {memory, 0};
    Workspace w = lay_out(p, &arena);
    start_head(job, head, &w);
    if (backward && p->d_base) start_sums(b, job, head, part, w);
    for (int64_t set = 0; set < p->sets; set++)
        if (b == 8)
            rotate_set_8(job, set, head, first, last, backward, w);
        else
            for (int64_t token = first; token < last; token++)
                if (backward)
                    rotate_token_back(b, job, set, head, token, part, w);
                else
                    rotate_token(b, p, set, head, token, w);
    if (backward && p->d_base) finish_sums(b, job, head, part, w);
}

static void forward_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    if (job->p->b == 8) /* specialised for the most frequent size */
        basis_part(8, job, item, memory, 0);
    else
        basis_part(job->p->b, job, item, memory, 0);
}

static void backward_part(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    if (job->p->b == 8)
        basis_part(8, job, item, memory, 1);
    else
        basis_part(job->p->b, job, item, memory, 1);
}

/* Of one block: U (G - G^T) / 2 U^T for the sum G of the parts in the basis. */
static void base_of_block(const void *context, int64_t item, void *memory) {
    const Job *job = context;
    const Basis *p = job->p;
    int64_t b = p->b, width = padded(b), all = p->heads * p->blocks * b * b;
    const float *basis = p->basis + item * b * b;
    float *skew = memory, *transposed = skew + b * width, *half = transposed + b * width, *sum = half + b * width;
    memset(memory, 0, 4 * 2 * b * width);
    for (int64_t i = 0; i < b * b; i++) {
        sum[i] = 0;
        for (int64_t part = 0; part < job->parts; part++) sum[i] += job->inside[part * all + item * b * b + i];
    }
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < b; j++) {
            skew[i * width + j] = 0.5f * (sum[i * b + j] - sum[j * b + i]);
            transposed[i * width + j] = basis[j * b + i];
        }
    product(b, b, width, basis, b, 1, skew, width, half, width, 0);
    product(b, b, width, half, width, 1, transposed, width, sum, width, 0);
    for (int64_t i = 0; i < b; i++) memcpy(p->d_base + (item * b + i) * b, sum + i * width, 4 * b);
}

/* Mean of p_a p_c over tokens, which gives the mean square of s of every block. */
static void find_squares(const Basis *p, double *squares) {
    int64_t count = p->sets * p->tokens, axes = p->axes;
    memset(squares, 0, 8 * axes * axes);
    for (int64_t token = 0; token < count; token++)
        for (int64_t a = 0; a < axes; a++)
            for (int64_t c = 0; c < axes; c++)
                squares[a * axes + c] += (double)p->positions[token * axes + a] * p->positions[token * axes + c] / count;
}

static int64_t run(const Job *job, int64_t backward) {
    const Basis *p = job->p;
    int64_t few = p->heads * floats_of_head(p) < 1 << 15;
    int64_t status = parallel_for(p->heads, few ? 1 : p->threads, 0, pad_basis, job);
    if (status != DONE) return status;
    Arena arena = {NULL, 0};
    lay_out(p, &arena);
    return parallel_for(p->heads * job->parts, p->threads, arena.used, backward ? backward_part : forward_part, job);
}

/* Lay out the memory of a call; without memory only count the bytes. */
static void lay_out_job(Job *job, int wanted, Arena *arena) {
    const Basis *p = job->p;
    int64_t places = p->d_positions ? p->sets * p->tokens * p->axes : 0;
    job->matrices = take(arena, 4 * p->heads * floats_of_head(p));
    job->squares = take(arena, 8 * wanted * p->axes * p->axes);
    job->inside = take(arena, 4 * wanted * job->parts * p->heads * p->blocks * p->b * p->b);
    job->coefficients = take(arena, 4 * wanted * job->parts * p->axes * p->heads * p->blocks);
    job->positions = take(arena, 4 * wanted * p->heads * places);
    if (!places) job->positions = NULL;
}

API int64_t torchrope_basis(const Basis *p, int64_t backward) {
    CHECK_LAYOUT(p);
    int wanted = backward && p->d_base;
    Job job = {.p = p, .parts = parts_of(p->heads, (p->tokens + 7) / 8, wanted, p->threads)};
    Arena arena = {NULL, 0};
    lay_out_job(&job, wanted, &arena);
    char *memory = arena.memory = allocate(arena.used);
    if (!memory) return OUT_OF_MEMORY;
    arena.used = 0;
    lay_out_job(&job, wanted, &arena);
    if (wanted) find_squares(p, job.squares);
    int64_t status = run(&job, backward);
    if (wanted && status == DONE)
        status = parallel_for(p->heads * p->blocks, p->threads, 16 * p->b * padded(p->b), base_of_block, &job);
    if (wanted && status == DONE) {
        add_parts(job.coefficients, job.parts, p->axes * p->heads * p->blocks, p->d_coefficients);
        if (job.positions) add_parts(job.positions, p->heads, p->sets * p->tokens * p->axes, p->d_positions);
    }
    free(memory);
    return status;
}
