"""Rotation of channel blocks by a table of matrices:  y = R x.

A matrix is loaded once and applied to the vectors of all samples and heads that share it. Many vectors are
rotated by one product on tensor cores, with small blocks side by side on the diagonal of one tile; for few vectors, or
blocks too large for that, each result is a sum over columns.
"""

# mypy: allow-untyped-defs

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import (
    MANY,
    VARYING,
    Sides,
    launch,
    locate,
    offsets,
    rows_of,
    share,
    splits_of,
    upper_index,
)
from torchrope.ops.gpu.products import multiply, multiply_vectors, outer_products
from torchrope.ops.record import specialisation
from torchrope.tensors import with_batch_dim

# Numbers in the tile of a program that sums over columns.
_TILE = 2048
# Larger tiles do not fit the shared memory of every device.
_WIDEST = 64


def rotate_block(q: Tensor, k: Tensor, table: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
    """Multiply blocks of channels by their matrices:  y = R x.  Channels beyond the blocks are unchanged."""
    return _run((q, k), table)[:2]


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, ...]:
    """Compute  dx = R^T dy  and, if wanted,  dΩ = X - X^T,  X = sum dy y^T,  of  R' = exp(Ω) R  at Ω = 0.

    dΩ is the strict upper triangle row by row.
    """
    return _run((grad_q, grad_k, q, k), table, wanted)


