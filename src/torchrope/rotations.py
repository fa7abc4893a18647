"""Rotations as values: `Planar`, `PlanarInBasis`, `Commuting`, `Block`, and `Action`. Sign and layout are here.

A vector x of `head_dim` channels is cut into consecutive blocks. A planar rotation turns channels (2i, 2i+1), or
(i, i + n) where its n pairs are laid out in halves, by the angle a_i, counter-clockwise:

    [y_2i  ]   [cos a  -sin a] [x_2i  ]           [0  -a]
    [y_2i+1] = [sin a   cos a] [x_2i+1]  = exp(   [a   0]   ) x

A block rotation multiplies channels [i b, (i+1) b) by an orthogonal b x b matrix. Channels beyond the rotated
ones (`rotary_dim` < `head_dim`) pass unchanged. Tokens are second to last, heads before them, as in q and k.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from torchrope.tensors import can_read, without_autocast


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Rotation(ABC):
    """What an encoding returns for positions: one rotation a head and token. Immutable.

    Attributes:
        head_dim: Channels of a head, rotated or not.
        num_heads: Heads that it was made for; its own by default. A rotation of one head serves them all.
    """

    head_dim: int
    num_heads: int | None = None

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Number of channels that turn."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(*batch, heads or 1, tokens)`: no batch where positions are shared, 1 where heads share."""

    @property
    def heads(self) -> int:
        """Heads that it was made for."""
        return self.shape[-2] if self.num_heads is None else self.num_heads

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self._tensors()[0].dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._tensors()[0].device

    def matrix(self) -> Tensor:
        """The same rotation as a dense matrix `(*batch, heads, tokens, head_dim, head_dim)`."""
        dense = block_diagonal(self.blocks(), self.head_dim)
        return dense.expand(*self.shape[:-2], self.heads, *dense.shape[-3:])

    @abstractmethod
    def blocks(self) -> Tensor:
        """The matrices on the diagonal, `(*batch, heads or 1, tokens, num_blocks, b, b)`."""

    @abstractmethod
    def inverse(self) -> "Rotation":
        """The rotation that undoes this one:  R(p)^-1 = R(p)^T."""

    @abstractmethod
    def at(self, positions: Tensor) -> "Rotation":
        """The rotation of other positions by the same generators, whose basis and frequencies both share.

        Scores of queries and keys at different positions may then leave a basis out (`rotate(..., scores_only=True,
        key_rotation=...)`), where two calls of the encoding would work it out twice.

        Args:
            positions: `(*batch, tokens, axes)`, in the dtype of the rotation or converted to it.

        Raises:
            ValueError: another number of axes; a `Block` rotation, which holds matrices and no generators.
        """

    def __getitem__(self, index: Any) -> "Rotation":
        """Part of the samples, heads and tokens, by slices, as a tensor of `(*batch, heads, tokens)` is sliced.

        Heads that share a rotation are counted as those that it was made for. What samples share stays shared: an index
        of a batch that is not there is refused.

        Args:
            index: Slices and at most one `...`; tokens also by a tensor of indices `(n,)`.

        Raises:
            ValueError: too many dimensions, an integer, which would remove one, or no head that is left.

        Example:
            >>> import torch, torchrope as tr
            >>> rotation = tr.MixedRoPE(num_axes=1, num_heads=4, head_dim=8)(torch.arange(9.0)[:, None])
            >>> rotation[:2, 3:].shape
            (2, 6)
        """
        batch, heads, tokens = _indices(index, len(self.shape))
        kept = range(self.heads)[heads]
        if not kept:
            raise ValueError(f"heads of a part must be 1 or more of {self.heads}, got {heads}")
        parts: dict[str, Any] = self._part(batch, heads, tokens)
        return replace(self, num_heads=len(kept), **parts)

    @abstractmethod
    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        """The tensors of some samples, heads and tokens, by name."""

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shown = f"shape={self.shape}, head_dim={self.head_dim}, rotary_dim={self.rotary_dim}"
        return f"{type(self).__name__}({shown}, heads={self.heads}, {dtype}, {self.device})"

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what kernels remember of them: addresses in this process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rotation":
        """The same rotation in memory of its own, without a gradient."""
        return self._mapped(lambda tensor: tensor.detach().clone())

    def to(self, *args: Any, **kwargs: Any) -> "Rotation":
        """The same rotation elsewhere; takes what `torch.Tensor.to` takes, but never narrows below float32."""

        def moved(tensor: Tensor) -> Tensor:
            there = tensor.to(*args, **kwargs)
            return there if there.dtype in (torch.float32, torch.float64) else tensor.to(there.device)

        return self._mapped(moved)

    def detach(self) -> "Rotation":
        """The same rotation without a gradient."""
        return self._mapped(Tensor.detach)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Rotation":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def _tensors(self) -> list[Tensor]:
        return [value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Planar(Rotation):
    """Rotation of channel pairs by the angles  a_i = sum_a p_a f_ai,  in radians.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        table: cos and sin of the angles, `(*batch, heads or 1, tokens, pairs, 2)`, where they were worked out
            beforehand; otherwise made where they are needed.
        halves: Whether pair i is channels (i, i + pairs), as `rotate_half` in transformers has it, in place of
            (2i, 2i + 1); `in_halves` makes one of the other.
    """

    positions: Tensor
    frequencies: Tensor
    table: Tensor | None = None
    halves: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.frequencies.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.positions.shape
        return (*batch, self.frequencies.shape[1], tokens)

    def angles(self) -> Tensor:
        """Angles in radians, `(*batch, heads or 1, tokens, pairs)`."""
        return combine(self.positions, self.frequencies)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, each `(*batch, heads or 1, tokens, pairs)`."""
        if self.table is not None:
            cos, sin = self.table.unbind(-1)
            return cos, sin
        angles = self.angles()
        return angles.cos(), angles.sin()

    def tabulated(self) -> "Planar":
        """The same rotation with cos and sin worked out."""
        return replace(self, table=torch.stack(self.cos_sin(), dim=-1))

    def in_halves(self) -> "Planar":
        """The same angles for models whose pairs are channels (i, i + rotary_dim / 2), in place of (2i, 2i + 1)."""
        return replace(self, halves=True)

    def matrix(self) -> Tensor:
        dense = super().matrix()
        if not self.halves:
            return dense
        first = torch.arange(self.head_dim, device=dense.device)
        place = torch.cat([first[: self.rotary_dim : 2], first[1 : self.rotary_dim : 2], first[self.rotary_dim :]])
        return dense[..., place, :][..., place]

    def blocks(self) -> Tensor:
        """The turn of each pair, `(*batch, heads or 1, tokens, pairs, 2, 2)`, wherever its channels are."""
        cos, sin = self.cos_sin()
        rows = [torch.stack([cos, -sin], dim=-1), torch.stack([sin, cos], dim=-1)]
        return torch.stack(rows, dim=-2)

    def at(self, positions: Tensor) -> "Planar":
        return replace(self, positions=_converted(positions, self.positions), table=None)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        table = None if self.table is None else _of_heads(self.table[(*batch, slice(None), tokens)], heads, len(batch))
        frequencies = _of_heads(self.frequencies, heads, 1)
        return {"positions": self.positions[(*batch, tokens)], "frequencies": frequencies, "table": table}

    def inverse(self) -> "Planar":
        turned = replace(self, positions=-self.positions, table=None)
        return turned if self.table is None else turned.tabulated()


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Commuting(Rotation):
    """Rotation by multiples of one skew base B per block:  R(p) = exp(s B) = U rot(s w) U^T,  s = sum_a p_a c_a.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        factors: c, `(axes, heads or 1, blocks)`.
        base: B, `(heads or 1, blocks, b, b)`, b even.
        basis: U, `(heads or 1, blocks, b, b)`, orthogonal, the planes in pairs of columns.
        angular: w, `(heads or 1, blocks, b / 2)`:  B = U diag([[0, -w], [w, 0]]) U^T.
    """

    positions: Tensor
    factors: Tensor
    base: Tensor
    basis: Tensor
    angular: Tensor

    @property
    def rotary_dim(self) -> int:
        return self.base.shape[-3] * self.base.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.positions.shape
        return (*batch, self.base.shape[0], tokens)

    def blocks(self) -> Tensor:
        along = combine(self.positions, self.factors)  # (*batch, heads, tokens, blocks)
        return exponential(along[..., None, None] * self.base.unsqueeze(1))

    def at(self, positions: Tensor) -> "Commuting":
        return replace(self, positions=_converted(positions, self.positions))

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        of_heads = {name: _of_heads(getattr(self, name), heads, 0) for name in ("base", "basis", "angular")}
        factors = _of_heads(self.factors, heads, 1)
        return {"positions": self.positions[(*batch, tokens)], "factors": factors, **of_heads}

    def inverse(self) -> "Commuting":
        return replace(self, positions=-self.positions)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PlanarInBasis(Rotation):
    """Rotation of channel pairs in another basis:  R(p) = P rot(a) P^T,  a_i = sum_a p_a f_ai,  block by block.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        basis: P, `(heads or 1, blocks, b, b)`, orthogonal, b even.
    """

    positions: Tensor
    frequencies: Tensor
    basis: Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * self.frequencies.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.positions.shape
        return (*batch, self.basis.shape[0], tokens)

    @property
    def planar(self) -> Planar:
        """rot(a), what is left of it where P is left out."""
        return Planar(
            positions=self.positions, frequencies=self.frequencies, head_dim=self.head_dim, num_heads=self.num_heads
        )

    def blocks(self) -> Tensor:
        b = self.basis.shape[-1]
        identity = torch.eye(b, dtype=self.dtype, device=self.device)
        turns = block_diagonal(self.planar.blocks().unflatten(-3, (-1, b // 2)), b)  # (..., tokens, blocks, b, b)
        basis = self.basis.unsqueeze(1)  # (heads, 1, blocks, b, b)
        # I + P (rot - I) P^T, not P rot P^T: at the origin this is I to the last bit.
        with without_autocast(basis):
            return identity + basis @ (turns - identity) @ basis.mT

    def at(self, positions: Tensor) -> "PlanarInBasis":
        return replace(self, positions=_converted(positions, self.positions))

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        frequencies, basis = _of_heads(self.frequencies, heads, 1), _of_heads(self.basis, heads, 0)
        return {"positions": self.positions[(*batch, tokens)], "frequencies": frequencies, "basis": basis}

    def inverse(self) -> "PlanarInBasis":
        return replace(self, positions=-self.positions)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Block(Rotation):
    """Rotation of channel blocks by orthogonal matrices.

    Attributes:
        table: The matrices `(*batch, heads or 1, tokens, blocks, b, b)`.
        tangent: Zeros `(*batch, heads or 1, tokens, blocks, b (b - 1) / 2)` without memory. Kernels return the
            gradient to Ω in exp(Ω) R at Ω = 0 through it, above the diagonal, half the size of a matrix's.
    """

    table: Tensor
    tangent: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        return self.table.shape[-3] * self.table.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape[:-3]

    def blocks(self) -> Tensor:
        return self.table

    def at(self, positions: Tensor) -> "Block":
        raise ValueError("a rotation at other positions needs generators, got a Block rotation of matrices alone")

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        def part(tensor: Tensor) -> Tensor:
            return _of_heads(tensor[(*batch, slice(None), tokens)], heads, len(batch))

        return {"table": part(self.table), "tangent": None if self.tangent is None else part(self.tangent)}

    def inverse(self) -> "Block":
        return replace(self, table=self.table.mT, tangent=None)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Expansion(Rotation):
    """No rotation: queries and keys get other channels, perhaps more of them, whose products are the scores.

    `rotate` applies it, and attention divides scores by √head_dim as before. A subclass says how in `of_queries` and
    `of_keys`. What only rotations have (`matrix`, `inverse`, another set of positions) is refused.
    """

    @abstractmethod
    def of_queries(self, q: Tensor, tokens: Tensor | None) -> Tensor:
        """Queries `(*batch, heads, tokens, head_dim)` to those of the scores, `(*batch, heads, tokens, channels)`.

        Args:
            q: Queries, float32 or wider.
            tokens: What they were projected from, `(*batch, tokens, dim)`, where attention tells it.

        Raises:
            ValueError: tokens are needed and were not told.
        """

    @abstractmethod
    def of_keys(self, k: Tensor) -> Tensor:
        """Keys to those of the scores, likewise."""

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def blocks(self) -> Tensor:
        raise ValueError(f"rotation matrices need a rotation, got {type(self).__name__}, which is none")

    def inverse(self) -> "Rotation":
        raise ValueError(f"the inverse needs a rotation, got {type(self).__name__}, which is none")

    def at(self, positions: Tensor) -> "Rotation":
        raise ValueError(f"other positions need generators, got {type(self).__name__}, which has none")


class Action(ABC):
    """Invertible matrices A of tokens, which need not be orthogonal, for queries, keys, values and outputs.

    q' = A_m^-T q,  k' = A_n k,  so that  q'^T k' = q^T A_m^-1 A_n k,  and  y = A_m^-1 sum_n w_mn A_n v. For rotations
    A^-T = A = R(p).
    """

    @abstractmethod
    def queries(self, q: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        """A^-T q for queries `(batch, heads, tokens, head_dim)`, with layout and backend as `torchrope.rotate`'s."""

    @abstractmethod
    def keys(self, k: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        """A k for keys, likewise."""

    @abstractmethod
    def values(self, v: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        """A v for the values of those tokens, likewise."""

    @abstractmethod
    def outputs(self, y: Tensor, *, layout: str | None = None, backend: str = "auto") -> Tensor:
        """A^-1 y for what the queries of those tokens attended to, likewise."""

    def bias(self, bias: Tensor) -> Tensor:
        """A bias or mask `(batch or 1, heads or 1, queries or 1, keys)` for the scores of `queries` and `keys`."""
        return bias

    def join(self, x: Tensor) -> Tensor:
        """What belongs to the tokens of `queries`, such as weights, as `(batch, heads, tokens, ...)`."""
        return x

    @abstractmethod
    def require_same_frame(self, other: "Rotation | Action") -> None:
        """Raise ValueError where queries of this action and keys of another one cannot be compared."""


def _converted(positions: Tensor, like: Tensor) -> Tensor:
    """Positions in the dtype and on the device of others, in memory of their own."""
    if positions.ndim < 2 or positions.shape[-1] != like.shape[-1]:
        raise ValueError(f"positions must be (*batch, tokens, {like.shape[-1]}), got {tuple(positions.shape)}")
    return positions.to(like, copy=True)


def _of_heads(x: Tensor, heads: slice, dim: int) -> Tensor:
    """Some heads of what has them in a dimension; what all heads share stays as it is."""
    return x if x.shape[dim] == 1 else x[(slice(None),) * dim + (heads,)]


def _indices(index: Any, ndim: int) -> tuple[tuple[slice, ...], slice, Any]:
    """Slices of samples, of heads, and of tokens, or their indices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    gaps = [at for at, part in enumerate(parts) if part is ...]
    if len(gaps) > 1 or len(parts) - len(gaps) > ndim:
        raise ValueError(f"an index must have at most {ndim} parts and one '...', got {len(parts)} parts")
    at = gaps[0] if gaps else len(parts)
    before, after, whole = parts[:at], parts[at + 1 :], slice(None)
    every: list[Any] = [*before, *(whole for _ in range(ndim - len(before) - len(after))), *after]
    *batch, heads, tokens = every
    by_indices = isinstance(tokens, Tensor) and tokens.ndim == 1 and not tokens.is_floating_point()
    if not (by_indices or isinstance(tokens, slice)) or not all(isinstance(part, slice) for part in (*batch, heads)):
        raise ValueError(f"a rotation must be indexed by slices, tokens also by indices (n,), got {index}")
    return tuple(batch), heads, tokens


# Each squaring inside torch.matrix_exp doubles the departure from orthogonality: below the first norm it stays at
# rounding error, below the second float32 is exact enough to be mended afterwards.
_NEAR, _FAR = 16.0, 1024.0
# No digit of a larger angle is left in float32.
_FARTHEST = 2.0**40


def exponential(skew: Tensor) -> Tensor:
    """exp of skew matrices `(..., b, b)`, float32 or float64, any strides; orthogonal whatever their norm.

    Far from zero it is computed in float64, where the device has it. Norms above 2^40 are scaled down to it.
    """
    skew = skew.contiguous()  # torch.matrix_exp refuses strides that einsum leaves behind
    norm = skew.detach().abs().sum(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)
    if skew.is_meta or (can_read(norm) and not (norm > _NEAR).any()):
        return torch.linalg.matrix_exp(skew)
    stays = skew.device.type == "mps" or (can_read(norm) and not (norm > _FAR).any())
    wide = skew if stays else skew.double()
    matrix = torch.linalg.matrix_exp(wide * (_FARTHEST / norm).clamp(max=1))
    identity = torch.eye(skew.shape[-1], dtype=wide.dtype, device=wide.device)
    with without_autocast(skew):
        for _ in range(2):  # each leaves the square of the error that was there
            matrix = matrix - matrix @ (matrix.mT @ matrix - identity) / 2
    return matrix.to(skew.dtype)


def combine(positions: Tensor, per_axis: Tensor) -> Tensor:
    """sum_a p_a X_a for p `(*batch, tokens, axes)` and X `(axes, heads, ...)`, to `(*batch, heads, tokens, ...)`.

    A sum of products, not a matmul: a GPU would round a matmul to TensorFloat-32.
    """
    trailing = (1,) * (per_axis.ndim - 2)
    terms: Sequence[Tensor] = [
        p.unsqueeze(-2).unflatten(-1, (-1, *trailing)) * x.unsqueeze(1)  # (*batch, 1, tokens, ...) (heads, 1, ...)
        for p, x in zip(positions.unbind(-1), per_axis.unbind(0), strict=True)
    ]
    return sum(terms[1:], start=terms[0])


def block_diagonal(blocks: Tensor, size: int) -> Tensor:
    """Lay blocks `(..., n, b, b)` on the diagonal of a `size` square; the diagonal left over is 1."""
    *batch, n, b, _ = blocks.shape
    dense = torch.eye(size, dtype=blocks.dtype, device=blocks.device).repeat(*batch, 1, 1)
    cells = dense[..., : n * b, : n * b].unflatten(-1, (n, b)).unflatten(-3, (n, b))  # (..., n, b, n, b)
    cells.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))  # (..., b, b, n)
    return dense
