"""`Encoding`, the base class of rotary encodings: one generator per axis, R(p) = exp(sum_a p_a A_a)."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchrope.ops.backends import check_not_onnx, takes_kernels
from torchrope.ops.skew_exp import exp_generators, fits_kernels, skew_eig, skew_exp
from torchrope.rotations import Block, Commuting, Planar, Rotation, block_diagonal, combine
from torchrope.tensors import can_read, wide_dtype

Init = Literal["paper", "zeros"]
Positions = Tensor | Sequence[Any]
"""Positions as encodings take them: a tensor, a NumPy array, or nested lists of numbers."""


class Encoding(nn.Module, ABC):
    """Give every position a rotation:  R(p) = exp(sum_a p_a A_a),  A_a skew-symmetric.

    A subclass must write `generators`, and `reset_parameters` if it has parameters. It should write
    `_take_generators`, the way back from generators to its parameters, and say in `relative` whether its
    generators commute. `torchrope.testing.check` then tests it and reports what is wrong.

    Args:
        num_axes: Length of a position, N.
        num_heads: Attention heads.
        head_dim: Channels of a head.
        block_size: Generators are block diagonal with blocks of this size, b.
        rotary_dim: Rotate only the first so many channels of a head; all by default.
        shared_heads: One set of parameters for all heads.

    Raises:
        ValueError: a number out of range, or a head_dim that blocks of this size do not fill.
    """

    title: ClassVar[str] = ""
    """Name in the literature."""
    formula: ClassVar[str] = "R(p) = exp(Σₐ pₐ Aₐ)"
    """The generators in one line of text."""
    summary: ClassVar[str] = ""
    """What it is, in one sentence."""
    source: ClassVar[str] = ""
    """Paper and equation."""
    reads_places: ClassVar[bool] = False
    """Whether positions are places in a unit of the encoding's own, which no scale, extent or period changes."""
    adds_to_scores: ClassVar[bool] = False
    """Whether it reads tokens and adds to scores, which linear attention does not have."""

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
    ) -> None:
        super().__init__()
        for name, value in dict(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim).items():
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if block_size < 2:
            raise ValueError(f"block_size must be 2 or more, got {block_size}")
        if rotary_dim is not None and not 0 <= rotary_dim <= head_dim:
            raise ValueError(f"rotary_dim must be between 0 and head_dim = {head_dim}, got {rotary_dim}")
        self.num_axes = num_axes
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.shared_heads = shared_heads
        self._require_divisible(block_size, "block_size")

    @abstractmethod
    def generators(self) -> Tensor:
        """Skew blocks in radians per unit of position, `(num_axes, num_heads, rotary_dim / b, b, b)`.

        Differentiable in the parameters; `num_heads` is 1 where heads share.
        """

    @property
    def relative(self) -> bool:
        """Whether the generators commute, so that R(p)^T R(p') depends on p' - p alone."""
        return self.block_size == 2 or self.num_axes == 1

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Spacing and origin, as `torchrope.grid` takes them, for which the paper chose its initialisation.

        Args:
            sizes: Tokens along each axis at the training size.
        """
        return {"spacing": 1.0, "origin": 0.0}

    def frequencies_per_axis(self) -> Tensor:
        """For blocks of 2, the generators' one number each: `(num_axes, num_heads or 1, rotary_dim / 2)`."""
        return self.generators()[..., 1, 0]

    def factors_and_base(self) -> tuple[Tensor, Tensor] | None:
        """The generators as multiples of one base per block,  A_a = c_a B, where the family is so made.

        Returns:
            Factors c `(num_axes, num_heads or 1, blocks)` and base B `(num_heads or 1, blocks, b, b)`, or None.
        """
        return None

    def forward(self, positions: Positions, *, backend: str = "auto") -> Rotation:
        """Rotate each of the positions:  R(p) = exp(sum_a p_a A_a).

        Args:
            positions: `(tokens, num_axes)` shared by a batch, or `(batch, tokens, num_axes)`; integers work. Lists and
                NumPy arrays become tensors of torch's default dtype on the device of the encoding. Of a jagged
                `torch.nested` tensor `(batch, jagged, num_axes)` the tokens are taken end to end, without a batch.
            backend: How matrices are exponentiated, as `rotate`'s.

        Returns:
            A `Planar` rotation for blocks of 2, a `Commuting` one for multiples of one base, a `Block` otherwise.
            Angles are float32, or float64 where the positions or the parameters are; autocast never touches them.

        Raises:
            ValueError: wrong shape or number of axes; NaN or infinity; a backend that cannot serve; a rotation that an
                export to ONNX has no operators for, where `torchrope.freeze` must come first. On a GPU, which would
                have to be waited for, and inside torch.compile, torch.export and torch.func, NaN and infinity are not
                looked for: the rotation of such a token is NaN, and of no other.
        """
        positions = self._check_positions(positions)
        made_for: dict[str, Any] = dict(head_dim=self.head_dim, num_heads=self.num_heads)
        if self.block_size == 2:
            # Copies, here and below: a rotation is a value, but positions and parameters change in place, and
            # parameters are freed where they are sharded.
            positions, frequencies = widened(positions, self.frequencies_per_axis(), copy=True)
            return Planar(positions=positions, frequencies=frequencies, **made_for)
        check_not_onnx(self)
        factored = self.factors_and_base()
        if factored is not None and self.block_size % 2 == 0:
            wide_positions, factors, base = widened(positions, *factored)
            if takes_kernels(backend, wide_positions, factors, base) and fits_kernels(positions, self.block_size):
                wide_positions, factors = widened(positions, factors, copy=True)
                basis, angular = skew_eig(base)
                return Commuting(
                    positions=wide_positions, factors=factors, base=base, basis=basis, angular=angular, **made_for
                )
        generators = self.generators()
        if generators.stride(1) == 0:  # one head's numbers, seen by all
            generators = generators[:, :1]
        positions, generators = widened(positions, generators)
        if takes_kernels(backend, positions, generators) and fits_kernels(positions, self.block_size):
            table, tangent = exp_generators(positions, generators)
            return Block(table=table, tangent=tangent, **made_for)
        return Block(table=skew_exp(combine(positions, generators), backend="reference"), **made_for)

    def set_generators(self, generators: Tensor) -> None:
        """Take generators over from another encoding, a checkpoint or a formula.

        Args:
            generators: `(num_axes, num_heads or 1, n, c, c)` skew blocks; blocks of another size c are regrouped.

        Raises:
            ValueError: wrong shape, not skew, or what this family cannot represent.
        """
        with torch.no_grad():
            self._take_generators(self._regrouped(generators.detach()))

    def reset_parameters(self) -> None:
        """Initialise the parameters, as at construction; for modules that were built on the meta device."""

    def extra_repr(self) -> str:
        """Show what the module was built with."""
        shown = ["num_axes", "num_heads", "head_dim", "block_size"]
        words = [f"{name}={getattr(self, name)}" for name in shown]
        words += [f"rotary_dim={self.rotary_dim}"] if self.rotary_dim != self.head_dim else []
        words += ["shared_heads=True"] if self.shared_heads else []
        return ", ".join(words)

    def _take_generators(self, generators: Tensor) -> None:
        """Set the parameters from checked generators `(num_axes, parameter_heads, num_blocks, b, b)`."""
        raise ValueError(f"{type(self).__name__} cannot take generators over, got {tuple(generators.shape)}")

    @property
    def num_blocks(self) -> int:
        """Blocks of a head."""
        return self.rotary_dim // self.block_size

    @property
    def parameter_heads(self) -> int:
        """Heads that have parameters of their own."""
        return 1 if self.shared_heads else self.num_heads

    def _require_divisible(self, divisor: int, meaning: str) -> None:
        """Refuse channels that blocks cannot fill; each family names its own rule."""
        if self.rotary_dim % divisor:
            name = "head_dim" if self.rotary_dim == self.head_dim else "rotary_dim"
            largest = self.rotary_dim // divisor * divisor
            hint = f"; rotary_dim={largest} would leave the rest unrotated" if largest else ""
            raise ValueError(f"{name} must be divisible by {meaning} = {divisor}, got {self.rotary_dim}{hint}")

    def _as_positions(self, positions: Sequence[Any]) -> Tensor:
        """Positions that are no tensor, as one."""
        device = next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).device
        try:
            return torch.as_tensor(positions, dtype=torch.get_default_dtype(), device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"positions must be numbers (tokens, axes), got {type(positions).__name__}: {error}"
            ) from None

    def _check_positions(self, given: Positions) -> Tensor:
        """Positions as a tensor; refuse what are none."""
        positions = given if isinstance(given, Tensor) else self._as_positions(given)
        if positions.is_nested:
            positions = positions.values()
        if positions.ndim not in (2, 3):
            raise ValueError(
                f"positions must be (tokens, axes) or (batch, tokens, axes), got shape {tuple(positions.shape)}"
            )
        if positions.shape[-1] != self.num_axes:
            raise ValueError(f"positions must have num_axes = {self.num_axes} axes, got {positions.shape[-1]}")
        if positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions must be real numbers, got {positions.dtype}")
        if not positions.is_floating_point() or not can_read(positions):
            return positions
        if (
            not math.isfinite(positions.detach().sum()) and not torch.isfinite(positions).all()
        ):  # the sum is the quick look
            bad = int((~torch.isfinite(positions)).any(dim=-1).sum())
            raise ValueError(f"positions must be finite, got NaN or infinity in {bad} of {positions[..., 0].numel()}")
        return positions

    def _regrouped(self, generators: Tensor) -> Tensor:
        """Check generators from elsewhere and cut them into blocks of this family's size."""
        a, b = generators, self.block_size
        if not a.is_floating_point():
            raise ValueError(f"generators must be floating point, got {a.dtype}")
        fits = a.ndim == 5 and a.shape[0] == self.num_axes and a.shape[1] in (1, self.num_heads)
        if not fits or a.shape[2] * a.shape[3] != self.rotary_dim or a.shape[3] != a.shape[4]:
            rule = f"({self.num_axes}, {self.num_heads} or 1, n, c, c) with n c = {self.rotary_dim}"
            raise ValueError(f"generators must be {rule}, got {tuple(a.shape)}")
        if not a.numel():
            return a
        slack = rounding(a)
        lopsided = (a + a.mT).abs().max().item()
        if not lopsided <= slack:
            raise ValueError(f"generators must be skew-symmetric, got A + A^T of up to {lopsided:.3g}")
        if a.shape[-1] != b:
            dense = block_diagonal(a, self.rotary_dim)
            cells = dense.unflatten(-1, (-1, b)).unflatten(-3, (-1, b))  # (axes, heads, n, b, n, b)
            a = cells.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
            if (block_diagonal(a, self.rotary_dim) - dense).abs().max().item() > slack:
                raise ValueError(f"{type(self).__name__} needs generators within blocks of {b}, got larger ones")
        if not self.shared_heads:
            return a.expand(-1, self.num_heads, -1, -1, -1)
        if (a - a[:, :1]).abs().max().item() > slack:
            raise ValueError(f"{type(self).__name__} shares its generators among heads, got heads that differ")
        return a[:, :1]


