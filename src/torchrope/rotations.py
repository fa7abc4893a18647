"""Rotations of the channels of each token, the values that encodings return: `Planar`, `PlanarInBasis`, `Commuting`,
`Block`. Conventions for the sign and the order of channels are stated here.

A vector x of `head_dim` channels is split into consecutive blocks. A planar rotation rotates channels (2i, 2i+1), or
(i, i + n) if its n pairs are laid out in halves, by the angle φ_i, counter-clockwise:

    [y_2i  ]   [cos φ  -sin φ] [x_2i  ]           [0  -φ]
    [y_2i+1] = [sin φ   cos φ] [x_2i+1]  = exp(   [φ   0]   ) x

A block rotation multiplies channels [i b, (i+1) b) by an orthogonal b x b matrix. Channels from `rotary_dim` on are
unchanged. Dimensions are ordered as in q and k: (..., heads, tokens, channels).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from torchrope.ops import dispatch
from torchrope.ops.dispatch import QueriesKeys, absent
from torchrope.ops.reference import combine, cos_sin
from torchrope.ops.shapes import basis_fits, block_fits, planar_fits
from torchrope.ops.skew_exp import exponential
from torchrope.tensors import Value, block_diagonal, can_read, exact_matmul, shown, wide_positions, without_autocast


class Rotation(Value, ABC):
    """One rotation per head and token, what an encoding returns for positions:  q' = R(p) q,  k' = R(p) k.  Immutable.

    Attributes:
        head_dim: Channels per head.
        num_heads: Number of heads to rotate; by default that of `shape`. A rotation with one head is broadcast.
    """

    head_dim: int
    num_heads: int | None = None
    # The tensors and their shapes when they fitted one another; an annotation would make it a field.
    _checked = tuple[tuple[Tensor, torch.Size], ...]()
    # Set by `rotate`: what it was last called with, and a function that repeats this call.
    _repeated = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if not torch.compiler.is_compiling():  # where operators check
            self._require_consistent()

    @abstractmethod
    def rotate_vectors(self, x: QueriesKeys) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys that fit; a side with 0 heads is absent and returned unchanged."""

    def tabulated(self) -> Self:
        """Return the rotation with cos and sin precomputed where it has any, for several layers that share it."""
        return self

    def shares_basis(self, other: "Rotation", x: QueriesKeys) -> bool:
        """Return whether queries and keys of x, whose rotation is another, share a basis that scores may omit."""
        return False

    def check(self, name: str, x: Tensor, partner: Tensor | None) -> None:
        """Raise unless x fits.

        Args:
            name: "q", "k" or "x", a tensor alone.
            x: `(*batch, heads, tokens, head_dim)`.
            partner: The other one of q and k.

        Raises:
            ValueError: another batch, number of heads or tokens, head_dim or device.
        """
        if not torch.compiler.is_compiling():
            # x.data = ..., x.resize_() and x.set_() change shapes of tensors that already fitted.
            if not self._checked or any([tensor.shape != shape for tensor, shape in self._checked]):  # noqa: C419
                self._require_consistent()
            if x.device != self._checked[0][0].device:
                raise ValueError(f"{name} and its rotation must be on one device, got {x.device} and {self.device}")
        if x.ndim < 3 or not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating point (batch, heads, tokens, head_dim), got {x.dtype} {tuple(x.shape)}"
            )
        *batch, heads, tokens, head_dim = x.shape
        *rotation_batch, rotation_heads, rotation_tokens = self.shape
        if head_dim != self.head_dim:
            raise ValueError(f"head_dim of {name} must be the rotation's {self.head_dim}, got {head_dim}")
        if tokens != rotation_tokens:
            rule = f"{name} must have the rotation's {rotation_tokens} tokens, got {tokens}"
            raise ValueError(f"{rule}{_hint_of_tokens(x, rotation_tokens)}")
        if rotation_batch:
            aligned = batch[len(batch) - len(rotation_batch) :] if len(rotation_batch) <= len(batch) else None
            if aligned is None or any(n not in (1, of_x) for n, of_x in zip(rotation_batch, aligned, strict=True)):
                rule = f"positions must have no batch dimension or that of {name}, {tuple(batch)}"
                raise ValueError(f"{rule}, got {tuple(rotation_batch)}")
        self._check_heads(name, heads, partner, rotation_heads == 1)

    def _check_heads(self, name: str, heads: int, partner: Tensor | None, shared: bool) -> None:
        """Raise unless key heads divide query heads, and the rotation has 1 head, those of q or those of k."""
        if partner is None:
            if not shared and heads % self.heads:
                raise ValueError(f"heads of {name} must be a multiple of the rotation's {self.heads}, got {heads}")
            return
        if partner.ndim < 3:
            return  # refused by its own check
        partner_heads = partner.shape[-3]
        heads, key_heads = (heads, partner_heads) if name == "q" else (partner_heads, heads)
        if key_heads == 0 or heads % key_heads:
            raise ValueError(f"heads of q must be a multiple of the heads of k, got {heads} and {key_heads}")
        if self.heads not in (1, heads, key_heads):
            raise ValueError(f"heads of q or k must be the rotation's {self.heads}, got {heads} and {key_heads}")
        if name == "k" and not shared and self.heads != key_heads:
            hint = f"for grouped queries build the encoding with num_heads={key_heads} or shared_heads=True"
            raise ValueError(f"heads of k must be the rotation's {self.heads}, got {key_heads}; {hint}")

    @abstractmethod
    def _fits(self) -> bool:
        """Return whether the shapes of the tensors fit one another; may raise ValueError or IndexError if not."""

    def _require_consistent(self) -> None:
        """Raise ValueError unless the tensors are floating point, on one device, and fit: kernels trust them."""
        tensors = self._tensors()
        try:
            device = tensors[0].device
            consistent = all([x.is_floating_point() and x.device == device for x in tensors])  # noqa: C419
            if consistent and self._fits() and (self.num_heads is None or self.shape[-2] in (1, self.num_heads)):
                object.__setattr__(self, "_checked", tuple([(x, x.shape) for x in tensors]))
                return
        except (AttributeError, IndexError, TypeError, ValueError):  # no tensor, or one of other dimensions
            pass
        sizes = ", ".join(f"{name}={shown(value)}" for name, value in self._values().items() if name[0] != "_")
        rule = f"{type(self).__name__} needs floating-point tensors on one device whose shapes fit one another"
        raise ValueError(f"{rule}, got {sizes}")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(*batch, heads or 1, tokens)`: no batch if samples share positions, 1 if heads share the rotation."""

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Number of rotated channels."""

    @property
    def heads(self) -> int:
        """Number of heads to rotate."""
        return self.shape[-2] if self.num_heads is None else self.num_heads

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return next(tensor.dtype for tensor in self._tensors() if tensor.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._tensors()[0].device

    def __getitem__(self, index: Any) -> Self:
        """Slice samples, heads and tokens like a tensor of `(*batch, heads, tokens)`.

        Heads that share a rotation are indexed by `heads`, as if expanded. A rotation without batch dimensions cannot
        be indexed along them.

        Args:
            index: Slices and at most one `...`; for tokens also a tensor of indices `(n,)`.

        Raises:
            ValueError: too many dimensions, an integer, which would remove a dimension, or an empty slice of heads.

        Example:
            >>> import torch, torchrope as tr
            >>> rotation = tr.MixedRoPE(num_axes=1, num_heads=4, head_dim=8)(torch.arange(9.0)[:, None])
            >>> rotation[:2, 3:].shape
            (2, 6)
        """
        batch, heads, tokens = _indices(index, len(self.shape))
        selected = range(self.heads)[heads]
        if not selected:
            raise ValueError(f"a slice of heads must select 1 or more of {self.heads}, got {heads}")
        parts: dict[str, Any] = self._part(batch, heads, tokens)
        return self._with(num_heads=len(selected), **parts)

    @abstractmethod
    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Any]:
        """Slice the tensors along samples, heads and tokens; return them by name."""

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"shape={self.shape}, rotary_dim={self.rotary_dim}, head_dim={self.head_dim}"
        return f"{type(self).__name__}({sizes}, heads={self.heads}, {dtype}, {self.device})"

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what was checked and what can be repeated from copies."""
        return self._values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a detached copy."""
        return self._mapped(lambda tensor: tensor.detach().clone())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert device and dtype; arguments as of `torch.Tensor.to`, but the dtype stays float32 or wider."""

        def convert(tensor: Tensor) -> Tensor:
            converted = tensor.to(*args, **kwargs)
            exact = tensor.is_floating_point() and converted.dtype in (torch.float32, torch.float64)
            return converted if exact else tensor.to(converted.device)

        return self._mapped(convert)

    def detach(self) -> Self:
        """Return the rotation detached from the graph."""
        return self._mapped(Tensor.detach)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: value for name, value in self._values().items() if isinstance(value, Tensor)}
        return self._with(**{name: function(tensor) for name, tensor in tensors.items()})

    def _tensors(self) -> list[Tensor]:
        return [value for name in self._fields if isinstance(value := getattr(self, name), Tensor)]

    def matrix(self) -> Tensor:
        """Return the dense matrices of the rotation, `(*batch, heads, tokens, head_dim, head_dim)`."""
        dense = block_diagonal(self.blocks(), self.head_dim)
        return dense.expand(*self.shape[:-2], self.heads, *dense.shape[-3:])

    @abstractmethod
    def blocks(self) -> Tensor:
        """Return the blocks on the diagonal of the matrices, `(*batch, heads or 1, tokens, num_blocks, b, b)`."""

    def for_export(self) -> "Rotation":
        """Return the same rotation by operations that ONNX has."""
        return self

    @abstractmethod
    def inverse(self) -> "Rotation":
        """Return the inverse rotation:  R(p)^-1 = R(p)^T."""

    @abstractmethod
    def at(self, positions: Tensor) -> "Rotation":
        """Return the rotation of the same encoding at other positions; basis and frequencies are not recomputed.

        Scores of queries and keys at different positions can then omit the basis (`rotate(..., scores_only=True,
        key_rotation=...)`), which two calls of the encoding would compute twice.

        Args:
            positions: `(*batch, tokens, axes)`, in the dtype of the rotation or converted to it; integers above 2^24
                widen the rotation.

        Raises:
            ValueError: another number of axes; a `Block` rotation, which stores matrices and no generators.
        """


class ByPositions(Rotation):
    """Rotation that is computed from positions when it is applied.

    Attributes:
        positions: `(*batch, tokens, axes)`.
    """

    positions: Tensor
    _table: Tensor | None = None  # cos and sin `(*batch, heads or 1, tokens, 2, pairs)`, if precomputed

    def at(self, positions: Tensor) -> Self:
        axes = self.positions.shape[-1]
        if positions.ndim < 2 or positions.shape[-1] != axes:
            raise ValueError(f"positions must be (*batch, tokens, {axes}), got {tuple(positions.shape)}")
        wide = torch.float32 if positions.is_floating_point() else wide_positions(positions).dtype
        dtype = torch.promote_types(wide, self.positions.dtype)
        return self.to(dtype)._with(positions=positions.to(self.device, dtype, copy=True), _table=None)

    def inverse(self) -> Self:
        inverse = self._with(positions=-self.positions, _table=None)
        return inverse if self._table is None else inverse.tabulated()


class Planar(ByPositions):
    """Rotation of channel pairs by the angles  φ_i = sum_a p_a f_ai,  in radians; by a table of them see `from_angles`.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        interleaved: Whether pair i is channels (2i, 2i + 1), or (i, i + pairs), as in `rotate_half` of transformers;
            `in_halves` sets it.
    """

    frequencies: Tensor
    interleaved: bool = True

    def rotate_vectors(self, x: QueriesKeys) -> tuple[Tensor, Tensor]:
        return dispatch.rotate_planar(x, self.positions, self.frequencies, self._table, self.interleaved)

    def _fits(self) -> bool:
        return planar_fits(self.positions, self.frequencies, self._table, self.head_dim)

    @property
    def rotary_dim(self) -> int:
        return 2 * self.frequencies.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.positions.shape
        return (*batch, self.frequencies.shape[1], tokens)

    def angles(self) -> Tensor:
        """Return the angles in radians, `(*batch, heads or 1, tokens, pairs)`."""
        return combine(self.positions, self.frequencies)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, each `(*batch, heads or 1, tokens, pairs)`."""
        return cos_sin(self.positions, self.frequencies, self._table)

    def tabulated(self) -> "Planar":
        # Pairs (1, 0) in halves become all cos, then all sin, as exactly as a kernel computes them.
        positions, frequencies = self.positions.detach(), self.frequencies.detach()
        units = positions.new_zeros(*self.shape, self.rotary_dim)
        units[..., : self.rotary_dim // 2] = 1
        rotated, _ = dispatch.rotate_planar(QueriesKeys(units, absent(units)), positions, frequencies, None, False)
        return self._with(_table=rotated.unflatten(-1, (2, -1)))

    def in_halves(self) -> "Planar":
        """Return the rotation of channel pairs (i, i + rotary_dim / 2) instead of (2i, 2i + 1) by the same angles."""
        return self._with(interleaved=False)

    def matrix(self) -> Tensor:
        dense = super().matrix()
        if self.interleaved:
            return dense
        channel = torch.arange(self.head_dim, device=dense.device)
        rotated, rest = channel[: self.rotary_dim], channel[self.rotary_dim :]
        order = torch.cat([rotated[::2], rotated[1::2], rest])
        return dense[..., order, :][..., order]

    def blocks(self) -> Tensor:
        """Return the rotation of each pair, `(*batch, heads or 1, tokens, pairs, 2, 2)`, for either channel layout."""
        cos, sin = self.cos_sin()
        rows = [torch.stack([cos, -sin], dim=-1), torch.stack([sin, cos], dim=-1)]
        return torch.stack(rows, dim=-2)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        table = (
            None if self._table is None else _of_heads(self._table[(*batch, slice(None), tokens)], heads, len(batch))
        )
        frequencies = _of_heads(self.frequencies, heads, 1)
        return {"positions": self.positions[(*batch, tokens)], "frequencies": frequencies, "_table": table}


class GivenAngles(Planar):
    """Rotation of channel pairs by given angles, with gradients to them; see `from_angles`.

    Attributes:
        given: The angles in radians, `(*batch, heads or 1, tokens, pairs)`.
        positions, frequencies: Without axes.
    """

    given: Tensor

    def rotate_vectors(self, x: QueriesKeys) -> tuple[Tensor, Tensor]:
        return dispatch.rotate_by_angles(x, self.given, self._table, self.interleaved)

    def _fits(self) -> bool:
        return planar_fits(self.given, self.frequencies, self._table, self.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.given.shape[:-1])

    def angles(self) -> Tensor:
        return self.given

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        return (self.given.cos(), self.given.sin()) if self._table is None else super().cos_sin()

    def tabulated(self) -> "GivenAngles":
        return self

    def at(self, positions: Tensor) -> "GivenAngles":
        raise ValueError("a rotation by given angles has no frequencies: give the angles at other positions")

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        angles = _of_heads(self.given[(*batch, slice(None), tokens)], heads, len(batch))
        return _of_angles(angles)

    def inverse(self) -> "GivenAngles":
        return self._with(**_of_angles(-self.given))


def from_angles(angles: Tensor, *, head_dim: int | None = None, num_heads: int | None = None) -> GivenAngles:
    """Return the rotation of channel pairs by given angles, for selective and data-dependent RoPE, tables of others:

        [y_2i  ]   [cos φ_i  -sin φ_i] [x_2i  ]
        [y_2i+1] = [sin φ_i   cos φ_i] [x_2i+1]

    Gradients reach the angles, by the kernels where there are any. A table of cos and sin has the angles
    `torch.atan2(sin, cos)`.

    Args:
        angles: φ in radians, `([batch,] heads or 1, tokens, pairs)`, or `(tokens, pairs)` for all samples and heads;
            computed in float32 or float64.
        head_dim: Channels per head, 2 · pairs by default; channels from 2 · pairs on are unchanged.
        num_heads: Number of heads, by default those of `angles`; 1 head of angles is shared by all.

    Raises:
        ValueError: angles of another shape or dtype; head_dim below 2 · pairs; other numbers of heads.

    References:
        Selective Rotary Position Embedding, arXiv:2511.17388, where angles are cumulative sums of functions of tokens.

    Example:
        >>> import torchrope as tr
        >>> step = torch.rand(2, 4, 6, 8)  # (batch, heads, tokens, pairs), computed from the tokens
        >>> q, k = tr.rotate(*torch.randn(2, 2, 4, 6, 16), from_angles(step.cumsum(dim=2)))
        >>> q.shape
        torch.Size([2, 4, 6, 16])
    """
    exact = isinstance(angles, Tensor) and angles.dtype in (torch.float32, torch.float64)
    if not exact or not 2 <= angles.ndim <= 4:
        rule = "angles must be ([batch,] heads or 1, tokens, pairs) in float32 or float64"
        raise ValueError(f"{rule}, got {shown(angles)}")
    batched = angles if angles.ndim > 2 else angles.unsqueeze(0)
    head_dim = 2 * batched.shape[-1] if head_dim is None else head_dim
    if head_dim < 2 * batched.shape[-1]:
        raise ValueError(f"head_dim must be 2 · {batched.shape[-1]} pairs or more, got {head_dim}")
    if num_heads is not None and batched.shape[-3] not in (1, num_heads):
        raise ValueError(f"angles must have 1 head or num_heads = {num_heads}, got {tuple(angles.shape)}")
    return GivenAngles(head_dim=head_dim, num_heads=num_heads, **_of_angles(batched))


def _of_angles(angles: Tensor) -> dict[str, Any]:
    """Return the tensors of a `GivenAngles`."""
    *batch, heads, tokens, pairs = angles.shape
    return {
        "given": angles,
        "_table": None if angles.requires_grad else torch.stack([angles.cos(), angles.sin()], dim=-2),
        "positions": angles.new_zeros(*batch, tokens, 0),
        "frequencies": angles.new_zeros(0, heads, pairs),
    }


class Commuting(ByPositions):
    """Rotation by multiples of one skew matrix B per block:  R(p) = exp(s B) = U rot(s w) U^T,  s = sum_a p_a c_a.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        factors: c, `(axes, heads or 1, blocks)`.
        base: B, `(heads or 1, blocks, b, b)`, b even.
        basis: U, `(heads or 1, blocks, b, b)`, orthogonal; each pair of columns spans one plane.
        angular: w, `(heads or 1, blocks, b / 2)`:  B = U diag([[0, -w], [w, 0]]) U^T.
    """

    factors: Tensor
    base: Tensor
    basis: Tensor
    angular: Tensor

    def rotate_vectors(self, x: QueriesKeys) -> tuple[Tensor, Tensor]:
        return dispatch.rotate_basis(x, self.positions, self.factors, self.base, self.basis, self.angular)

    def _fits(self) -> bool:
        return basis_fits(self.positions, self.factors, self.base, self.basis, self.angular, self.head_dim)

    def shares_basis(self, other: Rotation, x: QueriesKeys) -> bool:
        # Kernels apply U also to blocks that never rotate, so these must be the same: compare factors and w too.
        names = ("factors", "angular", "basis")
        if not isinstance(other, Commuting):
            return False
        # Only the kernel omits U, so it must take both sides or neither.
        of_q = dispatch.basis_kernel(x.only_q(), self.positions, self.factors, self.base)
        of_k = dispatch.basis_kernel(x.only_k(), other.positions, other.factors, other.base)
        return (of_q is None) == (of_k is None) and all(
            equal(getattr(self, name), getattr(other, name)) for name in names
        )

    @property
    def rotary_dim(self) -> int:
        return self.base.shape[-3] * self.base.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.positions.shape
        return (*batch, self.base.shape[0], tokens)

    def for_export(self) -> "PlanarInBasis":
        # U rot(s w) U^T as a rotation of pairs by the frequencies c w, instead of an exponential.
        frequencies = (self.factors.unsqueeze(-1) * self.angular).flatten(-2)
        return PlanarInBasis(
            positions=self.positions, frequencies=frequencies, basis=self.basis, head_dim=self.head_dim,
            num_heads=self.num_heads,
        )  # fmt: skip

    def blocks(self) -> Tensor:
        along = combine(self.positions, self.factors)  # (*batch, heads, tokens, blocks)
        return exponential(along[..., None, None] * self.base.unsqueeze(1))

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        of_heads = {name: _of_heads(getattr(self, name), heads, 0) for name in ("base", "basis", "angular")}
        factors = _of_heads(self.factors, heads, 1)
        return {"positions": self.positions[(*batch, tokens)], "factors": factors, **of_heads}


class PlanarInBasis(ByPositions):
    """Rotation of channel pairs in another basis:  R(p) = P rot(φ) P^T,  φ_i = sum_a p_a f_ai,  block by block.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        basis: P, `(heads or 1, blocks, b, b)`, orthogonal, b even.
    """

    frequencies: Tensor
    basis: Tensor

    def rotate_vectors(self, x: QueriesKeys) -> tuple[Tensor, Tensor]:
        return dispatch.in_basis(x, self.basis, self.planar.rotate_vectors) if self.basis.numel() else x[:2]

    def _fits(self) -> bool:
        heads, blocks, b, columns = self.basis.shape
        _, frequency_heads, pairs = self.frequencies.shape
        fits = b == columns and blocks * b == 2 * pairs and frequency_heads in (1, heads)
        return fits and planar_fits(self.positions, self.frequencies, self._table, self.head_dim)

    def shares_basis(self, other: Rotation, x: QueriesKeys) -> bool:
        if not isinstance(other, PlanarInBasis):
            return False
        # Two learned bases with equal values must both be applied, to get both gradients.
        learned = self.basis.requires_grad or other.basis.requires_grad
        return self.basis is other.basis or (not learned and equal(self.basis, other.basis))

    rotary_dim = Planar.rotary_dim

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.positions.shape
        return (*batch, self.basis.shape[0], tokens)

    @property
    def planar(self) -> Planar:
        """rot(φ), the rotation without the basis P."""
        return Planar(
            positions=self.positions, frequencies=self.frequencies, _table=self._table, head_dim=self.head_dim,
            num_heads=self.num_heads,
        )  # fmt: skip

    def tabulated(self) -> "PlanarInBasis":
        return self._with(_table=self.planar.tabulated()._table)

    def blocks(self) -> Tensor:
        b = self.basis.shape[-1]
        identity = torch.eye(b, dtype=self.dtype, device=self.device)
        rotations = block_diagonal(self.planar.blocks().unflatten(-3, (-1, b // 2)), b)  # (..., tokens, blocks, b, b)
        basis = self.basis.unsqueeze(1)  # (heads, 1, blocks, b, b)
        # I + P (rot - I) P^T, not P rot P^T: this is exactly I at the origin.
        with without_autocast(basis):
            return identity + exact_matmul(exact_matmul(basis, rotations - identity), basis.mT)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        return {**self.planar._part(batch, heads, tokens), "basis": _of_heads(self.basis, heads, 0)}


class Block(Rotation):
    """Rotation of channel blocks by orthogonal matrices.

    Attributes:
        table: The matrices `(*batch, heads or 1, tokens, blocks, b, b)`.
    """

    table: Tensor
    _tangent: Tensor | None = None  # of exp_generators, which takes the gradient of the table through it

    def rotate_vectors(self, x: QueriesKeys) -> tuple[Tensor, Tensor]:
        return dispatch.rotate_block(x, self.table, self._tangent)

    def _fits(self) -> bool:
        return block_fits(self.table, self._tangent, self.head_dim)

    @property
    def rotary_dim(self) -> int:
        return self.table.shape[-3] * self.table.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape[:-3]

    def blocks(self) -> Tensor:
        return self.table

    def for_export(self) -> "Block":
        # The ellipses of an ONNX Einsum must stand for equally many dimensions, so a batch dimension is added.
        if self.table.ndim != 5:
            return self
        tangent = None if self._tangent is None else self._tangent.unsqueeze(0)
        return self._with(table=self.table.unsqueeze(0), _tangent=tangent)

    def at(self, positions: Tensor) -> "Block":
        raise ValueError("at() must be called on a rotation with generators, got a Block, which stores matrices only")

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        def part(tensor: Tensor) -> Tensor:
            return _of_heads(tensor[(*batch, slice(None), tokens)], heads, len(batch))

        return {"table": part(self.table), "_tangent": None if self._tangent is None else part(self._tangent)}

    def inverse(self) -> "Block":
        return self._with(table=self.table.mT, _tangent=None)


def equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same object, or have one dtype and equal values, if these can be read."""
    return x is y or (x.dtype == y.dtype and can_read(x) and can_read(y) and torch.equal(x, y))


def _hint_of_tokens(x: Tensor, expected: int) -> str:
    """Return the likely cause of another number of tokens than the rotation's."""
    more = x.shape[-2] - expected
    if x.shape[-3] == expected:
        layouts = 'layout="bthd" is (batch, tokens, heads, head_dim), "bhtd" (batch, heads, tokens, head_dim)'
        return f"; it has as many heads: {layouts}"
    if 1 <= more <= 32:  # likely class and register tokens
        return f"; for {more} more in front (CLS, registers) pass positions through tr.prefix(positions, {more})"
    return ""


def _of_heads(x: Tensor, heads: slice, dim: int) -> Tensor:
    """Slice the heads of a tensor along a dimension; a dimension of 1, shared by all heads, is kept."""
    return x if x.shape[dim] == 1 else x[(slice(None),) * dim + (heads,)]


def _indices(index: Any, ndim: int) -> tuple[tuple[slice, ...], slice, Any]:
    """Expand an index to slices of samples, a slice of heads, and a slice or indices of tokens."""
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, part in enumerate(parts) if part is ...]
    if len(ellipses) > 1 or len(parts) - len(ellipses) > ndim:
        raise ValueError(f"an index must have at most {ndim} parts and one '...', got {len(parts)} parts")
    at = ellipses[0] if ellipses else len(parts)
    before, after = parts[:at], parts[at + 1 :]
    expanded: list[Any] = [*before, *(slice(None) for _ in range(ndim - len(before) - len(after))), *after]
    *batch, heads, tokens = expanded
    by_indices = isinstance(tokens, Tensor) and tokens.ndim == 1 and not tokens.is_floating_point()
    if not (by_indices or isinstance(tokens, slice)) or not all(isinstance(part, slice) for part in (*batch, heads)):
        raise ValueError(f"a rotation must be indexed by slices, tokens also by indices (n,), got {shown(index)}")
    return tuple(batch), heads, tokens
