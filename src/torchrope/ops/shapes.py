"""Checks of shapes, dtypes and devices: of what encodings return, of the tensors of rotations, of operators' arguments.

Kernels trust their arguments. Those of a rotation are checked once, when it is made, and q and k when they are rotated;
those of a registered operator at every call. No values are read, so the checks hold for symbolic sizes too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrope.ops.backends import runs_on_gpu
from torchrope.tensors import shown

# The GPU kernel holds blocks in registers, which fit at most 64 x 64.
_LARGEST_BLOCK, _LARGEST_BLOCK_OF_GPU = 128, 64

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_NARROW = _FLOATS - {torch.float64}


def fits_kernels(like: Tensor, block_size: int) -> bool:
    """Return whether the kernels of a tensor's device exponentiate blocks of this size."""
    return 2 <= block_size <= (_LARGEST_BLOCK_OF_GPU if runs_on_gpu(like) else _LARGEST_BLOCK)


def require_shape(what: str, x: object, sizes: tuple[int, ...], heads_dim: int) -> None:
    """Raise ValueError unless x, what a method returned, is a floating-point tensor of `sizes`, or 1 at `heads_dim`."""
    if isinstance(x, Tensor) and x.dtype in _FLOATS:
        shape = list(x.shape)
        if len(shape) > heads_dim and shape[heads_dim] == 1:
            shape[heads_dim] = sizes[heads_dim]
        if shape == [*sizes]:
            return
    names = [f"{size} or 1" if dim == heads_dim and size != 1 else str(size) for dim, size in enumerate(sizes)]
    kind = "" if isinstance(x, Tensor) and x.dtype in _FLOATS else "floating point "
    raise ValueError(f"{what} must be {kind}({', '.join(names)}), got {shown(x)}")


