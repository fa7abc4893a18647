"""Distance of generators from commuting: where it is 0, scores depend on relative positions only."""

import itertools

import torch
from torch import Tensor


def commutator_ratio(generators: Tensor) -> Tensor:
    """Compute the distance of generators from commuting:  ‖A B - B A‖ / (‖A‖ ‖B‖), Frobenius norms; 0 if A or B is 0.

    It is differentiable; the mean of its square is a penalty between free generators and commuting ones.

    Args:
        generators: `(axes, ..., b, b)`, such as those of `Encoding.generators`.

    Returns:
        One number per pair of axes, `(axes (axes - 1) / 2, ...)`; 0 to 1 for skew matrices. One zero for one axis.

    References:
        Bloch and Iserles, Commutators of skew-symmetric matrices, 2005: the bound.

    Example:
        >>> from torchrope import ComRoPELD, LieRE
        >>> shape = dict(num_axes=2, num_heads=1, head_dim=8)
        >>> commutator_ratio(ComRoPELD(**shape).generators()).max().item() < 1e-6
        True
        >>> commutes(LieRE(**shape).generators())
        False
    """
    ratios = []
    for a, b in itertools.combinations(generators, 2):
        norms = torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b)
        ratios.append(torch.linalg.matrix_norm(a @ b - b @ a) / torch.where(norms > 0, norms, 1.0))
    return torch.stack(ratios) if ratios else generators.new_zeros(1, *generators.shape[1:-2])


def commutes(generators: Tensor, tolerance: float = 1e-5) -> bool:
    """Return whether generators `(axes, ..., b, b)` commute, so that R(p)^T R(p') depends on p' - p alone.

    Args:
        generators: `(axes, ..., b, b)`.
        tolerance: Largest `commutator_ratio` that counts as rounding, by default that of float32.
    """
    return bool(commutator_ratio(generators.detach()).max() <= tolerance)
