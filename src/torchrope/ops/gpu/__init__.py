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
    return _planar.rotate(q, k, positions, frequencies, halves)


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
    dq, dk, d_frequencies, d_positions = _planar.rotate_backward(
        grad_q, grad_k, q, k, positions, frequencies, wanted[1], wanted[0], halves
    )
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
    """Normalise over channels, then rotate channel pairs. A table is ignored."""
    return _normed.rotate(q, k, positions, frequencies, halves, weights, kinds, eps)


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
    return _normed.rotate_backward(grad_q, grad_k, q, k, positions, frequencies, halves, weights, kinds, eps, wanted)


def rotate_block(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by the matrices of a table."""
    return _block.rotate(q, k, table)


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradients to q, k and the tangent."""
    dq, dk, d_tangent = _block.rotate_backward(grad_q, grad_k, q, k, table)
    return dq, dk, d_tangent if wanted else None


def rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    """Rotate in the planes of a basis, ignoring `outer`: the kernel is memory-bound, so omitting U saves no time.

    Blocks that never rotate get the identity as their basis, so that they pass bit-identically.
    """
    unrotated = (coefficients == 0).all(dim=0) | (angular == 0).all(dim=-1)  # (heads, blocks)
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    exact_basis = torch.where(unrotated[..., None, None], identity, basis)
    return _basis.rotate(q, k, positions, coefficients, exact_basis, angular, True)


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
    dq, dk, d_coefficients, d_positions, d_base = _basis.rotate_backward(
        grad_q, grad_k, q, k, positions, coefficients, basis, angular, True, wanted[0]
    )
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
