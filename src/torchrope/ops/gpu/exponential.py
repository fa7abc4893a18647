"""Exponential of skew blocks:  R = exp(sum_a p_a A_a),  computed in registers.

Forward: scale G until its norm is below 0.85, sum the Taylor series, square repeatedly; stored is E = R - I, so that
small rotations keep their precision. A squaring doubles the error of orthogonality, so the matrix is orthogonalised
every eighth time. Backward: the integral of e^-uG M e^uG over u in [0, 1], by its series at the same scale and
one doubling per level. Matrices of one tile share the scale; matrices that are not finite are replaced
by zeros, and their results are NaN.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import VARYING, on_device_of, plain, upper_index
from torchrope.ops.gpu.products import multiply
from torchrope.tensors import exact_einsum, with_batch_dim


def exp_generators(positions: Tensor, generators: Tensor) -> Tensor:
    """Compute exp(sum_a p_a A_a), exactly I where the exponent is 0, each block's transpose contiguous.

    Blocks have at most 64 rows: wider products fit neither registers nor shared memory.
    """
    (*sets, tokens, _), (_, heads, blocks, b, _) = positions.shape, generators.shape
    table = torch.empty(*sets, heads, tokens, blocks, b, b, dtype=torch.float32, device=generators.device)
    _run(with_batch_dim(positions, 3), generators.mT, table, None, None)
    return table.mT


def exp_generators_backward(
    positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Compute gradients to positions, if wanted, and generators from the tangent's: Ω in  R' = exp(Ω) R  at Ω = 0.

    With M the skew matrix of half the tangent and J the integral of e^-uG M e^uG over u in [0, 1], the gradients
    are  dA_a = sum_tokens p_a J  and  dp_a = <A_a, J>.
    """
    upper, b = torch.empty_like(d_tangent, memory_format=torch.contiguous_format), generators.shape[-1]
    _run(with_batch_dim(positions, 3), generators, None, plain(d_tangent), upper)
    of_sets, rows, columns = with_batch_dim(upper, 5), *torch.triu_indices(b, b, 1, device=upper.device)
    above = rows * b + columns
    sums = exact_einsum("sta,shtne->ahne", with_batch_dim(positions, 3).float(), of_sets)
    square = sums.new_zeros(*sums.shape[:-1], b * b).index_copy_(-1, above, sums).unflatten(-1, (b, b))
    if not wanted:
        return upper.new_empty(0), square - square.mT
    entries = generators.float().flatten(-2).index_select(-1, above)
    d_positions = 2 * exact_einsum("shtne,ahne->sta", of_sets, entries)
    return d_positions.view(positions.shape), square - square.mT


def skew_exp(exponents: Tensor) -> Tensor:
    """Compute exp of skew blocks `(count, b, b)`, each block's transpose contiguous."""
    return exp_generators(exponents.new_ones(1, 1), exponents[None, :, None])[:, 0, 0]


def skew_exp_backward(exponents: Tensor, d_tangent: Tensor) -> Tensor:
    """Compute the skew gradient to the exponents from the gradient of the tangent `(count, b (b - 1) / 2)`."""
    unit = exponents.new_ones(1, 1)
    return exp_generators_backward(unit, exponents[None, :, None], d_tangent[:, None, None], False)[1][0, :, 0]


