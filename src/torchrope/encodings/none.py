"""No encoding at all: the baseline."""

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding


class NoEncoding(Encoding):
    """Rotate nothing:  R(p) = I.  The model sees a bag of tokens.

    Args:
        num_axes: Length of a position, N.
        num_heads: Attention heads.
        head_dim: Channels of a head.

    Example:
        >>> import torchrope as tr
        >>> tr.NoEncoding(num_axes=2, num_heads=4, head_dim=16)(tr.grid(2, 2)).rotary_dim
        0
    """

    title = "none"
    formula = "R(p) = I"
    summary = "No position at all: the model sees a bag of tokens. The baseline."
    source = "Vaswani et al. 2017, section 3.5, left out"

    _nothing: Tensor

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=2,
            rotary_dim=0,
            shared_heads=True,
        )
        # A buffer, so that it follows the model to its device.
        self.register_buffer("_nothing", torch.empty(num_axes, 1, 0, 2, 2), persistent=False)

    def generators(self) -> Tensor:
        return self._nothing

    def _take_generators(self, generators: Tensor) -> None:
        pass  # the one shape that passes the check holds no numbers
