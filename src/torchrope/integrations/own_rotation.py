"""`OwnRotation`: a model's own RoPE (frequencies, positions, channel pairs), transferred to an encoding by `swap`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrope.encodings import Encoding
from torchrope.encodings.base import planar
from torchrope.lattice import Lattice
from torchrope.positions import prefix
from torchrope.rotations import Planar
from torchrope.tensors import is_narrow, warn_once


@dataclass(frozen=True)
class OwnRotation:
    """The rotation of q and k in one attention layer:  pair j of channels by the angle  a_j = sum_a p_a f_aj.

    Attributes:
        frequencies: f, `(axes, heads or 1, pairs)`, radians per unit of position; zeros for an unrotated pair. Axes are
            those of the data in order: height before width.
        channels: All channels of a head in the order in which pair j is channels 2j and 2j + 1, such as
            `interleaved(head_dim)` or `halves(head_dim)`. Those after the last pair are not rotated.
        lattice: The positions p of tokens; if the caller of the model passes positions, their units.
        num_prefix: Leading tokens that are not rotated (class token, registers): at the origin, where R = I.
    """

    frequencies: Tensor
    channels: tuple[int, ...]
    lattice: Lattice = field(default_factory=Lattice)
    num_prefix: int = 0

    def __post_init__(self) -> None:
        if self.frequencies.ndim != 3 or not self.frequencies.is_floating_point():
            received = f"{self.frequencies.dtype} {tuple(self.frequencies.shape)}"
            raise ValueError(f"frequencies must be floating point (axes, heads or 1, pairs), got {received}")
        if sorted(self.channels) != list(range(len(self.channels))):
            raise ValueError(f"channels must be each channel of a head once, got {self.channels}")
        if 2 * self.frequencies.shape[-1] > len(self.channels):
            raise ValueError(f"pairs must be at most half the channels, got {self.frequencies.shape[-1]} of them")

    def rotation(self, *sizes: int) -> Planar:
        """Return the rotation of the prefix tokens and a lattice of tokens, for q and k permuted by `channels`."""
        return self.at(prefix(self.lattice(*sizes, dtype=self.frequencies.dtype), self.num_prefix))

    def at(self, positions: Tensor) -> Planar:
        """Return the rotation of tokens at positions `(*batch, tokens, axes)`, for q and k permuted by `channels`."""
        return Planar(positions=positions, frequencies=self.frequencies, head_dim=len(self.channels))

    def same_as(self, other: "OwnRotation") -> bool:
        """Return whether two layers have the same rotation."""
        alike = (self.channels, self.lattice, self.num_prefix) == (other.channels, other.lattice, other.num_prefix)
        return alike and torch.equal(self.frequencies, other.frequencies)

    def transfer_to(self, encoding: Encoding) -> tuple[int, ...]:
        """Set an encoding to this rotation and return its order of channels; ValueError if it cannot represent it."""
        refusals = []
        for rotation in self._candidates(encoding):
            try:
                encoding.set_generators(planar(rotation.frequencies.to(encoding.generators().device)))
            except ValueError as refusal:
                refusals.append(refusal)
            else:
                return rotation.channels
        rule = f"init='model' needs a family that can represent the model's rotation ('mixed' can), got {encoding}"
        raise ValueError(f"{rule}: {refusals[0]}")

    def _candidates(self, encoding: Encoding) -> Iterator["OwnRotation"]:
        """Yield this rotation padded to the pairs that the encoding rotates, in the orders it may represent."""
        pairs, rotated = self.frequencies.shape[-1], encoding.rotary_dim // 2
        if rotated < pairs:
            rule = f"init='model' needs an encoding that rotates the {2 * pairs} channels which the model rotates"
            raise ValueError(f"{rule}, got rotary_dim={encoding.rotary_dim}")
        padded = replace(self, frequencies=pad(self.frequencies, (0, rotated - pairs)))
        yield padded
        order = _cyclic_order(padded.frequencies, encoding.block_size // 2) if encoding.block_size % 2 == 0 else None
        if order is not None:
            paired = [channel for pair in order for channel in self.channels[2 * pair : 2 * pair + 2]]
            channels = (*paired, *self.channels[2 * rotated :])
            yield replace(padded, frequencies=padded.frequencies[..., order], channels=channels)


def interleaved(head_dim: int) -> tuple[int, ...]:
    """Return the order for adjacent pairs, as in torchrope: pair j is channels 2j and 2j + 1."""
    return tuple(range(head_dim))


def halves(head_dim: int, parts: int = 1) -> tuple[int, ...]:
    """Return the order for pairs across halves of equal parts: pair j of n channels is its channels j and j + n / 2."""
    half = head_dim // (2 * parts)
    paired = [2 * part * half + j + side for part in range(parts) for j in range(half) for side in (0, half)]
    return (*paired, *range(2 * parts * half, head_dim))


def axis_by_axis(bands: Sequence[Tensor]) -> Tensor:
    """Return frequencies `(axes, 1, pairs)` from those of each axis; the first pairs rotate along the first axis."""
    return torch.block_diag(*bands).unsqueeze(1)


def geometric(dims: Sequence[int], thetas: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return frequencies theta^(-2 j / dim) of each axis, `(axes, 1, pairs)`, computed in the dtype of the model."""
    exponents = [torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim for dim in dims]
    return axis_by_axis([1.0 / theta**exponent for theta, exponent in zip(thetas, exponents, strict=True)])


def exact(frequencies: Tensor) -> Tensor:
    """Convert a model's frequencies to float64 on the CPU; warn once if they have less precision than float32."""
    if frequencies.is_meta:
        rule = "init='model' reads the model's frequencies: swap a model whose parameters have values"
        raise ValueError(f"{rule}, got frequencies on the meta device")
    if is_narrow(frequencies):
        rule = "init='model' keeps the model's frequencies, which a cast has rounded"
        warn_once(f"{rule}: swap before casting the model, got {frequencies.dtype}")
    return frequencies.detach().cpu().double()


def _cyclic_order(frequencies: Tensor, pairs_of_block: int) -> list[int] | None:
    """Return an order of pairs in which block j belongs to axis j mod N, or None if there is none."""
    num_axes, _, num_pairs = frequencies.shape
    rotates = (frequencies != 0).any(dim=1)  # (axes, pairs)
    if num_pairs % pairs_of_block != 0 or (rotates.sum(dim=0) > 1).any():
        return None
    by_axis = [axis.nonzero().flatten().tolist() for axis in rotates]
    unrotated = (~rotates.any(dim=0)).nonzero().flatten().tolist()
    order: list[int] = []
    for index in range(num_pairs):
        remaining = by_axis[index // pairs_of_block % num_axes] or unrotated
        if not remaining:
            return None
        order.append(remaining.pop(0))
    return order
