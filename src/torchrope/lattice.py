"""`Lattice`: positions of tokens from their indices on a lattice, one formula for the conventions of all papers."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrope.positions import (
    PerAxis,
    Periods,
    grid,
    jitter,
    per_axis,
    random_scale,
    random_shift,
    require_resolved,
    to_circle,
)
from torchrope.tensors import shown, wide_dtype, wide_positions

Divisor = Literal["one", "size", "longest", "shortest", "steps"]


@dataclass(frozen=True, repr=False)
class Lattice:
    """Positions of tokens from their indices on a lattice:  p_a = origin_a + spacing_a (index_a + offset_a) / n_a.

    A function of the sizes of a lattice, for `positions` of `ViT`, `Swin` and `Transformer`. The other settings are for
    other conventions. Settings of axes are one number or one per axis.

    Attributes:
        spacing: Distance between neighbours for n = 1. None, the default: 1, or in a model the convention of its
            encoding's paper at the training size, which never changes with the input size.
        origin: Position of index 0 for offset 0. None: 0, or in a model that of the paper.
        offset: Added to indices; 0.5 for the centres of patches.
        per: What n is: "one" (1, the spacing is the same at all sizes), "size" (tokens along the axis), "longest" or
            "shortest" (of the axes with this value), "steps" (tokens along the axis less one: from end to end), or the
            number of an axis, whose tokens are counted. One value or one per axis.
        train_sizes: Tokens along each axis at the training size. n is then relative to that size, and positions stay
            within the training range:  p = origin + spacing ((index + 1/2) / n - 1/2).  At the training size they are
            those of `torchrope.grid`.
        unit: Length of one unit of index, such as 16.0 for 16 mm between patches. Voxels, whose distances each call is
            given for each sample, scale the indices:  p = origin + spacing · index · patch_size · voxel / unit.
        patch_size: Voxels of a patch.
        periods: Period of each axis in the unit of indices or, with a `unit`, of lengths; None for an axis that is not
            periodic. Positions are mapped by `torchrope.positions.to_circle`. Of models only `Transformer` takes them.
        cell: Width of the cell within which each token is perturbed in training, 0 for none; see
            `torchrope.positions.jitter`. Samples of a batch share one draw, as in ComRoPE's code.
        intensity: Standard deviation of this perturbation before clipping, in half cells.
        shift: Largest random shift of all tokens in training, 0 for none; see `torchrope.positions.random_shift`.
        stretch: Largest random factor of each axis in training, 1 for none; see `torchrope.positions.random_scale`.
        rescale: Largest random factor of all axes in training, 1 for none; see `torchrope.positions.random_scale`.

    Raises:
        ValueError: an unknown `per`; `train_sizes` without a `per` other than "one", or with an offset; a period
            of an axis with such a `per` and no `train_sizes`; `shift` below 0, `stretch` or `rescale` below 1.

    References:
        ComRoPE, `get_positions` of its code, for `train_sizes`: (i + 1/2) / m on every axis, with the m of the sides of
        the image.

    Example:
        >>> Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="size")(1, 2).tolist()  # DINOv3
        [[0.0, -0.5], [0.0, 0.5]]
        >>> lattice = Lattice(spacing=0.5, origin=0.25, per="size", train_sizes=(2,))
        >>> lattice(2).flatten().tolist(), lattice(4).flatten().tolist()
        ([0.25, 0.75], [0.125, 0.375, 0.625, 0.875])
        >>> Lattice(unit=16.0, patch_size=(2, 16))(1, 3, spacing=torch.tensor([[5.0, 0.5]]))[0, :, 1]
        tensor([0.0000, 0.5000, 1.0000])
    """

    spacing: PerAxis | None = None
    origin: PerAxis | None = None
    offset: PerAxis = 0.0
    per: Divisor | int | Sequence[Divisor | int] = "one"
    train_sizes: Sequence[int] | None = None
    unit: PerAxis | None = None
    patch_size: PerAxis = 1
    periods: Periods | None = None
    cell: PerAxis = 0.0
    intensity: float = 1.0
    shift: float = 0.0
    stretch: float = 1.0
    rescale: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        rules = self.per if isinstance(self.per, tuple) else (self.per,)
        if any(not isinstance(rule, int) and rule not in get_args(Divisor) for rule in rules):
            raise ValueError(f"per must be one of {', '.join(get_args(Divisor))} or an axis, got {self.per!r}")
        if self.train_sizes is not None and (self.per == "one" or self.offset != 0):
            rule = "train_sizes needs per='size' or another that depends on sizes, and offset=0"
            raise ValueError(f"{rule}, got per={self.per!r} and offset={self.offset}")
        if not (self.shift >= 0 and self.stretch >= 1 and self.rescale >= 1):
            rule = "shift must be 0 or more, and stretch and rescale 1 or more"
            raise ValueError(f"{rule}, got {self.shift}, {self.stretch} and {self.rescale}")
        if not isinstance(self.periods, tuple | None):
            raise ValueError(f"periods must be one per axis, None if not periodic, got {self.periods}")
        along = zip(itertools.cycle(rules), self.periods or (), strict=False)
        if self.train_sizes is None and any(rule != "one" for rule, period in along if period is not None):
            rule = "an axis with a period, which is in units of indices, needs per='one' or train_sizes"
            raise ValueError(f"{rule}, got per={self.per!r}")

    def __repr__(self) -> str:
        return f"Lattice({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"

    def settings(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults, by name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def completed(self, spacing: PerAxis = 1.0, origin: PerAxis = 0.0) -> "Lattice":
        """Return this lattice with a spacing and an origin in place of None."""
        return replace(
            self,
            spacing=spacing if self.spacing is None else self.spacing,
            origin=origin if self.origin is None else self.origin,
        )

    def __call__(
        self,
        *sizes: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        spacing: Tensor | None = None,
    ) -> Tensor:
        """Return the positions of all tokens of a lattice, row-major.

        Args:
            sizes: Tokens along each axis.
            device: Device of the positions.
            dtype: Dtype of the positions, float32 or float64; with voxels that of their distances.
            spacing: For a lattice with a `unit`: distances between voxels in each sample, `(batch, axes)`.

        Returns:
            `(prod(sizes), axes)`, or `(batch, prod(sizes), axes)` with distances between voxels.

        Raises:
            ValueError: distances between voxels for a lattice without a unit, or none for one with a unit.
        """
        indices = grid(*sizes, device=device, dtype=dtype)
        if self.unit is None and spacing is None:
            return self.at(indices, sizes)
        if self.unit is None:
            rule = "spacing needs positions in a unit of length, such as tr.Lattice(unit=16.0, patch_size=16) for 16 mm"
            raise ValueError(f"{rule}, got {self} and spacing {shown(spacing)}")
        if not isinstance(spacing, Tensor) or spacing.ndim != 2 or spacing.shape[1] != len(sizes):
            raise ValueError(f"spacing must be voxel spacings (batch, {len(sizes)}), a tensor, got {shown(spacing)}")
        voxels = spacing.to(device, wide_dtype(spacing))
        patch, unit = (
            voxels.new_tensor(per_axis(name, value, len(sizes)))
            for name, value in {"patch_size": self.patch_size, "unit": self.unit}.items()
        )
        steps = voxels * patch / unit  # (batch, axes)
        return self._at(indices.to(steps), sizes, steps[:, None])

    def at(self, indices: Tensor, sizes: Sequence[int | Tensor] = ()) -> Tensor:
        """Return the positions of some tokens of a lattice, or of any points between them.

        Args:
            indices: `(..., tokens, axes)`, floating point.
            sizes: Tokens along each axis, numbers, or tensors `(..., 1)` if sizes differ between samples; not needed if
                n is 1.

        Returns:
            Positions of the shape of the indices, with two axes for each periodic one.
        """
        return self._at(indices, sizes or (1,) * indices.shape[-1])

    def spaced(self, *sizes: int) -> dict[str, Any]:
        """Return spacing and origin of a lattice of these sizes, as arguments of `torchrope.grid`.

        Example:
            >>> Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="size").spaced(1, 2)
            {'spacing': [2.0, 1.0], 'origin': [0.0, -0.5]}
        """
        steps, starts, offsets = self._numbers(len(sizes))
        counts: list[Any] = self._divisors(sizes)
        if self.train_sizes is None:
            steps = [step / n for step, n in zip(steps, counts, strict=True)]
            middles: list[float] = [offset * step for offset, step in zip(offsets, steps, strict=True)]
        else:
            trained: list[Any] = self._divisors(self.train_sizes)
            ratios = [before / n for before, n in zip(trained, counts, strict=True)]
            middles = [step * (ratio - 1) / 2 for step, ratio in zip(steps, ratios, strict=True)]
            steps = [step * ratio for step, ratio in zip(steps, ratios, strict=True)]
        return {"spacing": steps, "origin": [start + middle for start, middle in zip(starts, middles, strict=True)]}

    def scaled_periods(self, axes: int) -> list[float | None]:
        """Return the period of each axis in units of position."""
        spacing, units = self._numbers(axes)[0], per_axis("unit", 1.0 if self.unit is None else self.unit, axes)
        scaled = zip(self.periods or (None,) * axes, units, spacing, strict=True)
        return [None if period is None else period / unit * step for period, unit, step in scaled]

    def perturbed(self, positions: Tensor) -> Tensor:
        """Perturb positions at random as in training; unchanged if this lattice does not."""
        if self.cell != 0:
            positions = jitter(positions, self.cell, intensity=self.intensity)
        if self.shift > 0:
            positions = random_shift(positions, self.shift)
        if self.stretch > 1:
            positions = random_scale(positions, self.stretch, per_axis=True)
        return random_scale(positions, self.rescale) if self.rescale > 1 else positions

    def _at(self, indices: Tensor, sizes: Sequence[int | Tensor], scale: Tensor | None = None) -> Tensor:
        """Return positions of indices, which are multiplied by a scale `(..., 1, axes)` before spacing and origin."""
        steps, starts, offsets = self._numbers(indices.shape[-1])
        indices = wide_positions(indices)
        columns = list(indices.unbind(-1))
        if self.train_sizes is None:
            counts = self._divisors(sizes)
            columns = [(index + offset) / n for index, offset, n in zip(columns, offsets, counts, strict=True)]
        else:
            steps, starts = self.spaced(*sizes).values()  # type: ignore[arg-type]
        require_resolved(starts, steps, indices.dtype)
        if scale is not None:
            columns = [index * factor for index, factor in zip(columns, scale.unbind(-1), strict=True)]
        placed = [start + step * index for index, step, start in zip(columns, steps, starts, strict=True)]
        positions = torch.stack(placed, dim=-1)
        return positions if self.periods is None else to_circle(positions, self.scaled_periods(len(steps)))

    def _numbers(self, axes: int) -> list[list[float]]:
        """Return spacing, origin and offset of each axis."""
        spacing, origin = 1.0 if self.spacing is None else self.spacing, 0.0 if self.origin is None else self.origin
        named = {"spacing": spacing, "origin": origin, "offset": self.offset}
        return [list(per_axis(name, value, axes)) for name, value in named.items()]

    def _divisors(self, sizes: Sequence[int | Tensor]) -> list[int | Tensor]:
        rules: Any = self.per if isinstance(self.per, tuple) else (self.per,) * len(sizes)
        if len(rules) != len(sizes):
            raise ValueError(f"per must be one value or one per axis ({len(sizes)}), got {self.per}")
        if any(isinstance(rule, int) and not -len(sizes) <= rule < len(sizes) for rule in rules):
            raise ValueError(f"an axis in per must be from {-len(sizes)} to {len(sizes) - 1}, got {self.per}")
        return [_divisor(axis, rules, sizes) for axis in range(len(sizes))]


def _divisor(axis: int, rules: Sequence[Divisor | int], sizes: Sequence[int | Tensor]) -> int | Tensor:
    rule = rules[axis]
    if rule == "one":
        return 1
    size = sizes[rule if isinstance(rule, int) else axis]
    if rule == "steps":
        size = size - 1
    elif rule in ("longest", "shortest"):
        of_numbers, of_tensors = (max, torch.maximum) if rule == "longest" else (min, torch.minimum)
        same: list[Any] = [extent for extent, its_rule in zip(sizes, rules, strict=True) if its_rule == rule]
        size = functools.reduce(of_tensors if isinstance(size, Tensor) else of_numbers, same)
    return size.clamp(min=1) if isinstance(size, Tensor) else max(size, 1)
