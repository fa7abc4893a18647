"""Exponential of skew-symmetric matrices: by kernels, and the reference in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from torchrope.ops.backends import takes_kernels
from torchrope.ops.library import run
from torchrope.ops.shapes import fits_kernels, require_square
from torchrope.tensors import can_read, exact_matmul, in_forward_mode, wide_dtype, without_autocast


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
        return exponential(wide)
    return run("skew_exp", wide.reshape(-1, *wide.shape[-2:])).reshape(wide.shape)


# Each squaring inside torch.matrix_exp doubles the departure from orthogonality: below the first norm it stays at
# rounding error, below the second float32 is exact enough to be corrected afterwards.
_NORM_WITHOUT_CORRECTION, _NORM_IN_FLOAT32 = 16.0, 1024.0
# A larger angle has no correct digit modulo 2π in float32.
_LARGEST_NORM = 2.0**40


def exponential(skew: Tensor) -> Tensor:
    """Compute exp of skew matrices `(..., b, b)`, float32 or float64, any strides; orthogonal for any norm.

    On a CPU, large norms are computed in float64, those above 2^40 scaled down to it. On a GPU nothing is read and
    nothing wider than the input, so that angles are exact to about 8 rounding steps; float32 norms are at most 2^24.
    """
    with without_autocast(skew):
        if skew.device.type == "cuda":
            return _square_repeatedly(skew, None)[0] if in_forward_mode() else _Exponential.apply(skew)
        skew = skew.contiguous()  # torch.matrix_exp raises for some strides that einsum returns
        norm = _norm(skew)
        if skew.is_meta or (can_read(norm) and not (norm > _NORM_WITHOUT_CORRECTION).any()):
            return torch.linalg.matrix_exp(skew)
        keep_dtype = skew.device.type == "mps" or (can_read(norm) and not (norm > _NORM_IN_FLOAT32).any())
        wide = skew if keep_dtype else skew.double()
        matrix = torch.linalg.matrix_exp(wide * (_LARGEST_NORM / norm).clamp(max=1))
        return _nearer_to_orthogonal(_nearer_to_orthogonal(matrix)).to(skew.dtype)


def _norm(skew: Tensor) -> Tensor:
    return skew.detach().abs().sum(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)


def _nearer_to_orthogonal(matrix: Tensor) -> Tensor:
    """Return matrix after a Newton iteration to the nearest orthogonal one, which squares the error."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix - exact_matmul(matrix, exact_matmul(matrix.mT, matrix) - identity) / 2


class _Exponential(torch.autograd.Function):
    """exp of skew matrices by scaling and squaring; each step is selected on the device, and none is saved.

    For the gradient H to R = exp(G),  dL/dG = J(G, M) = ∫₀¹ e^(uG) M e^(-uG) du,  M = (R^T H - H^T R) / 2.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(skew: Tensor) -> Tensor:
        return _square_repeatedly(skew, None)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        skew, matrix = ctx.saved_tensors
        product = exact_matmul(matrix.mT, grad)
        return _square_repeatedly(skew, (product - product.mT) / 2)[1]


_DEGREE = {torch.float32: 8, torch.float64: 17}
"""Degree of the series at norms up to 1/2, whose remainder is below rounding."""
_SQUARINGS = {torch.float32: 25, torch.float64: 41}


def _square_repeatedly(skew: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute exp(G), and J(G, M) = ∫₀¹ e^(uG) M e^(-uG) du for skew M, or without M an empty tensor.

    With G = 2^s A both start as series in A. Then s times  R' = R R,  J' = (J + R J R^T) / 2;  s differs by matrix.
    """
    most = _SQUARINGS[skew.dtype]
    norm = _norm(skew)
    steps = torch.ceil(torch.log2(2 * norm)).clamp(0, most)
    scaled = skew * torch.exp2(-steps) * (2.0 ** (most - 1) / norm).clamp(max=1)
    matrix = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device).expand_as(skew)
    term, integral = matrix, moment
    power = moment
    for n in range(1, _DEGREE[skew.dtype] + 1):
        term = exact_matmul(term, scaled) / n
        matrix = matrix + term
        if power is not None and integral is not None:
            product = exact_matmul(scaled, power)
            power = (product - product.mT) / (n + 1)  # [A, X] = A X - (A X)^T for skew A and X
            integral = integral + power
    for step in range(most):
        selected = step < steps
        if integral is not None:
            turned = exact_matmul(exact_matmul(matrix, integral), matrix.mT)
            integral = torch.where(selected, (integral + turned) / 2, integral)
        matrix = torch.where(selected, exact_matmul(matrix, matrix), matrix)
        if step % 6 == 5 or step == most - 1:  # six squarings multiply the departure from orthogonality by 64
            matrix = _nearer_to_orthogonal(matrix)
    return matrix, skew.new_empty(0) if integral is None else integral
