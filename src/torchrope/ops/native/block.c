/* Rotation of channel blocks by matrices:  y = R x  in each block. */
#include "panel.h"

typedef struct {
    int64_t size;
    Side sides[2];
    int64_t tokens, heads, blocks, b, head_dim; /* heads: those of the rotation */
    int64_t sets, threads;                      /* sets of positions: 1, or one per sample */
    const float *table;                         /* (sets, heads, tokens, blocks, b, b) */
    int64_t table_stride[6];
    float *d_tangent; /* (sets, heads, tokens, blocks, b (b - 1) / 2) */
} Block;

/* Copy a block, transposed or not, into rows of the padded width. */
INLINE void copy_block(const float *block, int64_t rows_apart, int64_t columns_apart, int64_t b, float *target,
                       int64_t width) {
    for (int64_t i = 0; i < b; i++) {
        float *row = target + i * width;
        if (columns_apart == 1)
            memcpy(row, block + i * rows_apart, 4 * b);
        else
            for (int64_t j = 0; j < b; j++) row[j] = block[i * rows_apart + j * columns_apart];
    }
}

/* Specialised for the most frequent size. */
INLINE void apply(int64_t rows, int64_t b, int64_t width, const float *x, int64_t ldx, const float *matrix, float *y) {
    if (b == 8 && width == 8)
        product(rows, 8, 8, x, ldx, 1, matrix, 8, y, ldx, 0);
    else
        product(rows, b, width, x, ldx, 1, matrix, width, y, ldx, 0);
}

/* Buffers of a thread. */
typedef struct {
    float *x, *grad, *y, *back, *matrix, *transposed, *outer; /* panels; blocks, of all tokens of a group if b is 8 */
    int64_t row, width; /* floats of a panel's row, and of a padded block's */
} Workspace;

static Workspace lay_out(const Block *p, Arena *arena) {
    Workspace w;
    w.width = padded(p->b);
    w.row = round_up(p->blocks * p->b + w.width, 16);
    float **panels[] = {&w.x, &w.grad, &w.y, &w.back}, **squares[] = {&w.matrix, &w.transposed, &w.outer};
    for (int i = 0; i < 4; i++) *panels[i] = take(arena, 4 * ROWS * w.row);
    int64_t matrices = p->b == 8 ? GROUP_TOKENS * p->blocks : 1;
    for (int i = 0; i < 3; i++) *squares[i] = take(arena, 4 * matrices * p->b * w.width);
    return w;
}

static const float *block_of(const Block *p, int64_t set, int64_t head, int64_t token, int64_t block) {
    const int64_t *stride = p->table_stride;
    return p->table + set * stride[0] + head * stride[1] + token * stride[2] + block * stride[3];
}

static void rotate_token(const Block *p, int64_t set, int64_t head, int64_t token, Workspace w) {
    int64_t b = p->b, n = p->blocks * b;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 0, w.x, w.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t i = 0; i < p->blocks; i++) {
            /* y^T = x^T R^T */
            copy_block(block_of(p, set, head, token, i), p->table_stride[5], p->table_stride[4], b, w.transposed,
                       w.width);
            apply(panel.count, b, w.width, w.x + i * b, w.row, w.transposed, w.y + i * b);
        }
        spread(&panel, token, n, p->head_dim, 0, w.y, w.row);
    }
}

/* dx = R^T dy, and the tangent's gradient  X - X^T  with  X = sum dy y^T. */
static void rotate_token_back(const Block *p, int64_t set, int64_t head, int64_t token, Workspace w) {
    int64_t b = p->b, n = p->blocks * b, entries = b * (b - 1) / 2;
    float *tangent = NULL;
    if (p->d_tangent) {
        tangent = p->d_tangent + ((set * p->heads + head) * p->tokens + token) * p->blocks * entries;
        memset(tangent, 0, 4 * p->blocks * entries);
    }
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 1, w.grad, w.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        if (tangent) gather(&panel, token, n, 0, w.x, w.row);
        for (int64_t i = 0; i < p->blocks; i++) {
            const float *block = block_of(p, set, head, token, i);
            if (tangent) {
                copy_block(block, p->table_stride[5], p->table_stride[4], b, w.transposed, w.width);
                apply(panel.count, b, w.width, w.x + i * b, w.row, w.transposed, w.y);
                product(b, panel.count, w.width, w.grad + i * b, 1, w.row, w.y, w.row, w.outer, w.width, 0);
                float *entry = tangent + i * entries;
                for (int64_t r = 0; r < b; r++)
                    for (int64_t c = r + 1; c < b; c++)
                        *entry++ += w.outer[r * w.width + c] - w.outer[c * w.width + r];
            }
            copy_block(block, p->table_stride[4], p->table_stride[5], b, w.matrix, w.width);
            apply(panel.count, b, w.width, w.grad + i * b, w.row, w.matrix, w.back + i * b);
        }
        spread(&panel, token, n, p->head_dim, 1, w.back, w.row);
    }
}

