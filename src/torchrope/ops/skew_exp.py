"""Exponential of skew-symmetric matrices."""

from torch import Tensor

from torchrope.ops.backends import takes_kernels
from torchrope.ops.library import call
from torchrope.ops.shapes import fits_kernels, require_square
from torchrope.rotations import exponential
from torchrope.tensors import wide_dtype, without_autocast


def skew_exp(generator: Tensor) -> Tensor:
    """Exponentiate skew-symmetric matrices:  R = exp(G),  an orthogonal matrix of determinant 1.

    The gradient is projected onto skew-symmetric matrices:  dL/dG = ∫₀¹ e^(-uG) M e^(uG) du,
    M = (H R^T - R H^T) / 2  for the gradient H to R.

    Args:
        generator: Skew blocks `(..., b, b)`, G^T = -G, any strides. float16 and bfloat16 are computed in float32;
            autocast is disabled.

    Returns:
        Rotations `(..., b, b)`, float32 (float64 for float64).

    Raises:
        ValueError: the last two dimensions differ, no floating-point dtype, or the backend does not support the input.

    Example:
        >>> import torch
        >>> quarter_turn = skew_exp(torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]]))
        >>> torch.allclose(quarter_turn, torch.tensor([[0.0, -1.0], [1.0, 0.0]]), atol=1e-6)
        True
    """
    require_square("generator", generator)
    wide = generator.to(wide_dtype(generator))
    fast = takes_kernels("skew_exp", generator)
    if not fast or not wide.numel() or not fits_kernels(wide, generator.shape[-1]):
        return reference_exp(wide)
    return call("skew_exp", wide.reshape(-1, *wide.shape[-2:])).reshape(wide.shape)


def reference_exp(generator: Tensor) -> Tensor:
    """Exponentiate skew matrices `(..., b, b)`, float32 or float64, in plain PyTorch."""
    with without_autocast(generator):
        return exponential(generator)


def exp_generators(positions: Tensor, generators: Tensor) -> tuple[Tensor, Tensor]:
    """Compute exp(sum_a p_a A_a) by kernels, as the arguments `table` and `tangent` of `Block`.

    Args:
        positions: `(*batch, tokens, axes)`, float32, at most one batch dimension.
        generators: `(axes, heads or 1, blocks, b, b)`, skew, float32.

    Returns:
        Matrices `(*batch, heads or 1, tokens, blocks, b, b)`, and zeros `(*batch, heads or 1, tokens, blocks,
        b (b - 1) / 2)`.
    """
    shared = positions.ndim == 2
    table, tangent = call("exp_generators", positions.unsqueeze(0) if shared else positions, generators)
    # Not [0], whose backward would allocate a second tensor of this size filled with zeros.
    return (table.squeeze(0), tangent.squeeze(0)) if shared else (table, tangent)


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew blocks into planes of rotation and frequencies:  B = U diag([[0, -w], [w, 0]]) U^T,  w >= 0.

    Args:
        base: `(..., b, b)`, skew, float32, b even. No gradient flows through it; `Commuting` computes it separately.

    Returns:
        U `(..., b, b)`, orthogonal, planes in pairs of columns, and w `(..., b / 2)`.
    """
    return call("skew_eig", base.detach().contiguous())
