"""Rotation of channel blocks by a table of matrices:  y = R x.

A matrix is loaded once and applied to the vectors of all samples and heads that share it. Many vectors are
rotated by one product on tensor cores, with small blocks side by side on the diagonal of one tile; for few vectors, or
block sizes that do not suit tensor cores, each result is a sum over columns.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import (
    VARYING,
    WIDE_WARPS,
    offsets,
    on_device_of,
    outer_strides,
    power_of_two,
    share,
    splits,
)
from torchrope.ops.gpu.products import multiply, multiply_vectors, outer_products
from torchrope.tensors import contiguous_channels, empty_rows

# Numbers in the tile of a program that sums over columns.
_TILE = 2048
# Larger tiles do not fit the shared memory of every device.
_WIDEST = 64


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Multiply blocks of channels by their matrices:  y = R x.

    Args:
        x: `(batch, heads, tokens, channels)`, float32, bfloat16 or float16.
        table: `(1 or batch, rotation heads, tokens, blocks, b, b)` float32, any strides.

    Returns:
        Rotated x, in its memory order if its channels are contiguous; channels beyond the blocks are unchanged.
    """
    x = contiguous_channels(x)
    out = empty_rows(x)
    if x.numel() == 0:
        return out
    work = _Work(x, table)
    kernel = _rotate_products_kernel if work.by_products else _rotate_sums_kernel
    strides, unit = outer_strides(x, out)
    with on_device_of(x):
        kernel[work.grid](x, out, table, *strides, *work.strides, *work.sizes, UNIT=unit, **work.tile)
    copy_rest(x, out, work.rotary_dim)
    return out


