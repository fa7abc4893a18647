"""LeRoPE: one learned factor per frequency, shared by all heads."""

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from torchrope.encodings.axial import along_axes
from torchrope.encodings.base import FixedShape
from torchrope.encodings.fixed import OneAxisPerPair, default_base, geometric_sequence


class LeRoPE(OneAxisPerPair):
    """Rotate pair j of all heads along one axis by a learned frequency:  φ_j = p_a e^{α_j} θ_j,  α_j = 0 at first.

    For text, with one axis. A step of Adam changes every frequency by a similar factor, where in `MixedRoPE` it adds a
    similar number, which may exceed the lowest frequencies. In the paper all layers share α: pass one encoding to
    `swap`, with init="model" to start from the model's frequencies. Weight decay would pull e^α to 1.

    Args:
        base: Base of the geometric sequence θ; default: 10000^(1 / num_axes), as of `AxialRoPE`.
        shape: Arguments of `FixedFrequencies`; head_dim divisible by 2 num_axes.

    Raises:
        ValueError: a head_dim that is not divisible by 2 num_axes; a base of 0 or less.

    References:
        Karypis et al., LeRoPE: Learnable RoPE Frequencies Improve Language Modeling (arXiv:2607.10134), section 3.1,
        known here by others' accounts of it. Several axes are an addition.

    Example:
        >>> encoding = LeRoPE(num_axes=1, head_dim=64)
        >>> sum(p.numel() for p in encoding.parameters())
        32
    """

    def __init__(self, *, base: float | None = None, **shape: Unpack[FixedShape]) -> None:
        super().__init__(**shape)
        self.require_divisible(2 * self.num_axes, "2·num_axes")
        self.base = default_base(self.num_axes) if base is None else base
        if not self.base > 0:
            raise ValueError(f"base must be above 0, got {base}")
        self.log_scale = nn.Parameter(torch.empty_like(self.frequencies[0]))
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        return along_axes(geometric_sequence(self.num_blocks // self.num_axes, self.base), self.num_axes)

    def reset_parameters(self) -> None:
        """Write the initial frequencies, and zeros to `log_scale`."""
        super().reset_parameters()
        nn.init.zeros_(self.log_scale)

    def zero_(self) -> Self:
        rule = "LeRoPE learns factors of its frequencies, which must not be zero"
        raise ValueError(f"{rule}: swap a model without RoPE by init='paper', got zero_()")

    def frequencies_per_axis(self) -> Tensor:
        return (self.frequencies * self.log_scale.exp()).unsqueeze(1)

    def load_generators(self, generators: Tensor) -> None:
        super().load_generators(generators)
        self.log_scale.zero_()
