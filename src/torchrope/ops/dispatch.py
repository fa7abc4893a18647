"""Rotation of queries and keys by a kernel, or by the reference."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrope.ops import reference
from torchrope.ops.backends import is_plain, refuse, takes_kernels
from torchrope.ops.library import run
from torchrope.ops.skew_exp import exponential
from torchrope.tensors import wide_dtype, without_autocast


class QueriesKeys(NamedTuple):
    """Queries and keys, heads first, of which one may be absent: it then has 0 heads.

    Attributes:
        q: `(*batch, heads, tokens, head_dim)`.
        k: As q, with its own batch and heads.
        scores_only: Whether only the products q^T k are used, so that both may be expressed in another basis.
    """

    q: Tensor
    k: Tensor
    scores_only: bool = False

    def only_q(self) -> "QueriesKeys":
        """Return the pair without keys."""
        return QueriesKeys(self.q, absent(self.q), self.scores_only)

    def only_k(self) -> "QueriesKeys":
        """Return the pair without queries."""
        return QueriesKeys(absent(self.k), self.k, self.scores_only)

    def widened(self, *tensors: Tensor) -> "QueriesKeys":
        """Convert both sides to the widest dtype of both, of other tensors and float32."""
        wide = wide_dtype(self.q, self.k, *tensors)
        return QueriesKeys(self.q.to(wide), self.k.to(wide), self.scores_only)

    def separately(self, of_q: Callable[[Tensor], Tensor], of_k: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Apply a function to each side that is present."""
        return of_q(self.q) if self.q.shape[-3] else self.q, of_k(self.k) if self.k.shape[-3] else self.k


def absent(like: Tensor) -> Tensor:
    """Return the side of a `QueriesKeys` that is absent, for the tokens of the other one."""
    return like.detach().narrow(-3, 0, 0)


