"""Positions of tokens: lattices, functions from positions to positions, packing of samples, partition into windows.

Positions are float tensors `(tokens, axes)` or `(batch, tokens, axes)`. They are transformed by functions from
positions to positions: shift, rescale, jitter, and their random variants. Their unit is that of the lattice, one patch
by default.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrope.tensors import Value, require_counts, require_tensor, shown, wide_positions

PerAxis = float | Sequence[float]
Periods = Sequence[float | None]
"""The period of each periodic axis, such as an angle or a time of day, and None for each other axis."""


def grid(
    *sizes: int,
    spacing: PerAxis = 1.0,
    origin: PerAxis = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return positions of a lattice:  p = origin + spacing * index,  row-major, the last axis fastest.

    Args:
        sizes: Number of tokens along each axis.
        spacing: Distance between neighbours, one number or one per axis. LieRE's [0, 1) at the training size is
            `spacing=1/train_size`; ComRoPE's is `spacing=1/n, origin=0.5/n`. Voxel sizes in millimetres work too.
        origin: Position of the first token, one number or one per axis.
        device: Device of the positions.
        dtype: Dtype of the positions, float32 or float64.

    Returns:
        Positions `(prod(sizes), len(sizes))`.

    Raises:
        ValueError: no sizes, a negative size, a wrong number of spacings or origins, or a dtype other than float32 or
            float64.

    Example:
        >>> grid(2, 3).tolist()
        [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    """
    if any(isinstance(size, (tuple, list)) for size in sizes):
        raise ValueError(f"sizes must be one argument each, grid(8, 12) or grid(*sizes), got {sizes}")
    # Not symbolic sizes, which would become constants of the traced program.
    counts = [size if isinstance(size, (int, torch.SymInt)) else operator.index(size) for size in sizes]
    if not counts or any(count < 0 for count in counts):
        raise ValueError(f"grid needs one size per axis, each 0 or more, got {sizes}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"positions must be float32 or float64, got {dtype}")
    spacings = per_axis("spacing", spacing, len(sizes))
    origins = per_axis("origin", origin, len(sizes))
    require_resolved(origins, spacings, dtype)
    lines = [
        start + step * torch.arange(size, device=device, dtype=dtype)
        for size, step, start in zip(counts, spacings, origins, strict=True)
    ]
    return torch.cartesian_prod(*lines).reshape(-1, len(sizes))


def per_axis(name: str, value: PerAxis, num_axes: int) -> tuple[float, ...]:
    """Return one number per axis; one number is repeated for all axes."""
    try:
        numbers = tuple(value) if isinstance(value, Iterable) else (value,) * num_axes
        # Not float, which makes symbolic numbers constants.
        values: tuple[Any, ...] = tuple(map(torch.sym_float, numbers))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be one number or one per axis, got {shown(value)}") from None
    if len(values) != num_axes:
        raise ValueError(f"{name} must be one number or one per axis ({num_axes}), got {len(values)}")
    return values


def positive(name: str, value: PerAxis, num_axes: int) -> tuple[float, ...]:
    """Return one number per axis; raise if not above 0 and finite."""
    values = per_axis(name, value, num_axes)
    if not all(0 < number < math.inf for number in values):
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return values


def prefix(positions: Tensor, count: int) -> Tensor:
    """Prepend positions of prefix tokens (CLS, registers) at the origin, where R = I.

    Args:
        positions: `(..., tokens, axes)`.
        count: Number of prefix tokens, 0 or more.

    Returns:
        Positions `(..., count + tokens, axes)`.

    Raises:
        ValueError: count is negative.

    Example:
        >>> prefix(grid(2), 1).tolist()
        [[0.0], [0.0], [1.0]]
    """
    require_tensor("positions", positions)
    require_counts(0, count=count)
    origin = positions.new_zeros(*positions.shape[:-2], count, positions.shape[-1])
    return torch.cat([origin, positions], dim=-2)


def shift(positions: Tensor, offset: PerAxis | Tensor) -> Tensor:
    """Shift all positions:  p + offset.

    Args:
        positions: `(..., tokens, axes)`.
        offset: One number, one per axis, or a tensor that broadcasts, such as `(batch, 1, axes)`.

    Returns:
        Positions of the broadcast shape.

    Raises:
        ValueError: neither one number nor one per axis.
    """
    positions = wide_positions(positions)
    if isinstance(offset, Tensor):
        return positions + wide_positions(offset)
    numbers = per_axis("offset", offset, positions.shape[-1])
    if any(isinstance(number, float) and abs(number) > 2**24 for number in numbers):  # none that are symbolic
        positions = positions.double()
    return positions + _row("offset", offset, positions)


def rescale(positions: Tensor, factor: PerAxis | Tensor) -> Tensor:
    """Scale all positions about the origin:  p * factor.

    Args:
        positions: `(..., tokens, axes)`.
        factor: One number, one per axis, or a tensor that broadcasts, such as `(batch, 1, axes)`.

    Returns:
        Positions of the broadcast shape.

    Raises:
        ValueError: neither one number nor one per axis.
    """
    positions = wide_positions(positions)
    return positions * (factor if isinstance(factor, Tensor) else _row("factor", factor, positions))


def video_rope(
    frames: int,
    height: int,
    width: int,
    *,
    spacing: float = 2.0,
    start: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return positions of a video along the diagonal of three axes:  (τ, τ + y - (H - 1) / 2, τ + x - (W - 1) / 2).

    τ = start + spacing · frame. Frames are centred on the diagonal, as positions of text are, and time has its own
    spacing.

    Args:
        frames: Number of frames.
        height: Tokens of a frame along y, H.
        width: Tokens of a frame along x, W.
        spacing: Distance between frames.
        start: Position of the first frame: that of the last text token before it, plus 1.
        device: Device of the positions.
        dtype: Dtype of the positions, float32 or float64.

    Returns:
        `(frames · height · width, 3)`, the last axis fastest.

    References:
        Wei et al., VideoRoPE, arXiv:2502.05173: diagonal layout and adjustable temporal spacing. The authors' code
        rounds the centre of an even number of tokens down.

    Example:
        >>> video_rope(2, 1, 3)[:, 2].tolist()
        [-1.0, 0.0, 1.0, 1.0, 2.0, 3.0]
    """
    t, y, x = grid(frames, height, width, device=device, dtype=dtype).unbind(-1)
    along = start + spacing * t
    return torch.stack([along, along + y - (height - 1) / 2, along + x - (width - 1) / 2], dim=-1)


def circle_rope(
    height: int,
    width: int,
    *,
    radius: float = 10.0,
    angle_weight: float = 0.5,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return positions of image tokens on a circle around the diagonal of three axes, where text tokens are.

    All image tokens have the same distance from a text token (t, t, t):  √(radius² + 3 t²).  The angle on the circle is
    w α + (1 - w) β:  α is the token's angle about the image centre, rescaled to [0, 2π],  β = 2π index / tokens.

    Args:
        height: Tokens along y.
        width: Tokens along x.
        radius: Radius of the circle.
        angle_weight: Weight w of the angle against the index, from 0 to 1.
        device: Device of the positions.
        dtype: Dtype of the positions, float32 or float64.

    Returns:
        `(height · width, 3)`, x fastest, about the origin; `shift` moves them along the diagonal.

    Raises:
        ValueError: height, width, angle_weight or radius out of range.

    References:
        Wang et al., Circle-RoPE: Cone-like Decoupled Rotary Positional Embedding for Large Vision-Language Models,
        arXiv:2505.16416: circular image token projection.

    Example:
        >>> circle_rope(2, 3, radius=2.0).norm(dim=-1).round(decimals=3).unique().tolist()
        [2.0]
    """
    if not 0 <= angle_weight <= 1 or not 0 < radius < math.inf:
        rule = "radius must be above 0 and finite, and angle_weight from 0 to 1"
        raise ValueError(f"{rule}, got {radius} and {angle_weight}")
    require_counts(height=height, width=width)
    y, x = grid(height, width, device=device, dtype=dtype).unbind(-1)
    about = torch.atan2(y - (height - 1) / 2, x - (width - 1) / 2)
    span = about.max() - about.min()
    stretched = torch.where(span > 0, (about - about.min()) * (2 * math.pi / span), about)
    by_index = torch.arange(height * width, device=device, dtype=dtype) * (2 * math.pi / (height * width))
    angle = angle_weight * stretched + (1 - angle_weight) * by_index
    first = x.new_tensor([-1.0, 1.0, 0.0]) / math.sqrt(2)
    second = x.new_tensor([-1.0, -1.0, 2.0]) / math.sqrt(6)
    return radius * (angle.cos().unsqueeze(-1) * first + angle.sin().unsqueeze(-1) * second)


def wrap(positions: Tensor, periods: Periods) -> Tensor:
    """Wrap periodic axes into one period about the origin:  p - T round(p / T).

    Args:
        positions: `(..., tokens, axes)`.
        periods: T of each axis, None for axes that are not periodic.

    Returns:
        Positions of the same shape, in [-T / 2, T / 2] along periodic axes.

    Raises:
        ValueError: not one period per axis, or one that is not above 0.

    Example:
        >>> wrap(torch.tensor([[23.0, 23.0]]), (24, None)).tolist()
        [[-1.0, 23.0]]
    """
    check_periods(periods, positions.shape[-1])
    axes = [
        p if period is None else p - period * (p / period).round()
        for p, period in zip(wide_positions(positions).unbind(-1), periods, strict=True)
    ]
    return torch.stack(axes, dim=-1)


def to_circle(positions: Tensor, periods: Periods) -> Tensor:
    """Map each periodic axis to two axes, a circle of circumference T:  p -> T / 2π (cos 2πp / T, sin 2πp / T).

    Arc lengths equal distances along the axis. An encoding of these axes gives equal rotations at 0 and T. Its
    scores depend on the two points of the circle, not only on the angle between them; `Periodic` keeps scores relative,
    for encodings that have frequencies.

    Args:
        positions: `(..., tokens, axes)`.
        periods: T of each axis, None for axes that are not periodic.

    Returns:
        `(..., tokens, axes + periodic axes)`; the two axes of a circle replace their axis.

    Raises:
        ValueError: not one period per axis, or one that is not above 0.

    Example:
        >>> to_circle(torch.tensor([[5.0, 0.0], [5.0, 24.0]]), (None, 24)).round(decimals=2).tolist()
        [[5.0, 3.819999933242798, 0.0], [5.0, 3.819999933242798, 0.0]]
    """
    axes: list[Tensor] = []
    for p, period in zip(wrap(positions, periods).unbind(-1), periods, strict=True):
        if period is None:
            axes.append(p)
        else:
            radius = period / (2 * math.pi)
            axes += [radius * (p / radius).cos(), radius * (p / radius).sin()]
    return torch.stack(axes, dim=-1)


def check_periods(periods: Periods, num_axes: int) -> None:
    """Raise ValueError unless there is one period, or None, per axis, positive and finite."""
    if not isinstance(periods, Iterable) or len(periods) != num_axes:
        received = len(periods) if isinstance(periods, Iterable) else periods
        raise ValueError(f"periods must be one per axis ({num_axes}), None if not periodic, got {received}")
    if any(period is not None and not 0 < period < math.inf for period in periods):
        raise ValueError(f"periods must be above 0 and finite, or None, got {tuple(periods)}")


def jitter(
    positions: Tensor, cell: PerAxis, *, intensity: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Perturb every position independently:  p + clip(n * intensity, -1, 1) * cell / 2  with  n ~ N(0, 1).

    With `cell` equal to the spacing, tokens stay within their cells. This is ComRoPE's position perturbation, with
    `intensity` its `perturbation_intensity`. ComRoPE does not perturb the time axis (cell 0) or the class token
    (perturb, then `prefix`); its `offset_intensity` o is `shift(positions, o * torch.randn(axes))`.

    Args:
        positions: `(..., tokens, axes)`.
        cell: Width of the cell, one number or one per axis.
        intensity: Standard deviation before clipping to the cell, in half cells.
        generator: Random number generator.

    Returns:
        Positions of the same shape.

    Raises:
        ValueError: neither one cell nor one per axis.

    References:
        ComRoPE, table 3 (perturbation intensity) and `get_positions` of its code.
    """
    positions = wide_positions(positions)
    width = _row("cell", cell, positions)
    # Not torch.randn, which takes no generator with symbolic sizes.
    noise = positions.new_empty(positions.shape).normal_(generator=generator)
    return positions + (noise * intensity).clamp(-1, 1) * width / 2


def random_shift(positions: Tensor, amount: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Shift all tokens of a sample by one random offset per axis:  p + u  with  u ~ U(-amount, amount).

    Args:
        positions: `(tokens, axes)` with one draw for all tokens, or `(batch, tokens, axes)` with one draw per sample.
        amount: Largest shift, 0 or more.
        generator: Random number generator.

    Returns:
        Positions of the same shape.

    Raises:
        ValueError: amount is negative.

    References:
        DINOv3's code, `shift_coords`.
    """
    if amount < 0:
        raise ValueError(f"random_shift needs an amount of 0 or more, got {amount}")
    return shift(positions, _uniform(positions, positions.shape[-1], generator) * amount)


def random_scale(
    positions: Tensor, factor: float, *, per_axis: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    """Scale the positions of a sample by a random factor:  p * e^u  with  u ~ U(-ln factor, ln factor).

    DINOv3 trains with one factor of 2 for all axes, after `random_shift` and a factor per axis if these are enabled.

    Args:
        positions: `(tokens, axes)` with one draw for all tokens, or `(batch, tokens, axes)` with one draw per sample.
        factor: Largest factor, 1 or more; the smallest is 1 / factor.
        per_axis: Whether each axis has a factor of its own.
        generator: Random number generator.

    Returns:
        Positions of the same shape.

    Raises:
        ValueError: factor is below 1.

    References:
        Siméoni et al., DINOv3, section 3.2 (RoPE-box jittering); `rescale_coords` and `jitter_coords` of its code.

    Example:
        >>> random_scale(grid(2, 2).expand(5, -1, -1), 2.0).shape
        torch.Size([5, 4, 2])
    """
    if not factor >= 1:
        raise ValueError(f"factor must be 1 or more, got {factor}")
    exponents = _uniform(positions, positions.shape[-1] if per_axis else 1, generator)
    return rescale(positions, (exponents * math.log(factor)).exp())


class Packed(Value):
    """Samples of different lengths concatenated to one sequence, in which tokens attend within their sample only.

    Attributes:
        positions: `(total, axes)`, concatenated over samples.
        lengths: Tokens of each sample.
    """

    positions: Tensor
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> Tensor:
        """Cumulative lengths starting at 0, `(samples + 1)`, int32, as variable-length attention kernels take them."""
        ends = torch.tensor((0, *self.lengths), device=self.positions.device).cumsum(0)
        return ends.to(torch.int32)

    @property
    def samples(self) -> Tensor:
        """Index of the sample that each token belongs to, `(total)`."""
        lengths = torch.tensor(self.lengths, device=self.positions.device)
        number = torch.arange(len(self.lengths), device=lengths.device)
        return number.repeat_interleave(lengths, output_size=self.positions.shape[0])

    def mask(self) -> Tensor:
        """Return a mask for scaled_dot_product_attention, True within a sample, `(total, total)`."""
        samples = self.samples
        return samples.unsqueeze(-1) == samples


def pack(positions: Sequence[Tensor]) -> Packed:
    """Concatenate the positions of several samples.

    Rotate queries and keys `(1, heads, total, head_dim)` by an encoding's rotation of `positions`; then restrict
    attention to each sample: `Attention` takes `lengths`; `mask()` works with any attention; flex_attention takes
    `create_block_mask(lambda b, h, i, j: samples[i] == samples[j], None, None, total, total)`; kernels for variable
    lengths take `cu_seqlens`.

    Args:
        positions: `(tokens, axes)` of each sample.

    Returns:
        A `Packed`.

    Raises:
        ValueError: no samples, or positions that are not `(tokens, axes)` with the same number of axes.

    Example:
        >>> packed = pack([prefix(grid(2, 2), 1), prefix(grid(1, 3), 1)])
        >>> packed.lengths, packed.cu_seqlens.tolist()
        ((5, 4), [0, 5, 9])
    """
    positions = list(positions)  # of a tensor (samples, tokens, axes) too
    for p in positions:
        require_tensor("positions of a sample", p)
    if not positions or any(p.ndim != 2 or p.shape[1] != positions[0].shape[-1] for p in positions):
        received = [tuple(p.shape) for p in positions]
        raise ValueError(f"pack needs one or more positions (tokens, axes) of the same axes, got {received}")
    if len({p.dtype for p in positions}) > 1:  # which torch.cat would round
        positions = [wide_positions(p) for p in positions]
    return Packed(positions=torch.cat(positions), lengths=tuple(p.shape[0] for p in positions))


def _uniform(positions: Tensor, axes: int, generator: torch.Generator | None) -> Tensor:
    """Draw uniformly from [-1, 1], once for all tokens of a sample, `(*batch, 1, axes)`."""
    wide = torch.promote_types(positions.dtype, torch.float32)
    shape = (*positions.shape[:-2], 1, axes)
    return 2 * positions.new_empty(shape, dtype=wide).uniform_(generator=generator) - 1


def windows(
    positions: Tensor, sizes: Sequence[int], window: Sequence[int], *, offset: int | Sequence[int] = 0
) -> Tensor:
    """Partition a lattice into non-overlapping windows after a cyclic shift by `offset`.

    Any tensor with one row per token can be partitioned, not only positions.

    Args:
        positions: `(..., prod(sizes), axes)`, row-major.
        sizes: Tokens of the lattice along each axis.
        window: Tokens of a window along each axis, a divisor of the lattice's.
        offset: Tokens by which the windows are shifted, one number or one per axis; the tokens before it come last
            (the cyclic shift of Swin).

    Returns:
        `(..., windows, prod(window), axes)`, windows row-major and tokens within a window row-major.

    Raises:
        ValueError: a window that does not divide its lattice; another number of positions than the lattice has; neither
            one offset nor one per axis.

    References:
        Liu et al., Swin Transformer, section 3.2 and figure 4.

    Example:
        >>> windows(grid(4), (4,), (2,)).squeeze(-1).tolist()
        [[0.0, 1.0], [2.0, 3.0]]
        >>> windows(grid(4), (4,), (2,), offset=1).squeeze(-1).tolist()
        [[1.0, 2.0], [3.0, 0.0]]
    """
    num_axes = len(sizes)
    if len(window) != num_axes or any(part < 1 or size % part for size, part in zip(sizes, window, strict=True)):
        raise ValueError(f"a window must divide its lattice {tuple(sizes)} along each axis, got {tuple(window)}")
    if positions.shape[-2] != math.prod(sizes):
        raise ValueError(f"positions of a lattice {tuple(sizes)} must be {math.prod(sizes)}, got {positions.shape[-2]}")
    offsets = tuple(offset) if isinstance(offset, Iterable) else (offset,) * num_axes
    if len(offsets) != num_axes:
        raise ValueError(f"offset must be one number or one per axis ({num_axes}), got {len(offsets)}")
    lattice = positions.unflatten(-2, tuple(sizes))  # (..., *sizes, axes)
    if any(offsets):
        lattice = lattice.roll([-start for start in offsets], list(range(-num_axes - 1, -1)))
    leading = positions.ndim - 2
    for axis in reversed(range(num_axes)):
        lattice = lattice.unflatten(leading + axis, (sizes[axis] // window[axis], window[axis]))
    outer = range(leading, leading + 2 * num_axes, 2)
    inner = [axis + 1 for axis in outer]
    cells = lattice.permute(*range(leading), *outer, *inner, -1)  # (..., *windows, *window, axes)
    return cells.flatten(-num_axes - 1, -2).flatten(leading, leading + num_axes - 1)


def _row(name: str, value: PerAxis, positions: Tensor) -> Tensor:
    """Return one number per axis, which may be symbolic, as a tensor `(axes)` like positions."""
    return torch.stack([positions.new_full((), number) for number in per_axis(name, value, positions.shape[-1])])


def require_resolved(starts: Iterable[Any], steps: Iterable[Any], dtype: torch.dtype) -> None:
    """Raise ValueError if float32 would round neighbours at start + step index to one position."""
    compiling = torch.compiler.is_compiling()  # where torch 2.6 takes symbolic numbers for float
    for start, step in zip(starts, steps, strict=True):
        numbers = isinstance(start, float) and isinstance(step, float) and not compiling  # no tensors
        if dtype == torch.float32 and numbers and abs(start) > 2**24 * abs(step) > 0:
            rule = "an origin in float32 must be within 2^24 spacings: give dtype=torch.float64, or a nearer origin"
            raise ValueError(f"{rule}, got {start} with spacing {step}")
