"""RoPE and RoPE-Axial: fixed frequencies, each pair of channels rotated along one axis."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchrope.encodings.base import Encoding, FixedShape
from torchrope.encodings.fixed import OneAxisPerPair, default_base, geometric_sequence
from torchrope.lattice import Lattice


class AxialRoPE(OneAxisPerPair):
    """Rotate each pair of channels along one axis:  φ_j = p_{j mod N} θ_{j div N},  θ_t = base^(-t / n).

    n = head_dim / (2 N) is the number of frequencies per axis. With one axis this is RoPE (RoFormer, base 10,000),
    with two RoPE-Axial (base 100). `torchrope.encodings.baselines` has those of other papers by their settings.

    Args:
        base: Base of the geometric sequence of frequencies; 10,000^(1 / N) by default.
        max_frequency: Highest frequency, a factor on all.
        min_frequency: Lowest frequency, instead of base:  θ_t = max_frequency (min / max)^(t / (n - 1)).
        grouped: Assign n consecutive pairs to each axis,  φ_(a n + t) = p_a θ_t,  instead of every N-th.
        lattice: Positions that the frequencies are meant for; by default in tokens.
        shape: Arguments of `FixedFrequencies`; head_dim divisible by 2 N.

    Raises:
        ValueError: head_dim is not divisible by 2 N; both base and min_frequency; a frequency not above 0.

    References:
        Su et al., RoFormer, equation 15. Heo et al., Rotary Position Embedding for Vision Transformer (ECCV 2024,
        arXiv:2403.13298), equations 12 and 13.

    Example:
        >>> AxialRoPE(num_axes=2, head_dim=8).frequencies.tolist()
        [[1.0, 0.0, 0.10000000149011612, 0.0], [0.0, 1.0, 0.0, 0.10000000149011612]]
    """

    def __init__(
        self,
        *,
        base: float | None = None,
        max_frequency: float = 1.0,
        min_frequency: float | None = None,
        grouped: bool = False,
        lattice: Lattice = Encoding.lattice,
        **shape: Unpack[FixedShape],
    ) -> None:
        super().__init__(**shape)
        self.require_divisible(2 * self.num_axes, "2·num_axes")
        if base is not None and min_frequency is not None:
            raise ValueError(f"base must be None if min_frequency is given, got {base} and {min_frequency}")
        if not 0 < (max_frequency if min_frequency is None else min_frequency) <= max_frequency:
            rule = f"frequencies must be above 0, and min_frequency at most max_frequency = {max_frequency}"
            raise ValueError(f"{rule}, got {min_frequency}")
        self.base = default_base(self.num_axes) if base is None and min_frequency is None else base
        self.max_frequency = max_frequency
        self.min_frequency = min_frequency
        self.grouped = grouped
        self.lattice = lattice
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        n = self.num_blocks // self.num_axes
        if self.base is not None:
            theta = self.max_frequency * geometric_sequence(n, self.base)
        else:
            assert self.min_frequency is not None
            step = torch.arange(n, dtype=torch.float64) / max(n - 1, 1)
            theta = self.max_frequency * (self.min_frequency / self.max_frequency) ** step
        return along_axes(theta, self.num_axes, grouped=self.grouped)


def axial_frequencies(num_axes: int, num_pairs: int, base: float) -> Tensor:
    """Return frequencies `(num_axes, num_pairs)`: base^(-(j div N) / (num_pairs / N)) along axis j mod N for pair j."""
    step = torch.arange(-(-num_pairs // num_axes), dtype=torch.float64)
    theta = base ** (-step * num_axes / max(num_pairs, 1))
    return along_axes(theta, num_axes)[:, :num_pairs]


def along_axes(theta: Tensor, num_axes: int, *, grouped: bool = False) -> Tensor:
    """Give n frequencies to every axis, `(num_axes, n num_axes)`: pair j is of axis j mod N, or j div n if grouped."""
    axes = torch.eye(num_axes, dtype=theta.dtype)
    pairs = axes.unsqueeze(2) * theta if grouped else theta.unsqueeze(1) * axes.unsqueeze(1)
    return pairs.flatten(1)
