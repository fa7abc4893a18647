"""`ExpandingEncoding`, the base class of encodings that map queries and keys to features without a rotation."""

from abc import abstractmethod

from torch import Tensor
from typing_extensions import Self, Unpack

from torchrope.encodings.base import Encoding, Positions, Shape
from torchrope.rotations import FeatureMap


class ExpandingEncoding(Encoding):
    """Map queries and keys to features whose products are the scores:  q'^T k',  q' = E(p, q),  k' = F(p', k).

    A subclass must define `forward`. `ViT`, `Swin`, `Transformer`, `Attention` and `rotate` accept it as any encoding;
    functions that need generators or rotations (`set_generators`, `absorb`, `freeze`, `extend`, `swap`) raise
    ValueError.
    """

    relative = False
    has_frequencies = False

    def __init__(self, **shape: Unpack[Shape]) -> None:
        super().__init__(**shape, block_size=2, rotary_dim=0)

    def generators(self) -> Tensor:
        raise ValueError(f"generators need a rotation, got {type(self).__name__}, which is not one")

    def zero_(self) -> Self:
        raise ValueError(f"zero_ needs a rotation, got {type(self).__name__}, which is not one")

    @abstractmethod
    def forward(self, positions: Positions) -> FeatureMap:  # type: ignore[override]  # not a rotation
        """Compute the map of queries and keys at positions `(tokens, num_axes)` or `(batch, tokens, num_axes)`."""

    def extra_repr(self) -> str:
        return f"num_axes={self.num_axes}, num_heads={self.num_heads}, head_dim={self.head_dim}"
