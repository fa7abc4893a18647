/* Shared by all kernels: SIMD vectors, rows of any dtype, a parallel loop on PyTorch's OpenMP threads, cos and sin,
   products. */
#ifndef TORCHROPE_COMMON_H
#define TORCHROPE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX__)
#define VW 8
#else
#define VW 4
#endif

/* Vectors without alignment: any float pointer may be read through them. */
typedef float vf __attribute__((vector_size(4 * VW), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VW), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VW), aligned(2), may_alias)); /* pairs of bfloat16 too */
typedef double vd __attribute__((vector_size(4 * VW), aligned(8), may_alias)); /* half as many lanes */
typedef float vhalf __attribute__((vector_size(2 * VW), aligned(4), may_alias));
typedef uint16_t vshort __attribute__((vector_size(2 * VW), aligned(2), may_alias));
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));

#if VW == 16
#define LANES_IN_ORDER 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define LANES_SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define EACH_TWICE 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7
#define FIRST_IN_TURN 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LAST_IN_TURN 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define SIGNS_OF_PAIRS {INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0}
#elif VW == 8
#define LANES_IN_ORDER 0, 1, 2, 3, 4, 5, 6, 7
#define LANES_SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#define EACH_TWICE 0, 0, 1, 1, 2, 2, 3, 3
#define FIRST_IN_TURN 0, 8, 1, 9, 2, 10, 3, 11
#define LAST_IN_TURN 4, 12, 5, 13, 6, 14, 7, 15
#define SIGNS_OF_PAIRS {INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0}
#else
#define LANES_IN_ORDER 0, 1, 2, 3
#define LANES_SWAPPED 1, 0, 3, 2
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#define EACH_TWICE 0, 0, 1, 1
#define FIRST_IN_TURN 0, 4, 1, 5
#define LAST_IN_TURN 2, 6, 3, 7
#define SIGNS_OF_PAIRS {INT32_MIN, 0, INT32_MIN, 0}
#endif

/* Load into a register. The empty asm stops the compiler from repeating the load as a memory operand. */
INLINE vf loaded(const float *x) {
    vf lanes = *(const vf *)x;
#if defined(__AVX2__)
    __asm__("" : "+x"(lanes));
#endif
    return lanes;
}

INLINE vf swap_pairs(vf x) { return __builtin_shufflevector(x, x, LANES_SWAPPED); }
/* a b - c in even lanes, a b + c in odd lanes; the reverse if `back`. Compilers generate two instructions more. */
INLINE vf add_alternating(vf a, vf b, vf c, int back) {
#if VW == 16
    return back ? (vf)_mm512_fmsubadd_ps((__m512)a, (__m512)b, (__m512)c)
                : (vf)_mm512_fmaddsub_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return back ? (vf)_mm256_fmsubadd_ps((__m256)a, (__m256)b, (__m256)c)
                : (vf)_mm256_fmaddsub_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vi signs = SIGNS_OF_PAIRS;
    if (back) signs ^= INT32_MIN;
    return a * b + (vf)((vi)c ^ signs);
#endif
}

INLINE vi low_words(vi low, vi high) { return __builtin_shufflevector(low, high, EVEN_LANES); }
INLINE vd widen(const float *x) { return __builtin_convertvector(*(const vhalf *)x, vd); }
INLINE vf narrow(vd low, vd high) {
    return __builtin_shufflevector(__builtin_convertvector(low, vhalf), __builtin_convertvector(high, vhalf),
                                   LANES_IN_ORDER);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* ---- rows: channels of one head and token, as stored in a tensor ---- */

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef struct {
    void *data; /* NULL: absent */
    int64_t stride[3]; /* elements from one sample, head, token to the next */
    int64_t dtype;
} Rows;

/* Queries or keys: input, incoming gradient, output. */
typedef struct {
    int64_t batch, heads;
    Rows x, grad, out;
} Side;

INLINE int64_t row_offset(const Rows *rows, int64_t sample, int64_t head, int64_t token) {
    return sample * rows->stride[0] + head * rows->stride[1] + token * rows->stride[2];
}

/* Convert a vector of bfloat16 to float in one instruction; compilers need several. */
INLINE vf from_bf16(const uint16_t *x) {
#if VW == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vshort *)x, vu) << 16);
#endif
}

/* Replace NaN by the default NaN, which stays NaN when rounded to bfloat16. */
INLINE vf with_default_nan(vf x) {
    vi is_nan = x != x;
    return (vf)(((vi)x & ~is_nan) | (0x7fc00000 & is_nan));
}

/* Convert pairs of neighbouring bfloat16 channels to the vector of the first and that of the second of each pair. */
INLINE void pairs_from_bf16(const uint16_t *x, vf *first, vf *second) {
    vu words = *(const vu *)x;
    *first = (vf)(words << 16);
    *second = (vf)(words & 0xffff0000);
}

/* The reverse, rounded to nearest, ties away from zero: half as many instructions as ties to even. A NaN stays NaN
   unless its mantissa is below 0x8000 or at least 0x7f8000, which it never is from bfloat16 or from arithmetic. */
INLINE void pairs_to_bf16(uint16_t *y, vf first, vf second) {
    vu low = (vu)first + 0x8000, high = (vu)second + 0x8000;
#if VW == 16
    *(vu *)y = (vu)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(low >> 16), (__m512i)high);
#elif defined(__AVX2__)
    *(vu *)y = (vu)_mm256_blend_epi16((__m256i)(low >> 16), (__m256i)high, 0xaa);
#else
    *(vu *)y = (low >> 16) | (high & 0xffff0000);
#endif
}

