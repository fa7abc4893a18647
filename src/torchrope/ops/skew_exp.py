"""Exponential of skew-symmetric matrices."""

from torch import Tensor

from torchrope.ops import reference
from torchrope.ops.precision import wide_dtype, without_autocast


def skew_exp(generator: Tensor) -> Tensor:
    """Exponentiate skew-symmetric matrices:  R = exp(G),  an orthogonal matrix of determinant 1.

    Args:
        generator: Skew blocks `(..., b, b)`, G^T = -G. Any strides; float16 and bfloat16 are computed in float32,
            and autocast never touches the arithmetic.

    Returns:
        Rotations `(..., b, b)`, float32 (float64 for float64).

    Raises:
        ValueError: the last two dimensions differ.

    Example:
        >>> import torch
        >>> quarter_turn = skew_exp(torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]]))
        >>> torch.allclose(quarter_turn, torch.tensor([[0.0, -1.0], [1.0, 0.0]]), atol=1e-6)
        True
    """
    if generator.ndim < 2 or generator.shape[-1] != generator.shape[-2]:
        raise ValueError(f"skew_exp needs square matrices (..., b, b), got {tuple(generator.shape)}")
    with without_autocast(generator):
        return reference.skew_exp(generator.to(wide_dtype(generator)))