def skew(upper: Tensor, block_size: int) -> Tensor:
    """Build skew blocks from their strict upper triangles, row by row:  A_ij = u, A_ji = -u for i < j.

    Args:
        upper: `(..., b (b - 1) / 2)`.
        block_size: b.

    Returns:
        Blocks `(..., b, b)`.
    """
    rows, columns = torch.triu_indices(block_size, block_size, 1, device=upper.device)
    flat = upper.new_zeros(*upper.shape[:-1], block_size * block_size)
    square = flat.index_copy(-1, rows * block_size + columns, upper).unflatten(-1, (block_size, block_size))
    return square - square.mT


def upper_triangle(blocks: Tensor) -> Tensor:
    """Read the strict upper triangles `(..., b (b - 1) / 2)` of blocks `(..., b, b)`: the inverse of `skew`."""
    rows, columns = torch.triu_indices(blocks.shape[-1], blocks.shape[-1], 1, device=blocks.device)
    return blocks[..., rows, columns]


def planar(frequencies: Tensor) -> Tensor:
    """Write frequencies `(...)` as generators `(..., 2, 2)` of counter-clockwise turns:  [[0, -f], [f, 0]]."""
    return skew(-frequencies.unsqueeze(-1), 2)


def rounding(generators: Tensor) -> float:
    """The difference that rounding explains: 1e-5 of the largest generator, or two steps of its dtype."""
    share = max(1e-5, 2 * torch.finfo(generators.dtype).eps)
    return max(share * generators.abs().max().item(), 1e-12)


def check_init(init: str) -> Init:
    """Pass "paper" or "zeros" through; refuse anything else."""
    if init == "paper" or init == "zeros":
        return init  # type: ignore[return-value]
    raise ValueError(f"init must be 'paper' or 'zeros', got {init!r}")


def check_scale(init_scale: float) -> float:
    """Pass a positive, finite factor through; refuse anything else."""
    if not 0 < init_scale < math.inf:
        raise ValueError(f"init_scale must be above 0 and finite, got {init_scale}; init='zeros' starts at zero")
    return float(init_scale)


def widened(*tensors: Tensor, copy: bool = False) -> tuple[Tensor, ...]:
    """All in the narrowest dtype that holds them, float32 at least; in memory of their own if asked for."""
    wide = wide_dtype(*tensors)
    return tuple(tensor.to(wide, copy=copy) for tensor in tensors)
