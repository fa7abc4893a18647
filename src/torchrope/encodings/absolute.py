"""Absolute position encodings: vectors that are added to the tokens before the first layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.encodings.resample import resample_axis, sample_table
from torchrope.positions import PerAxis, grid, jitter, per_axis
from torchrope.tensors import wide_dtype, wide_positions


class AbsoluteEncoding(nn.Module, ABC):
    """Compute one vector per position of a lattice, added to its token:  x_p + e(p).

    Args:
        sizes: Number of tokens along each axis at the training size.
        dim: Channels per token.

    Raises:
        ValueError: a size or dim below 1.
    """

    def __init__(self, *, sizes: Sequence[int], dim: int) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1 or dim < 1:
            raise ValueError(f"sizes and dim must be 1 or more, got sizes {tuple(sizes)}, dim {dim}")
        self.sizes = tuple(sizes)
        self.dim = dim

    @abstractmethod
    def forward(self, *sizes: int) -> Tensor:
        """Return vectors `(prod(sizes), dim)` for a lattice of these sizes, row-major like `torchrope.grid`."""

    def reset_parameters(self) -> None:
        """Initialise the parameters as at construction; needed after building on the meta device."""

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}, dim={self.dim}"

    def _check_axes(self, sizes: Sequence[int]) -> None:
        if len(sizes) != len(self.sizes):
            raise ValueError(f"{type(self).__name__} needs {len(self.sizes)} sizes, one per axis, got {len(sizes)}")


class LearnedAPE(AbsoluteEncoding):
    """Look the vector up in a learned table:  e(p) = T[p],  in training optionally near it:

        e(p) = T[p + clip(n · intensity, -1, 1) · cell / 2],   n ~ N(0, 1) per token and axis, once for a whole batch

    For other lattice sizes the table is resampled by bicubic (tricubic, ...) interpolation with antialiasing. Between
    its entries it is interpolated multilinearly, outside it is clamped to its edge.

    Args:
        sizes: As of `AbsoluteEncoding`.
        dim: As of `AbsoluteEncoding`.
        intensity: Standard deviation of the perturbation before clipping, in units of half a cell; 0 for none.
        cell: Width of the cell that a perturbed token stays in, in tokens, one number or one per axis.

    References:
        Dosovitskiy et al., An Image is Worth 16x16 Words, sections 3.1 and 3.2 (resampling).

    Example:
        >>> LearnedAPE(sizes=(4, 4), dim=8)(6, 6).shape
        torch.Size([36, 8])
    """

    def __init__(self, *, sizes: Sequence[int], dim: int, intensity: float = 0.0, cell: PerAxis = 1.0) -> None:
        super().__init__(sizes=sizes, dim=dim)
        if not intensity >= 0:
            raise ValueError(f"intensity must be 0 or more, got {intensity}")
        self.intensity = intensity
        self.cell = per_axis("cell", cell, len(self.sizes))
        self.table = nn.Parameter(torch.empty(*self.sizes, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from a normal distribution of standard deviation 0.02, truncated at two deviations."""
        nn.init.trunc_normal_(self.table, std=0.02, a=-0.04, b=0.04)

    def forward(self, *sizes: int) -> Tensor:
        self._check_axes(sizes)
        table: Tensor = self.table
        for axis, size in enumerate(sizes):
            # Compared with a number, a symbolic size would never be that number in the exported program.
            if isinstance(size, torch.SymInt) or size != self.sizes[axis]:
                table = resample_axis(table, axis, size, antialias=True)
        vectors = table.flatten(0, -2)
        if not (self.training and self.intensity):
            return vectors
        positions = jitter(grid(*sizes, device=vectors.device), self.cell, intensity=self.intensity)
        return sample_table(vectors.unflatten(0, sizes), positions)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", intensity={self.intensity}" if self.intensity else "")


class SinusoidalAPE(AbsoluteEncoding):
    """Compute sines and cosines of each axis in separate channels:  sin(p_a ω_t), cos(p_a ω_t),  ω_t = base^(-t / n).

    n = dim div (2 N) is the number of frequencies per axis; remaining channels are zero.

    Args:
        sizes: As of `AbsoluteEncoding`; dim of 2 N or more.
        dim: As of `AbsoluteEncoding`.
        base: Base of the geometric sequence of frequencies.

    Raises:
        ValueError: dim is below 2 N.

    References:
        Vaswani et al., Attention Is All You Need, section 3.5, applied to each axis.

    Example:
        >>> SinusoidalAPE(sizes=(2,), dim=4)(2).round(decimals=3).tolist()
        [[0.0, 1.0, 0.0, 1.0], [0.8410000205039978, 0.5400000214576721, 0.009999999776482582, 1.0]]
    """

    def __init__(self, *, sizes: Sequence[int], dim: int, base: float = 10_000.0) -> None:
        super().__init__(sizes=sizes, dim=dim)
        if dim < 2 * len(self.sizes):
            raise ValueError(f"dim must be at least 2·num_axes = {2 * len(self.sizes)}, got {dim}")
        self.base = base
        # Empty; it follows the model to its device.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    def forward(self, *sizes: int) -> Tensor:
        self._check_axes(sizes)
        return self.at(grid(*sizes, device=self._anchor.device, dtype=wide_dtype(self._anchor)))

    def at(self, positions: Tensor) -> Tensor:
        """Return vectors `(..., tokens, dim)` of arbitrary positions `(..., tokens, axes)`."""
        positions = wide_positions(positions)
        n = self.dim // (2 * positions.shape[-1])
        omega = self.base ** (-torch.arange(n, device=positions.device, dtype=positions.dtype) / n)
        phase = positions.unsqueeze(-1) * omega  # (..., tokens, axes, n)
        waves = torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-3)  # (..., tokens, 2 axes n)
        return functional.pad(waves, (0, self.dim - waves.shape[-1])).to(self._anchor.dtype)

    _anchor: Tensor
