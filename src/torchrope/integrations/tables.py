"""Rotations of channel pairs from tables of cosines and sines that another library computed."""

import torch
from torch import Tensor

from torchrope.rotations import Planar, beside_table
from torchrope.tensors import wide_dtype


def planar_from_tables(cos: Tensor, sin: Tensor, head_dim: int, *, interleaved: bool) -> Planar:
    """Return the rotation of pair i by the matrix [[cos_i, -sin_i], [sin_i, cos_i]].

    Gradients reach tables that require them. Tables may be scaled, as YaRN's are: the same factor scales the result.

    Args:
        cos: `(*batch, heads or 1, tokens, pairs)`.
        sin: The same shape.
        head_dim: Channels per head; those from 2 pairs on are not rotated.
        interleaved: Whether pair i is channels (2i, 2i + 1), or (i, i + pairs).
    """
    table = torch.stack([cos, sin], dim=-2)  # (*batch, heads or 1, tokens, 2, pairs)
    table = table.to(wide_dtype(table))
    return Planar(table=table, head_dim=head_dim, interleaved=interleaved, **beside_table(table[..., 0, :]))