def rotate_backward(grad: Tensor, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rotate`:  dx = R^T dy,  dΩ = X - X^T,  X = sum dy y^T,  of R' = exp(Ω) R at Ω = 0.

    Args:
        grad: Gradient of the rotated x.
        x: As given to `rotate`.
        table: As given to `rotate`.

    Returns:
        Gradient of x in its dtype, and the strict upper triangles of X - X^T row by row,
        `(1 or batch, rotation heads, tokens, blocks, b (b - 1) / 2)` float32.
    """
    x, grad = contiguous_channels(x), contiguous_channels(grad)
    out = empty_rows(x)
    *outer, b, _ = table.shape
    upper = b * (b - 1) // 2
    if x.numel() == 0:
        return out, table.new_zeros(()).expand(*outer, upper)
    work = _Work(x, table)
    tangent = table.new_empty(work.splits, *outer, upper)
    kernel = _rotate_backward_products_kernel if work.by_products else _rotate_backward_sums_kernel
    strides, unit = outer_strides(x, out, grad)
    with on_device_of(x):
        kernel[work.grid](grad, x, out, table, tangent, *strides, *work.strides, *work.sizes, UNIT=unit, **work.tile)
    copy_rest(grad, out, work.rotary_dim)
    return out, tangent[0] if work.splits == 1 else tangent.sum(dim=0)


def copy_rest(x: Tensor, out: Tensor, rotary_dim: int) -> None:
    """Copy the channels that are not rotated."""
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])


class _Work:
    """Partition of a rotation into programs: tiles of matrices, and shares of the rows.

    Rows are the samples and heads that one matrix rotates.
    """

    def __init__(self, x: Tensor, table: Tensor) -> None:
        sets, heads, tokens, blocks, b, _ = table.shape
        self.rotary_dim = blocks * b
        samples, group = x.shape[0] // sets, x.shape[1] // heads
        rows = samples * group
        width = power_of_two(b)
        narrow = x.element_size() == 2
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
        self.sizes = tokens, heads, sets, samples, group, self.splits, blocks
        outer, self.tile["TABLE_UNIT"] = outer_strides(table)
        self.strides = *outer, *table.stride()[3:]


@triton.jit(do_not_specialize=VARYING)
def _rotate_products_kernel(
    x, out, table,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, heads, sets, samples, group, splits, blocks,
    UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, token, place, first_block, split = _locate_diagonal(tokens, blocks, heads, sets, TOGETHER)
    channel = first_block * BLOCK + tl.arange(0, WIDTH)
    is_rotated = _rotated_channels(first_block, blocks, BLOCK, WIDTH, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token, TABLE_UNIT)
    back = _load_diagonal(at, first_block, blocks, r_block, r_column, r_row, BLOCK, WIDTH, TOGETHER)  # R^T
    first, last = share(split, splits, samples * group)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & is_rotated[None, :]
        here = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(x + here[:, None] + channel[None, :], mask=inside, other=0.0)
        rotated = multiply_vectors(vectors, back)
        tl.store(out + there[:, None] + channel[None, :], rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _rotate_backward_products_kernel(
    grad, x, out, table, tangent,
    x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, heads, sets, samples, group, splits, blocks,
    UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, token, place, first_block, split = _locate_diagonal(tokens, blocks, heads, sets, TOGETHER)
    channel = first_block * BLOCK + tl.arange(0, WIDTH)
    is_rotated = _rotated_channels(first_block, blocks, BLOCK, WIDTH, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token, TABLE_UNIT)
    matrix = _load_diagonal(at, first_block, blocks, r_block, r_row, r_column, BLOCK, WIDTH, TOGETHER)
    first, last = share(split, splits, samples * group)
    outer = multiply_back_rows(
        grad, x, out, first, last, place, samples, head, group, token,
        x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
        matrix, channel, is_rotated, UNIT, WIDTH, ROWS,
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
def _matrix_offset(place, head, token, r_set, r_head, r_token, UNIT: tl.constexpr):
    in_set = tl.cast(head, tl.int64) * r_head + tl.cast(token, tl.int64) * r_token
    return (tl.cast(place, tl.int64) * r_set + in_set) * UNIT


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
def multiply_back_rows(
    grad, x, out, first, last, place, samples, head, group, token,
    x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
    matrix, channel, is_rotated, UNIT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store dx = R^T dy of rows; return sum dy x^T [WIDTH, WIDTH]."""
    outer = tl.zeros((WIDTH, WIDTH), tl.float32)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & is_rotated[None, :]
        here = offsets(row, token, place, samples, head, group, grad_sample, grad_head, grad_token, UNIT)
        origin = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        grads = tl.load(grad + here[:, None] + channel[None, :], mask=inside, other=0.0)
        vectors = tl.load(x + origin[:, None] + channel[None, :], mask=inside, other=0.0)
        back = multiply_vectors(grads, matrix)
        tl.store(out + there[:, None] + channel[None, :], back.to(out.dtype.element_ty), mask=inside)
        outer += outer_products(grads, vectors)
    return outer


@triton.jit(do_not_specialize=VARYING)
def _rotate_sums_kernel(
    x, out, table,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, heads, sets, samples, group, splits, blocks,
    UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    head, place, tile, split = _locate_matrices(tokens, blocks, heads, sets, TOGETHER)
    token, block, real = _tokens_and_blocks(tile, tokens, blocks, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token, TABLE_UNIT) + block * r_block
    matrix = _load_matrices(at, real, r_row, r_column, BLOCK, WIDTH)
    local = tl.arange(0, WIDTH)
    inside = real[:, None] & (local < BLOCK)[None, :]
    channel = (block * BLOCK)[:, None] + local[None, :]
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(x + here[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
        rotated = tl.sum(matrix * vectors[:, None, :], axis=2)
        tl.store(out + there[:, None] + channel, rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _rotate_backward_sums_kernel(
    grad, x, out, table, tangent,
    x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
    r_set, r_head, r_token, r_block, r_row, r_column,
    tokens, heads, sets, samples, group, splits, blocks,
    UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    head, place, tile, split = _locate_matrices(tokens, blocks, heads, sets, TOGETHER)
    token, block, real = _tokens_and_blocks(tile, tokens, blocks, TOGETHER)
    at = table + _matrix_offset(place, head, token, r_set, r_head, r_token, TABLE_UNIT) + block * r_block
    matrix = _load_matrices(at, real, r_row, r_column, BLOCK, WIDTH)
    local = tl.arange(0, WIDTH)
    inside = real[:, None] & (local < BLOCK)[None, :]
    channel = (block * BLOCK)[:, None] + local[None, :]
    skew = tl.zeros((TOGETHER, WIDTH, WIDTH), tl.float32)  # sum dy y^T - y dy^T
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, place, samples, head, group, grad_sample, grad_head, grad_token, UNIT)
        origin = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        grads = tl.load(grad + here[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
        vectors = tl.load(x + origin[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
        back = tl.sum(matrix * grads[:, :, None], axis=1)
        tl.store(out + there[:, None] + channel, back.to(out.dtype.element_ty), mask=inside)
        rotated = tl.sum(matrix * vectors[:, None, :], axis=2)
        skew += grads[:, :, None] * rotated[:, None, :] - rotated[:, :, None] * grads[:, None, :]
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
