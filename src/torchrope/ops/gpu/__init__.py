"""GPU kernels for CUDA and ROCm in Triton, with the same functions as `native`.

Only this package imports triton, and it is imported only if triton is installed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrope.ops.gpu import basis as _basis
from torchrope.ops.gpu import block as _block
from torchrope.ops.gpu import exponential as _exponential
from torchrope.ops.gpu import normed as _normed
from torchrope.ops.gpu import planar as _planar
from torchrope.ops.gpu import planes as _planes


def rotate_planar(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None = None, halves: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate channel pairs. `table` is ignored, because computing cos and sin is faster than reading them."""
    return (
        _planar.rotate(q, positions, frequencies, halves),
        _planar.rotate(k, positions, frequencies, halves),
    )


def rotate_planar_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute gradients to q, k, and if wanted to positions and frequencies."""
    dq, of_q = _planar.rotate_backward(grad_q, q, positions, frequencies, halves, wanted)
    dk, of_k = _planar.rotate_backward(grad_k, k, positions, frequencies, halves, wanted)
    d_positions, d_frequencies = map(_sum, of_q, of_k)
    return dq, dk, d_positions, d_frequencies


def rotate_normed(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    weights: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Normalise over channels, then rotate channel pairs. A table is ignored.

    Args:
        weights: Weight and bias of the norm of q, then of that of k; None for ones and zeros.
        kinds: Of the norms of q and k: 0 no norm, 1 RMSNorm, 2 LayerNorm.
        eps: Of the norms of q and k.
    """
    rotated_q, rotated_k = (
        _normed.rotate(x, positions, frequencies, halves, weights[2 * i], weights[2 * i + 1], kinds[i], eps[i])
        for i, x in enumerate((q, k))
    )
    return rotated_q, rotated_k


def rotate_normed_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    halves: bool,
    weights: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Compute gradients to q, k, and if wanted to positions, frequencies and the four weights."""
    (dq, of_q), (dk, of_k) = (
        _normed.rotate_backward(
            grad, x, positions, frequencies, halves, weights[2 * i], weights[2 * i + 1], kinds[i], eps[i],
            [*wanted[:2], *wanted[2 * i + 2 : 2 * i + 4]],
        )
        for i, (grad, x) in enumerate(((grad_q, q), (grad_k, k)))
    )  # fmt: skip
    return dq, dk, [*map(_sum, of_q[:2], of_k[:2]), *of_q[2:], *of_k[2:]]


def rotate_block(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by the matrices of a table."""
    return _block.rotate(q, table), _block.rotate(k, table)


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradients to q, k and the tangent."""
    dq, of_q = _block.rotate_backward(grad_q, q, table)
    dk, of_k = _block.rotate_backward(grad_k, k, table)
    return dq, dk, of_q + of_k if wanted else None


def rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    """Rotate in the planes of a basis, ignoring `outer`: the kernel is memory-bound, so omitting U saves no time.

    Blocks that never rotate get the identity as their basis, so that they pass bit-identically.
    """
    unrotated = (coefficients == 0).all(dim=0) | (angular == 0).all(dim=-1)  # (heads, blocks)
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    exact_basis = torch.where(unrotated[..., None, None], identity, basis)
    given = positions, coefficients, exact_basis, angular
    return _basis.rotate(q, *given), _basis.rotate(k, *given)


def rotate_basis_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients to q, k, and if wanted to positions, coefficients and the base."""
    given = positions, coefficients, basis, angular, wanted[0]
    dq, *of_q = _basis.rotate_backward(grad_q, q, *given)
    dk, *of_k = _basis.rotate_backward(grad_k, k, *given)
    d_positions, d_coefficients, d_base = map(_sum, of_q, of_k)
    return dq, dk, d_positions, d_coefficients, d_base


def exp_generators(positions: Tensor, generators: Tensor) -> Tensor:
    """Compute exp(sum_a p_a A_a), each block's transpose contiguous, as in `native`."""
    return _exponential.exp(positions, generators.mT).mT


def exp_generators_backward(
    positions: Tensor, generators: Tensor, tangent: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """Compute gradients to positions, if wanted, and generators from the gradient of the tangent."""
    d_generators, d_positions = _exponential.exp_backward(positions, generators, tangent, wanted)
    return d_positions, d_generators


def skew_exp(exponents: Tensor) -> Tensor:
    """Compute exp of skew blocks `(count, b, b)`, each block's transpose contiguous."""
    return exp_generators(_unit_position(exponents), exponents[None, :, None])[0, :, 0, 0]


def skew_exp_backward(exponents: Tensor, tangent: Tensor) -> Tensor:
    """Compute the skew gradient to the exponents from the gradient of the tangent `(count, b (b - 1) / 2)`."""
    _, gradient = exp_generators_backward(
        _unit_position(exponents), exponents[None, :, None], tangent[None, :, None, None], False
    )
    return gradient[0, :, 0]


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew blocks `(count, b, b)`, b even, into planes, frequencies:  B = U diag([[0, -w], [w, 0]]) U^T."""
    return _planes.decompose(base)


def _unit_position(exponents: Tensor) -> Tensor:
    return exponents.new_ones(1, 1, 1)


def _sum(of_q: Tensor | None, of_k: Tensor | None) -> Tensor | None:
    """Sum the gradients of both sides to what they share; both are None if it is not wanted."""
    return None if of_q is None or of_k is None else of_q + of_k