/* As `pairs_to_bf16`, for consecutive channels. */
INLINE vshort to_bf16(vf x) { return __builtin_convertvector(((vu)x + 0x8000) >> 16, vshort); }

/* Read n channels as float; float32 is not copied. */
INLINE const float *load_row(const Rows *rows, int64_t at, int64_t n, float *scratch) {
    if (rows->dtype == FLOAT32) return (const float *)rows->data + at;
    if (rows->dtype == BFLOAT16) {
        const uint16_t *source = (const uint16_t *)rows->data + at;
        int64_t i = 0;
        for (; i + VW <= n; i += VW) *(vf *)(scratch + i) = from_bf16(source + i);
        for (; i < n; i++) {
            uint32_t bits = (uint32_t)source[i] << 16;
            memcpy(scratch + i, &bits, 4);
        }
    } else {
        const _Float16 *source = (const _Float16 *)rows->data + at;
        int64_t i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8) *(v8 *)(scratch + i) = (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + i)));
#endif
        for (; i < n; i++) scratch[i] = (float)source[i];
    }
    return scratch;
}

/* Round n floats to the dtype of the rows, to nearest; ties to even in float16, away from zero in bfloat16. */
INLINE void store_row(const Rows *rows, int64_t at, int64_t n, const float *values) {
    if (rows->dtype == FLOAT32) {
        float *target = (float *)rows->data + at;
        if (target != values) memcpy(target, values, 4 * n);
    } else if (rows->dtype == BFLOAT16) {
        uint16_t *target = (uint16_t *)rows->data + at;
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, values + i, 4);
            uint32_t rounded = (bits + 0x8000) >> 16;
            target[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded); /* keeps NaN */
        }
    } else {
        _Float16 *target = (_Float16 *)rows->data + at;
        int64_t i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)(target + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT));
#endif
        for (; i < n; i++) target[i] = (_Float16)values[i];
    }
}

/* Copy n channels. */
INLINE void copy_row(const Rows *from, int64_t at, const Rows *to, int64_t target, int64_t skip, int64_t n) {
    int64_t size = from->dtype == FLOAT32 ? 4 : 2;
    memcpy((char *)to->data + (target + skip) * size, (char *)from->data + (at + skip) * size, n * size);
}

/* ---- threads ---- */

/* OpenMP's entry points, looked up in the runtime that PyTorch has loaded; single-threaded if there are none. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));

enum { DONE = 0, OUT_OF_MEMORY = 1, OTHER_LAYOUT = 2 }; /* status codes returned by kernels */

/* Structures begin with the size that the caller assumes: a mismatched build is rejected, not misread. */
#define CHECK_LAYOUT(p) \
    if ((p)->size != (int64_t)sizeof *(p)) return OTHER_LAYOUT

INLINE void *allocate(int64_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, (size_t)(bytes > 0 ? bytes : 64)) ? NULL : memory;
}

/* A bump allocator; without memory it only counts the bytes. */
typedef struct {
    char *memory;
    int64_t used;
} Arena;

INLINE void *take(Arena *arena, int64_t bytes) {
    void *piece = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += round_up(bytes, 64);
    return piece;
}

typedef struct {
    void (*work)(const void *, int64_t, void *);
    const void *context;
    char *memory; /* of all threads, consecutive, after their counters */
    int64_t count, bytes, threads, started;
} Loop;

enum {
    APART = 64, /* bytes between the threads' counters: one cache line each */
    KEPT = 64   /* bytes at the start of a thread's memory that are zero before its first item */
};

INLINE int64_t first_item(const Loop *loop, int64_t thread) { return loop->count * thread / loop->threads; }

