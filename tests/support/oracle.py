"""Reference rotations in float64, exp(sum_a p_a A_a) as a dense matrix, independent of the library's code.

What an encoding is comes in as plain numbers, by family:

    frequencies  (axes, heads, pairs)                    blocks of 2, one frequency an axis and pair
    liere        (axes, heads, blocks, b (b - 1) / 2)    entries above the diagonal
    ap           (heads, blocks, b (b - 1) / 2)          block j belongs to axis j mod N
    ld           factors (axes, heads, blocks), upper (heads, blocks, b (b - 1) / 2)
    string       frequencies (axes, heads, pairs), upper (heads, blocks, b (b - 1) / 2)
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor


def generators(family: str, parameters: Sequence[Tensor], axes: int, b: int) -> Tensor:
    """Skew blocks `(axes, heads, blocks, b, b)`, float64, differentiable in the parameters."""
    first, *rest = (p.double() for p in parameters)
    if family == "frequencies":
        return _planar(first)
    if family == "liere":
        return _skew(first, b)
    if family == "ap":
        blocks = _skew(first, b)
        own = torch.tensor([[j % axes == axis for j in range(blocks.shape[1])] for axis in range(axes)])
        return own[:, None, :, None, None] * blocks
    if family == "ld":
        return first[..., None, None] * _skew(rest[0], b)
    assert family == "string"
    skew, identity = _skew(rest[0], b), torch.eye(b, dtype=torch.float64)
    basis = (identity - skew) @ torch.linalg.inv(identity + skew)
    pairs = _planar(first).unflatten(2, (-1, b // 2))  # (axes, heads, blocks, b / 2, 2, 2)
    planes = torch.stack([torch.stack([torch.block_diag(*block) for block in head]) for head in pairs.flatten(0, 1)])
    return basis @ planes.unflatten(0, pairs.shape[:2]) @ basis.mT


def rotated(x: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """R(p) x, float64; channels beyond the blocks pass.

    Args:
        x: `(*batch, heads, tokens, head_dim)`.
        positions: `(tokens, axes)` or `(last of batch, tokens, axes)`.
        blocks: Generators `(axes, own heads, blocks, b, b)`; own heads divide those of x.
    """
    own, count, b = blocks.shape[1:4]
    exponent = torch.einsum("...ta,ahnij->...htnij", positions.double(), blocks)
    matrices = torch.linalg.matrix_exp(exponent.contiguous())  # (..., own, tokens, blocks, b, b)
    matrices = matrices.repeat_interleave(x.shape[-3] // own, dim=-5)
    columns = x.double()[..., : count * b].unflatten(-1, (count, b))
    turned = (matrices @ columns.unsqueeze(-1)).flatten(-3)
    return torch.cat([turned, x.double()[..., count * b :]], dim=-1)


def _skew(upper: Tensor, b: int) -> Tensor:
    rows, columns = zip(*combinations(range(b), 2), strict=True)
    square = upper.new_zeros(*upper.shape[:-1], b, b)
    square[..., list(rows), list(columns)] = upper
    return square - square.transpose(-1, -2)


def _planar(frequencies: Tensor) -> Tensor:
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    return frequencies[..., None, None] * quarter
