"""`ExpandingEncoding`, the base class of encodings that give queries and keys other channels and rotate nothing."""

from abc import abstractmethod

from torch import Tensor

from torchrope.encodings.base import Encoding, Positions
from torchrope.rotations import Expansion


class ExpandingEncoding(Encoding):
    """Scores of an encoding that is no rotation:  q'^T k' with q' = E(p, q),  k' = F(p', k).

    A subclass writes `forward`. `tr.ViT`, `Swin`, `Transformer`, `Attention` and `rotate` take it as any other; what
    asks for generators (`set_generators`, `swap`, `absorb`, `freeze`, `extend`, studies of generators) refuses it.
    """

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=2, rotary_dim=0)

    @property
    def relative(self) -> bool:
        return False

    def generators(self) -> Tensor:
        """Refuse: there are none.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"generators belong to rotations, got {type(self).__name__}, which is none")

    @abstractmethod
    def forward(self, positions: Positions, *, backend: str = "auto") -> Expansion:
        """What `rotate` takes for positions `(tokens, num_axes)` or `(batch, tokens, num_axes)`."""

    def extra_repr(self) -> str:
        """Return the arguments of the module."""
        return f"num_axes={self.num_axes}, num_heads={self.num_heads}, head_dim={self.head_dim}"