def require_square(what: str, x: Tensor) -> None:
    """Raise ValueError unless x is floating-point blocks `(..., b, b)` with b of 1 or more."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 1 or x.dtype not in _FLOATS:
        raise ValueError(f"{what} must be floating point (..., b, b), got {shown(x)}")


# The predicates may raise ValueError or IndexError where a tensor has another number of dimensions.


def planar_fits(positions: Tensor, frequencies: Tensor, table: Tensor | None, head_dim: int) -> bool:
    """Return whether positions, frequencies and table of a `Planar` rotation fit: as `SCHEMAS` says."""
    axes, heads, pairs = frequencies.shape
    *batch, tokens, _ = positions.shape
    batch = batch if axes else batch[:-1]
    of_positions = (*batch, tokens, axes) if axes else (*batch, heads, tokens, pairs)
    fits = positions.shape == of_positions and heads > 0 and 2 * pairs <= head_dim
    return fits and (table is None or table.shape == (*batch, heads, tokens, 2, pairs))


def basis_fits(positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor, head_dim: int) -> bool:
    """Return whether the tensors of a `Commuting` rotation fit one another."""
    heads, blocks, b, columns = basis.shape
    *_, _tokens, axes = positions.shape
    return (
        base.shape == basis.shape
        and factors.shape == (axes, heads, blocks)
        and angular.shape == (heads, blocks, b // 2)
        and b == columns
        and b % 2 == 0
        and axes > 0
        and heads > 0
        and blocks * b <= head_dim
    )


def block_fits(table: Tensor, tangent: Tensor | None, head_dim: int) -> bool:
    """Return whether blocks `(*batch, heads, tokens, blocks, b, b)` and the tangent of a `Block` rotation fit."""
    *batch, heads, tokens, blocks, b, columns = table.shape
    entries = (*batch, heads, tokens, blocks, b * (b - 1) // 2)
    return b == columns and heads > 0 and blocks * b <= head_dim and (tangent is None or tangent.shape == entries)


def _sides_fit(q: Tensor, k: Tensor, batch: Sequence[int], heads: int, tokens: int, channels: int) -> bool:
    """Return whether q and k can be rotated by so many batch dimensions, heads, tokens and channels of a rotation."""
    batch_of_q, q_heads, q_tokens, head_dim = q.shape
    key_batch, key_heads, key_tokens, key_dim = k.shape
    sets = batch[0] if batch else 1
    return (
        len(batch) <= 1
        and channels > 0
        and q_tokens == tokens == key_tokens
        and head_dim == key_dim
        and q_heads % heads == 0 == key_heads % heads
        and (sets == 1 or (batch_of_q in (0, sets) and key_batch in (0, sets)))
        and q.dtype in _NARROW
        and k.dtype in _NARROW
    )


def _gradients_fit(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor) -> bool:
    shapes = grad_q.shape == q.shape and grad_k.shape == k.shape
    return shapes and grad_q.dtype in _NARROW and grad_k.dtype in _NARROW


def _rotate_planar(q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor | None, _: bool) -> bool:
    axes, heads, pairs = frequencies.shape
    *batch, tokens = positions.shape[:-1] if axes else positions[..., 0, :, 0].shape
    return planar_fits(positions, frequencies, table, q.shape[3]) and _sides_fit(q, k, batch, heads, tokens, pairs)


def _rotate_planar_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> bool:
    return _gradients_fit(grad_q, grad_k, q, k) and _rotate_planar(q, k, *args[:4])


def _rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor, _: bool
) -> bool:
    *batch, tokens, _axes = positions.shape
    fits = basis_fits(positions, factors, base, basis, angular, q.shape[3])
    return fits and _sides_fit(q, k, batch, factors.shape[1], tokens, basis.shape[1] * basis.shape[2])


def _rotate_basis_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> bool:
    positions, factors, basis, angular, outer, _ = args
    of_rotation = (positions, factors, basis, basis, angular, outer)
    return _gradients_fit(grad_q, grad_k, q, k) and _rotate_basis(q, k, *of_rotation)


def _rotate_block(q: Tensor, k: Tensor, table: Tensor, tangent: Tensor) -> bool:
    *batch, heads, tokens, blocks, b, _ = table.shape
    fits = block_fits(table, None if tangent.shape == (0,) else tangent, q.shape[3]) and table.dtype == torch.float32
    return fits and _sides_fit(q, k, batch, heads, tokens, blocks * b)


def _rotate_block_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, table: Tensor, wanted: bool) -> bool:
    return _gradients_fit(grad_q, grad_k, q, k) and _rotate_block(q, k, table, table.new_empty(0))


def _exp_generators(positions: Tensor, generators: Tensor) -> bool:
    axes = positions.shape[-1]
    num_axes, heads, _blocks, b, columns = generators.shape
    return (
        positions.ndim in (2, 3) and axes == num_axes > 0 and heads > 0 and b == columns and fits_kernels(generators, b)
    )


def _exp_generators_backward(positions: Tensor, generators: Tensor, d_tangent: Tensor, wanted: bool) -> bool:
    *sets, tokens, _axes = positions.shape
    _, heads, blocks, b, _ = generators.shape
    entries = (*sets, heads, tokens, blocks, b * (b - 1) // 2)
    return _exp_generators(positions, generators) and d_tangent.shape == entries


def _skew_exp(exponents: Tensor) -> bool:
    _, b, columns = exponents.shape
    return b == columns and exponents.dtype == torch.float32 and fits_kernels(exponents, b)


def _skew_exp_backward(exponents: Tensor, d_tangent: Tensor) -> bool:
    count, b, _ = exponents.shape
    return _skew_exp(exponents) and d_tangent.shape == (count, b * (b - 1) // 2)


def _skew_eig(base: Tensor) -> bool:
    *_, _blocks, b, columns = base.shape
    return b == columns >= 2 and b % 2 == 0 and base.dtype == torch.float32


_FITS: dict[str, Callable[..., bool]] = {
    "rotate_planar": _rotate_planar,
    "rotate_planar_backward": _rotate_planar_backward,
    "rotate_basis": _rotate_basis,
    "rotate_basis_backward": _rotate_basis_backward,
    "skew_eig": _skew_eig,
    "rotate_block": _rotate_block,
    "rotate_block_backward": _rotate_block_backward,
    "exp_generators": _exp_generators,
    "exp_generators_backward": _exp_generators_backward,
    "skew_exp": _skew_exp,
    "skew_exp_backward": _skew_exp_backward,
}
"""Of each operator, whether its arguments fit one another."""


def require_fit(name: str, parameters: Sequence[str], args: Sequence[Any], *, sizes: bool = True) -> None:
    """Raise ValueError unless arguments of an operator are floating point, on one device, and fit in their sizes."""
    on_cpu = args[0].is_cpu
    for parameter, x in zip(parameters, args, strict=True):
        if not isinstance(x, Tensor):
            continue
        on_device = x.is_cpu if on_cpu else x.device == args[0].device
        if not on_device or x.dtype not in _FLOATS:
            rule = f"{name} needs floating-point tensors on one device, {args[0].device}"
            raise ValueError(f"{rule}, got {parameter} {shown(x)} on {x.device}")
    if not sizes:
        return
    try:
        if _FITS[name](*args):
            return
    except (ValueError, IndexError):  # a tensor has another number of dimensions
        pass
    named = zip(parameters, args, strict=True)
    shapes = ", ".join(f"{parameter} {shown(x)}" for parameter, x in named if isinstance(x, Tensor))
    raise ValueError(f"{name} needs shapes and dtypes as SCHEMAS of torchrope.ops.library says, got {shapes}")
