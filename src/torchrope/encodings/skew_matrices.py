"""Invariant planes of skew-symmetric matrices (float64, on the CPU), and the Cayley transform and its inverse."""

from typing import Any

import torch
from torch import Tensor

from torchrope.encodings.base import planar
from torchrope.ops.shapes import require_square
from torchrope.tensors import block_diagonal, exact_matmul, in_forward_mode, without_autocast

# Eigenvalues above this fraction of the largest are accepted: the columns of a plane are orthogonal up to rounding
# error divided by it. Smaller ones are recomputed in the complement.
_ACCEPTED_FRACTION = 1e-3

# Coefficients of a sum: fractional parts of multiples of an irrational number, which are evenly distributed.
_STEP = 0.7548776662466927
_TRIES = 8


def invariant_planes(base: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the invariant planes of a skew matrix:  B = U diag([[0, -w], [w, 0]]) U^T,  w >= 0.

    An eigenvector x + iy of iB at w > 0 gives the plane, B x = w y. Eigenvectors of w and -w are inaccurate if w is
    near zero, so small w are recomputed in the orthogonal complement of the other planes. Equal w need no treatment.
    For odd b the last column of U is in the null space of B. Of B `(b, b)`, float64, U is `(b, b)`, w `(b div 2)`.
    """
    size = len(base)
    basis, angular = base.new_empty(size, 0), base.new_empty(0)
    complement = torch.eye(size, dtype=base.dtype)
    while complement.shape[-1] > 1:
        within = complement.mT @ base @ complement
        w, vectors = torch.linalg.eigh(0.5j * (within - within.mT))
        if not w[-1] > 0:
            break
        fast = w > _ACCEPTED_FRACTION * w[-1]
        pairs = torch.view_as_real(vectors[:, fast]).flatten(1) * 2**0.5  # columns x, y, x, y, ...
        basis, angular = torch.cat([basis, complement @ pairs], dim=-1), torch.cat([angular, w[fast]])
        complement = complement @ torch.linalg.qr(pairs, mode="complete").Q[:, pairs.shape[-1] :]
    zeros = angular.new_zeros(size // 2 - len(angular))
    return torch.cat([basis, complement], dim=-1), torch.cat([angular, zeros])


def common_planes(generators: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute the common invariant planes of commuting skew matrices:  A_a = U diag([[0, -f_aj], [f_aj, 0]]) U^T.

    Commuting matrices share their planes with any linear combination. If two planes have equal frequencies in the
    combination but not in the matrices, rounding mixes them; the combination with the smallest error is used. Returns
    U `(b, b)`, f `(axes, b / 2)`, and the largest error of the equation, large if the A `(axes, b, b)` do not commute.
    """
    axis = torch.arange(1, len(generators) + 1, dtype=generators.dtype)
    tries = [_planes_of_sum(generators, 0.5 + torch.frac(axis * step * _STEP)) for step in range(1, _TRIES + 1)]
    return min(tries, key=lambda result: result[2])


def _planes_of_sum(generators: Tensor, proportions: Tensor) -> tuple[Tensor, Tensor, float]:
    basis, _ = invariant_planes((proportions[:, None, None] * generators).sum(dim=0))
    within = basis.mT @ generators @ basis
    frequencies = within[:, 1::2, 0::2].diagonal(dim1=-2, dim2=-1)
    off = within - block_diagonal(planar(frequencies), len(basis))
    return basis, frequencies, off.abs().max().item()


def cayley(skew: Tensor) -> Tensor:
    """Compute the Cayley transform of a skew matrix S:  P = (I - S)(I + S)^-1,  `(..., b, b)`.

    Raises:
        ValueError: the last two dimensions differ, or S is not floating point.
    """
    require_square("S of the Cayley transform", skew)
    return _solve(skew) if in_forward_mode() else _Cayley.apply(skew)


def _solve(skew: Tensor) -> Tensor:
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    # I + S has no zero eigenvalue: solve_ex skips the check for singular matrices, which would synchronise a GPU.
    return torch.linalg.solve_ex(identity + skew, identity - skew)[0]


class _Cayley(torch.autograd.Function):
    """`cayley`, whose backward needs no other solve:  P + I = 2 (I + S)^-1,  dP = -1/2 (P + I) dS (P + I)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(skew: Tensor) -> Tensor:
        return _solve(skew)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (basis,) = ctx.saved_tensors
        shifted = (basis + torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)).mT
        with without_autocast(grad):
            return -0.5 * exact_matmul(exact_matmul(shifted, grad), shifted)


def inverse_cayley(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Find a skew S and signs d such that P = (I - S)(I + S)^-1 has the columns of a basis, up to these signs.

    A basis with an eigenvalue of -1 has no S, but has one for some signs of its columns. Gaussian elimination of
    U + diag(d) finds them: with d_k of the sign of pivot k, every pivot is at least 1 in magnitude. Of U `(b, b)`,
    orthogonal, float64, it returns S and d `(b)`, for P = U diag(d).

    References:
        Kahan, Is there a small skew Cayley transform with zero diagonal?, 2006: the signs exist.
    """
    reduced, signs = basis.clone(), torch.ones(len(basis), dtype=basis.dtype)
    for k in range(len(basis)):
        signs[k] = 1.0 if reduced[k, k] >= 0 else -1.0
        column = reduced[k + 1 :, k] / (reduced[k, k] + signs[k])
        reduced[k + 1 :, k + 1 :] -= torch.outer(column, reduced[k, k + 1 :])
    signed = basis * signs
    identity = torch.eye(len(basis), dtype=basis.dtype)
    transform = torch.linalg.solve(identity + signed, identity - signed)
    return (transform - transform.mT) / 2, signs
