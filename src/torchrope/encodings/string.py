"""STRING: RoPE-Mixed in a learned orthogonal basis, the most general rotation whose scores are relative."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torchrope.encodings.base import Encoding, HeadShape, check_scale, in_basis, planar, rounding, skew, upper_triangle
from torchrope.encodings.mixed import rotated_axial_frequencies
from torchrope.encodings.skew_matrices import cayley, common_planes, inverse_cayley
from torchrope.ops.shapes import require_shape
from torchrope.tensors import block_diagonal, wide_dtype, without_autocast

# The paper does not give the initialisation of S; near zero the encoding starts near RoPE-Mixed.
_STD = 0.02


class STRING(Encoding):
    """Rotate pairs of channels in a learned basis:  R(p) = P rot(sum_a p_a θ_a) P^T,  P = (I - S)(I + S)^-1.

    All commuting generators are of this form (theorem 3.4), so this is the most general rotation with relative scores.
    Frequencies θ and the strict upper triangle of the skew S are learned. Scores need only P^T, which `absorb` merges
    into the projections.

    Args:
        block_size: Size b of the diagonal blocks of P, even; head_dim by default, as in the paper.
        base: Base of the geometric sequence of initial frequencies, as in RoPE-Mixed.
        init_scale: Factor on the initial frequencies, and so on the generators; it does not affect S.
        shape: Arguments of `Encoding`; head_dim divisible by block_size.

    Raises:
        ValueError: block_size is odd, or does not divide head_dim; init_scale is not above 0.

    References:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with STRING, equations 9 and 10
        (Cayley-STRING).

    Example:
        >>> sum(p.numel() for p in STRING(num_axes=2, num_heads=12, head_dim=64).parameters())  # 12 (2016 + 64)
        24960
    """

    relative = True
    has_frequencies = True

    def __init__(
        self, *, block_size: int | None = None, base: float = 10.0, init_scale: float = 1.0, **shape: Unpack[HeadShape]
    ) -> None:
        super().__init__(block_size=block_size, **shape)
        if self.block_size % 2:
            raise ValueError(f"block_size must be even, since blocks hold channel pairs, got {self.block_size}")
        self.base = base
        self.init_scale = check_scale(init_scale)
        entries = self.block_size * (self.block_size - 1) // 2
        self.frequencies = nn.Parameter(torch.empty(self.num_axes, self.parameter_heads, self.rotary_dim // 2))
        self.upper = nn.Parameter(torch.empty(self.parameter_heads, self.num_blocks, entries))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw frequencies as RoPE-Mixed, and the basis near the identity: S from N(0, 0.02²)."""
        with torch.no_grad():
            self.frequencies.copy_(self.init_scale * rotated_axial_frequencies(self.frequencies, self.base))
            self.upper.normal_(0, _STD)

    def basis(self) -> Tensor:
        """Compute P, `(num_heads or 1, blocks, b, b)`, float32 at least."""
        with without_autocast(self.upper):
            return cayley(skew(self.upper.to(wide_dtype(self.upper)), self.block_size))

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies

    def generators(self) -> Tensor:
        return in_basis(self.frequencies, self.basis())

    def set_frequencies(self, frequencies: Tensor) -> None:
        require_shape("frequencies", frequencies, tuple(self.frequencies.shape), 1)
        with torch.no_grad():
            self.frequencies.copy_(frequencies)

    def load_generators(self, generators: Tensor) -> None:
        b, tolerance = self.block_size, rounding(generators)
        cells = generators.unflatten(-1, (b // 2, 2)).unflatten(-3, (b // 2, 2))  # (axes, heads, blocks, n, 2, n, 2)
        pairs = cells.diagonal(dim1=-4, dim2=-2)[..., 1, 0, :]  # (axes, heads, blocks, n)
        inside = block_diagonal(planar(pairs), b)
        if not (generators - inside).abs().max() > tolerance:  # P = I
            self.upper.zero_()
            self.frequencies.copy_(pairs.flatten(2))
            return
        exact = generators.cpu().double()
        for head in range(exact.shape[1]):
            for block in range(exact.shape[2]):
                basis, frequencies, error = common_planes(exact[:, head, block])
                if error > tolerance * b:
                    rule = f"generators of {type(self).__name__} must commute"
                    raise ValueError(f"{rule}, got some without common planes, with an error of {error:.3g}")
                skew_basis, signs = inverse_cayley(basis)
                self.upper[head, block] = upper_triangle(skew_basis)
                self.frequencies.unflatten(-1, (-1, b // 2))[:, head, block] = frequencies * signs[::2] * signs[1::2]