def _run(positions: Tensor, generators: Tensor, *arguments: Tensor | None) -> None:
    """Run by programs for tiles of matrices: small ones are packed on the diagonal of one tile, up to 16 rows."""
    (sets, tokens, axes), (_, heads, blocks, b, _) = positions.shape, generators.shape
    width, matrices = max(triton.next_power_of_2(b), 16), sets * heads * tokens * blocks
    together = width // b
    with on_device_of(generators):
        _exp_kernel[(triton.cdiv(matrices, together),)](
            plain(positions), plain(generators), *arguments, tokens, heads, blocks, matrices,
            AXES=axes, BLOCK=b, WIDTH=width, TOGETHER=together, num_warps={16: 1, 32: 2, 64: 4}[width],
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _exp_kernel(
    positions, generators, table, tangent, upper, tokens, heads, blocks, matrices,
    AXES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Store the table; or for a tangent J above the diagonal."""
    slot = tl.arange(0, WIDTH) // BLOCK
    local = tl.arange(0, WIDTH) % BLOCK
    row = local[:, None]
    column = local[None, :]
    matrix = tl.cast(tl.program_id(0), tl.int64) * TOGETHER + slot
    real = (slot < TOGETHER) & (matrix < matrices)
    same = real[:, None] & (slot[:, None] == slot[None, :])
    cell = (matrix // blocks // tokens % heads * blocks + matrix % blocks)[:, None]  # of a generator
    axis_size = heads * blocks * BLOCK * BLOCK
    token = matrix // blocks // tokens // heads * tokens + matrix // blocks % tokens
    exponent = tl.zeros((WIDTH, WIDTH), tl.float32)
    for axis in tl.static_range(AXES):
        position = tl.load(positions + token * AXES + axis, mask=real, other=0.0)
        generator = tl.load(generators + axis * axis_size + (cell * BLOCK + row) * BLOCK + column, mask=same, other=0.0)
        exponent += position[:, None] * generator
    exponent, finite = _near(exponent, BLOCK, WIDTH)
    small, excess, levels = _small_exp(exponent)
    above = same & (row < column)
    at = matrix[:, None] * (BLOCK * (BLOCK - 1) // 2)
    at += upper_index(tl.minimum(row, column), tl.maximum(row, column), BLOCK)
    if tangent is not None:
        moment = tl.load(tangent + at, mask=same & (row != column), other=0.0) * 0.5
        finite &= _largest(moment, BLOCK, WIDTH) < 0x7F800000
        moment = tl.where(finite[:, None], tl.where(above, moment, -moment), 0.0)
        # sum_k (-ad)^k M / (k + 1)!,  where  ad M = G M - (G M)^T  since both are skew;  1.7^13 / 14! < 2e-8.
        integral = moment
        for term in range(12):
            product = multiply(small, moment)
            moment = (tl.trans(product) - product) / (term + 2)
            integral += moment
    for level in range(levels):
        if tangent is not None:
            # J <- (J + R^T J R) / 2  with  R = I + E,  exactly skew: a symmetric remainder would grow with every level.
            product = multiply(integral, excess)
            product += 0.5 * multiply(tl.trans(excess), product)
            integral += 0.5 * (product - tl.trans(product))
        excess = _squared(excess, level, levels)
    if table is not None:
        rotation = excess + (row == column).to(tl.float32)
        rotation = tl.where(finite[:, None], rotation, float("nan"))
        tl.store(table + matrix[:, None] * (BLOCK * BLOCK) + row * BLOCK + column, rotation, mask=same)
    if tangent is not None:
        integral = tl.where(finite[:, None], integral, float("nan"))
        tl.store(upper + at, integral, mask=above)


@triton.jit
def _near(exponent, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Scale exponents to norms below 2^40, above which no digit is correct; return also which rows are finite."""
    largest = _largest(exponent, BLOCK, WIDTH)
    finite = largest < 0x7F800000
    beyond = tl.maximum((largest >> 23) - (126 + 40 - 6), 0)  # 2^6 rows at most
    scale = ((127 - beyond) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite[:, None], exponent, 0.0) * scale[:, None], finite


@triton.jit
def _largest(skew, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the bits of the largest absolute value of each row's block: ordered as these, infinity and NaN last."""
    slot = tl.arange(0, WIDTH) // BLOCK
    same = slot[:, None] == slot[None, :]
    of_column = tl.max(tl.where(same, skew.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=0)
    return tl.max(tl.where(same, of_column[None, :], 0), axis=1)  # skew: equal row and column maxima


@triton.jit
def _squared(excess, level, levels):
    """Compute (I + E)^2 - I, orthogonalised every eighth time and at the end:  R <- R (1 - F / 2),  F = R^T R - I."""
    excess = 2 * excess + multiply(excess, excess)
    if (level % 8 == 7) | ((level == levels - 1) & (level % 8 >= 4)):
        half = -0.5 * (excess + tl.trans(excess) + multiply(tl.trans(excess), excess))
        excess += half + multiply(excess, half)
    return excess


@triton.jit
def _small_exp(exponent):
    """Return A = G / 2^levels of norm 0.85 or less, exp(A) - I, and levels."""
    square = multiply(exponent, exponent)
    # The largest row sum bounds the largest eigenvalue of -G^2, the square of the norm.
    norm = tl.sqrt(tl.max(tl.sum(tl.abs(square), axis=1), axis=0))
    levels = 0
    scale = 1.0
    while (norm > 0.85) & (levels < 64):
        norm = norm * 0.5
        scale = scale * 0.5
        levels = levels + 1
    small = exponent * scale
    square = square * (scale * scale)
    fourth = multiply(square, square)
    even = square * (1 / 2) + (fourth * (1 / 24) + multiply(fourth, square * (1 / 720) + fourth * (1 / 40320)))
    odd = square * (1 / 6) + (fourth * (1 / 120) + multiply(fourth, square * (1 / 5040) + fourth * (1 / 362880)))
    return small, small + (even + multiply(small, odd)), levels
