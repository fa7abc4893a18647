"""Results of encodings: rotations of the channels of each token (`Planar`, `PlanarInBasis`, `Commuting`, `Block`), maps
to other features (`Expansion`) and matrices for values too (`Action`); sign and order of channels.

A vector x of `head_dim` channels is split into consecutive blocks. A planar rotation rotates channels (2i, 2i+1), or
(i, i + n) if its n pairs are laid out in halves, by the angle φ_i, counter-clockwise:

    [y_2i  ]   [cos φ  -sin φ] [x_2i  ]           [0  -φ]
    [y_2i+1] = [sin φ   cos φ] [x_2i+1]  = exp(   [φ   0]   ) x

A block rotation multiplies channels [i b, (i+1) b) by an orthogonal b x b matrix. Channels from `rotary_dim` on are
unchanged. Dimensions are ordered as in q and k: (..., heads, tokens, channels).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from torchrope.tensors import can_read, exact_matmul, in_forward_mode, without_autocast


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Rotation(ABC):
    """One rotation per head and token, returned by an encoding for given positions. Immutable.

    From the second use on, `rotate` on a CPU may keep cos and sin with a planar rotation, in at most two tables of as
    many numbers as q, computed again if a tensor of the rotation was changed in place. It does not notice changes
    through `.data`, nor those of inference tensors (made in `torch.inference_mode`): build another rotation instead.

    Attributes:
        head_dim: Channels per head, rotated or not.
        num_heads: Number of heads to rotate; by default that of `shape`. A rotation with one head is broadcast.
    """

    head_dim: int
    num_heads: int | None = None

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Number of rotated channels."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(*batch, heads or 1, tokens)`: no batch if samples share positions, 1 if heads share the rotation."""

    @property
    def heads(self) -> int:
        """Number of heads to rotate."""
        return self.shape[-2] if self.num_heads is None else self.num_heads

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self._tensors()[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._tensors()[0].device

    def matrix(self) -> Tensor:
        """Return the dense matrices of the rotation, `(*batch, heads, tokens, head_dim, head_dim)`."""
        dense = block_diagonal(self.blocks(), self.head_dim)
        return dense.expand(*self.shape[:-2], self.heads, *dense.shape[-3:])

    @abstractmethod
    def blocks(self) -> Tensor:
        """Return the blocks on the diagonal of the matrices, `(*batch, heads or 1, tokens, num_blocks, b, b)`."""

    @abstractmethod
    def inverse(self) -> "Rotation":
        """Return the inverse rotation:  R(p)^-1 = R(p)^T."""

    @abstractmethod
    def at(self, positions: Tensor) -> "Rotation":
        """Return the rotation of the same encoding at other positions; basis and frequencies are not recomputed.

        Scores of queries and keys at different positions can then omit the basis (`rotate(..., scores_only=True,
        key_rotation=...)`), which two calls of the encoding would compute twice.

        Args:
            positions: `(*batch, tokens, axes)`, in the dtype of the rotation or converted to it.

        Raises:
            ValueError: another number of axes; a `Block` rotation, which stores matrices and no generators.
        """

    def __getitem__(self, index: Any) -> "Rotation":
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
        return replace(self, num_heads=len(selected), **parts)

    @abstractmethod
    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        """Slice the tensors along samples, heads and tokens; return them by name."""

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shown = f"shape={self.shape}, head_dim={self.head_dim}, rotary_dim={self.rotary_dim}"
        return f"{type(self).__name__}({shown}, heads={self.heads}, {dtype}, {self.device})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields only; attributes that kernels cache hold addresses valid in this process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rotation":
        """Return a detached copy."""
        return self._mapped(lambda tensor: tensor.detach().clone())

    def to(self, *args: Any, **kwargs: Any) -> "Rotation":
        """Convert device and dtype; arguments as of `torch.Tensor.to`, but the dtype stays float32 or wider."""

        def convert(tensor: Tensor) -> Tensor:
            converted = tensor.to(*args, **kwargs)
            return converted if converted.dtype in (torch.float32, torch.float64) else tensor.to(converted.device)

        return self._mapped(convert)

    def detach(self) -> "Rotation":
        """Return the rotation detached from the graph."""
        return self._mapped(Tensor.detach)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "Rotation":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        mapped = {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        return type(self)(**{**values, **mapped})  # not replace, which torch 2.6 does not compile

    def _tensors(self) -> list[Tensor]:
        return [value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Planar(Rotation):
    """Rotation of channel pairs by the angles  φ_i = sum_a p_a f_ai,  in radians.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        table: cos and sin of the angles, `(*batch, heads or 1, tokens, pairs, 2)`, if precomputed; None to compute
            them on use.
        halves: Whether pair i is channels (i, i + pairs), as in `rotate_half` of transformers, instead of
            (2i, 2i + 1); `in_halves` sets it.
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
        """Return the angles in radians, `(*batch, heads or 1, tokens, pairs)`."""
        return combine(self.positions, self.frequencies)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, each `(*batch, heads or 1, tokens, pairs)`."""
        if self.table is not None:
            cos, sin = self.table.unbind(-1)
            return cos, sin
        angles = self.angles()
        return angles.cos(), angles.sin()

    def tabulated(self) -> "Planar":
        """Return the rotation with cos and sin precomputed."""
        return replace(self, table=torch.stack(self.cos_sin(), dim=-1))

    def in_halves(self) -> "Planar":
        """Return the rotation of channel pairs (i, i + rotary_dim / 2) instead of (2i, 2i + 1) by the same angles."""
        # torch 2.6 cannot compile dataclasses.replace
        return Planar(
            positions=self.positions, frequencies=self.frequencies, table=self.table, halves=True,
            head_dim=self.head_dim, num_heads=self.num_heads,
        )  # fmt: skip

    def matrix(self) -> Tensor:
        dense = super().matrix()
        if not self.halves:
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

    def at(self, positions: Tensor) -> "Planar":
        return replace(self, positions=_converted(positions, self.positions), table=None)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        table = None if self.table is None else _of_heads(self.table[(*batch, slice(None), tokens)], heads, len(batch))
        frequencies = _of_heads(self.frequencies, heads, 1)
        return {"positions": self.positions[(*batch, tokens)], "frequencies": frequencies, "table": table}

    def inverse(self) -> "Planar":
        inverse = replace(self, positions=-self.positions, table=None)
        return inverse if self.table is None else inverse.tabulated()


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Commuting(Rotation):
    """Rotation by multiples of one skew matrix B per block:  R(p) = exp(s B) = U rot(s w) U^T,  s = sum_a p_a c_a.

    Attributes:
        positions: `(*batch, tokens, axes)`.
        factors: c, `(axes, heads or 1, blocks)`.
        base: B, `(heads or 1, blocks, b, b)`, b even.
        basis: U, `(heads or 1, blocks, b, b)`, orthogonal; each pair of columns spans one plane.
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
    """Rotation of channel pairs in another basis:  R(p) = P rot(φ) P^T,  φ_i = sum_a p_a f_ai,  block by block.

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
        """rot(φ), the rotation without the basis P."""
        return Planar(
            positions=self.positions, frequencies=self.frequencies, head_dim=self.head_dim, num_heads=self.num_heads
        )

    def blocks(self) -> Tensor:
        b = self.basis.shape[-1]
        identity = torch.eye(b, dtype=self.dtype, device=self.device)
        rotations = block_diagonal(self.planar.blocks().unflatten(-3, (-1, b // 2)), b)  # (..., tokens, blocks, b, b)
        basis = self.basis.unsqueeze(1)  # (heads, 1, blocks, b, b)
        # I + P (rot - I) P^T, not P rot P^T: this is exactly I at the origin.
        with without_autocast(basis):
            return identity + exact_matmul(exact_matmul(basis, rotations - identity), basis.mT)

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
        tangent: Expanded zeros `(*batch, heads or 1, tokens, blocks, b (b - 1) / 2)`, whose gradient kernels return
            instead of that of table: the strict upper triangle of dL/dΩ for exp(Ω) R at Ω = 0.
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
        raise ValueError("at() must be called on a rotation with generators, got a Block, which stores matrices only")

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        def part(tensor: Tensor) -> Tensor:
            return _of_heads(tensor[(*batch, slice(None), tokens)], heads, len(batch))

        return {"table": part(self.table), "tangent": None if self.tangent is None else part(self.tangent)}

    def inverse(self) -> "Block":
        return replace(self, table=self.table.mT, tangent=None)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Expansion(Rotation):
    """Map from queries and keys to feature vectors, perhaps wider ones, whose dot products are the scores.

    Not a rotation: `rotate`, `Attention` and the models accept it, `rotate_one` raises ValueError. Scores are divided
    by √head_dim of the input. A subclass defines `of_queries` and `of_keys`; `matrix`, `inverse` and `at` raise
    ValueError.
    """

    @abstractmethod
    def of_queries(self, q: Tensor, tokens: Tensor | None) -> Tensor:
        """Map queries `(*batch, heads, tokens, head_dim)` to features `(*batch, heads, tokens, channels)`.

        Args:
            q: Queries, float32 or wider.
            tokens: Tokens that the queries were projected from, `(*batch, tokens, dim)`, if attention passes them.

        Raises:
            ValueError: tokens are needed and None.
        """

    @abstractmethod
    def of_keys(self, k: Tensor) -> Tensor:
        """Map keys `(*batch, heads, tokens, head_dim)` to features `(*batch, heads, tokens, channels)`."""

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def blocks(self) -> Tensor:
        raise ValueError(f"matrices need a rotation, got {type(self).__name__}, which is not one")

    def inverse(self) -> "Rotation":
        raise ValueError(f"the inverse needs a rotation, got {type(self).__name__}, which is not one")

    def at(self, positions: Tensor) -> "Rotation":
        raise ValueError(f"other positions need generators, got {type(self).__name__}, which has none")


class Action(ABC):
    """Invertible matrices A, one per token and not necessarily orthogonal, for queries, keys, values and outputs.

    q' = A_m^-T q,  k' = A_n k,  so that  q'^T k' = q^T A_m^-1 A_n k,  and  y = A_m^-1 sum_n w_mn A_n v. For rotations
    A^-T = A = R(p).
    """

    @abstractmethod
    def queries(self, q: Tensor, *, layout: str | None = None) -> Tensor:
        """Compute A^-T q for queries `(batch, heads, tokens, head_dim)`; layout as of `rotate`."""

    @abstractmethod
    def keys(self, k: Tensor, *, layout: str | None = None) -> Tensor:
        """Compute A k for keys; shapes and arguments as of `queries`."""

    @abstractmethod
    def values(self, v: Tensor, *, layout: str | None = None) -> Tensor:
        """Compute A v for values of the same tokens as the keys."""

    @abstractmethod
    def outputs(self, y: Tensor, *, layout: str | None = None) -> Tensor:
        """Compute A^-1 y for attention outputs of the same tokens as the queries."""

    def bias(self, bias: Tensor) -> Tensor:
        """Rearrange a bias or mask `(batch or 1, heads or 1, queries or 1, keys)` for transformed queries and keys."""
        return bias

    def join(self, x: Tensor) -> Tensor:
        """Rearrange per-query values, such as attention weights, to `(batch, heads, tokens, ...)`."""
        return x

    @abstractmethod
    def require_same_frame(self, other: "Rotation | Action") -> None:
        """Raise ValueError if queries of this action cannot be compared with keys of another."""


def _converted(positions: Tensor, like: Tensor) -> Tensor:
    """Copy positions to the dtype and device of others."""
    if positions.ndim < 2 or positions.shape[-1] != like.shape[-1]:
        raise ValueError(f"positions must be (*batch, tokens, {like.shape[-1]}), got {tuple(positions.shape)}")
    return positions.to(like, copy=True)


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
        raise ValueError(f"a rotation must be indexed by slices, tokens also by indices (n,), got {index}")
    return tuple(batch), heads, tokens


# Each squaring inside torch.matrix_exp doubles the departure from orthogonality: below the first norm it stays at
# rounding error, below the second float32 is exact enough to be corrected afterwards.
_NORM_WITHOUT_CORRECTION, _NORM_IN_FLOAT32 = 16.0, 1024.0
# A larger angle has no correct digit modulo 2π in float32.
_LARGEST_NORM = 2.0**40


def exponential(skew: Tensor) -> Tensor:
    """Compute exp of skew matrices `(..., b, b)`, float32 or float64, any strides; orthogonal for any norm.

    On a CPU, large norms are computed in float64, and norms above 2^40 are scaled down to 2^40. On a GPU nothing is
    read from the device and nothing is wider than the input, so that angles are exact to about 8 of its rounding steps;
    norms above 2^24 in float32 are scaled down to 2^24. The gradient there is projected onto skew matrices.
    """
    if skew.device.type == "cuda":
        with without_autocast(skew):
            return _square_repeatedly(skew, None)[0] if in_forward_mode() else _Exponential.apply(skew)
    skew = skew.contiguous()  # torch.matrix_exp raises for some strides that einsum returns
    norm = _norm(skew)
    if skew.is_meta or (can_read(norm) and not (norm > _NORM_WITHOUT_CORRECTION).any()):
        return torch.linalg.matrix_exp(skew)
    keep_dtype = skew.device.type == "mps" or (can_read(norm) and not (norm > _NORM_IN_FLOAT32).any())
    wide = skew if keep_dtype else skew.double()
    matrix = torch.linalg.matrix_exp(wide * (_LARGEST_NORM / norm).clamp(max=1))
    with without_autocast(skew):
        for _ in range(2):
            matrix = _nearer_to_orthogonal(matrix)
    return matrix.to(skew.dtype)


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


def combine(positions: Tensor, per_axis: Tensor) -> Tensor:
    """Compute sum_a p_a X_a `(*batch, heads, tokens, ...)` for p `(*batch, tokens, axes)` and X `(axes, heads, ...)`.

    A sum of products, not a matmul: a GPU would round a matmul to TensorFloat-32.
    """
    trailing = (1,) * (per_axis.ndim - 2)
    terms: Sequence[Tensor] = [
        p.unsqueeze(-2).unflatten(-1, (-1, *trailing)) * x.unsqueeze(1)  # (*batch, 1, tokens, ...) (heads, 1, ...)
        for p, x in zip(positions.unbind(-1), per_axis.unbind(0), strict=True)
    ]
    return sum(terms[1:], start=terms[0])


def block_diagonal(blocks: Tensor, size: int) -> Tensor:
    """Place blocks `(..., n, b, b)` on the diagonal of a `size` x `size` matrix; the rest of the diagonal is 1."""
    *batch, n, b, _ = blocks.shape
    dense = torch.eye(size, dtype=blocks.dtype, device=blocks.device).repeat(*batch, 1, 1)
    cells = dense[..., : n * b, : n * b].unflatten(-1, (n, b)).unflatten(-3, (n, b))  # (..., n, b, n, b)
    cells.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))  # (..., b, b, n)
    return dense
