"""Real Schur form of skew-symmetric matrices: generators to frequencies and a basis, in float64 on the CPU."""

import torch
from torch import Tensor

from torchrope.encodings.base import planar
from torchrope.rotations import block_diagonal

# A plane's two columns are orthogonal to rounding error over this share; slower planes are found among what is left.
_FAST_ENOUGH = 1e-3

# Proportions of a sum: fractions of multiples of an irrational number, as far from one another as can be.
_STEP = 0.7548776662466927
_TRIES = 8


def planes(base: Tensor) -> tuple[Tensor, Tensor]:
    """The planes that a skew matrix turns:  B = U diag([[0, -w], [w, 0]]) U^T,  w >= 0, a column at rest last.

    An eigenvector x + iy of iB at w > 0 gives the plane, B x = w y. Those of ±w mix where w is near zero, so the
    slow planes are sought again in the complement of the fast ones, where they are large; equal w are safe.

    Args:
        base: B, `(b, b)`, float64.

    Returns:
        U `(b, b)`, orthogonal, and w `(b div 2)`.
    """
    size = len(base)
    found, angular = base.new_empty(size, 0), base.new_empty(0)
    left = torch.eye(size, dtype=base.dtype)  # columns whose planes are still sought
    while left.shape[-1] > 1:
        within = left.mT @ base @ left
        w, vectors = torch.linalg.eigh(0.5j * (within - within.mT))
        if not w[-1] > 0:
            break
        fast = w > _FAST_ENOUGH * w[-1]
        pairs = torch.view_as_real(vectors[:, fast]).flatten(1) * 2**0.5  # columns x, y, x, y, ...
        found, angular = torch.cat([found, left @ pairs], dim=-1), torch.cat([angular, w[fast]])
        left = left @ torch.linalg.qr(pairs, mode="complete").Q[:, pairs.shape[-1] :]
    resting = angular.new_zeros(size // 2 - len(angular))
    return torch.cat([found, left], dim=-1), torch.cat([angular, resting])


def common_planes(generators: Tensor) -> tuple[Tensor, Tensor, float]:
    """The planes that commuting skew matrices all turn:  A_a = U diag([[0, -f_aj], [f_aj, 0]]) U^T.

    What commutes shares its planes with any sum of the matrices. Where two planes turn alike in the sum and not in the
    matrices, rounding decides among their mixtures: of sums in several proportions the one that errs least is taken.

    Args:
        generators: A `(axes, b, b)`, b even, float64 on the CPU.

    Returns:
        U `(b, b)`, f `(axes, b / 2)`, and the largest error of the equation, large where the A do not commute.
    """
    axis = torch.arange(1, len(generators) + 1, dtype=generators.dtype)
    tries = [_planes_of_sum(generators, 0.5 + torch.frac(axis * step * _STEP)) for step in range(1, _TRIES + 1)]
    return min(tries, key=lambda found: found[2])


def _planes_of_sum(generators: Tensor, proportions: Tensor) -> tuple[Tensor, Tensor, float]:
    basis, _ = planes((proportions[:, None, None] * generators).sum(dim=0))
    within = basis.mT @ generators @ basis
    frequencies = within[:, 1::2, 0::2].diagonal(dim1=-2, dim2=-1)
    off = within - block_diagonal(planar(frequencies), len(basis))
    return basis, frequencies, off.abs().max().item()


def cayley(skew: Tensor) -> Tensor:
    """The orthogonal matrix of a skew one:  P = (I - S)(I + S)^-1,  `(..., b, b)`."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    # I + S has no zero eigenvalue, so there is no failure to look for, which a GPU would have to be waited for.
    return torch.linalg.solve_ex(identity + skew, identity - skew)[0]


def inverse_cayley(basis: Tensor) -> tuple[Tensor, Tensor]:
    """A skew S and signs d such that P = (I - S)(I + S)^-1 has the columns of a basis, up to these signs.

    A basis with an eigenvalue of -1 has no S; of the signs of its columns some always do. Elimination of U + diag(d)
    from the top finds them: d_k of the pivot's own sign keeps every pivot at 1 or more.

    Args:
        basis: U `(b, b)`, orthogonal, float64.

    Returns:
        S `(b, b)` and d `(b)`, for P = U diag(d).

    References:
        Kahan, Is there a small skew Cayley transform with zero diagonal?, 2006: the signs exist.
    """
    left, signs = basis.clone(), torch.ones(len(basis), dtype=basis.dtype)
    for k in range(len(basis)):
        signs[k] = 1.0 if left[k, k] >= 0 else -1.0
        column = left[k + 1 :, k] / (left[k, k] + signs[k])
        left[k + 1 :, k + 1 :] -= torch.outer(column, left[k, k + 1 :])
    signed = basis * signs
    identity = torch.eye(len(basis), dtype=basis.dtype)
    found = torch.linalg.solve(identity + signed, identity - signed)
    return (found - found.mT) / 2, signs
