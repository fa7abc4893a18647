"""`RoPE2D`, the rotary encoding of CroCo, DUSt3R and models built on them, and LitePT's `PointROPE`, in PyTorch."""

import torch
from torch import Tensor, nn

from torchrope.rotating import apply
from torchrope.rotations import from_angles
from torchrope.tensors import wide_dtype, wide_positions


class _AxialHalves(nn.Module):
    """Rotation of one equal part of the channels per axis, within a part of the pairs (i, i + pairs)."""

    axes: int
    names: str

    def __init__(self, freq: float = 100.0, F0: float = 1.0) -> None:
        super().__init__()
        if not (freq > 0 and F0 > 0):
            raise ValueError(f"freq and F0 must be above 0, got {freq} and {F0}")
        self.base = freq
        self.F0 = F0

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return tokens `(batch, heads, n, head_dim)` rotated by real positions `(batch or 1, n, axes)`."""
        self._check(tokens, positions)
        whole = None if positions.is_floating_point() else wide_positions(positions, unread=torch.float32)
        wide = wide_dtype(tokens) if whole is None else wide_dtype(tokens, whole)
        pairs = tokens.shape[-1] // (2 * self.axes)
        step = torch.arange(pairs, device=tokens.device, dtype=wide) / max(pairs, 1)
        frequencies = self.F0 / self.base**step  # (pairs,)
        angles = positions.to(wide).mT.unsqueeze(-1) * frequencies  # (groups, axes, n, pairs), groups = batch or 1
        # Axes, whose rotations differ, as samples; samples that share positions as heads.
        (batch, heads, n, _), groups = tokens.shape, len(positions)
        parts = tokens.reshape(groups, batch // max(groups, 1), heads, n, self.axes, 2 * pairs)
        parts = parts.permute(0, 4, 1, 2, 3, 5)  # (groups, axes, samples, heads, n, 2 pairs)
        rotation = from_angles(angles.flatten(0, 1).unsqueeze(1)).in_halves()
        rotated = apply(parts.flatten(2, 3).flatten(0, 1), rotation)
        return rotated.reshape(parts.shape).permute(0, 2, 3, 4, 1, 5).reshape(tokens.shape)

    def _check(self, tokens: Tensor, positions: Tensor) -> None:
        if tokens.ndim != 4 or not tokens.is_floating_point():
            received = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"tokens must be floating point (batch, heads, n, head_dim), got {received}")
        (batch, _, n, channels), axes = tokens.shape, self.axes
        if channels % (2 * axes):
            pairs = f"{2 * axes}, a pair for each of {self.names}"
            raise ValueError(f"head_dim must be divisible by {pairs}, got {channels}")
        shapes = (batch, n, axes), (1, n, axes)
        if tuple(positions.shape) not in shapes:
            rule = f"positions must be {self.names}, {shapes[0]} or {shapes[1]}"
            raise ValueError(f"{rule}, got {tuple(positions.shape)}")
        if positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions must be real numbers, got {positions.dtype}")

    def extra_repr(self) -> str:
        """Return the constructor arguments for `repr`."""
        return f"freq={self.base}, F0={self.F0}"


class RoPE2D(_AxialHalves):
    """Replacement for CroCo's RoPE2D: rotate queries or keys by the row and column of their patches.

    The first half of the channels of a head is rotated by the row y, the second half by the column x. Within a half of
    m = head_dim / 2 channels, channels i and i + m / 2 are a pair, rotated by  a_i = p F0 / freq^(2i/m):

        z_i = cos(a_i) x_i - sin(a_i) x_{i+m/2},    z_{i+m/2} = sin(a_i) x_i + cos(a_i) x_{i+m/2}

    The input is not modified and may require a gradient. Arithmetic is float32, or float64 for float64, in a model of
    any dtype and under autocast, rounded once. There are neither parameters nor buffers, so checkpoints of models with
    another RoPE2D load unchanged; the device is not synchronised.

    References:
        Weinzaepfel et al., CroCo v2, section 3.2, for RoPE of two axes; Wang et al., DUSt3R, where freq is 100; Su et
        al., RoFormer, equation 15, for the frequencies.
    """

    axes = 2
    names = "y and x"


class PointROPE(_AxialHalves):
    """Replacement for LitePT's PointROPE: rotate queries or keys by the three coordinates of their points.

    The first third of the channels of a head is rotated by x, the second by y, the last by z. Within a third of
    m = head_dim / 3 channels, channels i and i + m / 2 are a pair, rotated by a_i = p F0 / freq^(2i/m), F0 in radians
    per cell of the grid. Arguments, precision and gradients are those of `RoPE2D`. The original changes its input in
    place and returns it: use what is returned, the input is not modified. Yue et al., LitePT (arXiv:2512.13689).
    """

    axes = 3
    names = "x, y and z"