/* ---- blocks of eight whose transposes are contiguous, the layout that the exponential writes ---- */

INLINE int is_fast(const Block *p) { return p->b == 8 && p->table_stride[4] == 1 && p->table_stride[5] == 8; }

INLINE void transpose(const float *from, float *to) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) to[8 * j + i] = from[8 * i + j];
}

/* Gradient of the tangent from  sum dy x^T  of a token's block:  X - X^T  above the diagonal,  X = sum dy (R x)^T. */
INLINE void write_tangent(float *outer, const float *transposed, float *entry) {
    float flipped[64];
    multiply_matrix(outer, transposed);
    transpose(outer, flipped);
    for (int r = 0; r < 8; r++)
        for (int c = r + 1; c < 8; c++) *entry++ = outer[8 * r + c] - flipped[8 * r + c];
}

INLINE void rotate_group(const Block *p, int64_t set, int64_t head, int64_t first, int64_t tokens, int backward,
                         Workspace w) {
    int64_t n = p->blocks * 8;
    int wanted = backward && p->d_tangent;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    Places places;
    Scratch scratch = {w.x, w.grad, w.y, w.row};
    for (int64_t t = 0; backward && t < tokens; t++)
        for (int64_t i = 0; i < p->blocks; i++)
            transpose(block_of(p, set, head, first + t, i), w.matrix + 64 * (t * p->blocks + i));
    if (wanted) memset(w.outer, 0, 4 * 64 * tokens * p->blocks);
    while (next_panel(&walk, &panel))
        for (int64_t from = 0; from < panel.count; from += GROUP_ROWS) {
            Group g = {&panel, from, least(GROUP_ROWS, panel.count - from), first, tokens};
            find_places(g, n, !backward || wanted, backward, scratch, &places);
            for (int64_t i = 0; i < p->blocks; i++)
                for (int64_t t = 0; t < tokens; t++) {
                    const float *const *in = (backward ? places.grad : places.x) + t * g.rows;
                    int64_t at = t * p->blocks + i;
                    v8 matrix[8];
                    load_matrix(backward ? w.matrix + 64 * at : block_of(p, set, head, first + t, i), matrix);
                    for (int64_t r = 0; r < g.rows; r++)
                        *(v8 *)(places.out[t * g.rows + r] + 8 * i) = times_matrix(in[r] + 8 * i, matrix);
                    if (!wanted) continue;
                    const float *rows[GROUP_ROWS];
                    for (int64_t r = 0; r < g.rows; r++) rows[r] = in[r] + 8 * i;
                    add_outer(rows, places.x + t * g.rows, 8 * i, g.rows, w.outer + 64 * at);
                }
            finish_rows(g, n, p->head_dim, backward, scratch);
        }
    for (int64_t t = 0; wanted && t < tokens; t++)
        for (int64_t i = 0; i < p->blocks; i++) {
            int64_t token = (set * p->heads + head) * p->tokens + first + t;
            write_tangent(w.outer + 64 * (t * p->blocks + i), block_of(p, set, head, first + t, i),
                          p->d_tangent + (token * p->blocks + i) * 28);
        }
}

enum { TOKENS = GROUP_TOKENS }; /* of an item */

INLINE void block_part(const Block *p, int64_t item, void *memory, int backward) {
    Arena arena = {memory, 0};
    Workspace w = lay_out(p, &arena);
    if (w.width != p->b) {
        memset(w.matrix, 0, 4 * p->b * w.width);
        memset(w.transposed, 0, 4 * p->b * w.width);
    }
    int64_t tiles = (p->tokens + TOKENS - 1) / TOKENS;
    int64_t set = item / (tiles * p->heads), head = item / tiles % p->heads, first = item % tiles * TOKENS;
    if (is_fast(p)) {
        rotate_group(p, set, head, first, least(TOKENS, p->tokens - first), backward, w);
        return;
    }
    for (int64_t token = first; token < least(first + TOKENS, p->tokens); token++)
        if (backward)
            rotate_token_back(p, set, head, token, w);
        else
            rotate_token(p, set, head, token, w);
}

static void forward_part(const void *context, int64_t item, void *memory) { block_part(context, item, memory, 0); }
static void backward_part(const void *context, int64_t item, void *memory) { block_part(context, item, memory, 1); }

API int64_t torchrope_block(const Block *p, int64_t backward) {
    CHECK_LAYOUT(p);
    int64_t items = p->sets * p->heads * ((p->tokens + TOKENS - 1) / TOKENS);
    Arena arena = {NULL, 0};
    lay_out(p, &arena);
    return parallel_for(items, p->threads, arena.used, backward ? backward_part : forward_part, p);
}