def rotate_planar(
    x: QueriesKeys, positions: Tensor, frequencies: Tensor, table: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate channel pairs by the angles  φ_i = sum_a p_a f_ai.

    Args:
        x: Queries and keys that fit the rotation.
        positions: `(*batch, tokens, axes)`.
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        table: cos and sin `(*batch, heads or 1, tokens, 2, pairs)`, read instead of computed if given; unless it
            requires a gradient, this reaches positions and frequencies all the same.
        interleaved: Whether pair i is channels (2i, 2i + 1), or (i, i + pairs).

    Returns:
        Rotated q and k, in the dtypes of the inputs.
    """
    if not frequencies.shape[-1]:
        return x[:2]
    narrow = torch.float64 not in (x.q.dtype, x.k.dtype)
    if narrow and positions.dtype == torch.float64 and table is None:  # within a turn, float32 holds the angles
        angles = reference.combine(positions, frequencies.to(positions.dtype))
        turns = (angles.detach() / (2 * math.pi)).round()
        return rotate_by_angles(x, (angles - turns * (2 * math.pi)).float(), None, interleaved)
    learned = table is not None and table.requires_grad
    reason = "needs a table without requires_grad, got one that requires a gradient" if learned else None
    of_angles = positions.ndim - 2, positions, frequencies  # the table is computed from them
    if (kernel := _kernel("rotate_planar", x, *of_angles, reason=reason, halves=not interleaved)) is not None:
        return _like(x, kernel(_flat(x.q), _flat(x.k), positions, frequencies, table, interleaved))
    with without_autocast(x.q):
        dtype = x.widened(positions).q.dtype
        known = None if table is None else table.to(dtype)
        return _by_reference(x, *reference.cos_sin(positions.to(dtype), frequencies.to(dtype), known), interleaved)


def _by_reference(x: QueriesKeys, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    def rotated(y: Tensor) -> Tensor:
        return reference.rotate_planar(y, cos, sin, interleaved)

    return _narrowed(x, x.widened(cos).separately(rotated, rotated))


def rotate_by_angles(x: QueriesKeys, angles: Tensor, table: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate channel pairs by given angles `(*batch, heads or 1, tokens, pairs)`, as `rotate_planar` does."""
    if not angles.shape[-1]:
        return x[:2]
    no_axes = angles.new_zeros(0, angles.shape[-3], angles.shape[-1])
    if (kernel := _kernel("rotate_planar", x, angles.ndim - 3, angles, no_axes, halves=not interleaved)) is not None:
        return _like(x, kernel(_flat(x.q), _flat(x.k), angles, no_axes, table, interleaved))
    with without_autocast(x.q):
        wide = angles.to(wide_dtype(x.q, x.k, angles))
        cos, sin = (wide.cos(), wide.sin()) if table is None else table.to(wide.dtype).unbind(-2)
        return _by_reference(x, cos, sin, interleaved)


def rotate_basis(
    x: QueriesKeys, positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate by  exp(s B) = U rot(s w) U^T,  s = sum_a p_a c_a,  without the outer U if only scores are used.

    Positions p `(*batch, tokens, axes)`, factors c `(axes, heads or 1, blocks)`, base B and basis U
    `(heads or 1, blocks, b, b)`, b even, angular w `(heads or 1, blocks, b / 2)`.
    """
    if not factors.shape[-1]:
        return x[:2]
    if (kernel := basis_kernel(x, positions, factors, base)) is not None:
        of_basis = positions, factors, base, basis, angular
        return _like(x, kernel(_flat(x.q), _flat(x.k), *of_basis, not x.scores_only))
    with without_autocast(x.q):
        wide = x.widened(positions)
        positions, factors, base = (tensor.to(wide.q.dtype) for tensor in (positions, factors, base))
        along = reference.combine(positions, factors)  # (*batch, heads, tokens, blocks)
        blocks = exponential(along[..., None, None] * base.unsqueeze(1))
        return _rotate_blocks(x, wide, blocks)


def basis_kernel(x: QueriesKeys, positions: Tensor, factors: Tensor, base: Tensor) -> Callable[..., Any] | None:
    """Return the kernel that computes `rotate_basis` of x, and omits the outer U if it may; None for the reference."""
    return _kernel("rotate_basis", x, positions.ndim - 2, positions, factors, base)


def rotate_block(x: QueriesKeys, table: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiply channel blocks by a table of matrices `(*batch, heads or 1, tokens, blocks, b, b)`.

    The tangent of `exp_generators`, if the table is of it and needs a gradient, receives it.
    """
    if not table.shape[-3]:
        return x[:2]
    learned = table.requires_grad and tangent is None
    reason = "needs a table without requires_grad, or of an encoding, got one that requires a gradient"
    if (kernel := _kernel("rotate_block", x, table.ndim - 5, table, reason=reason if learned else None)) is not None:
        matrices = table.detach().to(torch.float32)
        zeros = matrices.new_empty(0) if tangent is None else tangent
        return _like(x, kernel(_flat(x.q), _flat(x.k), matrices, zeros))
    with without_autocast(x.q):
        wide = x.widened(table)
        return _rotate_blocks(x, wide, table.to(wide.q.dtype))


def _rotate_blocks(x: QueriesKeys, wide: QueriesKeys, blocks: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(y: Tensor) -> Tensor:
        return reference.rotate_blocks(y, blocks)

    return _narrowed(x, wide.separately(rotated, rotated))


def in_basis(x: QueriesKeys, basis: Tensor, rotate: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rotate as  x + P (rot y - y),  y = P^T x,  exact at the origin; as rot y for scores only; in float32 or wider."""

    def into(y: Tensor) -> Tensor:
        return reference.into_basis(y, basis)

    def out_of(y: Tensor) -> Tensor:
        return reference.out_of_basis(y, basis)

    wide = x.widened(basis)
    with without_autocast(x.q):
        inner = QueriesKeys(*wide.separately(into, into))
        rotated = rotate(inner)
        if x.scores_only:
            return rotated
        q, k = QueriesKeys(rotated[0] - inner.q, rotated[1] - inner.k).separately(out_of, out_of)
        return wide.q + q, wide.k + k


def _kernel(
    name: str, x: QueriesKeys, batch_dims: int, *tensors: Tensor, reason: str | None = None, halves: bool = False
) -> Callable[..., Any] | None:
    """Return the kernel that rotates, None for the reference; an explicitly chosen backend raises if it cannot."""
    plain = is_plain(x.q, x.k, *tensors)
    if not takes_kernels(name, x.q, x.k, *tensors, halves=halves, plain=plain):
        return None
    leading = max(x.q.ndim, x.k.ndim) - 3
    if batch_dims > 1 or (batch_dims and leading > 1 and tensors[0].shape[0] != 1):
        batch = tuple(tensors[0].shape[:batch_dims])
        reason = f"needs positions shared by all samples, or one batch dimension in both, got {batch}"
    if x.q.dtype != x.k.dtype and x.q.device.type != "cpu":
        reason = f"needs q and k of one dtype, got {x.q.dtype} and {x.k.dtype}"
    if reason is not None:
        refuse(reason)
        return None
    return partial(run, name, plain=plain)


def _flat(x: Tensor) -> Tensor:
    """Flatten all leading dimensions into one batch dimension."""
    return x if x.ndim == 4 else x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4)


def _like(x: QueriesKeys, rotated: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Restore the leading dimensions."""
    q, k = rotated
    return q if x.q.ndim == 4 else q.reshape(x.q.shape), k if x.k.ndim == 4 else k.reshape(x.k.shape)


def _narrowed(x: QueriesKeys, rotated: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Round to the dtypes of the inputs."""
    return rotated[0].to(x.q.dtype), rotated[1].to(x.k.dtype)
