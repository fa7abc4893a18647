"""`Encoding`, the base class of rotary encodings: one generator per axis, R(p) = exp(sum_a p_a A_a)."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import NotRequired, Self, TypedDict

from torchrope.lattice import Lattice
from torchrope.ops.backends import check_not_onnx, takes_kernels
from torchrope.ops.layouts import require_dense
from torchrope.ops.library import run
from torchrope.ops.reference import combine
from torchrope.ops.shapes import fits_kernels, require_shape, require_square
from torchrope.ops.skew_exp import exponential
from torchrope.rotations import Block, Commuting, Planar, PlanarInBasis, Rotation
from torchrope.tensors import (
    Float32Module,
    as_numbers,
    block_diagonal,
    can_read,
    exact_matmul,
    is_narrow,
    require_counts,
    require_unrounded,
    shown,
    warn_once,
    wide_dtype,
    wide_positions,
    without_autocast,
)

Positions = Tensor | Sequence[Any]
"""Positions as encodings take them: a tensor, a NumPy array, or nested lists of numbers."""


class FixedShape(TypedDict):
    """Arguments that every encoding has, as documented in `Encoding`; with num_heads=1 all heads rotate alike."""

    num_axes: int
    head_dim: int
    num_heads: NotRequired[int]
    rotary_dim: NotRequired[int | None]


class HeadShape(TypedDict):
    """Arguments of every encoding with parameters for each head, as documented in `Encoding`."""

    num_axes: int
    num_heads: int
    head_dim: int
    rotary_dim: NotRequired[int | None]
    shared_heads: NotRequired[bool]


class Encoding(Float32Module, ABC):
    """Map positions to rotations:  R(p) = exp(sum_a p_a A_a),  A_a skew-symmetric.

    A subclass must define `generators`, and `reset_parameters` if it has parameters. It should define
    `load_generators`, which sets its parameters from generators, and `relative`, whether its generators commute.
    `torchrope.testing.check` tests it and names mistakes.

    Parameters and buffers stay float32, or float64, in a model that is cast to bfloat16 or float16.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head.
        block_size: Size b of the diagonal blocks of the generators; None for one block of all rotated channels.
        rotary_dim: Rotate only the first so many channels of a head; all by default.
        shared_heads: Share one set of parameters among all heads.

    Raises:
        ValueError: a number out of range, or a head_dim that is not divisible by the block size.
    """

    lattice: Lattice = Lattice()
    """Positions for which the initialisation was chosen, those of its paper: a function of the training size. At other
    sizes models keep its spacing and origin at the training size, `lattice.spaced(*sizes)`."""

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        block_size: int | None,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
    ) -> None:
        super().__init__()
        require_counts(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim)
        if rotary_dim is not None and not (hasattr(rotary_dim, "__index__") and 0 <= rotary_dim <= head_dim):
            raise ValueError(f"rotary_dim must be an integer from 0 to head_dim = {head_dim}, got {shown(rotary_dim)}")
        self.num_axes = num_axes
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.block_size = (self.rotary_dim or head_dim) if block_size is None else block_size
        require_counts(2, block_size=self.block_size)
        self.shared_heads = shared_heads
        self.require_divisible(self.block_size, "block_size")

    @abstractmethod
    def generators(self) -> Tensor:
        """Return skew blocks in radians per unit of position, `(num_axes, num_heads, rotary_dim / b, b, b)`.

        Differentiable in the parameters; the dimension of heads is 1 if heads share them.
        """

    @property
    def relative(self) -> bool:
        """Whether the generators commute, so that R(p)^T R(p') depends on p' - p alone."""
        return self.block_size == 2 or self.num_axes == 1

    @property
    def has_frequencies(self) -> bool:
        """Whether it rotates planes, A_a = P planar(f_a) P^T: pairs of channels, P = I, or those of another `basis`."""
        return self.block_size == 2

    def frequencies_per_axis(self) -> Tensor:
        """Return the frequencies f of the planes in radians per unit, `(num_axes, num_heads or 1, rotary_dim / 2)`.

        Raises:
            ValueError: blocks larger than 2 that have no common planes.
        """
        if not self.has_frequencies:
            raise ValueError(f"frequencies need blocks of 2 or STRING, got {self}")
        return self.generators()[..., 1, 0]

    def basis(self) -> Tensor | None:
        """Return the orthogonal basis P of the planes, `(num_heads or 1, blocks, b, b)`; None for pairs of channels."""
        return None

    def set_frequencies(self, frequencies: Tensor) -> None:
        """Set the frequencies of the planes, which stay as they are.

        Raises:
            ValueError: frequencies that this encoding cannot represent, or none.
        """
        self.set_generators(in_basis(frequencies, self.basis()))

    def factors_and_base(self) -> tuple[Tensor, Tensor] | None:
        """Factor the generators into multiples of one base per block,  A_a = c_a B; None if they have no such form.

        Returns:
            Factors c `(num_axes, num_heads or 1, blocks)` and base B `(num_heads or 1, blocks, b, b)`, or None.
        """
        return None

    def forward(self, positions: Positions) -> Rotation:
        """Compute the rotation of each position:  R(p) = exp(sum_a p_a A_a).

        Args:
            positions: `(tokens, num_axes)` shared by a batch, or `(batch, tokens, num_axes)`, never rounded below
                float32. Integers, and lists, become float64 above 2^24, such as Unix times; on a GPU and where compiled
                integer tensors of 32 and 64 bits always do, since reading them would synchronise.

        Returns:
            A `Planar` rotation for blocks of 2, a `PlanarInBasis` for frequencies in another basis. A `Commuting` one
            if the generators are multiples of one base, the block size is even and kernels support the inputs. A
            `Block` otherwise.
            Angles are float32, or float64 if positions or parameters are; autocast does not affect them.

        Raises:
            ValueError: wrong shape, device or number of axes; NaN, infinity, integers from 2^53 on; `generators`,
                `frequencies_per_axis` or `factors_and_base` returned another shape than promised, or no floating-point
                tensor; inputs that the chosen `torchrope.backend` does not support; a rotation without operators in
                ONNX during export (apply `torchrope.freeze` first). Values are not checked on a GPU, which would have
                to synchronise, nor inside torch.compile, torch.export and torch.func: the rotation of a token at NaN or
                infinity, and of no other, is NaN, and so is that of blocks of 3 and more where an entry of
                sum_a p_a A_a overflows float32.

        Warns:
            UserWarning: frequencies or generators in less than float32, as of FSDP with mixed precision; once.
        """
        positions = self.check_positions(positions)
        # Copied, because positions and parameters may be modified or freed (sharded) while the rotation exists.
        if self.has_frequencies:
            frequencies, basis = self._as_exact(self._checked_frequencies(), positions), self.basis()
            if basis is None:
                positions, frequencies = widened(positions, frequencies, copy=True)
                return Planar(positions=positions, frequencies=frequencies, **self.head_sizes)
            check_not_onnx(self)
            positions, frequencies, basis = widened(positions, frequencies, basis, copy=True)
            return PlanarInBasis(positions=positions, frequencies=frequencies, basis=basis, **self.head_sizes)
        check_not_onnx(self)
        factored = self._checked_factors_and_base()
        if factored is not None and self.block_size % 2 == 0:
            wide_positions, factors, base = widened(positions, *(self._as_exact(x, positions) for x in factored))
            if fits_kernels(positions, self.block_size) and all(
                takes_kernels(name, wide_positions, factors, base) for name in ("skew_eig", "rotate_basis")
            ):
                wide_positions, factors = widened(positions, factors, copy=True)
                basis, angular = run("skew_eig", base.detach().contiguous())  # Commuting computes the gradient
                planes: dict[str, Any] = dict(base=base, basis=basis, angular=angular)
                return Commuting(positions=wide_positions, factors=factors, **planes, **self.head_sizes)
        generators, b = self.generators(), self.block_size
        require_shape("generators()", generators, (self.num_axes, self.num_heads, self.num_blocks, b, b), 1)
        if generators.stride(1) == 0:  # expanded over heads
            generators = generators[:, :1]
        positions, generators = widened(positions.clone(), self._as_exact(generators, positions))
        if fits_kernels(positions, self.block_size) and all(
            takes_kernels(name, positions, generators) for name in ("exp_generators", "rotate_block")
        ):
            table, tangent = run("exp_generators", positions, generators)
            return Block(table=table, _tangent=tangent, **self.head_sizes)
        return Block(table=exponential(combine(positions, generators)), **self.head_sizes)

    def set_generators(self, generators: Tensor) -> None:
        """Set the parameters such that `generators()` equals the given generators.

        Args:
            generators: `(num_axes, num_heads or 1, n, c, c)` skew blocks; blocks of another size c are regrouped.

        Raises:
            ValueError: wrong shape, not skew, or generators that this encoding cannot represent.
        """
        with torch.no_grad():
            regrouped = self._regrouped(generators.detach())
            if regrouped.numel():
                self.load_generators(regrouped)

    def load_generators(self, generators: Tensor) -> None:
        """Set the parameters in place from validated generators `(num_axes, parameter_heads, num_blocks, b, b)`.

        Raises:
            ValueError: generators that this encoding cannot represent.
        """
        name = type(self).__name__
        raise ValueError(f"{name} cannot be set from generators, it must define load_generators(generators)")

    def zero_(self) -> Self:
        """Set the generators to zero, R(p) = I, so that a trained model's outputs do not change; return the encoding.

        All parameters are set to zero. An encoding with another parametrisation must define it.

        Raises:
            ValueError: the generators are not zero if all parameters are.
        """
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
        generators = self.generators().detach()
        if can_read(generators) and generators.any():
            rule = f"{type(self).__name__} must define zero_(), since zero parameters do not give zero generators"
            raise ValueError(f"{rule}, got some of up to {generators.abs().max():.3g}")
        return self

    def reset_parameters(self) -> None:
        """Initialise the parameters as at construction; needed after building on the meta device."""

    def extra_repr(self) -> str:
        names = ["num_axes", "num_heads", "head_dim", "block_size"]
        arguments = [f"{name}={getattr(self, name)}" for name in names]
        arguments += [f"rotary_dim={self.rotary_dim}"] if self.rotary_dim != self.head_dim else []
        arguments += ["shared_heads=True"] if self.shared_heads else []
        return ", ".join(arguments)

    @property
    def head_sizes(self) -> dict[str, Any]:
        """The sizes `head_dim` and `num_heads` of the rotations that it returns."""
        return {"head_dim": self.head_dim, "num_heads": self.num_heads}

    @property
    def num_blocks(self) -> int:
        """Number of blocks per head."""
        return self.rotary_dim // self.block_size

    @property
    def parameter_heads(self) -> int:
        """Number of heads with separate parameters."""
        return 1 if self.shared_heads else self.num_heads

    def require_divisible(self, divisor: int, meaning: str) -> None:
        """Raise ValueError unless rotary_dim is divisible by `divisor`, called `meaning` in the message."""
        if self.rotary_dim % divisor:
            name = "head_dim" if self.rotary_dim == self.head_dim else "rotary_dim"
            largest = self.rotary_dim // divisor * divisor
            hint = f"; rotary_dim={largest} would leave the rest unrotated" if largest else ""
            raise ValueError(f"{name} must be divisible by {meaning} = {divisor}, got {self.rotary_dim}{hint}")

    def _checked_frequencies(self) -> Tensor:
        """Return `frequencies_per_axis()`; raise ValueError if it is not what the method promises."""
        frequencies, sizes = self.frequencies_per_axis(), (self.num_axes, self.num_heads, self.rotary_dim // 2)
        require_shape("frequencies_per_axis()", frequencies, sizes, 1)
        return frequencies

    def _checked_factors_and_base(self) -> tuple[Tensor, Tensor] | None:
        """Return `factors_and_base()`, both with the same number of heads; raise as `_checked_frequencies`."""
        factored: Any = self.factors_and_base()
        if factored is None:
            return None
        if not isinstance(factored, tuple) or len(factored) != 2:
            raise ValueError(f"factors_and_base() must be (factors, base) or None, got {shown(factored)}")
        (factors, base), heads, blocks, b = factored, self.num_heads, self.num_blocks, self.block_size
        require_shape("factors of factors_and_base()", factors, (self.num_axes, heads, blocks), 1)
        require_shape("base of factors_and_base()", base, (heads, blocks, b, b), 0)
        if factors.shape[1] != base.shape[0]:
            return factors.expand(-1, heads, -1), base.expand(heads, -1, -1, -1)
        return factors, base

    def check_positions(self, positions: Positions) -> Tensor:
        """Return positions as a tensor; raise if their shape, dtype or values are invalid."""
        if not isinstance(positions, Tensor):
            device = next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).device
            try:
                positions = as_numbers(positions).to(device)
            except (TypeError, ValueError, RuntimeError) as error:
                rule = "positions must be numbers (tokens, axes)"
                raise ValueError(f"{rule}, got {type(positions).__name__}: {error}") from None
        require_dense("positions", positions)
        if positions.ndim not in (2, 3):
            rule = "positions must be (tokens, axes) or (batch, tokens, axes)"
            hint = "; those of a lattice are tr.grid(*sizes), of one axis x[:, None]" if positions.ndim < 2 else ""
            raise ValueError(f"{rule}, got shape {tuple(positions.shape)}{hint}")
        if positions.shape[-1] != self.num_axes:
            raise ValueError(f"positions must have num_axes = {self.num_axes} axes, got {positions.shape[-1]}")
        if positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions must be real numbers, got {positions.dtype}")
        require_finite("positions", positions)
        if positions.dtype == torch.float32:
            return positions
        require_unrounded(positions)
        return wide_positions(positions)

    def _as_exact(self, frequencies: Tensor, positions: Tensor) -> Tensor:
        """Return frequencies or generators; warn once of less precision than float32, raise on another device."""
        if positions.device != frequencies.device:
            rule = f"positions are on {positions.device}, the encoding on {frequencies.device}"
            raise ValueError(f"{rule}: tr.grid(..., device=x.device)")
        if is_narrow(frequencies) and not torch.compiler.is_compiling():
            rule = f"angles need frequencies in float32, got {frequencies.dtype} from {type(self).__name__}"
            if torch.is_autocast_enabled(positions.device.type):
                fix = "compute matrix products in generators() under torch.autocast(device_type, enabled=False)"
            else:
                fix = "give encodings an FSDP2 group of their own, without mixed precision, or FSDP1's ignored_modules"
            warn_once(f"{rule}: {fix}")
        return frequencies

    def _regrouped(self, generators: Tensor) -> Tensor:
        """Validate generators and split them into blocks of this encoding's size."""
        a, b = generators, self.block_size
        if not a.is_floating_point() or a.is_meta:
            raise ValueError(f"generators must be floating point, not on the meta device, got {a.dtype} on {a.device}")
        fits = a.ndim == 5 and a.shape[0] == self.num_axes and a.shape[1] in (1, self.num_heads)
        if not fits or a.shape[2] * a.shape[3] != self.rotary_dim or a.shape[3] != a.shape[4]:
            rule = f"({self.num_axes}, {self.num_heads} or 1, n, c, c) with n c = {self.rotary_dim}"
            raise ValueError(f"generators must be {rule}, got {tuple(a.shape)}")
        if not a.numel():
            return a
        tolerance = rounding(a)
        symmetric = (a + a.mT).abs().max().item()
        if not symmetric <= tolerance:
            raise ValueError(f"generators must be skew-symmetric, got A + A^T of up to {symmetric:.3g}")
        if a.shape[-1] != b:
            dense = block_diagonal(a, self.rotary_dim)
            cells = dense.unflatten(-1, (-1, b)).unflatten(-3, (-1, b))  # (axes, heads, n, b, n, b)
            a = cells.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
            if (block_diagonal(a, self.rotary_dim) - dense).abs().max().item() > tolerance:
                rule = f"generators of {type(self).__name__} must be zero outside blocks of {b}"
                raise ValueError(f"{rule}, got blocks of {generators.shape[-1]}")
        if not self.shared_heads:
            return a.expand(-1, self.num_heads, -1, -1, -1)
        if (a - a[:, :1]).abs().max().item() > tolerance:
            raise ValueError(f"{type(self).__name__} shares its generators among heads, got heads that differ")
        return a[:, :1]


def skew(upper: Tensor, block_size: int) -> Tensor:
    """Build skew blocks from their strict upper triangles, row by row:  A_ij = u, A_ji = -u for i < j.

    Args:
        upper: `(..., b (b - 1) / 2)`.
        block_size: b.

    Returns:
        Blocks `(..., b, b)`.

    Raises:
        ValueError: block_size is below 1, or upper is not floating point or has another last dimension.
    """
    require_counts(block_size=block_size)
    entries = block_size * (block_size - 1) // 2
    if not upper.ndim or upper.shape[-1] != entries or not upper.is_floating_point():
        rule = f"upper must be floating point (..., {entries}) for block_size = {block_size}"
        raise ValueError(f"{rule}, got {shown(upper)}")
    if not entries:
        return upper.new_zeros(*upper.shape[:-1], block_size, block_size)
    if block_size == 2:
        return planar(-upper.squeeze(-1))
    rows, columns = torch.triu_indices(block_size, block_size, 1, device=upper.device)
    flat = upper.new_zeros(*upper.shape[:-1], block_size * block_size)
    square = flat.index_copy(-1, rows * block_size + columns, upper).unflatten(-1, (block_size, block_size))
    return square - square.mT


def upper_triangle(blocks: Tensor) -> Tensor:
    """Read the strict upper triangles `(..., b (b - 1) / 2)` of blocks `(..., b, b)`: the inverse of `skew`."""
    require_square("blocks", blocks)
    rows, columns = torch.triu_indices(blocks.shape[-1], blocks.shape[-1], 1, device=blocks.device)
    return blocks[..., rows, columns]


def planar(frequencies: Tensor) -> Tensor:
    """Convert frequencies `(...)` to generators `(..., 2, 2)` of counter-clockwise rotations:  [[0, -f], [f, 0]].

    Raises:
        ValueError: frequencies are not floating point.
    """
    if not frequencies.is_floating_point():
        raise ValueError(f"frequencies must be floating point, got {frequencies.dtype}")
    zeros = torch.zeros_like(frequencies)
    return torch.stack([zeros, -frequencies, frequencies, zeros], dim=-1).unflatten(-1, (2, 2))


def in_basis(frequencies: Tensor, basis: Tensor | None) -> Tensor:
    """Convert frequencies `(axes, heads, pairs)` to generators P planar(f) P^T, P `(heads, blocks, b, b)` or I."""
    if basis is None:
        return planar(frequencies)
    frequencies, basis = widened(frequencies, basis)
    b = basis.shape[-1]
    pairs = planar(frequencies).unflatten(2, (-1, b // 2))  # (axes, heads, blocks, b / 2, 2, 2)
    with without_autocast(basis):
        generators = exact_matmul(exact_matmul(basis, block_diagonal(pairs, b)), basis.mT)
    return (generators - generators.mT) / 2


def rounding(generators: Tensor) -> float:
    """Return the tolerance for rounding error: 1e-5 of the largest entry, or 2 eps of the dtype if larger."""
    relative = max(1e-5, 2 * torch.finfo(generators.dtype).eps)
    return max(relative * generators.abs().max().item(), 1e-12)


def require_finite(name: str, x: Tensor) -> None:
    """Raise ValueError of NaN or infinity in x `(..., channels)`, unless they cannot be read."""
    # The sum is a fast test that needs no second tensor.
    if not x.is_floating_point() or not can_read(x) or math.isfinite(x.detach().sum()):
        return
    bad = (~torch.isfinite(x)).any(dim=-1)
    if bad.any():
        raise ValueError(f"{name} must be finite, got NaN or infinity in {int(bad.sum())} of {bad.numel()}")


def check_scale(init_scale: float) -> float:
    """Return a factor if it is positive and finite; raise otherwise."""
    if not 0 < init_scale < math.inf:
        raise ValueError(f"init_scale must be above 0 and finite, got {init_scale}; zero_() starts at zero")
    return float(init_scale)


def widened(*tensors: Tensor, copy: bool = False) -> tuple[Tensor, ...]:
    """Convert tensors to their promoted dtype, at least float32; with `copy` no result shares memory with its input."""
    wide = wide_dtype(*tensors)
    return tuple([tensor.clone() if copy and tensor.dtype == wide else tensor.to(wide) for tensor in tensors])
