"""DINOv3's RoPE: RoPE-Axial with given periods on coordinates in [-1, 1]."""

import math
from typing import Any

import torch
from torch import Tensor

from torchrope.encodings.fixed import OneAxisPerPair, centred_lattice


class DINOv3RoPE(OneAxisPerPair):
    """Rotate each pair of channels along one axis:  φ_(a n + t) = 2π p_a / base^(t / n),  n = head_dim / (2 N).

    RoPE-Axial parametrised by periods, on an image that spans [-1, 1]; each axis has n consecutive pairs. The
    coordinates are `torchrope.patch_centers`; DINOv3's augmentations of them in training are the functions
    `random_shift`, `random_stretch` and `random_rescale`.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by 2 N.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.
        base: Base of the geometric sequence of periods, of which the first is 1 unit of position.

    Raises:
        ValueError: head_dim is not divisible by 2 N.

    References:
        Siméoni et al., DINOv3, section 3.2, and its code, `rope_position_encoding.py`. There pair j is channels j and
        j + head_dim / 2, here 2j and 2j + 1.

    Example:
        >>> (2 * math.pi / DINOv3RoPE(num_axes=2, num_heads=1, head_dim=8).frequencies).tolist()
        [[1.0, 10.0, inf, inf], [inf, inf, 1.0, 10.0]]
    """

    title = "RoPE, DINOv3"
    formula = "angle of pair a·n + t = 2π pₐ / base^(t/n) fixed,  p in [−1, 1]"
    summary = "RoPE-Axial parametrised by periods, on coordinates in [-1, 1] for every image; fixed frequencies."
    source = "Siméoni et al., DINOv3, section 3.2"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        base: float = 100.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        self._require_divisible(2 * num_axes, "2·num_axes")
        self.base = base
        self.reset_parameters()

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Patch centres, with the training image spanning [-1, 1] along every axis."""
        return centred_lattice(sizes)

    def initial_frequencies(self) -> Tensor:
        pair = torch.arange(self.num_blocks)
        per_axis = max(self.num_blocks // self.num_axes, 1)
        theta = 2 * math.pi * self.base ** -((pair % per_axis).double() / per_axis)
        own_axis = torch.div(pair, per_axis, rounding_mode="floor") == torch.arange(self.num_axes).unsqueeze(1)
        return theta * own_axis
