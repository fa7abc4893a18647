"""Rotation of channel blocks by a table of matrices:  y = R x.

A matrix is loaded once and applied to the vectors of all samples and heads that share it. Many vectors are
rotated by one product on tensor cores, with small blocks side by side on the diagonal of one tile; for few vectors, or
block sizes that do not suit tensor cores, each result is a sum over columns.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import (
    WIDE_WARPS,
    contiguous_channels,
    on_device_of,
    outer_strides,
    power_of_two,
    splits,
)
from torchrope.ops.gpu.products import multiply, multiply_vectors, outer_products
from torchrope.tensors import empty_rows

# Numbers in the tile of a program that sums over columns.
_TILE = 2048
# Larger tiles do not fit the shared memory of every device.
_WIDEST = 64


def rotate(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply blocks of channels by their matrices:  y = R x.

    Args:
        q: `(batch, query heads, tokens, channels)`, float32, bfloat16 or float16.
        k: `(batch, key heads, tokens, channels)`.
        table: `(1 or batch, rotation heads, tokens, blocks, b, b)` float32, any strides.

    Returns:
        Rotated q and k, contiguous, in the dtypes of the inputs; channels beyond the blocks are unchanged.
    """
    q, k = contiguous_channels(q), contiguous_channels(k)
    q_out, k_out = empty_rows(q), empty_rows(k)
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    work = _Work(q, k, table)
    kernel = _rotate_products_kernel if work.by_products else _rotate_sums_kernel
    with on_device_of(q):
        kernel[work.grid](
            q, k, q_out, k_out, table,
            *outer_strides(q), *outer_strides(k), *outer_strides(q_out), *outer_strides(k_out), *table.stride(),
            *work.sizes, **work.tile,
        )  # fmt: skip
    copy_rest(q, q_out, work.rotary_dim)
    copy_rest(k, k_out, work.rotary_dim)
    return q_out, k_out


