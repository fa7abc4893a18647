"""Spherical harmonics: scores that depend on positions on a sphere only through the angle between them."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchrope.encodings.base import Positions, Shape, widened
from torchrope.encodings.expanding import ExpandingEncoding
from torchrope.positions import latlon_to_unit
from torchrope.rotations import FeatureMap


class SphereHarmonics(ExpandingEncoding):
    """Weight each channel's product by a Legendre polynomial of the angle γ between two points on a sphere:

        q'^T k' = sum_c q_c k_c P_l(c)(cos γ),   q'_c = q_c Y_l(c)(p),   |Y_l(p)| = 1

    Y_l(p) are the 2 l + 1 real spherical harmonics of degree l, scaled so that Y_l(p)^T Y_l(p') = P_l(p^T p') (the
    addition theorem). A rotation g of the sphere maps Y_l by an orthogonal (2 l + 1) x (2 l + 1) matrix D_l(g), the
    same for queries and keys: scores are invariant, also near the poles. At equal positions the score is q^T k.

    Queries and keys become wider: sum_c (2 l(c) + 1) channels instead of head_dim, max_degree + 1 times as many if the
    degrees are evenly distributed. head_dim channels do not suffice: no rotation R(p) of queries and keys except a
    constant one has scores that depend only on the angle (docs/mathematics.md, "Scores on a sphere", has the proof).

    Args:
        max_degree: Largest degree L; channel c has degree round(c L / (head_dim - 1)). P_L resolves angles of about
            180 / L degrees.
        shape: num_axes, num_heads and head_dim of `Encoding`; all heads are encoded equally. num_axes = 2 for latitude
            and longitude in degrees, 3 for vectors of any length, of which the direction is used; at the centre
            (0, 0, 0), which has none, all channels but those of degree 0 are zero.

    Raises:
        ValueError: num_axes is neither 2 nor 3; max_degree below 0. In `forward`, latitudes beyond 90 degrees,
            NaN or infinity.

    References:
        Müller, Spherical Harmonics, 1966, theorem 2: the addition theorem. Schoenberg, Positive Definite Functions on
        Spheres, 1942, theorem 1: positive definite functions of the angle are the sums of P_l with nonnegative weights.

    Example:
        >>> import torchrope as tr
        >>> encoding = SphereHarmonics(num_axes=2, num_heads=1, head_dim=2, max_degree=1)
        >>> q = k = torch.ones(1, 1, 2, 2)
        >>> q, k = tr.rotate(q, k, encoding([[0.0, 0.0], [60.0, 0.0]]), layout="bhtd")
        >>> (q @ k.mT).squeeze().tolist()  # 1 + cos γ
        [[2.0, 1.5], [1.5, 2.0]]
    """

    fixed_units: ClassVar[bool] = True

    def __init__(self, *, max_degree: int = 8, **shape: Unpack[Shape]) -> None:
        super().__init__(**shape)
        if self.num_axes not in (2, 3):
            rule = "num_axes must be 2, latitude and longitude, or 3, vectors from the centre"
            raise ValueError(f"{rule}, got {self.num_axes}")
        if max_degree < 0:
            raise ValueError(f"max_degree must be 0 or more, got {max_degree}")
        self.max_degree = max_degree

    def degrees(self) -> list[int]:
        """Return the degree of each channel."""
        return [round(c * self.max_degree / max(self.head_dim - 1, 1)) for c in range(self.head_dim)]

    def forward(self, positions: Positions) -> "Harmonics":  # type: ignore[override]
        """Compute the spherical harmonics of positions; raise ValueError if latitudes are beyond 90 degrees."""
        (positions,) = widened(self.check_positions(positions))
        vectors = latlon_to_unit(positions)
        values = spherical_harmonics(vectors, self.max_degree)
        values = torch.cat([values[..., :1], values[..., 1:] * (vectors != 0).any(dim=-1, keepdim=True)], dim=-1)
        return Harmonics(harmonics=values, degrees=tuple(self.degrees()), **self.head_sizes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_degree={self.max_degree}"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Harmonics(FeatureMap):
    """Spherical harmonics of positions, as returned by `SphereHarmonics`.

    Attributes:
        harmonics: Y_0, Y_1, ... Y_L concatenated, `(*batch, tokens, (L + 1)²)`.
        degrees: Degree of each channel, ascending.
    """

    harmonics: Tensor
    degrees: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, tokens, _ = self.harmonics.shape
        return (*batch, 1, tokens)

    def of_queries(self, q: Tensor) -> Tensor:
        degrees = sorted({*self.degrees})
        factors = q.split([self.degrees.count(degree) for degree in degrees], dim=-1)
        parts = []
        for degree, of_degree in zip(degrees, factors, strict=True):
            harmonics = self.harmonics[..., degree**2 : (degree + 1) ** 2].unsqueeze(-2).unsqueeze(-4)
            products = of_degree.unsqueeze(-1) * harmonics  # (*batch, heads, tokens, channels, 2 l + 1)
            parts.append(products.flatten(-2))
        return torch.cat(parts, dim=-1)

    def of_keys(self, k: Tensor) -> Tensor:
        return self.of_queries(k)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        return {"harmonics": self.harmonics[(*batch, tokens)]}


def spherical_harmonics(vectors: Tensor, max_degree: int) -> Tensor:
    """Compute real spherical harmonics, scaled so that  Y_l(p)^T Y_l(p') = P_l(p^T p').

    Y_lm = N_lm Q_lm(z) Re (x + iy)^m and N_lm Q_lm(z) Im (x + iy)^m, with the associated Legendre functions' part
    Q_lm(z) = d^m P_l / dz^m by its recurrence in l: polynomials in x, y and z, also smooth at the poles.

    Args:
        vectors: Unit vectors `(..., 3)`.
        max_degree: L.

    Returns:
        `(..., (L + 1)²)`, ordered by degree; per degree m = 0, then Re and Im for m = 1 ... l.

    Example:
        >>> spherical_harmonics(torch.tensor([0.0, 0.0, 1.0]), 2).tolist()
        [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    x, y, z = vectors.unbind(-1)
    real, imaginary = [torch.ones_like(x)], [torch.zeros_like(x)]
    for _ in range(max_degree):
        r, i = real[-1], imaginary[-1]
        real.append(x * r - y * i)
        imaginary.append(x * i + y * r)
    # √(2 (l - m)! / (l + m)!) d^m P_l / dz^m, and P_l for m = 0; scaled at each step to avoid overflow of factorials.
    q: list[list[Tensor]] = [[torch.ones_like(z)]]
    for degree in range(1, max_degree + 1):
        row = []
        for m in range(degree):
            before = (2 * degree - 1) * z * q[degree - 1][m]
            if m < degree - 1:
                before = before - math.sqrt((degree - 1) ** 2 - m**2) * q[degree - 2][m]
            row.append(before / math.sqrt(degree**2 - m**2))
        row.append(q[degree - 1][degree - 1] * (1.0 if degree == 1 else math.sqrt((2 * degree - 1) / (2 * degree))))
        q.append(row)
    parts = []
    for degree in range(max_degree + 1):
        parts.append(q[degree][0])
        for m in range(1, degree + 1):
            parts += [q[degree][m] * real[m], q[degree][m] * imaginary[m]]
    return torch.stack(parts, dim=-1)
