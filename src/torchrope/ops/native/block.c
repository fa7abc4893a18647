/* Rotation of channel blocks by matrices:  y = R x  in each block. */
#include "panel.h"

typedef struct {
    Side sides[2];
    int64_t tokens, heads, blocks, b, head_dim; /* heads: those of the rotation */
    int64_t sets, threads;                      /* sets of positions: 1, or one a sample */
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

/* The one size that the compiler should know is the most frequent. */
INLINE void apply(int64_t rows, int64_t b, int64_t width, const float *x, int64_t ldx, const float *matrix, float *y) {
    if (b == 8 && width == 8)
        product(rows, 8, 8, x, ldx, 1, matrix, 8, y, ldx, 0);
    else
        product(rows, b, width, x, ldx, 1, matrix, width, y, ldx, 0);
}

typedef struct {
    float *x, *grad, *y, *back, *matrix, *transposed, *outer;
    int64_t row, width; /* floats of a panel's row, and of a padded block's */
} Room;

static Room room_for(const Block *p) {
    Room room;
    room.width = padded(p->b);
    room.row = round_up(p->blocks * p->b + room.width, 16);
    int64_t square = p->b * room.width;
    room.x = scratch(4 * (4 * ROWS * room.row + 3 * square));
    memset(room.x, 0, 4 * (4 * ROWS * room.row + 3 * square));
    room.grad = room.x + ROWS * room.row;
    room.y = room.grad + ROWS * room.row;
    room.back = room.y + ROWS * room.row;
    room.matrix = room.back + ROWS * room.row;
    room.transposed = room.matrix + square;
    room.outer = room.transposed + square;
    return room;
}

static const float *block_of(const Block *p, int64_t set, int64_t head, int64_t token, int64_t block) {
    const int64_t *stride = p->table_stride;
    return p->table + set * stride[0] + head * stride[1] + token * stride[2] + block * stride[3];
}

static void turn_token(const Block *p, int64_t set, int64_t head, int64_t token, Room room) {
    int64_t b = p->b, n = p->blocks * b;
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 0, room.x, room.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        for (int64_t i = 0; i < p->blocks; i++) {
            /* y^T = x^T R^T */
            copy_block(block_of(p, set, head, token, i), p->table_stride[5], p->table_stride[4], b, room.transposed,
                       room.width);
            apply(panel.count, b, room.width, room.x + i * b, room.row, room.transposed, room.y + i * b);
        }
        spread(&panel, token, n, p->head_dim, 0, room.y, room.row);
    }
}

/* dx = R^T gy, and the tangent's gradient  X - X^T  with  X = sum gy y^T. */
static void turn_token_back(const Block *p, int64_t set, int64_t head, int64_t token, Room room) {
    int64_t b = p->b, n = p->blocks * b, entries = b * (b - 1) / 2;
    float *tangent = NULL;
    if (p->d_tangent) {
        tangent = p->d_tangent + ((set * p->heads + head) * p->tokens + token) * p->blocks * entries;
        memset(tangent, 0, 4 * p->blocks * entries);
    }
    Walk walk = walk_over(p->sides, head, p->heads, set, p->sets);
    Panel panel;
    while (next_panel(&walk, &panel)) {
        gather(&panel, token, n, 1, room.grad, room.row);
        if (token + 1 < p->tokens) fetch_panel(&panel, token + 1, n);
        if (tangent) gather(&panel, token, n, 0, room.x, room.row);
        for (int64_t i = 0; i < p->blocks; i++) {
            const float *block = block_of(p, set, head, token, i);
            if (tangent) {
                copy_block(block, p->table_stride[5], p->table_stride[4], b, room.transposed, room.width);
                apply(panel.count, b, room.width, room.x + i * b, room.row, room.transposed, room.y);
                product(b, panel.count, room.width, room.grad + i * b, 1, room.row, room.y, room.row, room.outer,
                        room.width, 0);
                float *entry = tangent + i * entries;
                for (int64_t r = 0; r < b; r++)
                    for (int64_t c = r + 1; c < b; c++)
                        *entry++ += room.outer[r * room.width + c] - room.outer[c * room.width + r];
            }
            copy_block(block, p->table_stride[4], p->table_stride[5], b, room.matrix, room.width);
            apply(panel.count, b, room.width, room.grad + i * b, room.row, room.matrix, room.back + i * b);
        }
        spread(&panel, token, n, p->head_dim, 1, room.back, room.row);
    }
}

enum { TOKENS = 4 };

static void block_part(const Block *p, int64_t item, int backward) {
    Room room = room_for(p);
    int64_t tiles = (p->tokens + TOKENS - 1) / TOKENS;
    int64_t set = item / (tiles * p->heads), head = item / tiles % p->heads, first = item % tiles * TOKENS;
    for (int64_t token = first; token < least(first + TOKENS, p->tokens); token++)
        if (backward)
            turn_token_back(p, set, head, token, room);
        else
            turn_token(p, set, head, token, room);
    free(room.x);
}

static void forward_part(void *context, int64_t item) { block_part(context, item, 0); }
static void backward_part(void *context, int64_t item) { block_part(context, item, 1); }

API void torchrope_block(const Block *p, int64_t backward) {
    int64_t items = p->sets * p->heads * ((p->tokens + TOKENS - 1) / TOKENS);
    parallel_for(items, p->threads, backward ? backward_part : forward_part, (void *)p);
}