/* A thread first runs the items of its share, which repeated calls find in its cache; then items of other shares. */
static void drain(void *data) {
    Loop *loop = data;
    int64_t slot = __atomic_fetch_add(&loop->started, 1, __ATOMIC_RELAXED);
    int64_t own = omp_get_thread_num && loop->threads > 1 ? omp_get_thread_num() % loop->threads : slot;
    char *memory = loop->memory + APART * loop->threads + slot * loop->bytes;
    for (int64_t ahead = 0; ahead < loop->threads; ahead++) {
        int64_t share = (own + ahead) % loop->threads, last = first_item(loop, share + 1);
        int64_t *next = (int64_t *)(loop->memory + APART * share);
        for (;;) {
            int64_t item = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            if (item >= last) break;
            loop->work(loop->context, item, memory);
        }
    }
}

/* Run work(context, i, memory) for i < count. Each thread has `bytes` of memory, kept between its items, whose first
   KEPT bytes are zero before the first. The result of an item depends neither on the thread that runs it nor on the
   number of threads. */
INLINE int64_t parallel_for(int64_t count, int64_t threads, int64_t bytes, void (*work)(const void *, int64_t, void *),
                            const void *context) {
    if (count < 1) return DONE;
    threads = least(threads, count);
    Loop loop = {work, context, NULL, count, round_up(bytes, 64), threads, 0};
    loop.memory = allocate(threads * (APART + loop.bytes));
    if (!loop.memory) return OUT_OF_MEMORY;
    for (int64_t thread = 0; thread < threads; thread++) {
        *(int64_t *)(loop.memory + APART * thread) = first_item(&loop, thread);
        memset(loop.memory + APART * threads + thread * loop.bytes, 0, least(KEPT, loop.bytes));
    }
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(drain, &loop, (unsigned)threads, 0);
    else
        drain(&loop);
    free(loop.memory);
    return DONE;
}

/* Number of floats below which starting threads takes longer than the work. */
enum { SMALL = 1 << 15 };

/* ---- sums over parts ---- */

/* Number of parts that `units` of each column are split into. With partial sums it does not depend on the number of
   threads, because the order of the sums, and therefore rounding, must not. */
INLINE int64_t parts_of(int64_t columns, int64_t units, int with_sums, int64_t threads) {
    int64_t items = with_sums ? 64 : 4 * threads;
    if (units < 1 || columns < 1) return 1;
    return least((items + columns - 1) / columns, units);
}

/* total = sum of the parts, which are consecutive in memory, in order. */
INLINE void add_parts(const float *partial, int64_t parts, int64_t size, float *total) {
    memcpy(total, partial, 4 * size);
    for (int64_t part = 1; part < parts; part++)
        for (int64_t i = 0; i < size; i++) total[i] += partial[part * size + i];
}

/* ---- angles ---- */

/* Largest angle for which subtracting one multiple of a pi / 2 rounded to double is accurate enough. */
static const double FARTHEST_ANGLE = 1e8;

/* cos and sin of a vector of angles up to FARTHEST_ANGLE, in two halves. Reduced in double, so that large positions keep
   full accuracy; cos 0 = 1 and sin 0 = 0 exactly. */
INLINE void cos_sin_lanes(vd low, vd high, vf *cosine, vf *sine) {
    const double rounder = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer, held in the low bits */
    vd low_quarters = low * 0.63661977236758134308 + rounder, high_quarters = high * 0.63661977236758134308 + rounder;
    vi quadrant = low_words((vi)low_quarters, (vi)high_quarters);
    vf r = narrow(low - (low_quarters - rounder) * 1.57079632679489661923,
                  high - (high_quarters - rounder) * 1.57079632679489661923);
    vf z = r * r;
    vf s = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
    vf c = 1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
    vi swapped = ((vi)s ^ (vi)c) & -(quadrant & 1);
    *cosine = (vf)((vi)c ^ swapped ^ (((quadrant + 1) & 2) << 30));
    *sine = (vf)((vi)s ^ swapped ^ ((quadrant & 2) << 30));
}

/* cos and sin of n angles up to FARTHEST_ANGLE, n a multiple of VW. */
INLINE void cos_sin(const double *angle, float *cosine, float *sine, int64_t n) {
    for (int64_t i = 0; i < n; i += VW)
        cos_sin_lanes(*(const vd *)(angle + i), *(const vd *)(angle + i + VW / 2), (vf *)(cosine + i), (vf *)(sine + i));
}