def rotate_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `rotate`:  dx = R^T dy,  dΩ = X - X^T,  X = sum dy y^T,  of R' = exp(Ω) R at Ω = 0.

    Args:
        grad_q: Gradient of the rotated q.
        grad_k: Gradient of the rotated k.
        q: As given to `rotate`.
        k: As given to `rotate`.
        table: As given to `rotate`.

    Returns:
        Gradients of q and k in their dtypes, and the strict upper triangles of X - X^T row by row,
        `(1 or batch, rotation heads, tokens, blocks, b (b - 1) / 2)` float32.
    """
    q, k, grad_q, grad_k = map(contiguous_channels, (q, k, grad_q, grad_k))
    q_out, k_out = empty_rows(q), empty_rows(k)
    *outer, b, _ = table.shape
    upper = b * (b - 1) // 2
    if q.numel() + k.numel() == 0:
        return q_out, k_out, torch.zeros(*outer, upper, dtype=torch.float32, device=q.device)
    work = _Work(q, k, table)
    tangent = torch.empty(work.splits, *outer, upper, dtype=torch.float32, device=q.device)
    kernel = _rotate_backward_products_kernel if work.by_products else _rotate_backward_sums_kernel
    with on_device_of(q):
        kernel[work.grid](
            grad_q, grad_k, q, k, q_out, k_out, table, tangent,
            *outer_strides(grad_q), *outer_strides(grad_k), *outer_strides(q), *outer_strides(k),
            *outer_strides(q_out), *outer_strides(k_out), *table.stride(),
            *work.sizes, **work.tile,
        )  # fmt: skip
    copy_rest(grad_q, q_out, work.rotary_dim)
    copy_rest(grad_k, k_out, work.rotary_dim)
    return q_out, k_out, tangent[0] if work.splits == 1 else tangent.sum(dim=0)


def copy_rest(x: Tensor, out: Tensor, rotary_dim: int) -> None:
    """Copy the channels that are not rotated."""
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])


class _Work:
    """Partition of a rotation into programs: tiles of matrices, and shares of the rows.

    Rows are the samples and heads that one matrix rotates.
    """

    def __init__(self, q: Tensor, k: Tensor, table: Tensor) -> None:
        sets, heads, tokens, blocks, b, _ = table.shape
        self.rotary_dim = blocks * b
        samples = q.shape[0] // sets
        groups = q.shape[1] // heads, k.shape[1] // heads
        rows = samples * max(groups)
        width = power_of_two(b)
        narrow = q.element_size() == 2
        self.by_products = rows >= 16 and b <= _WIDEST and (b >= 16 or narrow)
        if self.by_products:
            # 32 channels of 16 bits are two whole sectors of memory; a wider diagonal would hold more zeros.
            width = max(width, 32 if narrow else 16)
            height = 64 if narrow else 32
            together = min(width // b, blocks)
            programs = sets * heads * tokens * triton.cdiv(blocks, together)
            self.tile = dict(
                BLOCK=b, WIDTH=width, TOGETHER=together, ROWS=height, num_warps=WIDE_WARPS if width > 32 else 4
            )
        else:
            together = max(_TILE // width**2, 1)
            programs = sets * heads * triton.cdiv(tokens * blocks, together)
            self.tile = dict(BLOCK=b, WIDTH=width, TOGETHER=together, num_warps=8 if width > 64 else 4)
        self.splits = splits(programs, triton.cdiv(rows, 32) if self.by_products else rows)
        self.grid = (programs * self.splits,)
        self.sizes = tokens, blocks, heads, sets, samples, *groups, self.splits


@triton.jit
def share(split, splits, rows):
    """Compute the range of rows of a program."""
    each = tl.cdiv(rows, splits)
    return split * each, tl.minimum((split + 1) * each, rows)


@triton.jit
def row_offset(start, row, group, head, stride_sample, stride_head):
    """Compute the offset of a row: the row'th of the vectors that share a matrix, over samples and heads of a group."""
    sample = tl.cast(start + row // group, tl.int64)
    return sample * stride_sample + (head * group + row % group) * tl.cast(stride_head, tl.int64)


@triton.jit
def _rotate_products_kernel(
    q, k, q_out, k_out, table,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, blocks, heads, sets, samples, q_group, k_group, splits,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, token, place, first_block, split = _locate_diagonal(tokens, blocks, heads, sets, TOGETHER)
    channel = first_block * BLOCK + tl.arange(0, WIDTH)
    is_rotated = _rotated_channels(first_block, blocks, BLOCK, WIDTH, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token)
    back = _load_diagonal(at, first_block, blocks, r_block, r_column, r_row, BLOCK, WIDTH, TOGETHER)  # R^T
    start = place * samples
    first, last = share(split, splits, samples * q_group)
    _multiply_rows(
        q, q_out, first, last, start, q_group, head, token, q_sample, q_head, q_token,
        q_out_sample, q_out_head, q_out_token, back, channel, is_rotated, ROWS,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    _multiply_rows(
        k, k_out, first, last, start, k_group, head, token, k_sample, k_head, k_token,
        k_out_sample, k_out_head, k_out_token, back, channel, is_rotated, ROWS,
    )  # fmt: skip


@triton.jit
def _rotate_backward_products_kernel(
    grad_q, grad_k, q, k, q_out, k_out, table, tangent,
    gq_sample, gq_head, gq_token, gk_sample, gk_head, gk_token,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, blocks, heads, sets, samples, q_group, k_group, splits,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, token, place, first_block, split = _locate_diagonal(tokens, blocks, heads, sets, TOGETHER)
    channel = first_block * BLOCK + tl.arange(0, WIDTH)
    is_rotated = _rotated_channels(first_block, blocks, BLOCK, WIDTH, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token)
    matrix = _load_diagonal(at, first_block, blocks, r_block, r_row, r_column, BLOCK, WIDTH, TOGETHER)
    start = place * samples
    outer = tl.zeros((WIDTH, WIDTH), tl.float32)  # sum dy x^T
    first, last = share(split, splits, samples * q_group)
    outer = multiply_back_rows(
        grad_q, q, q_out, first, last, start, q_group, head, token, gq_sample, gq_head, gq_token,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token,
        matrix, outer, channel, is_rotated, ROWS,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    outer = multiply_back_rows(
        grad_k, k, k_out, first, last, start, k_group, head, token, gk_sample, gk_head, gk_token,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token,
        matrix, outer, channel, is_rotated, ROWS,
    )  # fmt: skip
    outer = multiply(outer, tl.trans(matrix))  # sum dy y^T
    outer = outer - tl.trans(outer)
    local = tl.arange(0, WIDTH)
    row = (local % BLOCK)[:, None]
    column = (local % BLOCK)[None, :]
    kept = is_rotated[:, None] & ((local // BLOCK)[:, None] == (local // BLOCK)[None, :]) & (row < column)
    cell = ((tl.cast(split * sets + place, tl.int64) * heads + head) * tokens + token) * blocks + first_block
    cell = cell + (local // BLOCK)[:, None]
    tl.store(tangent + cell * (BLOCK * (BLOCK - 1) // 2) + _upper_index(row, column, BLOCK), outer, mask=kept)


@triton.jit
def _locate_diagonal(tokens, blocks, heads, sets, TOGETHER: tl.constexpr):
    """Locate a program of matrix products: head, token, set of matrices, first block and share of the rows."""
    program = tl.program_id(0)
    parts = tl.cdiv(blocks, TOGETHER)
    first_block = program % parts * TOGETHER
    program = program // parts
    head = program % heads
    program = program // heads
    return head, program % tokens, program // tokens % sets, first_block, program // tokens // sets


@triton.jit
def _matrix_offset(place, head, token, r_set, r_head, r_token):
    return tl.cast(place, tl.int64) * r_set + tl.cast(head, tl.int64) * r_head + tl.cast(token, tl.int64) * r_token


@triton.jit
def _rotated_channels(first_block, blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """Mask the channels of a tile that belong to a block [WIDTH]."""
    slot = tl.arange(0, WIDTH) // BLOCK
    return (slot < TOGETHER) & (first_block + slot < blocks)


@triton.jit
def _load_diagonal(
    at, first_block, blocks, r_block, r_row, r_column,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Load matrices side by side on the diagonal of a tile, zeros elsewhere [WIDTH, WIDTH]."""
    local = tl.arange(0, WIDTH)
    slot = local // BLOCK
    own = _rotated_channels(first_block, blocks, BLOCK, WIDTH, TOGETHER)[:, None] & (slot[:, None] == slot[None, :])
    row = (first_block + slot) * r_block + local % BLOCK * r_row
    return tl.load(at + row[:, None] + (local % BLOCK * r_column)[None, :], mask=own, other=0.0)


@triton.jit
def _multiply_rows(
    x, out, first, last, start, group, head, token, x_sample, x_head, x_token, out_sample, out_head, out_token,
    matrix, channel, is_rotated, ROWS: tl.constexpr,
):  # fmt: skip
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & is_rotated[None, :]
        here = row_offset(start, row, group, head, x_sample, x_head) + tl.cast(token, tl.int64) * x_token
        there = row_offset(start, row, group, head, out_sample, out_head) + tl.cast(token, tl.int64) * out_token
        vectors = tl.load(x + here[:, None] + channel[None, :], mask=inside, other=0.0)
        rotated = multiply_vectors(vectors, matrix)
        tl.store(out + there[:, None] + channel[None, :], rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_back_rows(
    grad, x, out, first, last, start, group, head, token,
    grad_sample, grad_head, grad_token, x_sample, x_head, x_token, out_sample, out_head, out_token,
    matrix, outer, channel, is_rotated, ROWS: tl.constexpr,
):  # fmt: skip
    """Store dx = R^T dy of rows; return `outer` plus sum dy x^T [WIDTH, WIDTH]."""
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & is_rotated[None, :]
        wide = tl.cast(token, tl.int64)
        here = row_offset(start, row, group, head, grad_sample, grad_head) + wide * grad_token
        origin = row_offset(start, row, group, head, x_sample, x_head) + wide * x_token
        there = row_offset(start, row, group, head, out_sample, out_head) + wide * out_token
        grads = tl.load(grad + here[:, None] + channel[None, :], mask=inside, other=0.0)
        vectors = tl.load(x + origin[:, None] + channel[None, :], mask=inside, other=0.0)
        back = multiply_vectors(grads, matrix)
        tl.store(out + there[:, None] + channel[None, :], back.to(out.dtype.element_ty), mask=inside)
        outer += outer_products(grads, vectors)
    return outer


@triton.jit
def _rotate_sums_kernel(
    q, k, q_out, k_out, table,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, blocks, heads, sets, samples, q_group, k_group, splits,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    head, place, tile, split = _locate_matrices(tokens, blocks, heads, sets, TOGETHER)
    token, block, real = _tokens_and_blocks(tile, tokens, blocks, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token) + block * r_block
    matrix = _load_matrices(at, real, r_row, r_column, BLOCK, WIDTH)
    start = place * samples
    first, last = share(split, splits, samples * q_group)
    _sum_rows(
        q, q_out, first, last, start, q_group, head, token, block, real, q_sample, q_head, q_token,
        q_out_sample, q_out_head, q_out_token, matrix, BLOCK, WIDTH,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    _sum_rows(
        k, k_out, first, last, start, k_group, head, token, block, real, k_sample, k_head, k_token,
        k_out_sample, k_out_head, k_out_token, matrix, BLOCK, WIDTH,
    )  # fmt: skip


@triton.jit
def _rotate_backward_sums_kernel(
    grad_q, grad_k, q, k, q_out, k_out, table, tangent,
    gq_sample, gq_head, gq_token, gk_sample, gk_head, gk_token,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, blocks, heads, sets, samples, q_group, k_group, splits,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    head, place, tile, split = _locate_matrices(tokens, blocks, heads, sets, TOGETHER)
    token, block, real = _tokens_and_blocks(tile, tokens, blocks, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token) + block * r_block
    matrix = _load_matrices(at, real, r_row, r_column, BLOCK, WIDTH)
    start = place * samples
    skew = tl.zeros((TOGETHER, WIDTH, WIDTH), tl.float32)  # sum dy y^T - y dy^T
    first, last = share(split, splits, samples * q_group)
    skew = _sum_back_rows(
        grad_q, q, q_out, first, last, start, q_group, head, token, block, real, gq_sample, gq_head, gq_token,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, matrix, skew, BLOCK, WIDTH,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    skew = _sum_back_rows(
        grad_k, k, k_out, first, last, start, k_group, head, token, block, real, gk_sample, gk_head, gk_token,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, matrix, skew, BLOCK, WIDTH,
    )  # fmt: skip
    row = tl.arange(0, WIDTH)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    kept = real[:, None, None] & (row < column) & (column < BLOCK)
    cell = ((tl.cast(split * sets + place, tl.int64) * heads + head) * tokens + token) * blocks + block
    at = tangent + cell[:, None, None] * (BLOCK * (BLOCK - 1) // 2) + _upper_index(row, column, BLOCK)
    tl.store(at, skew, mask=kept)


@triton.jit
def _upper_index(row, column, BLOCK: tl.constexpr):
    """Index of an entry above the diagonal, row by row."""
    return row * (2 * BLOCK - row - 1) // 2 + column - row - 1


@triton.jit
def _locate_matrices(tokens, blocks, heads, sets, TOGETHER: tl.constexpr):
    """Locate a program of column sums: head, set of matrices, tile of matrices and share of the rows."""
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens * blocks, TOGETHER)
    head = program % heads
    program = program // heads
    return head, program // tiles % sets, program % tiles, program // tiles // sets


@triton.jit
def _tokens_and_blocks(tile, tokens, blocks, TOGETHER: tl.constexpr):
    """Compute token and block of each matrix of a tile, and whether it exists [TOGETHER]."""
    matrix = tile * TOGETHER + tl.arange(0, TOGETHER)
    return (matrix // blocks).to(tl.int64), matrix % blocks, matrix < tokens * blocks


@triton.jit
def _load_matrices(at, real, r_row, r_column, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Load matrices [TOGETHER, WIDTH, WIDTH], zeros beyond the block."""
    row = tl.arange(0, WIDTH)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    inside = real[:, None, None] & (row < BLOCK) & (column < BLOCK)
    return tl.load(at[:, None, None] + row * r_row + column * r_column, mask=inside, other=0.0)


@triton.jit
def _sum_rows(
    x, out, first, last, start, group, head, token, block, real, x_sample, x_head, x_token,
    out_sample, out_head, out_token, matrix, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    local = tl.arange(0, WIDTH)
    inside = real[:, None] & (local < BLOCK)[None, :]
    channel = (block * BLOCK)[:, None] + local[None, :]
    for row in range(first, last):
        here = row_offset(start, row, group, head, x_sample, x_head)
        there = row_offset(start, row, group, head, out_sample, out_head)
        vectors = tl.load(x + here + (token * x_token)[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
        rotated = tl.sum(matrix * vectors[:, None, :], axis=2)
        tl.store(out + there + (token * out_token)[:, None] + channel, rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_back_rows(
    grad, x, out, first, last, start, group, head, token, block, real, grad_sample, grad_head, grad_token,
    x_sample, x_head, x_token, out_sample, out_head, out_token, matrix, skew,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store dx = R^T dy of rows; return `skew` plus sum dy y^T - y dy^T [TOGETHER, WIDTH, WIDTH]."""
    local = tl.arange(0, WIDTH)
    inside = real[:, None] & (local < BLOCK)[None, :]
    channel = (block * BLOCK)[:, None] + local[None, :]
    for row in range(first, last):
        here = row_offset(start, row, group, head, grad_sample, grad_head)
        origin = row_offset(start, row, group, head, x_sample, x_head)
        there = row_offset(start, row, group, head, out_sample, out_head)
        grads = tl.load(grad + here + (token * grad_token)[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
        vectors = tl.load(x + origin + (token * x_token)[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
        back = tl.sum(matrix * grads[:, :, None], axis=1)
        tl.store(out + there + (token * out_token)[:, None] + channel, back.to(out.dtype.element_ty), mask=inside)
        rotated = tl.sum(matrix * vectors[:, None, :], axis=2)
        skew += grads[:, :, None] * rotated[:, None, :] - rotated[:, :, None] * grads[:, None, :]
    return skew
