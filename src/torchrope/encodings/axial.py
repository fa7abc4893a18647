"""RoPE and RoPE-Axial: fixed frequencies, each pair of channels rotated along one axis."""

import torch
from torch import Tensor

from torchrope.encodings.fixed import OneAxisPerPair


class AxialRoPE(OneAxisPerPair):
    """Rotate each pair of channels along one axis:  a_j = p_{j mod N} θ_{j div N},  θ_t = base^(-t / n).

    n = head_dim / (2 N) is the number of frequencies per axis. With one axis this is RoPE (RoFormer, base 10,000),
    with two RoPE-Axial (base 100). Frequencies are a buffer, which stays float32 in a model cast to bfloat16.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by 2 N.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.
        base: Base of the geometric sequence of frequencies; 10,000^(1 / N) by default.

    Raises:
        ValueError: head_dim is not divisible by 2 N.

    References:
        Su et al., RoFormer, equation 15. Heo et al., Rotary Position Embedding for Vision Transformer (ECCV 2024,
        arXiv:2403.13298), equations 12 and 13.

    Example:
        >>> AxialRoPE(num_axes=2, num_heads=1, head_dim=8).frequencies.tolist()
        [[1.0, 0.0, 0.10000000149011612, 0.0], [0.0, 1.0, 0.0, 0.10000000149011612]]
    """

    title = "RoPE-Axial"
    formula = "angle of pair j = p_{j mod N} · θ_{j div N},  θₜ = base^(−t/n) fixed"
    summary = "RoPE with each pair of channels assigned to one axis; fixed frequencies, nothing learned."
    source = "Heo et al., RoPE for Vision Transformer, eq. 12-13; one axis: Su et al., RoFormer, eq. 15"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        base: float | None = None,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        self._require_divisible(2 * num_axes, "2·num_axes")
        self.base = 10_000.0 ** (1 / num_axes) if base is None else base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        return axial_frequencies(self.num_axes, self.num_blocks, self.base)


def axial_frequencies(num_axes: int, num_pairs: int, base: float) -> Tensor:
    """Return frequencies `(num_axes, num_pairs)`: base^(-(j div N) / (num_pairs / N)) along axis j mod N for pair j."""
    pair = torch.arange(num_pairs)
    step = torch.div(pair, num_axes, rounding_mode="floor")
    theta = base ** (-step.double() * num_axes / max(num_pairs, 1))
    own_axis = pair % num_axes == torch.arange(num_axes).unsqueeze(1)
    return theta * own_axis