def _run(sides: Sides, table: Tensor, wanted: bool = False) -> tuple[Tensor, ...]:
    """Multiply by matrices, or back, by programs for tiles of them and shares of the rows; if wanted also sum dΩ."""
    matrices = with_batch_dim(table, 6).mT  # contiguous, as exp_generators stores it
    sets, heads, tokens = matrices.shape[:3]
    of = specialisation("rotate_block", (*sides[:2], matrices))
    b, blocks = of.b, of.blocks
    rows = rows_of(sides, sets, heads)
    width = triton.next_power_of_2(b)
    narrow = sides[0].element_size() == 2
    constants: dict[str, Any]
    if max(rows) >= MANY and b <= _WIDEST:
        kernel, shares = _rotate_products_kernel, triton.cdiv(sum(rows), 32)
        # 32 channels of 16 bits are two whole sectors of memory; a wider diagonal would hold more zeros.
        width = max(width, 32 if narrow else 16)
        together = min(width // b, blocks)
        tiles = tokens * triton.cdiv(blocks, together)
        constants = dict(ROWS=64 if narrow else 32, num_warps=4)
    else:
        kernel, shares = _rotate_sums_kernel, sum(rows)
        together = max(_TILE // width**2, 1)
        tiles = triton.cdiv(tokens * blocks, together)
        constants = dict(num_warps=8 if width > 64 else 4)
    programs = sets * heads * tiles
    splits = splits_of(programs, shares)
    constants |= dict(BLOCK=b, WIDTH=width, TOGETHER=together)
    part = splits, (*table.shape[:-2], b * (b - 1) // 2)
    return launch(kernel, of, sides, [matrices], heads, sets, programs, splits, [blocks], [part], [wanted], **constants)


@triton.jit(do_not_specialize=VARYING)
def _rotate_products_kernel(
    q, q_out, q_x, k, k_out, k_x, table, tangent,
    q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
    k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
    tokens, heads, sets, q_samples, q_group, k_samples, k_group, splits, blocks,
    BACK: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    part, head, token, set_, split = locate(tl.cdiv(blocks, TOGETHER), heads, tokens, sets)
    first_block = part * TOGETHER
    local = tl.arange(0, WIDTH)
    slot = local // BLOCK
    is_rotated = (slot < TOGETHER) & (first_block + slot < blocks)
    in_block = is_rotated[:, None] & (slot[:, None] == slot[None, :])
    row = (local % BLOCK)[:, None]
    column = (local % BLOCK)[None, :]
    block = ((tl.cast(set_, tl.int64) * heads + head) * tokens + token) * blocks + first_block + slot[:, None]
    matrix = tl.load(table + _entries(block, row, column, BACK, BLOCK), mask=in_block, other=0.0)
    channel = (first_block * BLOCK + local)[None, :]
    outer = tl.zeros((WIDTH, WIDTH), tl.float32)
    q_rows = q_samples * q_group
    first, last = share(split, splits, q_rows + k_samples * k_group)
    outer = multiply_rows(
        q, q_out, q_x, first, tl.minimum(last, q_rows), set_, q_samples, head, q_group, token,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
        matrix, outer, channel, is_rotated, UNIT, GROUPED, ROWS,
    )  # fmt: skip
    outer = multiply_rows(
        k, k_out, k_x, tl.maximum(first - q_rows, 0), last - q_rows, set_, k_samples, head, k_group, token,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
        matrix, outer, channel, is_rotated, UNIT, GROUPED, ROWS,
    )  # fmt: skip
    if tangent is not None:
        outer = multiply(outer, tl.trans(matrix))  # sum dy y^T
        outer = outer - tl.trans(outer)
        cell = ((tl.cast(split * sets + set_, tl.int64) * heads + head) * tokens + token) * blocks + first_block
        cell = cell + slot[:, None]
        at = tangent + cell * (BLOCK * (BLOCK - 1) // 2) + upper_index(row, column, BLOCK)
        tl.store(at, outer, mask=in_block & (row < column))


@triton.jit
def _entries(block, row, column, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute offsets of entries of R^T, or of R if BACK, in blocks that are stored as R^T."""
    if BACK:
        return block * (BLOCK * BLOCK) + column * BLOCK + row
    else:
        return block * (BLOCK * BLOCK) + row * BLOCK + column


@triton.jit
def multiply_rows(
    source, out, x, first, last, set_, samples, head, group, token,
    source_sample, source_head, source_token, out_sample, out_head, out_token, x_sample, x_head, x_token,
    matrix, outer, channel, is_rotated, UNIT: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store  y = M^T s  for rows s of source; add  sum s x^T,  nothing if x is None [WIDTH, WIDTH]."""
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & is_rotated[None, :]
        here = offsets(
            row, token, channel, set_, samples, head, group, source_sample, source_head, source_token, UNIT, GROUPED
        )  # fmt: skip
        there = offsets(row, token, channel, set_, samples, head, group, out_sample, out_head, out_token, UNIT, GROUPED)
        vectors = tl.load(source + here, mask=inside, other=0.0)
        if x is not None:
            origin = offsets(row, token, channel, set_, samples, head, group, x_sample, x_head, x_token, UNIT, GROUPED)
            before = tl.load(x + origin, mask=inside, other=0.0)
        rotated = multiply_vectors(vectors, matrix)
        tl.store(out + there, rotated.to(out.dtype.element_ty), mask=inside)
        if x is not None:
            outer += outer_products(vectors, before)
    return outer


@triton.jit(do_not_specialize=VARYING)
def _rotate_sums_kernel(
    q, q_out, q_x, k, k_out, k_x, table, tangent,
    q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
    k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
    tokens, heads, sets, q_samples, q_group, k_samples, k_group, splits, blocks,
    BACK: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    _, head, tile, set_, split = locate(1, heads, tl.cdiv(tokens * blocks, TOGETHER), sets)
    index = tile * TOGETHER + tl.arange(0, TOGETHER)
    real = index < tokens * blocks
    token = (index // blocks).to(tl.int64)
    block = index % blocks
    local = tl.arange(0, WIDTH)
    row_of_matrix = local[None, :, None]
    column = local[None, None, :]
    in_block = real[:, None, None] & (row_of_matrix < BLOCK) & (column < BLOCK)
    cell = ((tl.cast(set_, tl.int64) * heads + head) * tokens + token) * blocks + block
    at = table + _entries(cell[:, None, None], row_of_matrix, column, BACK, BLOCK)
    matrix = tl.load(at, mask=in_block, other=0.0)
    inside = real[:, None] & (local < BLOCK)[None, :]
    channel = (block * BLOCK)[:, None] + local[None, :]
    skew = tl.zeros((TOGETHER, WIDTH, WIDTH), tl.float32)  # sum dy y^T - y dy^T
    q_rows = q_samples * q_group
    first, last = share(split, splits, q_rows + k_samples * k_group)
    skew = _sum_columns(
        q, q_out, q_x, first, tl.minimum(last, q_rows), set_, q_samples, head, q_group, token,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
        matrix, skew, channel, inside, UNIT, GROUPED,
    )  # fmt: skip
    skew = _sum_columns(
        k, k_out, k_x, tl.maximum(first - q_rows, 0), last - q_rows, set_, k_samples, head, k_group, token,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
        matrix, skew, channel, inside, UNIT, GROUPED,
    )  # fmt: skip
    if tangent is not None:
        cell = ((tl.cast(split * sets + set_, tl.int64) * heads + head) * tokens + token) * blocks + block
        at = tangent + cell[:, None, None] * (BLOCK * (BLOCK - 1) // 2) + upper_index(row_of_matrix, column, BLOCK)
        tl.store(at, skew, mask=in_block & (row_of_matrix < column))


@triton.jit
def _sum_columns(
    source, out, x, first, last, set_, samples, head, group, token,
    source_sample, source_head, source_token, out_sample, out_head, out_token, x_sample, x_head, x_token,
    matrix, skew, channel, inside, UNIT: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Store  y = M^T s  for rows s of source; add  sum s y^T - y s^T  of y = M^T x  [TOGETHER, WIDTH, WIDTH]."""
    for row in range(first, last):
        here = offsets(
            row, token, channel, set_, samples, head, group, source_sample, source_head, source_token, UNIT, GROUPED
        )  # fmt: skip
        there = offsets(row, token, channel, set_, samples, head, group, out_sample, out_head, out_token, UNIT, GROUPED)
        vectors = tl.load(source + here, mask=inside, other=0.0).to(tl.float32)
        if x is not None:
            origin = offsets(row, token, channel, set_, samples, head, group, x_sample, x_head, x_token, UNIT, GROUPED)
            before = tl.load(x + origin, mask=inside, other=0.0).to(tl.float32)
        rotated = tl.sum(matrix * vectors[:, :, None], axis=1)
        tl.store(out + there, rotated.to(out.dtype.element_ty), mask=inside)
        if x is not None:
            after = tl.sum(matrix * before[:, None, :], axis=2)
            skew += vectors[:, :, None] * after[:, None, :] - after[:, :, None] * vectors[:, None, :]
    return skew