/* cos and sin of any angles; the default NaN for infinity and NaN. */
static __attribute__((noinline, cold, unused)) void cos_sin_far(const double *angle, float *cosine, float *sine,
                                                                int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        cosine[i] = isfinite(angle[i]) ? (float)cos(angle[i]) : NAN;
        sine[i] = isfinite(angle[i]) ? (float)sin(angle[i]) : NAN;
    }
}

/* ---- products and transposes ---- */

/* C (+)= A B for R rows and NV vectors of columns; A[i][k] is a[i ai + k ak]. */
#define DEFINE_TILE(NAME, V, WIDTH)                                                                                   \
    INLINE void NAME(int R, int NV, int64_t depth, const float *a, int64_t ai, int64_t ak, const float *b,            \
                     int64_t ldb, float *c, int64_t ldc, int accumulate) {                                            \
        V sum[8][4];                                                                                                  \
        _Pragma("GCC unroll 8") for (int i = 0; i < R; i++)                                                           \
            _Pragma("GCC unroll 4") for (int j = 0; j < NV; j++)                                                      \
                sum[i][j] = accumulate ? *(const V *)(c + i * ldc + j * WIDTH) : (V){0};                              \
        _Pragma("GCC unroll 8") for (int64_t k = 0; k < depth; k++) {                                                                     \
            V right[4];                                                                                               \
            _Pragma("GCC unroll 4") for (int j = 0; j < NV; j++) right[j] = *(const V *)(b + k * ldb + j * WIDTH);    \
            _Pragma("GCC unroll 8") for (int i = 0; i < R; i++) {                                                     \
                float left = a[i * ai + k * ak];                                                                      \
                _Pragma("GCC unroll 4") for (int j = 0; j < NV; j++) sum[i][j] += left * right[j];                    \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("GCC unroll 8") for (int i = 0; i < R; i++)                                                           \
            _Pragma("GCC unroll 4") for (int j = 0; j < NV; j++)                                                      \
                *(V *)(c + i * ldc + j * WIDTH) = sum[i][j];                                                          \
    }

DEFINE_TILE(tile_wide, vf, VW)
DEFINE_TILE(tile_8, v8, 8)
DEFINE_TILE(tile_4, v4, 4)

/* Padded number of columns in products of blocks of size b: a multiple of the vector width. */
INLINE int64_t padded(int64_t b) { return b <= 4 ? 4 : b <= 8 ? 8 : round_up(b, VW < 8 ? 8 : VW); }

#define EACH_ROW_TILE(TILE, NV, STEP)                                                                                 \
    do {                                                                                                              \
        int64_t i = 0;                                                                                                \
        for (; i + STEP <= rows; i += STEP)                                                                           \
            TILE(STEP, NV, depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc, accumulate);                          \
        for (; i < rows; i++) TILE(1, NV, depth, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc, accumulate);           \
    } while (0)

/* C = A B, or C += A B if `accumulate`; C has `rows` rows and `columns` columns, a value of `padded`. */
INLINE void product(int64_t rows, int64_t depth, int64_t columns, const float *a, int64_t ai, int64_t ak,
                    const float *b, int64_t ldb, float *c, int64_t ldc, int accumulate) {
    if (columns == 4) {
        EACH_ROW_TILE(tile_4, 1, 8);
        return;
    }
    if (columns == 8) {
        EACH_ROW_TILE(tile_8, 1, 8);
        return;
    }
    while (columns > 0) {
        if (VW == 16 && columns >= 64) {
            EACH_ROW_TILE(tile_wide, 4, 4);
            columns -= 64, b += 64, c += 64;
        } else if (columns >= 2 * VW) {
            EACH_ROW_TILE(tile_wide, 2, 4);
            columns -= 2 * VW, b += 2 * VW, c += 2 * VW;
        } else {
            EACH_ROW_TILE(tile_wide, 1, 8);
            columns -= VW, b += VW, c += VW;
        }
    }
}

/* Transpose VW vectors. */
INLINE void transpose_lanes(vf *rows) {
    vf next[VW];
    for (int step = 1; step < VW; step *= 2) { /* each perfect shuffle of rows moves one bit of the index */
        for (int i = 0; i < VW / 2; i++) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + VW / 2], FIRST_IN_TURN);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + VW / 2], LAST_IN_TURN);
        }
        for (int i = 0; i < VW; i++) rows[i] = next[i];
    }
}

/* Transpose a square of vectors. */
INLINE void transpose_square(const float *from, int64_t from_width, float *to, int64_t to_width) {
    vf rows[VW];
    for (int i = 0; i < VW; i++) rows[i] = *(const vf *)(from + i * from_width);
    transpose_lanes(rows);
    for (int i = 0; i < VW; i++) *(vf *)(to + i * to_width) = rows[i];
}

#endif
