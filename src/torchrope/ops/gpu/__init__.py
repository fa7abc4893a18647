"""GPU kernels for CUDA and ROCm in Triton, with the arguments and results of the operators, as `native`.

Only this package imports triton, and it is imported only if triton is installed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrope.ops.gpu import basis as _basis
from torchrope.ops.gpu import block as _block
from torchrope.ops.gpu import exponential as _exponential
from torchrope.ops.gpu import normed as _normed
from torchrope.ops.gpu import planar as _planar
from torchrope.ops.gpu import planes as _planes


def rotate_planar(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate channel pairs. `table` is ignored, because computing cos and sin is faster than reading them."""
    return (
        _planar.rotate(q, _sets(positions, 3), frequencies, not interleaved),
        _planar.rotate(k, _sets(positions, 3), frequencies, not interleaved),
    )


def rotate_planar_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    interleaved: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions and frequencies, else empty tensors."""
    of_sets = _sets(positions, 3)
    dq, of_q = _planar.rotate_backward(grad_q, q, of_sets, frequencies, not interleaved, wanted)
    dk, of_k = _planar.rotate_backward(grad_k, k, of_sets, frequencies, not interleaved, wanted)
    return (dq, dk, *_sums(of_q, of_k, (positions, frequencies)))


def rotate_planar_normed(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Normalise over channels, then rotate channel pairs. A table is ignored."""
    positions, frequencies, _, interleaved, *weights, kinds, eps = args
    rotated_q, rotated_k = (
        _normed.rotate(
            x, _sets(positions, 3), frequencies, not interleaved, weights[2 * i], weights[2 * i + 1], kinds[i], eps[i]
        )
        for i, x in enumerate((q, k))
    )
    return rotated_q, rotated_k


def rotate_planar_normed_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions, frequencies and the four weights, else empty tensors."""
    positions, frequencies, _, interleaved, *weights, kinds, eps, wanted = args
    (dq, of_q), (dk, of_k) = (
        _normed.rotate_backward(
            grad, x, _sets(positions, 3), frequencies, not interleaved, weights[2 * i], weights[2 * i + 1], kinds[i],
            eps[i],
            [*wanted[:2], *wanted[2 * i + 2 : 2 * i + 4]],
        )
        for i, (grad, x) in enumerate(((grad_q, q), (grad_k, k)))
    )  # fmt: skip
    of_weights = (_or_empty(x, q) for x in (*of_q[2:], *of_k[2:]))
    return (dq, dk, *_sums(of_q[:2], of_k[:2], (positions, frequencies)), *of_weights)


def rotate_block(q: Tensor, k: Tensor, table: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by the matrices of a table."""
    return _block.rotate(q, _sets(table, 6)), _block.rotate(k, _sets(table, 6))


def rotate_block_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients to q, k and, if wanted, the tangent."""
    dq, of_q = _block.rotate_backward(grad_q, q, _sets(table, 6))
    dk, of_k = _block.rotate_backward(grad_k, k, _sets(table, 6))
    if not wanted:
        return dq, dk, _or_empty(None, q)
    b = table.shape[-1]
    return dq, dk, (of_q + of_k).view(*table.shape[:-2], b * (b - 1) // 2)


def rotate_basis(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    factors: Tensor,
    base: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate in the planes of a basis, ignoring `outer`: the kernel is memory-bound, so omitting U saves no time.

    Blocks that never rotate get the identity as their basis, so that they pass bit-identically.
    """
    unrotated = (factors == 0).all(dim=0) | (angular == 0).all(dim=-1)  # (heads, blocks)
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    exact_basis = torch.where(unrotated[..., None, None], identity, basis)
    given = _sets(positions, 3), factors, exact_basis, angular
    return _basis.rotate(q, *given), _basis.rotate(k, *given)


def rotate_basis_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    factors: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions, factors and the base, else empty tensors."""
    given = _sets(positions, 3), factors, basis, angular, wanted[0]
    dq, *of_q = _basis.rotate_backward(grad_q, q, *given)
    dk, *of_k = _basis.rotate_backward(grad_k, k, *given)
    parameters = _sums(of_q, of_k, (positions, factors, basis))
    return (dq, dk, *(_or_empty(x if needed else None, q) for x, needed in zip(parameters, wanted, strict=True)))


def exp_generators(positions: Tensor, generators: Tensor) -> Tensor:
    """Compute exp(sum_a p_a A_a), each block's transpose contiguous, as in `native`."""
    table = _exponential.exp(_sets(positions, 3), generators.mT).mT
    return table if positions.ndim == 3 else table.squeeze(0)


def exp_generators_backward(
    positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Compute gradients to positions, if wanted, and generators from the gradient of the tangent."""
    of_sets = _sets(positions, 3), generators, _sets(d_tangent, 5)
    d_generators, d_positions = _exponential.exp_backward(*of_sets, wanted)
    return _or_empty(d_positions if d_positions is None else d_positions.view_as(positions), positions), d_generators


def skew_exp(exponents: Tensor) -> Tensor:
    """Compute exp of skew blocks `(count, b, b)`, each block's transpose contiguous."""
    return exp_generators(_unit_position(exponents), exponents[None, :, None])[0, :, 0, 0]


def skew_exp_backward(exponents: Tensor, d_tangent: Tensor) -> Tensor:
    """Compute the skew gradient to the exponents from the gradient of the tangent `(count, b (b - 1) / 2)`."""
    _, gradient = exp_generators_backward(
        _unit_position(exponents), exponents[None, :, None], d_tangent[None, :, None, None], False
    )
    return gradient[0, :, 0]


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew blocks `(..., b, b)`, b even, into planes, frequencies:  B = U diag([[0, -w], [w, 0]]) U^T."""
    basis, angular = _planes.decompose(base.flatten(0, -3))
    return basis.view(base.shape), angular.view(*base.shape[:-2], base.shape[-1] // 2)


def _unit_position(exponents: Tensor) -> Tensor:
    return exponents.new_ones(1, 1, 1)


def _sets(x: Tensor, ndim: int) -> Tensor:
    """Add the dimension of sets of positions if samples share them."""
    return x if x.ndim == ndim else x.unsqueeze(0)


def _sums(of_q: Sequence[Tensor | None], of_k: Sequence[Tensor | None], shared: Sequence[Tensor]) -> list[Tensor]:
    """Sum the gradients of both sides to what they share; empty where they are None."""
    given = zip(of_q, of_k, shared, strict=True)
    return [_or_empty(None, x) if q is None or k is None else (q + k).view_as(x) for q, k, x in given]


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if gradient is None else gradient
