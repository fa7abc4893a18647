"""nD-RoPE: fixed frequencies along the vertices of a regular simplex, at several scales."""

import torch
from torch import Tensor

from torchrope.encodings.fixed import FixedFrequencies
from torchrope.encodings.mixed import random_rotations


class SimplexRoPE(FixedFrequencies):
    """Rotate pairs along the N + 1 vertices of a regular simplex, at S scales:  a_si = base^(-s / S) <Q_h u_i, p>.

    The vertices are unit vectors with sum_i u_i = 0, <u_i, u_j> = -1 / N and sum_i u_i u_i^T = (N + 1) / N I, so the
    second moment is isotropic, like that of N orthogonal axes. For two axes these are three directions 120 degrees
    apart. Q_h is a fixed random rotation per head. One axis has one direction: RoPE.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by 2 (N + 1), or by 2 with one axis.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Share one rotation of the simplex among all heads.
        base: Base of the geometric sequence of scales.

    Raises:
        ValueError: head_dim is not divisible by 2 (N + 1).

    References:
        Li et al., nD-RoPE: A Generalized RoPE for n-Dimensional Position Embedding, ICML 2026, arXiv:2606.12146: the
        simplex and its scales. The random rotation per head and the base are those of code that the authors published
        for a model of places.

    Example:
        >>> encoding = SimplexRoPE(num_axes=2, num_heads=1, head_dim=6)
        >>> f = encoding.frequencies[:, 0]  # (axes, vertices)
        >>> (f @ f.T).mul(2).round().div(2).abs().tolist()
        [[1.5, 0.0], [0.0, 1.5]]
    """

    title = "nD-RoPE"
    formula = "angle of pair (s, i) = base^(−s/S) ⟨Q uᵢ, p⟩,  uᵢ the vertices of a regular simplex, fixed"
    summary = "Fixed frequencies along N + 1 directions that form a regular simplex, at several scales."
    source = "Li et al., nD-RoPE, arXiv:2606.12146"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        base: float = 10_000.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        vertices = num_axes + 1 if num_axes > 1 else 1
        self._require_divisible(2 * vertices, "2·(num_axes + 1)" if num_axes > 1 else "2")
        self.base = base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        vertices = simplex(self.num_axes)  # (vertices, axes)
        scales = self.num_blocks // len(vertices)
        theta = self.base ** (-torch.arange(scales, dtype=torch.float64) / max(scales, 1))
        rotations = random_rotations(self.parameter_heads, self.num_axes).double()
        along = torch.einsum("hab,ib->ahi", rotations, vertices)
        return (theta[:, None] * along.unsqueeze(-2)).flatten(-2)  # (axes, heads, scales · vertices)


def simplex(num_axes: int) -> Tensor:
    """Return the vertices of a regular simplex, unit vectors `(num_axes + 1, num_axes)`; `[[1]]` for one axis.

    Vertex k is zero after axis k, and all later vertices have equal coordinates on axis k: Cholesky factorisation of
    the Gram matrix, with off-diagonal entries -1 / N.

    Example:
        >>> simplex(2).round(decimals=2).tolist()
        [[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]]
    """
    if num_axes == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    vertices = torch.zeros(num_axes + 1, num_axes, dtype=torch.float64)
    for axis in range(num_axes):
        rest = 1 - vertices[axis].square().sum()
        vertices[axis, axis] = rest.sqrt()
        vertices[axis + 1 :, axis] = (-1 / num_axes - vertices[axis] @ vertices[axis + 1 :].T) / vertices[axis, axis]
    return vertices
