"""nD-RoPE: fixed frequencies along the vertices of a regular simplex, at several scales."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchrope.encodings.base import FixedShape
from torchrope.encodings.fixed import FixedFrequencies, geometric_sequence
from torchrope.encodings.mixed import random_rotations


class SimplexRoPE(FixedFrequencies):
    """Rotate pairs along the N + 1 vertices of a regular simplex, at S scales:  a_si = base^(-s / S) <Q_h u_i, p>.

    The vertices are unit vectors with sum_i u_i = 0, <u_i, u_j> = -1 / N and sum_i u_i u_i^T = (N + 1) / N I, so the
    second moment is isotropic, like that of N orthogonal axes. For two axes these are three directions 120 degrees
    apart. Q_h is a fixed random rotation per head. One axis has one direction: RoPE.

    Args:
        base: Base of the geometric sequence of scales.
        shape: Arguments of `FixedFrequencies`; head_dim divisible by 2 (N + 1), or by 2 with one axis.

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

    def __init__(self, *, base: float = 10_000.0, **shape: Unpack[FixedShape]) -> None:
        super().__init__(**shape)
        vertices = self.num_axes + 1 if self.num_axes > 1 else 1
        self.require_divisible(2 * vertices, "2·(num_axes + 1)" if vertices > 1 else "2")
        self.base = base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        vertices = simplex(self.num_axes)  # (vertices, axes)
        theta = geometric_sequence(self.num_blocks // len(vertices), self.base)
        rotations = random_rotations(self.num_heads, self.num_axes).double()
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
